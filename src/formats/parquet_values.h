// ---- Parquet: levels and values of a page -------------------------------------------------------

// n bits (at most 64) from bit `at` of the data, lowest first.
static uint64_t qlora__parquet_bits(const uint8_t* data, size_t size, uint64_t at, unsigned n) {
    uint64_t word = 0;
    size_t byte = (size_t)(at >> 3);
    unsigned shift = (unsigned)at & 7;
    size_t left = size - byte;
    memcpy(&word, data + byte, left < 8 ? left : 8);
    word >>= shift;
    if (shift + n > 64 && left > 8) {
        word |= (uint64_t)data[byte + 8] << (64 - shift);
    }
    return n == 64 ? word : word & (((uint64_t)1 << n) - 1);
}

// ---- runs: levels, indices of a dictionary, booleans

// Runs of one value, and runs of packed values of `width` bits.
typedef struct qlora__parquet_runs {
    qlora__thrift in;
    unsigned width;
    uint32_t value;
    uint64_t same;       // copies of `value` that are left
    uint64_t packed;     // packed values that are left
    const uint8_t* bits; // the packed run
    size_t bytes;
    uint64_t bit;
} qlora__parquet_runs;

static void qlora__parquet_runs_begin(qlora__parquet_runs* r, const uint8_t* data, size_t size,
                                      unsigned width) {
    memset(r, 0, sizeof *r);
    r->in.at = data;
    r->in.end = data + size;
    r->width = width;
}

// The next value; false if there is none.
static bool qlora__parquet_runs_next(qlora__parquet_runs* r, uint32_t* value) {
    *value = 0;
    if (r->width == 0) {
        return true; // nothing is stored
    }
    while (r->same == 0 && r->packed == 0) {
        uint64_t header = qlora__thrift_varint(&r->in);
        uint64_t count = header >> 1;
        size_t left = qlora__thrift_left(&r->in);
        if (r->in.bad) {
            return false;
        }
        if ((header & 1) != 0) {
            // groups of 8 values; the last one may be incomplete
            r->bytes = count > left / r->width ? left : (size_t)count * r->width;
            r->packed = count > left / r->width ? (uint64_t)left * 8 / r->width : count * 8;
            r->bits = r->in.at;
            r->bit = 0;
            r->in.at += r->bytes;
            continue;
        }
        size_t bytes = (r->width + 7) / 8;
        if (bytes > left) {
            return false;
        }
        r->value = 0;
        for (size_t i = 0; i < bytes; i++) {
            r->value |= (uint32_t)r->in.at[i] << (8 * i);
        }
        r->in.at += bytes;
        r->same = count;
    }
    if (r->same > 0) {
        r->same--;
        *value = r->value;
        return true;
    }
    *value = (uint32_t)qlora__parquet_bits(r->bits, r->bytes, r->bit, r->width);
    r->bit += r->width;
    r->packed--;
    return true;
}

// ---- DELTA_BINARY_PACKED

typedef struct qlora__parquet_delta {
    qlora__thrift in;
    uint64_t left;  // values
    uint64_t value; // the last one
    uint64_t least; // smallest difference of the block
    uint64_t pack;  // values of a pack; a block has `packs` of them
    uint64_t packs;
    uint64_t next;         // pack of the block
    const uint8_t* widths; // of the packs
    const uint8_t* bits;   // of the current pack
    size_t bytes;
    uint64_t bit;
    uint64_t unread; // values of the current pack
    bool begun;
} qlora__parquet_delta;

static bool qlora__parquet_delta_begin(qlora__parquet_delta* d, const uint8_t* data, size_t size) {
    memset(d, 0, sizeof *d);
    d->in.at = data;
    d->in.end = data + size;
    uint64_t block = qlora__thrift_varint(&d->in);
    d->packs = qlora__thrift_varint(&d->in);
    d->left = qlora__thrift_varint(&d->in);
    d->value = (uint64_t)qlora__thrift_int(&d->in);
    if (d->in.bad || block == 0 || block % 128 != 0 || block > 1u << 24 || d->packs == 0 ||
        d->packs > block || block % d->packs != 0 || block / d->packs % 32 != 0) {
        return false;
    }
    d->pack = block / d->packs;
    d->next = d->packs;
    return true;
}

// Enters the next pack.
static bool qlora__parquet_delta_pack(qlora__parquet_delta* d) {
    if (d->next == d->packs) {
        d->least = (uint64_t)qlora__thrift_int(&d->in);
        if (d->packs > qlora__thrift_left(&d->in)) {
            return false;
        }
        d->widths = d->in.at;
        d->in.at += d->packs;
        d->next = 0;
    }
    unsigned width = d->widths[d->next++];
    uint64_t bytes = d->pack / 8 * width;
    if (width > 64 || bytes > qlora__thrift_left(&d->in)) {
        return false;
    }
    d->bits = d->in.at;
    d->bytes = (size_t)bytes;
    d->bit = 0;
    d->in.at += bytes;
    d->unread = d->pack;
    return true;
}

static bool qlora__parquet_delta_next(qlora__parquet_delta* d, uint64_t* value) {
    if (d->left == 0) {
        return false;
    }
    if (!d->begun) {
        d->begun = true;
    } else {
        if (d->unread == 0 && !qlora__parquet_delta_pack(d)) {
            return false;
        }
        unsigned width = d->widths[d->next - 1];
        uint64_t more = width > 0 ? qlora__parquet_bits(d->bits, d->bytes, d->bit, width) : 0;
        d->value += d->least + more;
        d->bit += width;
        d->unread--;
    }
    d->left--;
    *value = d->value;
    return true;
}

// The first byte after all values, which are not decoded for it; NULL if they are not valid.
static const uint8_t* qlora__parquet_delta_end(const qlora__parquet_delta* d) {
    qlora__parquet_delta copy = *d;
    for (uint64_t left = d->left > 0 ? d->left - 1 : 0; left > 0;) {
        if (!qlora__parquet_delta_pack(&copy)) {
            return NULL;
        }
        left -= left < copy.pack ? left : copy.pack;
    }
    return copy.in.at;
}

// ---- a column that is being read

// Memory that a column owns, and the limit for all columns together.
typedef struct qlora__parquet_block {
    uint8_t* data;
    size_t capacity;
} qlora__parquet_block;

typedef struct qlora__parquet_held {
    uint64_t bytes;
    uint64_t limit;
} qlora__parquet_held;

typedef struct qlora__parquet_leaf qlora__parquet_leaf;
typedef bool (*qlora__parquet_begin_fn)(qlora__parquet_leaf* leaf);
typedef bool (*qlora__parquet_next_fn)(qlora__parquet_leaf* leaf);

struct qlora__parquet_leaf {
    uint32_t node;
    qlora__parquet_type type;
    qlora__parquet_form form;
    uint32_t width; // bytes of a value, 0: varies
    unsigned bits;  // of an integer
    uint32_t max_definition;
    uint32_t max_repetition;
    // the pages that are still to be read
    const uint8_t* at;
    const uint8_t* end;
    int64_t codec;
    int64_t left; // entries in them
    // the dictionary
    qlora__parquet_block dictionary;
    qlora__parquet_block places; // of strings: where each one starts, a uint32_t
    const uint8_t* words;
    size_t words_size;
    uint32_t word_count;
    bool has_dictionary;
    // the page
    qlora__parquet_block page;
    uint64_t entries; // that are left
    qlora__parquet_runs repetitions;
    qlora__parquet_runs definitions;
    qlora__parquet_next_fn next;
    const uint8_t* values;
    const uint8_t* values_end;
    uint64_t index;
    qlora__parquet_runs runs;
    qlora__parquet_delta lengths;
    qlora__parquet_delta prefixes;
    qlora__parquet_block previous; // the last string, whose beginning the next one may share
    // the next entry, if `ready`
    bool ready;
    bool ended; // there is none in this row group
    uint32_t repetition;
    uint32_t definition;
    // the last value
    const uint8_t* value;
    size_t value_size;
    uint8_t made[16]; // where it was put together
};

static void qlora__parquet_block_free(qlora__env* env, qlora__parquet_held* held,
                                      qlora__parquet_block* block) {
    held->bytes -= block->capacity;
    qlora__env_free(env, block->data, block->capacity);
    memset(block, 0, sizeof *block);
}

// Makes room for `size` bytes; what was there is lost.
static qlora_result qlora__parquet_block_room(qlora__env* env, qlora__parquet_held* held,
                                              qlora__parquet_block* block, uint64_t size) {
    if (size <= block->capacity) {
        return QLORA_OK;
    }
    qlora__parquet_block_free(env, held, block);
    if (size > held->limit - held->bytes) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "its pages need more than %llu MiB of memory together with those "
                               "of the other columns",
                               (unsigned long long)(held->limit >> 20));
    }
    block->data = (uint8_t*)qlora__env_alloc(env, (size_t)size);
    if (block->data == NULL) {
        return QLORA_ERR_MEMORY;
    }
    block->capacity = (size_t)size;
    held->bytes += size;
    return QLORA_OK;
}

// ---- encodings: `begin` prepares the values of a page, `next` reads one into leaf->value

static bool qlora__parquet_take(qlora__parquet_leaf* leaf, uint64_t size) {
    if (size > (uint64_t)(leaf->values_end - leaf->values)) {
        return false;
    }
    leaf->value = leaf->values;
    leaf->value_size = (size_t)size;
    leaf->values += size;
    return true;
}

static bool qlora__parquet_plain_next(qlora__parquet_leaf* leaf) {
    if (leaf->type == QLORA__PARQUET_BYTE_ARRAY) {
        if (leaf->values_end - leaf->values < 4) {
            return false;
        }
        uint32_t size = qlora__load32(leaf->values);
        leaf->values += 4;
        return qlora__parquet_take(leaf, size);
    }
    if (leaf->type != QLORA__PARQUET_BOOLEAN) {
        return qlora__parquet_take(leaf, leaf->width);
    }
    if (leaf->index / 8 >= (uint64_t)(leaf->values_end - leaf->values)) {
        return false;
    }
    leaf->made[0] = leaf->values[leaf->index / 8] >> (leaf->index % 8) & 1;
    leaf->index++;
    leaf->value = leaf->made;
    leaf->value_size = 1;
    return true;
}

static bool qlora__parquet_plain_begin(qlora__parquet_leaf* leaf) {
    leaf->index = 0;
    return true;
}

// One byte with the width, then runs of indices.
static bool qlora__parquet_indices_begin(qlora__parquet_leaf* leaf) {
    size_t size = (size_t)(leaf->values_end - leaf->values);
    if (!leaf->has_dictionary) {
        return false;
    }
    if (size == 0) { // nothing but nulls
        qlora__parquet_runs_begin(&leaf->runs, leaf->values, 0, 1);
        return true;
    }
    if (leaf->values[0] > 32) {
        return false;
    }
    qlora__parquet_runs_begin(&leaf->runs, leaf->values + 1, size - 1, leaf->values[0]);
    return true;
}

static bool qlora__parquet_indices_next(qlora__parquet_leaf* leaf) {
    uint32_t index = 0;
    if (!qlora__parquet_runs_next(&leaf->runs, &index) || index >= leaf->word_count) {
        return false;
    }
    if (leaf->type != QLORA__PARQUET_BYTE_ARRAY) {
        leaf->value = leaf->words + (size_t)index * leaf->width;
        leaf->value_size = leaf->width;
        return true;
    }
    uint32_t place = 0;
    memcpy(&place, leaf->places.data + 4 * (size_t)index, 4);
    leaf->value_size = qlora__load32(leaf->words + place);
    leaf->value = leaf->words + place + 4;
    return true;
}

// Booleans: a length, then runs of one bit.
static bool qlora__parquet_rle_begin(qlora__parquet_leaf* leaf) {
    size_t size = (size_t)(leaf->values_end - leaf->values);
    uint32_t length = size >= 4 ? qlora__load32(leaf->values) : 0;
    if (size > 0 && (size < 4 || length > size - 4)) {
        return false;
    }
    qlora__parquet_runs_begin(&leaf->runs, leaf->values + (size > 0 ? 4 : 0), length, 1);
    return true;
}

static bool qlora__parquet_rle_next(qlora__parquet_leaf* leaf) {
    uint32_t value = 0;
    bool ok = qlora__parquet_runs_next(&leaf->runs, &value);
    leaf->made[0] = (uint8_t)value;
    leaf->value = leaf->made;
    leaf->value_size = 1;
    return ok && value < 2;
}

// A page without values may be empty.
static bool qlora__parquet_delta_start(qlora__parquet_delta* d, const uint8_t* data,
                                       const uint8_t* end) {
    if (data == end) {
        memset(d, 0, sizeof *d);
        d->in.at = data;
        d->in.end = end;
        return true;
    }
    return qlora__parquet_delta_begin(d, data, (size_t)(end - data));
}

static bool qlora__parquet_numbers_begin(qlora__parquet_leaf* leaf) {
    return qlora__parquet_delta_start(&leaf->lengths, leaf->values, leaf->values_end);
}

static bool qlora__parquet_numbers_next(qlora__parquet_leaf* leaf) {
    uint64_t value = 0;
    bool ok = qlora__parquet_delta_next(&leaf->lengths, &value);
    memcpy(leaf->made, &value, 8); // little-endian: the low bytes first
    leaf->value = leaf->made;
    leaf->value_size = leaf->width;
    return ok;
}

// All lengths, then all bytes.
static bool qlora__parquet_strings_begin(qlora__parquet_leaf* leaf) {
    if (!qlora__parquet_delta_start(&leaf->lengths, leaf->values, leaf->values_end)) {
        return false;
    }
    leaf->values = qlora__parquet_delta_end(&leaf->lengths);
    return leaf->values != NULL;
}

static bool qlora__parquet_strings_next(qlora__parquet_leaf* leaf) {
    uint64_t size = 0;
    return qlora__parquet_delta_next(&leaf->lengths, &size) && qlora__parquet_take(leaf, size);
}

// All lengths of shared beginnings, then the rest of each string as above.
static bool qlora__parquet_prefixes_begin(qlora__parquet_leaf* leaf) {
    if (!qlora__parquet_delta_start(&leaf->prefixes, leaf->values, leaf->values_end)) {
        return false;
    }
    leaf->values = qlora__parquet_delta_end(&leaf->prefixes);
    leaf->index = 0; // length of the last string
    return leaf->values != NULL && qlora__parquet_strings_begin(leaf);
}

// The room for leaf->previous is that of the page: no string can be longer than all its rests.
static bool qlora__parquet_prefixes_next(qlora__parquet_leaf* leaf) {
    uint64_t shared = 0;
    if (!qlora__parquet_delta_next(&leaf->prefixes, &shared) || shared > leaf->index ||
        !qlora__parquet_strings_next(leaf) || leaf->value_size > leaf->previous.capacity - shared) {
        return false;
    }
    if (leaf->value_size > 0) {
        memcpy(leaf->previous.data + shared, leaf->value, leaf->value_size);
    }
    leaf->value = leaf->previous.data;
    leaf->value_size += (size_t)shared;
    leaf->index = leaf->value_size;
    return leaf->type == QLORA__PARQUET_BYTE_ARRAY || leaf->value_size == leaf->width;
}

// The first byte of every value, then the second byte of every value, and so on.
static bool qlora__parquet_split_begin(qlora__parquet_leaf* leaf) {
    leaf->index = 0;
    return leaf->width <= sizeof leaf->made &&
           (size_t)(leaf->values_end - leaf->values) % leaf->width == 0;
}

static bool qlora__parquet_split_next(qlora__parquet_leaf* leaf) {
    uint64_t count = (uint64_t)(leaf->values_end - leaf->values) / leaf->width;
    if (leaf->index >= count) {
        return false;
    }
    for (uint32_t i = 0; i < leaf->width; i++) {
        leaf->made[i] = leaf->values[i * count + leaf->index];
    }
    leaf->index++;
    leaf->value = leaf->made;
    leaf->value_size = leaf->width;
    return true;
}

typedef struct qlora__parquet_encoding {
    const char* name;
    unsigned types;                // a bit for each physical type that it may have
    qlora__parquet_begin_fn begin; // NULL: not supported
    qlora__parquet_next_fn next;
} qlora__parquet_encoding;

// By their number.
static const qlora__parquet_encoding qlora__parquet_encodings[] = {
    {"PLAIN", 0xFF, qlora__parquet_plain_begin, qlora__parquet_plain_next},
    {"GROUP_VAR_INT", 0, NULL, NULL},
    {"PLAIN_DICTIONARY", 0xFE, qlora__parquet_indices_begin, qlora__parquet_indices_next},
    {"RLE", 1u << QLORA__PARQUET_BOOLEAN, qlora__parquet_rle_begin, qlora__parquet_rle_next},
    {"BIT_PACKED", 0, NULL, NULL},
    {"DELTA_BINARY_PACKED", 1u << QLORA__PARQUET_INT32 | 1u << QLORA__PARQUET_INT64,
     qlora__parquet_numbers_begin, qlora__parquet_numbers_next},
    {"DELTA_LENGTH_BYTE_ARRAY", 1u << QLORA__PARQUET_BYTE_ARRAY, qlora__parquet_strings_begin,
     qlora__parquet_strings_next},
    {"DELTA_BYTE_ARRAY", 1u << QLORA__PARQUET_BYTE_ARRAY | 1u << QLORA__PARQUET_FIXED,
     qlora__parquet_prefixes_begin, qlora__parquet_prefixes_next},
    {"RLE_DICTIONARY", 0xFE, qlora__parquet_indices_begin, qlora__parquet_indices_next},
    {"BYTE_STREAM_SPLIT",
     1u << QLORA__PARQUET_INT32 | 1u << QLORA__PARQUET_INT64 | 1u << QLORA__PARQUET_FLOAT |
         1u << QLORA__PARQUET_DOUBLE | 1u << QLORA__PARQUET_FIXED,
     qlora__parquet_split_begin, qlora__parquet_split_next}};

enum {
    QLORA__PARQUET_PLAIN = 0,
    QLORA__PARQUET_PLAIN_DICTIONARY = 2,
    QLORA__PARQUET_RLE = 3,
    QLORA__PARQUET_DELTA_BYTE_ARRAY = 7,
    QLORA__PARQUET_ENCODING_COUNT = 10
};
