// The "Precompiled" normalizer of SentencePiece: graphemes and characters that become others.
//
// The map: the size of a trie in bytes, the trie, then the texts that it leads to, each with a zero
// byte after it. The trie is a double array of 32-bit units. Of a unit, bits 0 to 7 and 31 are the
// label, bit 8 says that a text belongs to the node, and the rest is the offset of its children, in
// steps of 256 if bit 9 is set. A child is at the node's offset, exclusive-or the label; the text
// of a node is in bits 0 to 30 of the unit at its offset.

enum { QLORA__TEXT_MAX_MAPPED = 256 }; // bytes that one character can become

static uint32_t qlora__text_charsmap_word(const char* map, size_t index) {
    const unsigned char* p = (const unsigned char*)map + 4 * index;
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

// What is wrong with a map, or NULL.
static const char* qlora__text_charsmap_fault(const char* map, size_t size) {
    if (size < 8) {
        return "is too short";
    }
    uint32_t trie = qlora__text_charsmap_word(map, 0);
    if (trie % 4 != 0 || trie < 4 || trie > size - 4) {
        return "has a trie of the wrong size";
    }
    size_t length = 0;
    for (size_t at = 4 + trie; at < size; at++) {
        length = map[at] != 0 ? length + 1 : 0;
        if (length > QLORA__TEXT_MAX_MAPPED) { // a text could grow out of bounds
            return "has a text of more than 256 bytes";
        }
    }
    return NULL;
}

static uint32_t qlora__text_charsmap_offset(uint32_t unit) {
    return unit >> 10 << ((unit & 1u << 9) >> 6);
}

// What the start of a text becomes, and how long that start is; NULL if nothing fits. The shortest
// entry is taken, or, with `longest`, the longest one.
static const char* qlora__text_charsmap_find(const char* map, size_t map_size, const char* text,
                                             size_t size, bool longest, size_t* used,
                                             size_t* out_size) {
    size_t trie = qlora__text_charsmap_word(map, 0);
    size_t units = trie / 4;
    const char* found = NULL;
    uint32_t node = qlora__text_charsmap_offset(qlora__text_charsmap_word(map, 1));
    for (size_t i = 0; i < size && text[i] != 0; i++) {
        uint32_t label = (unsigned char)text[i];
        node ^= label;
        if (node >= units) {
            break;
        }
        uint32_t unit = qlora__text_charsmap_word(map, 1 + (size_t)node);
        if ((unit & (1u << 31 | 0xFFu)) != label) {
            break;
        }
        node ^= qlora__text_charsmap_offset(unit);
        if ((unit >> 8 & 1u) == 0 || node >= units) {
            continue;
        }
        size_t at = qlora__text_charsmap_word(map, 1 + (size_t)node) & 0x7FFFFFFFu;
        if (at >= map_size - 4 - trie) {
            break;
        }
        const char* begin = map + 4 + trie + at;
        const char* end = (const char*)memchr(begin, 0, (size_t)(map + map_size - begin));
        found = begin;
        *used = i + 1;
        *out_size = (size_t)((end != NULL ? end : map + map_size) - begin);
        if (!longest) {
            break;
        }
    }
    return found;
}

// Replaces graphemes of up to five bytes as a whole, by the entry that fits their start, and
// otherwise single characters. That is not what the map is made for, but what the library does.
static qlora_result qlora__text_charsmap_apply(qlora__env* env, const char* map, size_t map_size,
                                               const char* text, size_t size,
                                               qlora_text_bytes* out) {
    for (size_t at = 0; at < size;) {
        size_t whole = qlora__text_grapheme_size((const unsigned char*)text + at, size - at);
        size_t used;
        size_t length;
        const char* to = NULL;
        if (whole < 6) {
            to = qlora__text_charsmap_find(map, map_size, text + at, whole, false, &used, &length);
        }
        if (to != NULL) {
            QLORA__TRY(qlora__text_bytes_add(env, out, to, length));
            at += whole;
            continue;
        }
        for (size_t end = at + whole; at < end;) {
            uint32_t code;
            size_t one = qlora__text_utf8((const unsigned char*)text + at, end - at, &code);
            one = one > 0 ? one : 1;
            to = qlora__text_charsmap_find(map, map_size, text + at, one, false, &used, &length);
            QLORA__TRY(to != NULL ? qlora__text_bytes_add(env, out, to, length)
                                  : qlora__text_bytes_add(env, out, text + at, one));
            at += one;
        }
    }
    return QLORA_OK;
}
