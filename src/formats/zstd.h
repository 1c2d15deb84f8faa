// ---- Zstandard frames (RFC 8878) ----------------------------------------------------------------

#define QLORA__ZSTD_BLOCK 131072u // bytes that one block may have
#define QLORA__ZSTD_HUFFMAN_BITS 11

typedef struct qlora__zstd_cell {
    uint16_t base; // of the next state
    uint8_t symbol;
    uint8_t bits; // to be read and added to `base`
} qlora__zstd_cell;

// A table of finite state entropy. `bits` is its accuracy: 1 << bits cells.
typedef struct qlora__zstd_table {
    qlora__zstd_cell cells[512];
    unsigned bits;
    bool known; // a later block may use it again
} qlora__zstd_table;

typedef struct qlora__zstd {
    qlora__zstd_table lengths; // of literals
    qlora__zstd_table offsets;
    qlora__zstd_table matches;
    qlora__zstd_table weights;                       // of a Huffman tree
    uint16_t huffman[1 << QLORA__ZSTD_HUFFMAN_BITS]; // symbol << 4 | bits
    unsigned huffman_bits;                           // 0: no tree yet
    uint64_t repeat[3];                              // the last offsets
    uint8_t literals[QLORA__ZSTD_BLOCK];
    size_t literal_count;
    const char* fault; // what was wrong, for a message
} qlora__zstd;

static bool qlora__zstd_bad(qlora__zstd* z, const char* fault) {
    z->fault = z->fault != NULL ? z->fault : fault;
    return false;
}

static unsigned qlora__high_bit(uint64_t value) {
    unsigned bit = 0;
    while (value >>= 1) {
        bit++;
    }
    return bit;
}

// ---- bits, backwards: a stream is read from its last bit to its first

typedef struct qlora__zstd_bits {
    const uint8_t* data;
    size_t size;
    int64_t left; // bits; below 0 when more were read than there are
} qlora__zstd_bits;

// The highest bit of the last byte marks the end of the stream.
static bool qlora__zstd_bits_begin(qlora__zstd_bits* b, const uint8_t* data, size_t size) {
    if (size == 0 || data[size - 1] == 0) {
        return false;
    }
    b->data = data;
    b->size = size;
    b->left = (int64_t)(8 * (size - 1) + qlora__high_bit(data[size - 1]));
    return true;
}

// The next n bits (at most 32) without using them. Before the first bit there are zeros.
static uint32_t qlora__zstd_peek(const qlora__zstd_bits* b, unsigned n) {
    uint64_t word = 0;
    int64_t from = b->left - (int64_t)n;
    unsigned missing = 0;
    if (from < 0) {
        missing = from < -64 ? 64 : (unsigned)-from;
        from = 0;
    }
    if (b->left <= 0 || missing >= n) {
        return 0;
    }
    size_t at = (size_t)from >> 3;
    size_t size = b->size - at < 8 ? b->size - at : 8;
    if (size == 8) {
        memcpy(&word, b->data + at, 8);
    } else {
        for (size_t i = 0; i < size; i++) {
            word |= (uint64_t)b->data[at + i] << (8 * i);
        }
    }
    word >>= (size_t)from & 7;
    word &= ((uint64_t)1 << (n - missing)) - 1;
    return (uint32_t)(word << missing);
}

static uint32_t qlora__zstd_take(qlora__zstd_bits* b, unsigned n) {
    uint32_t value = n > 0 ? qlora__zstd_peek(b, n) : 0;
    b->left -= (int64_t)n;
    return value;
}

// ---- tables

// Spreads the symbols over the cells. A share of -1 is a symbol that is rarer than one cell.
static void qlora__zstd_spread(qlora__zstd_table* t, const int16_t* shares, unsigned symbols,
                               unsigned bits) {
    uint16_t next[256];
    unsigned size = 1u << bits;
    unsigned high = size;
    unsigned at = 0;
    t->bits = bits;
    t->known = true;
    for (unsigned s = 0; s < symbols; s++) {
        next[s] = shares[s] < 0 ? 1 : (uint16_t)shares[s];
        if (shares[s] < 0) {
            t->cells[--high].symbol = (uint8_t)s;
        }
    }
    for (unsigned s = 0; s < symbols; s++) {
        for (int i = 0; i < shares[s]; i++) {
            t->cells[at].symbol = (uint8_t)s;
            do {
                at = (at + (size >> 1) + (size >> 3) + 3) & (size - 1);
            } while (at >= high);
        }
    }
    for (unsigned i = 0; i < size; i++) {
        unsigned state = next[t->cells[i].symbol]++;
        unsigned width = bits - qlora__high_bit(state);
        t->cells[i].bits = (uint8_t)width;
        t->cells[i].base = (uint16_t)((state << width) - size);
    }
}

// n bits (at most 16) from bit `at`, lowest first; zeros after the end.
static unsigned qlora__zstd_forward(const uint8_t* in, size_t size, size_t at, unsigned n) {
    uint32_t word = 0;
    for (size_t i = 0; i < 4 && at / 8 + i < size; i++) {
        word |= (uint32_t)in[at / 8 + i] << (8 * i);
    }
    return (unsigned)(word >> (at & 7)) & ((1u << n) - 1);
}

// Reads the description of a table; *used is its size in bytes.
static bool qlora__zstd_describe(qlora__zstd_table* t, const uint8_t* in, size_t size,
                                 unsigned max_bits, unsigned max_symbols, size_t* used) {
    int16_t shares[256];
    unsigned bits = qlora__zstd_forward(in, size, 0, 4) + 5;
    size_t at = 4;
    unsigned symbols = 0;
    int left = 1 << bits;
    if (size == 0 || bits > max_bits) {
        return false;
    }
    while (left > 0 && symbols < max_symbols) {
        unsigned width = qlora__high_bit((uint64_t)left + 1) + 1;
        unsigned value = qlora__zstd_forward(in, size, at, width);
        unsigned lower = (1u << (width - 1)) - 1;
        unsigned threshold = (1u << width) - 1 - ((unsigned)left + 1);
        at += width;
        if ((value & lower) < threshold) {
            at--; // small values have one bit less
            value &= lower;
        } else if (value > lower) {
            value -= threshold;
        }
        int share = (int)value - 1;
        left -= share < 0 ? 1 : share;
        shares[symbols++] = (int16_t)share;
        unsigned zeros = share == 0 ? 3 : 0;
        while (zeros == 3) {
            zeros = qlora__zstd_forward(in, size, at, 2);
            at += 2;
            if (zeros > max_symbols - symbols || at > 8 * size) {
                return false;
            }
            memset(shares + symbols, 0, zeros * sizeof shares[0]);
            symbols += zeros;
        }
    }
    *used = (at + 7) / 8;
    if (left != 0 || *used > size) {
        return false;
    }
    qlora__zstd_spread(t, shares, symbols, bits);
    return true;
}

// ---- literals

// The weights of a tree, which two interleaved states give until the bits end.
static bool qlora__zstd_weights(qlora__zstd* z, const uint8_t* in, size_t size, uint8_t* weights,
                                unsigned* count) {
    size_t used = 0;
    qlora__zstd_bits bits;
    qlora__zstd_table* t = &z->weights;
    if (!qlora__zstd_describe(t, in, size, 6, 12 + 1, &used)) {
        return false;
    }
    if (!qlora__zstd_bits_begin(&bits, in + used, size - used)) {
        return false;
    }
    unsigned state[2];
    state[0] = qlora__zstd_take(&bits, t->bits);
    state[1] = qlora__zstd_take(&bits, t->bits);
    unsigned n = 0;
    for (unsigned which = 0; n < 254; which ^= 1) {
        const qlora__zstd_cell* cell = &t->cells[state[which]];
        weights[n++] = cell->symbol;
        if (bits.left < cell->bits) {
            weights[n++] = t->cells[state[which ^ 1]].symbol;
            *count = n;
            return true;
        }
        state[which] = cell->base + qlora__zstd_take(&bits, cell->bits);
    }
    return false;
}

// Reads a tree; *used is its size in bytes.
static bool qlora__zstd_tree(qlora__zstd* z, const uint8_t* in, size_t size, size_t* used) {
    uint8_t weights[256];
    unsigned count = 0;
    if (size < 1) {
        return false;
    }
    size_t bytes = in[0] < 128 ? in[0] : (in[0] - 127u + 1) / 2;
    if (bytes > size - 1) {
        return false;
    }
    if (in[0] >= 128) {
        count = in[0] - 127u;
        for (unsigned i = 0; i < count; i++) {
            weights[i] = i % 2 == 0 ? in[1 + i / 2] >> 4 : in[1 + i / 2] & 15;
        }
    } else if (!qlora__zstd_weights(z, in + 1, bytes, weights, &count)) {
        return false;
    }
    uint32_t sum = 0;
    for (unsigned i = 0; i < count; i++) {
        if (weights[i] > QLORA__ZSTD_HUFFMAN_BITS) {
            return false;
        }
        sum += weights[i] > 0 ? 1u << (weights[i] - 1) : 0;
    }
    // the last weight fills up to a power of two
    unsigned bits = sum > 0 ? qlora__high_bit(sum) + 1 : 0;
    uint32_t rest = (1u << bits) - sum;
    if (sum == 0 || bits > QLORA__ZSTD_HUFFMAN_BITS || (rest & (rest - 1)) != 0) {
        return false;
    }
    weights[count++] = (uint8_t)(qlora__high_bit(rest) + 1);
    uint32_t at = 0;
    for (unsigned weight = 1; weight <= bits; weight++) {
        for (unsigned i = 0; i < count; i++) {
            for (uint32_t k = 0; weights[i] == weight && k < 1u << (weight - 1); k++) {
                z->huffman[at++] = (uint16_t)(i << 4 | (bits + 1 - weight));
            }
        }
    }
    z->huffman_bits = bits;
    *used = bytes + 1;
    return at == 1u << bits;
}

// One stream of literals, which must end with its last bit.
static bool qlora__zstd_stream(qlora__zstd* z, const uint8_t* in, size_t size, uint8_t* out,
                               size_t count) {
    qlora__zstd_bits bits;
    if (!qlora__zstd_bits_begin(&bits, in, size)) {
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        unsigned entry = z->huffman[qlora__zstd_peek(&bits, z->huffman_bits)];
        bits.left -= entry & 15;
        out[i] = (uint8_t)(entry >> 4);
        if (bits.left < 0) {
            return false;
        }
    }
    return bits.left == 0;
}

// Literals in one stream or in four.
static bool qlora__zstd_streams(qlora__zstd* z, const uint8_t* in, size_t size, bool four) {
    if (!four) {
        return qlora__zstd_stream(z, in, size, z->literals, z->literal_count);
    }
    if (size < 6) {
        return false;
    }
    size_t part = (z->literal_count + 3) / 4;
    size_t at = 6;
    for (size_t i = 0; i < 4; i++) {
        size_t bytes = i < 3 ? in[2 * i] + 256u * in[2 * i + 1] : size - at;
        size_t begin = i * part;
        if (begin > z->literal_count || bytes > size - at) {
            return false;
        }
        size_t count = i < 3 ? part : z->literal_count - begin;
        if (count > z->literal_count - begin ||
            !qlora__zstd_stream(z, in + at, bytes, z->literals + begin, count)) {
            return false;
        }
        at += bytes;
    }
    return true;
}

// The literals of a block; *used is the size of their section.
static bool qlora__zstd_literals(qlora__zstd* z, const uint8_t* in, size_t size, size_t* used) {
    static const uint8_t header_bytes[2][4] = {{1, 2, 1, 3}, {3, 3, 4, 5}};
    static const uint8_t size_bits[2][4] = {{5, 12, 5, 20}, {10, 10, 14, 18}};
    if (size < 1) {
        return false;
    }
    unsigned type = in[0] & 3;
    unsigned format = in[0] >> 2 & 3;
    bool packed = type >= 2;
    size_t header = header_bytes[packed][format];
    unsigned bits = size_bits[packed][format];
    unsigned shift = packed || (format & 1) != 0 ? 4 : 3;
    uint64_t word = 0;
    if (size < header) {
        return false;
    }
    for (size_t i = 0; i < header; i++) {
        word |= (uint64_t)in[i] << (8 * i);
    }
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    z->literal_count = (size_t)(word >> shift & mask);
    size_t stored = packed      ? (size_t)(word >> (shift + bits) & mask)
                    : type == 1 ? 1
                                : z->literal_count;
    if (z->literal_count > QLORA__ZSTD_BLOCK || stored > size - header) {
        return false;
    }
    in += header;
    *used = header + stored;
    if (type == 0) {
        memcpy(z->literals, in, stored);
        return true;
    }
    if (type == 1) {
        memset(z->literals, in[0], z->literal_count);
        return true;
    }
    size_t tree = 0;
    if (type == 2 && !qlora__zstd_tree(z, in, stored, &tree)) {
        z->huffman_bits = 0;
        return qlora__zstd_bad(z, "invalid Huffman tree");
    }
    return z->huffman_bits > 0 && qlora__zstd_streams(z, in + tree, stored - tree, format != 0);
}

// ---- sequences

// A kind of symbol: its default table, and the base and extra bits of every code.
typedef struct qlora__zstd_kind {
    const int16_t* shares;
    uint8_t symbols; // of the default table
    uint8_t bits;
    uint8_t max_bits;
    uint8_t max_symbols;
} qlora__zstd_kind;

static const int16_t qlora__zstd_length_shares[36] = {4, 3, 2, 2, 2, 2, 2, 2, 2,  2,  2,  2,
                                                      2, 1, 1, 1, 2, 2, 2, 2, 2,  2,  2,  2,
                                                      2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
static const int16_t qlora__zstd_offset_shares[29] = {
    1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};
static const int16_t qlora__zstd_match_shares[53] = {
    1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,  1,  1,  1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};

static const qlora__zstd_kind qlora__zstd_kinds[3] = {{qlora__zstd_length_shares, 36, 6, 9, 36},
                                                      {qlora__zstd_offset_shares, 29, 5, 8, 32},
                                                      {qlora__zstd_match_shares, 53, 6, 9, 53}};

static const uint32_t qlora__zstd_length_base[36] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,   9,   10,  11,   12,   13,   14,   15,    16,    18,
    20, 22, 24, 28, 32, 40, 48, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};
static const uint8_t qlora__zstd_length_bits[36] = {0, 0, 0, 0, 0, 0,  0,  0,  0,  0,  0,  0,
                                                    0, 0, 0, 0, 1, 1,  1,  1,  2,  2,  3,  3,
                                                    4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static const uint32_t qlora__zstd_match_base[53] = {
    3,  4,  5,  6,  7,  8,  9,  10,  11,  12,  13,   14,   15,   16,   17,    18,    19,   20,
    21, 22, 23, 24, 25, 26, 27, 28,  29,  30,  31,   32,   33,   34,   35,    37,    39,   41,
    43, 47, 51, 59, 67, 83, 99, 131, 259, 515, 1027, 2051, 4099, 8195, 16387, 32771, 65539};
static const uint8_t qlora__zstd_match_bits[53] = {
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  0,  0,  0, 0,
    0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

// Prepares one of the three tables in the way that the block names; *at moves on.
static bool qlora__zstd_table_of(qlora__zstd_table* t, const qlora__zstd_kind* kind, unsigned mode,
                                 const uint8_t* in, size_t size, size_t* at) {
    size_t used = 0;
    switch (mode) {
    case 0:
        qlora__zstd_spread(t, kind->shares, kind->symbols, kind->bits);
        return true;
    case 1: // one symbol
        if (*at >= size || in[*at] >= kind->max_symbols) {
            return false;
        }
        t->cells[0].symbol = in[(*at)++];
        t->cells[0].bits = 0;
        t->cells[0].base = 0;
        t->bits = 0;
        t->known = true;
        return true;
    case 2:
        if (!qlora__zstd_describe(t, in + *at, size - *at, kind->max_bits, kind->max_symbols,
                                  &used)) {
            return false;
        }
        *at += used;
        return true;
    default:
        return t->known;
    }
}

// The offset that a value means: a new one, or one of the last three.
static uint64_t qlora__zstd_offset(qlora__zstd* z, uint64_t value, bool no_literals) {
    uint64_t* last = z->repeat;
    uint64_t offset = value - 3;
    unsigned which = 3;
    if (value <= 3) {
        which = (unsigned)value - 1 + (no_literals ? 1 : 0);
        offset = which < 3 ? last[which] : last[0] - 1;
    }
    if (which > 1) {
        last[2] = last[1];
    }
    if (which > 0) {
        last[1] = last[0];
    }
    last[0] = offset;
    return offset;
}

// The sequences of a block: literals, then a copy of what was written before, and so on.
static bool qlora__zstd_sequences(qlora__zstd* z, qlora__zstd_bits* bits, size_t count,
                                  uint8_t* out, size_t* place, size_t limit) {
    unsigned length_state = qlora__zstd_take(bits, z->lengths.bits);
    unsigned offset_state = qlora__zstd_take(bits, z->offsets.bits);
    unsigned match_state = qlora__zstd_take(bits, z->matches.bits);
    const uint8_t* literals = z->literals;
    size_t left = z->literal_count;
    size_t at = *place;
    for (size_t i = 0; i < count; i++) {
        const qlora__zstd_cell* length_cell = &z->lengths.cells[length_state];
        const qlora__zstd_cell* offset_cell = &z->offsets.cells[offset_state];
        const qlora__zstd_cell* match_cell = &z->matches.cells[match_state];
        uint64_t value =
            ((uint64_t)1 << offset_cell->symbol) + qlora__zstd_take(bits, offset_cell->symbol);
        size_t match = qlora__zstd_match_base[match_cell->symbol] +
                       qlora__zstd_take(bits, qlora__zstd_match_bits[match_cell->symbol]);
        size_t length = qlora__zstd_length_base[length_cell->symbol] +
                        qlora__zstd_take(bits, qlora__zstd_length_bits[length_cell->symbol]);
        uint64_t offset = qlora__zstd_offset(z, value, length == 0);
        if (i + 1 < count) {
            length_state = length_cell->base + qlora__zstd_take(bits, length_cell->bits);
            match_state = match_cell->base + qlora__zstd_take(bits, match_cell->bits);
            offset_state = offset_cell->base + qlora__zstd_take(bits, offset_cell->bits);
        }
        if (bits->left < 0 || length > left || length > limit - at || match > limit - at - length ||
            offset == 0 || offset > at + length) {
            return qlora__zstd_bad(z, "invalid sequence");
        }
        memcpy(out + at, literals, length);
        literals += length;
        left -= length;
        at += length;
        for (size_t k = 0; k < match; k++) { // they may overlap: byte by byte
            out[at + k] = out[at + k - (size_t)offset];
        }
        at += match;
    }
    if (bits->left != 0 || left > limit - at) {
        return qlora__zstd_bad(z, "invalid sequences");
    }
    memcpy(out + at, literals, left);
    *place = at + left;
    return true;
}

static bool qlora__zstd_block(qlora__zstd* z, const uint8_t* in, size_t size, uint8_t* out,
                              size_t* place, size_t limit) {
    size_t at = 0;
    if (!qlora__zstd_literals(z, in, size, &at) || at >= size) {
        return qlora__zstd_bad(z, "invalid literals");
    }
    size_t count = in[at++];
    size_t more = count < 128 ? 0 : count < 255 ? 1 : 2;
    if (more > size - at) {
        return qlora__zstd_bad(z, "truncated block");
    }
    count = more == 0   ? count
            : more == 1 ? ((count - 128) << 8) + in[at]
                        : in[at] + ((size_t)in[at + 1] << 8) + 0x7F00;
    at += more;
    if (count == 0) {
        if (at != size || z->literal_count > limit - *place) {
            return qlora__zstd_bad(z, "invalid block");
        }
        memcpy(out + *place, z->literals, z->literal_count);
        *place += z->literal_count;
        return true;
    }
    qlora__zstd_table* const tables[3] = {&z->lengths, &z->offsets, &z->matches};
    if (at == size || (in[at] & 3) != 0) {
        return qlora__zstd_bad(z, "invalid block");
    }
    unsigned modes = in[at++];
    for (unsigned i = 0; i < 3; i++) {
        if (!qlora__zstd_table_of(tables[i], &qlora__zstd_kinds[i], modes >> (6 - 2 * i) & 3, in,
                                  size, &at)) {
            return qlora__zstd_bad(z, "invalid table of a block");
        }
    }
    qlora__zstd_bits bits;
    if (!qlora__zstd_bits_begin(&bits, in + at, size - at)) {
        return qlora__zstd_bad(z, "truncated block");
    }
    return qlora__zstd_sequences(z, &bits, count, out, place, limit);
}

// ---- frames

static uint64_t qlora__xxh_round(uint64_t sum, uint64_t word) {
    sum += word * 0xC2B2AE3D27D4EB4Fu;
    return (sum << 31 | sum >> 33) * 0x9E3779B185EBCA87u;
}

// XXH64 with seed 0, of which a frame stores the low half.
static uint64_t qlora__xxh64(const uint8_t* p, size_t size) {
    const uint64_t prime1 = 0x9E3779B185EBCA87u;
    const uint64_t prime2 = 0xC2B2AE3D27D4EB4Fu;
    const uint64_t prime3 = 0x165667B19E3779F9u;
    const uint64_t prime4 = 0x85EBCA77C2B2AE63u;
    const uint64_t prime5 = 0x27D4EB2F165667C5u;
    uint64_t sum = prime5;
    size_t left = size;
    uint64_t word = 0;
    if (size >= 32) {
        uint64_t lane[4] = {prime1 + prime2, prime2, 0, 0 - prime1};
        for (; left >= 32; left -= 32, p += 32) {
            for (int i = 0; i < 4; i++) {
                memcpy(&word, p + 8 * i, 8);
                lane[i] = qlora__xxh_round(lane[i], word);
            }
        }
        sum = (lane[0] << 1 | lane[0] >> 63) + (lane[1] << 7 | lane[1] >> 57) +
              (lane[2] << 12 | lane[2] >> 52) + (lane[3] << 18 | lane[3] >> 46);
        for (int i = 0; i < 4; i++) {
            sum = (sum ^ qlora__xxh_round(0, lane[i])) * prime1 + prime4;
        }
    }
    sum += size;
    for (; left >= 8; left -= 8, p += 8) {
        memcpy(&word, p, 8);
        sum ^= qlora__xxh_round(0, word);
        sum = (sum << 27 | sum >> 37) * prime1 + prime4;
    }
    for (; left >= 4; left -= 4, p += 4) {
        sum ^= (uint64_t)qlora__load32(p) * prime1;
        sum = (sum << 23 | sum >> 41) * prime2 + prime3;
    }
    for (; left > 0; left--, p++) {
        sum ^= *p * prime5;
        sum = (sum << 11 | sum >> 53) * prime1;
    }
    sum = (sum ^ sum >> 33) * prime2;
    sum = (sum ^ sum >> 29) * prime3;
    return sum ^ sum >> 32;
}

typedef struct qlora__zstd_frame {
    uint64_t content; // bytes, UINT64_MAX: not told
    bool sum;         // a checksum follows the blocks
} qlora__zstd_frame;

// Reads the header after the magic number; *at moves on.
static bool qlora__zstd_header(qlora__zstd* z, const uint8_t* in, size_t size, size_t* at,
                               qlora__zstd_frame* frame) {
    static const uint8_t dictionary_bytes[4] = {0, 1, 2, 4};
    if (*at >= size) {
        return qlora__zstd_bad(z, "truncated header");
    }
    unsigned flags = in[(*at)++];
    bool single = (flags & 32) != 0;
    size_t dictionary = dictionary_bytes[flags & 3];
    size_t content = flags >> 6 == 0 ? (single ? 1 : 0) : (size_t)1 << (flags >> 6);
    if ((flags & 8) != 0) {
        return qlora__zstd_bad(z, "a reserved bit is set");
    }
    if ((single ? 0u : 1u) + dictionary + content > size - *at) {
        return qlora__zstd_bad(z, "truncated header");
    }
    *at += single ? 0 : 1; // the window: everything that was written can be used
    for (size_t i = 0; i < dictionary; i++) {
        if (in[*at + i] != 0) {
            return qlora__zstd_bad(z, "it needs a dictionary");
        }
    }
    *at += dictionary;
    frame->sum = (flags & 4) != 0;
    frame->content = content > 0 ? 0 : UINT64_MAX;
    for (size_t i = 0; i < content; i++) {
        frame->content |= (uint64_t)in[*at + i] << (8 * i);
    }
    frame->content += content == 2 ? 256 : 0;
    *at += content;
    return true;
}

// One block; *last tells whether it ends its frame.
static bool qlora__zstd_next(qlora__zstd* z, const uint8_t* in, size_t size, size_t* at,
                             uint8_t* out, size_t* place, size_t wanted, bool* last) {
    if (size - *at < 3) {
        return qlora__zstd_bad(z, "truncated");
    }
    uint32_t header = (uint32_t)in[*at] | (uint32_t)in[*at + 1] << 8 | (uint32_t)in[*at + 2] << 16;
    unsigned type = header >> 1 & 3;
    size_t bytes = header >> 3;
    size_t stored = type == 1 ? 1 : bytes;
    *at += 3;
    *last = (header & 1) != 0;
    if (type == 3 || bytes > QLORA__ZSTD_BLOCK || stored > size - *at) {
        return qlora__zstd_bad(z, "invalid block");
    }
    const uint8_t* data = in + *at;
    *at += stored;
    if (type == 2) {
        size_t limit = wanted - *place < QLORA__ZSTD_BLOCK ? wanted : *place + QLORA__ZSTD_BLOCK;
        return qlora__zstd_block(z, data, bytes, out, place, limit);
    }
    if (bytes > wanted - *place) {
        return qlora__zstd_bad(z, "more bytes than announced");
    }
    if (type == 1) {
        memset(out + *place, data[0], bytes);
    } else {
        memcpy(out + *place, data, bytes);
    }
    *place += bytes;
    return true;
}

static bool qlora__zstd_frame_read(qlora__zstd* z, const uint8_t* in, size_t size, size_t* at,
                                   uint8_t* out, size_t* place, size_t wanted) {
    qlora__zstd_frame frame;
    if (!qlora__zstd_header(z, in, size, at, &frame)) {
        return false;
    }
    uint8_t* begin = out + *place; // a frame cannot use what stands before it
    size_t written = 0;
    bool last = false;
    z->repeat[0] = 1;
    z->repeat[1] = 4;
    z->repeat[2] = 8;
    z->huffman_bits = 0;
    z->lengths.known = false;
    z->offsets.known = false;
    z->matches.known = false;
    while (!last) {
        if (!qlora__zstd_next(z, in, size, at, begin, &written, wanted - *place, &last)) {
            return false;
        }
    }
    if (frame.content != UINT64_MAX && frame.content != written) {
        return qlora__zstd_bad(z, "another size than announced");
    }
    if (frame.sum) {
        if (size - *at < 4) {
            return qlora__zstd_bad(z, "truncated");
        }
        if (qlora__load32(in + *at) != (uint32_t)qlora__xxh64(begin, written)) {
            return qlora__zstd_bad(z, "its checksum is wrong");
        }
        *at += 4;
    }
    *place += written;
    return true;
}

// Decodes all frames, which must give exactly `wanted` bytes. False: z->fault says why.
static bool qlora__zstd_decode(qlora__zstd* z, const uint8_t* in, size_t size, uint8_t* out,
                               size_t wanted) {
    size_t at = 0;
    size_t place = 0;
    z->fault = NULL;
    while (at < size) {
        uint32_t magic = size - at >= 4 ? qlora__load32(in + at) : 0;
        if (magic == 0xFD2FB528u) {
            at += 4;
            if (!qlora__zstd_frame_read(z, in, size, &at, out, &place, wanted)) {
                return false;
            }
            continue;
        }
        if ((magic & 0xFFFFFFF0u) != 0x184D2A50u || size - at < 8 ||
            qlora__load32(in + at + 4) > size - at - 8) {
            return qlora__zstd_bad(z, "no valid frame");
        }
        at += 8 + (size_t)qlora__load32(in + at + 4); // a frame to be skipped
    }
    return place == wanted || qlora__zstd_bad(z, "another size than announced");
}
