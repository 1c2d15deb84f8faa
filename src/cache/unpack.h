// ---- packed PTX: what `embed --packed` writes ---------------------------------------------------

#ifndef QLORA_NO_CUDA

// Bytes stand in string literals, 13 bits in two characters. The characters are the 91 that need no
// escape and are not blank; the first of a pair is the low digit. The bytes are the length of a
// part, in four of them, and the part as a deflate stream.
//
// The chunks of a text are those of its own part, NULL, those of the part that all texts of its
// module share, NULL. The shared part is a list of runs with a mark between them; a mark in the own
// part stands for the next run. PTX does not contain the mark.
#define QLORA__UNPACK_MARK 1

// The digit that a character stands for; 91 if it is none.
static unsigned qlora__unpack_digit(char c) {
    if (c < '!' || c > '~' || c == '"' || c == '?' || c == '\\') {
        return 91;
    }
    return (unsigned)(c - '!') - (c > '"' ? 1u : 0u) - (c > '?' ? 1u : 0u) - (c > '\\' ? 1u : 0u);
}

// How many bytes the chunks up to a NULL stand for.
static QLORA__UNUSED size_t qlora__unpack_size(const char* const* chunks) {
    size_t pairs = 0;
    for (; *chunks != NULL; chunks++) {
        pairs += strlen(*chunks) / 2;
    }
    return pairs / 8 * 13 + pairs % 8 * 13 / 8;
}

// Writes these bytes. False if a character is wrong.
static QLORA__UNUSED bool qlora__unpack_bytes(const char* const* chunks, uint8_t* out,
                                              size_t size) {
    uint8_t digits[256];
    uint32_t bits = 0;
    unsigned count = 0;
    size_t at = 0;
    for (int i = 0; i < 256; i++) {
        digits[i] = (uint8_t)qlora__unpack_digit((char)i);
    }
    for (; *chunks != NULL; chunks++) {
        for (const char* c = *chunks; *c != '\0'; c += 2) {
            unsigned low = digits[(uint8_t)c[0]];
            unsigned high = digits[(uint8_t)c[1]]; // of a chunk that is cut: its final zero
            if (low > 90 || low + 91 * high > 8191) {
                return false;
            }
            bits |= (uint32_t)(low + 91 * high) << count;
            count += 13;
            for (; count >= 8 && at < size; count -= 8) {
                out[at++] = (uint8_t)(bits & 255);
                bits >>= 8;
            }
        }
    }
    return at == size;
}

// The length of the part in these bytes; 0 if there is none.
static QLORA__UNUSED size_t qlora__unpack_length(const uint8_t* bytes, size_t size) {
    return size < 4 ? 0 : qlora__load32(bytes);
}

// Decompresses the part, which has `length` bytes, into room for one more: where room is left, the
// stream has been read to its end. False if it is damaged.
static QLORA__UNUSED bool qlora__unpack_part(const uint8_t* bytes, size_t size, uint8_t* out,
                                             size_t length) {
    qlora__inflate s;
    size_t at = 0;
    qlora__inflate_begin(&s, bytes + 4, size - 4);
    return qlora__inflate_run(&s, out, &at, length + 1) && at == length;
}

// What is still to be copied of a part.
typedef struct qlora__unpack_rest {
    const uint8_t* at;
    const uint8_t* end;
    bool more; // a run begins at `at`
} qlora__unpack_rest;

// Copies a run to out[*at]. False if it does not fit into `length` bytes.
static bool qlora__unpack_run(qlora__unpack_rest* rest, char* out, size_t* at, size_t length) {
    size_t size = (size_t)(rest->end - rest->at);
    const void* mark = memchr(rest->at, QLORA__UNPACK_MARK, size);
    rest->more = mark != NULL;
    size_t n = rest->more ? (size_t)((const uint8_t*)mark - rest->at) : size;
    if (n > length - *at) {
        return false;
    }
    memcpy(out + *at, rest->at, n);
    *at += n;
    rest->at += rest->more ? n + 1 : n;
    return true;
}

// Puts the runs of the shared part where the own part has marks. False if the result does not have
// this length, or if a run or a mark is left over.
static QLORA__UNUSED bool qlora__unpack_merge(const uint8_t* own, size_t own_length,
                                              const uint8_t* shared, size_t shared_length,
                                              char* out, size_t length) {
    qlora__unpack_rest a = {own, own + own_length, true};
    qlora__unpack_rest b = {shared, shared + shared_length, shared_length > 0};
    size_t at = 0;
    for (;;) {
        if (!qlora__unpack_run(&a, out, &at, length)) {
            return false;
        }
        if (!a.more) {
            return at == length && !b.more;
        }
        if (!b.more || !qlora__unpack_run(&b, out, &at, length)) {
            return false;
        }
    }
}

// FNV-1a in 32 bits, as in the table.
static QLORA__UNUSED uint32_t qlora__unpack_hash(const char* text, size_t length) {
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < length; i++) {
        hash = (hash ^ (uint8_t)text[i]) * 16777619u;
    }
    return hash;
}

#endif // QLORA_NO_CUDA
