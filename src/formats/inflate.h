#ifndef QLORA__PART_INFLATE
#define QLORA__PART_INFLATE

// ---- deflate ------------------------------------------------------------------------------------

static uint32_t qlora__load32(const uint8_t* p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

#define QLORA__INFLATE_WINDOW 32768u
#define QLORA__INFLATE_FAST 10

// A prefix code. Codes of up to QLORA__INFLATE_FAST bits are looked up, longer ones are counted.
typedef struct qlora__inflate_code {
    uint16_t fast[1 << QLORA__INFLATE_FAST]; // symbol << 4 | length; 0: not here
    uint16_t symbols[288];                   // in the order of their codes
    uint16_t count[16];                      // codes of each length
} qlora__inflate_code;

typedef enum qlora__inflate_mode {
    QLORA__INFLATE_HEADER, // a block begins
    QLORA__INFLATE_STORED,
    QLORA__INFLATE_CODES,
    QLORA__INFLATE_DONE
} qlora__inflate_mode;

// A deflate stream that lies in memory. It can be decoded in pieces: the state is kept between
// calls.
typedef struct qlora__inflate {
    const uint8_t* at;
    const uint8_t* end;
    uint64_t bits; // taken from `at` and not used yet, the next one lowest
    unsigned bit_count;
    qlora__inflate_mode mode;
    bool last;         // this block is the last one
    uint32_t stored;   // bytes of a stored block that are still to come
    uint32_t length;   // of a match that is still to be copied
    uint32_t distance; // its distance
    uint64_t total;    // bytes written so far
    qlora__inflate_code literals;
    qlora__inflate_code distances;
} qlora__inflate;

static QLORA__UNUSED void qlora__inflate_begin(qlora__inflate* s, const uint8_t* data,
                                               size_t size) {
    s->at = data;
    s->end = data + size;
    s->bits = 0;
    s->bit_count = 0;
    s->mode = QLORA__INFLATE_HEADER;
    s->last = false;
    s->stored = 0;
    s->length = 0;
    s->distance = 0;
    s->total = 0;
}

static void qlora__inflate_fill(qlora__inflate* s) {
    while (s->bit_count <= 56 && s->at < s->end) {
        s->bits |= (uint64_t)*s->at++ << s->bit_count;
        s->bit_count += 8;
    }
}

// The next n bits (at most 16), or -1 at the end of the data.
static int32_t qlora__inflate_bits(qlora__inflate* s, unsigned n) {
    if (s->bit_count < n) {
        qlora__inflate_fill(s);
    }
    if (s->bit_count < n) {
        return -1;
    }
    int32_t value = (int32_t)(s->bits & (((uint64_t)1 << n) - 1));
    s->bits >>= n;
    s->bit_count -= n;
    return value;
}

// Builds the code with these lengths. False if they contradict each other. As in zlib, a code that
// leaves bit patterns unused is valid only if it has at most one symbol, of one bit.
static bool qlora__inflate_build(qlora__inflate_code* code, const uint8_t* lengths, int symbols) {
    uint16_t next[16];
    uint16_t bits = 0;
    int left = 1;
    int used = 0;
    memset(code->count, 0, sizeof code->count);
    memset(code->fast, 0, sizeof code->fast);
    for (int i = 0; i < symbols; i++) {
        code->count[lengths[i]]++;
    }
    used = symbols - code->count[0];
    code->count[0] = 0;
    uint16_t place[16];
    next[0] = 0;
    place[0] = 0;
    for (int n = 1; n < 16; n++) {
        left = 2 * left - code->count[n];
        if (left < 0) {
            return false;
        }
        bits = (uint16_t)((bits + code->count[n - 1]) << 1);
        next[n] = bits;
        place[n] = (uint16_t)(place[n - 1] + code->count[n - 1]);
    }
    if (left > 0 && (used > 1 || (used == 1 && code->count[1] != 1))) {
        return false;
    }
    for (int i = 0; i < symbols; i++) {
        unsigned n = lengths[i];
        if (n == 0) {
            continue;
        }
        code->symbols[place[n]++] = (uint16_t)i;
        unsigned reversed = 0;
        for (unsigned k = 0; k < n; k++) {
            reversed |= ((unsigned)next[n] >> k & 1u) << (n - 1 - k);
        }
        next[n]++;
        for (unsigned k = reversed; n <= QLORA__INFLATE_FAST && k < 1u << QLORA__INFLATE_FAST;
             k += 1u << n) {
            code->fast[k] = (uint16_t)((unsigned)i << 4 | n);
        }
    }
    return true;
}

// The next symbol, or -1 for bits that are no code or that the data do not have.
static int32_t qlora__inflate_symbol(qlora__inflate* s, const qlora__inflate_code* code) {
    if (s->bit_count < 15) {
        qlora__inflate_fill(s);
    }
    unsigned entry = code->fast[s->bits & ((1u << QLORA__INFLATE_FAST) - 1)];
    unsigned n = entry & 15;
    int32_t symbol = (int32_t)(entry >> 4);
    if (entry == 0) {
        int32_t first = 0; // the first code of n bits
        int32_t place = 0; // its symbol
        int32_t bits = 0;
        for (n = 1; n < 16; n++) {
            bits |= (int32_t)(s->bits >> (n - 1) & 1);
            int32_t count = code->count[n];
            if (bits - first < count) {
                break;
            }
            place += count;
            first = (first + count) << 1;
            bits <<= 1;
        }
        if (n == 16) {
            return -1;
        }
        symbol = code->symbols[place + bits - first];
    }
    if (n > s->bit_count) {
        return -1;
    }
    s->bits >>= n;
    s->bit_count -= n;
    return symbol;
}

// The lengths of both codes of a dynamic block, which are themselves compressed.
static bool qlora__inflate_lengths(qlora__inflate* s, int32_t literals, int32_t distances,
                                   uint8_t* lengths) {
    int32_t count = 0;
    while (count < literals + distances) {
        int32_t symbol = qlora__inflate_symbol(s, &s->literals);
        if (symbol < 0) {
            return false;
        }
        if (symbol < 16) {
            lengths[count++] = (uint8_t)symbol;
            continue;
        }
        static const uint8_t extra[3] = {2, 3, 7};
        static const uint8_t base[3] = {3, 3, 11};
        int32_t more = qlora__inflate_bits(s, extra[symbol - 16]);
        int32_t repeat = base[symbol - 16] + more;
        if (more < 0 || repeat > literals + distances - count || (symbol == 16 && count == 0)) {
            return false;
        }
        uint8_t value = symbol == 16 ? lengths[count - 1] : 0;
        memset(lengths + count, value, (size_t)repeat);
        count += repeat;
    }
    return true;
}

static bool qlora__inflate_dynamic(qlora__inflate* s) {
    static const uint8_t order[19] = {16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
                                      11, 4,  12, 3, 13, 2, 14, 1, 15};
    uint8_t lengths[320];
    int32_t literals = qlora__inflate_bits(s, 5) + 257;
    int32_t distances = qlora__inflate_bits(s, 5) + 1;
    int32_t count = qlora__inflate_bits(s, 4) + 4;
    if (literals < 257 || distances < 1 || count < 4 || literals > 286 || distances > 30) {
        return false;
    }
    memset(lengths, 0, sizeof lengths);
    for (int32_t i = 0; i < count; i++) {
        int32_t length = qlora__inflate_bits(s, 3);
        if (length < 0) {
            return false;
        }
        lengths[order[i]] = (uint8_t)length;
    }
    if (!qlora__inflate_build(&s->literals, lengths, 19)) {
        return false;
    }
    return qlora__inflate_lengths(s, literals, distances, lengths) && lengths[256] != 0 &&
           qlora__inflate_build(&s->literals, lengths, literals) &&
           qlora__inflate_build(&s->distances, lengths + literals, distances);
}

static bool qlora__inflate_fixed(qlora__inflate* s) {
    uint8_t lengths[288];
    for (int i = 0; i < 288; i++) {
        lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
    }
    bool ok = qlora__inflate_build(&s->literals, lengths, 288);
    memset(lengths, 5, 32);
    return ok && qlora__inflate_build(&s->distances, lengths, 32);
}

// Gives back the whole bytes among the bits, and drops the rest of the current byte.
static void qlora__inflate_align(qlora__inflate* s) {
    s->at -= s->bit_count / 8;
    s->bits = 0;
    s->bit_count = 0;
}

static bool qlora__inflate_header(qlora__inflate* s) {
    if (s->last) {
        qlora__inflate_align(s);
        s->mode = QLORA__INFLATE_DONE;
        return true;
    }
    int32_t header = qlora__inflate_bits(s, 3);
    if (header < 0 || header >> 1 == 3) {
        return false;
    }
    s->last = (header & 1) != 0;
    s->mode = QLORA__INFLATE_CODES;
    if (header >> 1 == 1) {
        return qlora__inflate_fixed(s);
    }
    if (header >> 1 == 2) {
        return qlora__inflate_dynamic(s);
    }
    qlora__inflate_align(s);
    if (s->end - s->at < 4) {
        return false;
    }
    uint32_t sizes = qlora__load32(s->at);
    s->at += 4;
    s->stored = sizes & 0xFFFF;
    s->mode = QLORA__INFLATE_STORED;
    return (sizes >> 16 ^ 0xFFFF) == s->stored && s->stored <= (size_t)(s->end - s->at);
}

// Reads the length and the distance of a match, whose symbol is at least 257.
static bool qlora__inflate_match(qlora__inflate* s, int32_t symbol) {
    static const uint16_t length_base[29] = {3,  4,  5,  6,   7,   8,   9,   10,  11, 13,
                                             15, 17, 19, 23,  27,  31,  35,  43,  51, 59,
                                             67, 83, 99, 115, 131, 163, 195, 227, 258};
    static const uint8_t length_bits[29] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                            2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
    static const uint16_t base[30] = {
        1,   2,   3,   4,   5,   7,    9,    13,   17,   25,   33,   49,   65,    97,    129,
        193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
    if (symbol > 285) {
        return false;
    }
    int32_t more = qlora__inflate_bits(s, length_bits[symbol - 257]);
    int32_t code = more < 0 ? -1 : qlora__inflate_symbol(s, &s->distances);
    if (code < 0 || code > 29) {
        return false;
    }
    int32_t further = qlora__inflate_bits(s, code < 2 ? 0 : (unsigned)(code / 2 - 1));
    s->length = (uint32_t)(length_base[symbol - 257] + more);
    s->distance = (uint32_t)(base[code] + further);
    return further >= 0 && s->distance <= s->total;
}

// Literals and matches, up to the end of the block or of the room.
static bool qlora__inflate_codes(qlora__inflate* s, uint8_t* out, size_t* at, size_t capacity) {
    size_t begin = *at;
    size_t place = begin;
    uint64_t before = s->total;
    bool ok = true;
    while (place < capacity) {
        if (s->length > 0) {
            if (s->distance > place) {
                ok = false; // the caller kept less than a window
                break;
            }
            size_t count = s->length < capacity - place ? s->length : capacity - place;
            const uint8_t* from = out + place - s->distance;
            for (size_t i = 0; i < count; i++) { // they may overlap: byte by byte
                out[place + i] = from[i];
            }
            place += count;
            s->length -= (uint32_t)count;
            continue;
        }
        int32_t symbol = qlora__inflate_symbol(s, &s->literals);
        if (symbol < 256) {
            ok = symbol >= 0;
            if (!ok) {
                break;
            }
            out[place++] = (uint8_t)symbol;
            continue;
        }
        if (symbol == 256) {
            s->mode = QLORA__INFLATE_HEADER;
            break;
        }
        s->total = before + (place - begin);
        ok = qlora__inflate_match(s, symbol);
        if (!ok) {
            break;
        }
    }
    s->total = before + (place - begin);
    *at = place;
    return ok;
}

// Continues to write at out[*at], up to out[capacity]; before *at lies what was written already (at
// least the last 32 KiB of it). The stream has ended when its mode is QLORA__INFLATE_DONE. False:
// the data are damaged or end too early.
static QLORA__UNUSED bool qlora__inflate_run(qlora__inflate* s, uint8_t* out, size_t* at,
                                             size_t capacity) {
    while (s->mode != QLORA__INFLATE_DONE) {
        if (s->mode == QLORA__INFLATE_HEADER) {
            if (!qlora__inflate_header(s)) {
                return false;
            }
            continue;
        }
        if (*at == capacity) {
            return true;
        }
        if (s->mode == QLORA__INFLATE_CODES) {
            if (!qlora__inflate_codes(s, out, at, capacity)) {
                return false;
            }
            continue;
        }
        size_t count = s->stored < capacity - *at ? s->stored : capacity - *at;
        memcpy(out + *at, s->at, count);
        s->at += count;
        *at += count;
        s->total += count;
        s->stored -= (uint32_t)count;
        s->mode = s->stored == 0 ? QLORA__INFLATE_HEADER : QLORA__INFLATE_STORED;
    }
    return true;
}

#endif // QLORA__PART_INFLATE
