// ---- Parquet: pages -----------------------------------------------------------------------------

typedef struct qlora__parquet_group {
    const uint8_t* columns; // the list in the footer
    int64_t rows;
} qlora__parquet_group;

// An open file. The bytes belong to the caller.
typedef struct qlora__parquet {
    const char* label;
    const uint8_t* file;
    uint64_t size;
    uint64_t footer;            // where it begins: no page lies behind it
    qlora__parquet_node* nodes; // the first one is the row
    uint32_t node_count;
    uint32_t node_capacity;
    qlora__parquet_leaf* leaves;
    uint32_t leaf_count;
    uint32_t leaf_capacity;
    qlora__parquet_group* groups;
    uint32_t group_count;
    uint32_t group;    // that is being read, from 1; 0: none yet
    int64_t rows_left; // of it
    uint64_t row;      // of the file, from 1
    bool inside;       // this row is being put together
    uint64_t text;     // bytes of JSON so far
    uint64_t text_limit;
    qlora__parquet_held held;
    qlora__crc32 crc;
    qlora__zstd* zstd; // both are made when they are needed
    qlora__gzip* gzip;
} qlora__parquet;

static const struct {
    const char* name;
    uint32_t growth; // what a byte can become at most; 0: not supported
} qlora__parquet_codecs[] = {{"UNCOMPRESSED", 1}, {"SNAPPY", 22}, {"GZIP", 1033},  {"LZO", 0},
                             {"BROTLI", 0},       {"LZ4", 0},     {"ZSTD", 65536}, {"LZ4_RAW", 0}};

enum { QLORA__PARQUET_CODEC_COUNT = 8 };

// Writes the name of a column: of its fields, with dots between.
static void qlora__parquet_path(const qlora__parquet* p, uint32_t node, char* out, size_t room) {
    size_t used = 0;
    out[0] = '\0';
    for (uint32_t i = 1; i <= node; i++) {
        const qlora__parquet_node* n = &p->nodes[i];
        if (n->end > node && n->name != NULL) {
            int size = n->name_size < 60 ? (int)n->name_size : 60;
            qlora__append(out, room, &used, "%s%.*s", used > 0 ? "." : "", size, n->name);
        }
    }
}

// Puts the place before the error text.
static qlora_result qlora__parquet_at(qlora__env* env, const qlora__parquet* p,
                                      const qlora__parquet_leaf* leaf, qlora_result result) {
    char path[256];
    char row[40] = "";
    qlora__parquet_path(p, leaf->node, path, sizeof path);
    if (p->inside) {
        snprintf(row, sizeof row, ", row %llu", (unsigned long long)p->row);
    }
    return qlora__env_wrap(env, result, "%s: row group %u%s, column \"%s\": ", p->label, p->group,
                           row, path);
}

// ---- page headers

enum { QLORA__PARQUET_DATA = 0, QLORA__PARQUET_DICTIONARY = 2, QLORA__PARQUET_DATA_V2 = 3 };

typedef struct qlora__parquet_page {
    int64_t type;
    int64_t size;   // decompressed
    int64_t stored; // in the file
    int64_t crc;    // -1: none
    int64_t entries; // this and what follows: -1 if it is missing
    int64_t encoding;
    int64_t definition; // encoding of the levels; in version 2 their bytes
    int64_t repetition;
    bool plain; // version 2: the values are not compressed
} qlora__parquet_page;

// The fields of the three kinds of headers. Version 2 has two numbers in between that are not used.
static void qlora__parquet_page_kind(qlora__thrift* t, qlora__parquet_page* page, bool second) {
    qlora__thrift_field field = {0, 0};
    page->plain = false;
    while (qlora__thrift_next(t, &field)) {
        bool number = field.type == QLORA__THRIFT_I32;
        int64_t id = second && field.id > 3 ? field.id - 2 : second && field.id > 1 ? 0 : field.id;
        int64_t* const into[5] = {NULL, &page->entries, &page->encoding, &page->definition,
                                  &page->repetition};
        if (number && id >= 1 && id <= 4) {
            *into[id] = qlora__thrift_int(t);
            continue;
        }
        if (second && field.id == 7) {
            page->plain = field.type == QLORA__THRIFT_FALSE;
        }
        qlora__thrift_skip(t, field.type);
    }
}

static bool qlora__parquet_page_read(qlora__parquet_leaf* leaf, qlora__parquet_page* page) {
    qlora__thrift t;
    qlora__thrift_field field = {0, 0};
    memset(page, 0, sizeof *page);
    page->type = -1;
    page->crc = -1;
    page->size = -1;
    page->stored = -1;
    page->entries = -1;
    page->encoding = -1;
    page->definition = -1;
    page->repetition = -1;
    t.at = leaf->at;
    t.end = leaf->end;
    t.bad = false;
    while (qlora__thrift_next(&t, &field)) {
        bool number = field.type == QLORA__THRIFT_I32;
        bool inner = field.type == QLORA__THRIFT_STRUCT;
        if (field.id == 1 && number) {
            page->type = qlora__thrift_int(&t);
        } else if (field.id == 2 && number) {
            page->size = qlora__thrift_int(&t);
        } else if (field.id == 3 && number) {
            page->stored = qlora__thrift_int(&t);
        } else if (field.id == 4 && number) {
            page->crc = (int64_t)(uint32_t)qlora__thrift_int(&t);
        } else if (inner && (field.id == 5 || field.id == 7 || field.id == 8)) {
            qlora__parquet_page_kind(&t, page, field.id == 8);
        } else {
            qlora__thrift_skip(&t, field.type);
        }
    }
    leaf->at = t.at;
    return !t.bad && page->type >= 0 && page->size >= 0 && page->stored >= 0 &&
           page->stored <= t.end - t.at && page->entries <= INT32_MAX;
}

// ---- decompression

static qlora_result qlora__parquet_gunzip(qlora__env* env, qlora__parquet* p, const uint8_t* in,
                                          size_t size, uint8_t* out, size_t wanted) {
    if (p->gzip == NULL) {
        p->gzip = (qlora__gzip*)qlora__env_alloc(env, sizeof *p->gzip);
        if (p->gzip == NULL) {
            return QLORA_ERR_MEMORY;
        }
    }
    size_t at = 0;
    bool ended = false;
    qlora__gzip_begin(p->gzip, in, size);
    QLORA__TRY(qlora__gzip_read(env, p->gzip, out, &at, wanted + 1, &ended)); // one byte too many
    return ended && at == wanted
               ? QLORA_OK
               : qlora__env_fail(env, QLORA_ERR_FORMAT,
                                 "damaged gzip data: its length is not the announced %llu bytes",
                                 (unsigned long long)wanted);
}

// Decompresses into `out`, which has room for one byte more than `wanted`.
static qlora_result qlora__parquet_unpack(qlora__env* env, qlora__parquet* p, int64_t codec,
                                          const uint8_t* in, size_t size, uint8_t* out,
                                          size_t wanted) {
    if (codec == 2) {
        return qlora__parquet_gunzip(env, p, in, size, out, wanted);
    }
    if (codec == 1) {
        return qlora__snappy_decode(in, size, out, wanted)
                   ? QLORA_OK
                   : qlora__env_fail(env, QLORA_ERR_FORMAT, "damaged Snappy data");
    }
    if (p->zstd == NULL) {
        p->zstd = (qlora__zstd*)qlora__env_alloc_zero(env, sizeof *p->zstd);
        if (p->zstd == NULL) {
            return QLORA_ERR_MEMORY;
        }
    }
    return qlora__zstd_decode(p->zstd, in, size, out, wanted)
               ? QLORA_OK
               : qlora__env_fail(env, QLORA_ERR_FORMAT, "damaged Zstandard data: %s",
                                 p->zstd->fault);
}

// Bytes of a page as they are in the file, and how many they are in memory.
typedef struct qlora__parquet_stored {
    const uint8_t* data;
    size_t size;
    uint64_t wanted;
    bool compressed;
} qlora__parquet_stored;

static qlora__parquet_stored qlora__parquet_whole_page(const qlora__parquet_leaf* leaf,
                                                       const qlora__parquet_page* page) {
    qlora__parquet_stored s;
    s.data = leaf->at;
    s.size = (size_t)page->stored;
    s.wanted = (uint64_t)page->size;
    s.compressed = leaf->codec != 0;
    return s;
}

// The bytes of a page: in the file if they are not compressed, else in `block`.
static qlora_result qlora__parquet_open_page(qlora__env* env, qlora__parquet* p,
                                             const qlora__parquet_leaf* leaf,
                                             qlora__parquet_stored stored,
                                             qlora__parquet_block* block, const uint8_t** out) {
    size_t size = stored.size;
    uint64_t wanted = stored.wanted;
    if (!stored.compressed || (size == 0 && wanted == 0)) {
        *out = stored.data;
        return size == wanted
                   ? QLORA_OK
                   : qlora__env_fail(env, QLORA_ERR_FORMAT, "a page has two sizes, %llu and %llu",
                                     (unsigned long long)size, (unsigned long long)wanted);
    }
    uint64_t growth = qlora__parquet_codecs[leaf->codec].growth;
    if (wanted > growth * (size + 64)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%llu bytes cannot decompress to the %llu announced",
                               (unsigned long long)size, (unsigned long long)wanted);
    }
    if (wanted > QLORA__PARQUET_MAX_PAGE) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "a page of %llu bytes; %llu at most",
                               (unsigned long long)wanted,
                               (unsigned long long)QLORA__PARQUET_MAX_PAGE);
    }
    QLORA__TRY(qlora__parquet_block_room(env, &p->held, block, wanted + 1));
    *out = block->data;
    return qlora__parquet_unpack(env, p, leaf->codec, stored.data, size, block->data,
                                 (size_t)wanted);
}

// ---- dictionaries

// Finds where every string of a dictionary starts.
static qlora_result qlora__parquet_places(qlora__env* env, qlora__parquet* p,
                                          qlora__parquet_leaf* leaf) {
    QLORA__TRY(
        qlora__parquet_block_room(env, &p->held, &leaf->places, 4 * (uint64_t)leaf->word_count));
    size_t at = 0;
    for (uint32_t i = 0; i < leaf->word_count; i++) {
        uint32_t place = (uint32_t)at;
        uint32_t size = leaf->words_size - at >= 4 ? qlora__load32(leaf->words + at) : 0;
        if (leaf->words_size - at < 4 || size > leaf->words_size - at - 4) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "its dictionary ends inside entry %u of %u", i + 1,
                                   leaf->word_count);
        }
        memcpy(leaf->places.data + 4 * (size_t)i, &place, 4);
        at += 4 + (size_t)size;
    }
    return QLORA_OK;
}

static qlora_result qlora__parquet_dictionary(qlora__env* env, qlora__parquet* p,
                                              qlora__parquet_leaf* leaf,
                                              const qlora__parquet_page* page) {
    if (leaf->has_dictionary || leaf->type == QLORA__PARQUET_BOOLEAN) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "a dictionary where none is allowed");
    }
    if (page->encoding != QLORA__PARQUET_PLAIN &&
        page->encoding != QLORA__PARQUET_PLAIN_DICTIONARY) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "its dictionary has the encoding %lld; only PLAIN is supported",
                               (long long)page->encoding);
    }
    QLORA__TRY(qlora__parquet_open_page(env, p, leaf, qlora__parquet_whole_page(leaf, page),
                                        &leaf->dictionary, &leaf->words));
    leaf->words_size = (size_t)page->size;
    leaf->word_count = (uint32_t)page->entries;
    leaf->has_dictionary = true;
    uint64_t least = leaf->width > 0 ? leaf->width : 4;
    if (leaf->word_count > leaf->words_size / least) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%u entries do not fit in its dictionary of %llu bytes",
                               leaf->word_count, (unsigned long long)leaf->words_size);
    }
    return leaf->width > 0 ? QLORA_OK : qlora__parquet_places(env, p, leaf);
}

// ---- data pages

static unsigned qlora__parquet_level_bits(uint32_t level) {
    return level > 0 ? qlora__high_bit(level) + 1 : 0;
}

// Levels of a version 1 page: a length, then runs. *at moves on.
static bool qlora__parquet_levels(const uint8_t* data, size_t size, size_t* at, uint32_t max,
                                  qlora__parquet_runs* runs) {
    size_t length = 0;
    if (max > 0) {
        if (size - *at < 4 || qlora__load32(data + *at) > size - *at - 4) {
            return false;
        }
        length = qlora__load32(data + *at);
        *at += 4;
    }
    qlora__parquet_runs_begin(runs, data + *at, length, qlora__parquet_level_bits(max));
    *at += length;
    return true;
}

// Prepares the values of a page, with the encoding that its header names.
static qlora_result qlora__parquet_values(qlora__env* env, qlora__parquet* p,
                                          qlora__parquet_leaf* leaf, int64_t number) {
    const qlora__parquet_encoding* encoding = number >= 0 && number < QLORA__PARQUET_ENCODING_COUNT
                                                  ? &qlora__parquet_encodings[number]
                                                  : NULL;
    if (encoding == NULL || encoding->begin == NULL) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "the encoding %s (number %lld) is not supported",
                               encoding != NULL ? encoding->name : "unknown", (long long)number);
    }
    if ((encoding->types >> leaf->type & 1) == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s values cannot have the encoding %s",
                               qlora__parquet_type_name(leaf->type), encoding->name);
    }
    if (number == QLORA__PARQUET_DELTA_BYTE_ARRAY) {
        QLORA__TRY(qlora__parquet_block_room(env, &p->held, &leaf->previous,
                                             (uint64_t)(leaf->values_end - leaf->values) + 1));
    }
    leaf->next = encoding->next;
    return encoding->begin(leaf)
               ? QLORA_OK
               : qlora__env_fail(env, QLORA_ERR_FORMAT,
                                 "invalid %s values, or no dictionary for them", encoding->name);
}

static qlora_result qlora__parquet_first_version(qlora__env* env, qlora__parquet* p,
                                                 qlora__parquet_leaf* leaf,
                                                 const qlora__parquet_page* page) {
    const uint8_t* data = NULL;
    size_t size = (size_t)page->size;
    size_t at = 0;
    if ((leaf->max_repetition > 0 && page->repetition != QLORA__PARQUET_RLE) ||
        (leaf->max_definition > 0 && page->definition != QLORA__PARQUET_RLE)) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "levels in another encoding than RLE (BIT_PACKED, say) are not "
                               "supported");
    }
    QLORA__TRY(qlora__parquet_open_page(env, p, leaf, qlora__parquet_whole_page(leaf, page),
                                        &leaf->page, &data));
    if (!qlora__parquet_levels(data, size, &at, leaf->max_repetition, &leaf->repetitions) ||
        !qlora__parquet_levels(data, size, &at, leaf->max_definition, &leaf->definitions)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "the levels of a page do not fit in it");
    }
    leaf->values = data + at;
    leaf->values_end = data + size;
    return QLORA_OK;
}

static qlora_result qlora__parquet_second_version(qlora__env* env, qlora__parquet* p,
                                                  qlora__parquet_leaf* leaf,
                                                  const qlora__parquet_page* page) {
    if (page->repetition < 0 || page->definition < 0 || page->repetition > page->stored ||
        page->definition > page->stored - page->repetition ||
        page->repetition + page->definition > page->size) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "the levels of a page do not fit in it");
    }
    size_t repetition = (size_t)page->repetition;
    size_t levels = repetition + (size_t)page->definition;
    qlora__parquet_runs_begin(&leaf->repetitions, leaf->at, repetition,
                              qlora__parquet_level_bits(leaf->max_repetition));
    qlora__parquet_runs_begin(&leaf->definitions, leaf->at + repetition, levels - repetition,
                              qlora__parquet_level_bits(leaf->max_definition));
    qlora__parquet_stored stored = qlora__parquet_whole_page(leaf, page);
    stored.data += levels; // which are never compressed
    stored.size -= levels;
    stored.wanted -= levels;
    stored.compressed = stored.compressed && !page->plain;
    const uint8_t* data = NULL;
    QLORA__TRY(qlora__parquet_open_page(env, p, leaf, stored, &leaf->page, &data));
    leaf->values = data;
    leaf->values_end = data + stored.wanted;
    return QLORA_OK;
}

// Goes to the next page with entries.
static qlora_result qlora__parquet_turn(qlora__env* env, qlora__parquet* p,
                                        qlora__parquet_leaf* leaf) {
    while (leaf->entries == 0) {
        qlora__parquet_page page;
        if (!qlora__parquet_page_read(leaf, &page)) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "invalid page header; %lld entries are missing",
                                   (long long)leaf->left);
        }
        bool first = page.type == QLORA__PARQUET_DATA;
        bool second = page.type == QLORA__PARQUET_DATA_V2;
        bool used = first || second || page.type == QLORA__PARQUET_DICTIONARY;
        if (used && page.crc >= 0 &&
            page.crc != (int64_t)qlora__crc32_add(&p->crc, 0, leaf->at, (size_t)page.stored)) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "the checksum of a page is wrong");
        }
        bool levels = page.definition >= 0 && page.repetition >= 0;
        if (used && (page.entries < 0 || page.encoding < 0 || (!levels && (first || second)))) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "invalid page header");
        }
        if (page.type == QLORA__PARQUET_DICTIONARY) {
            QLORA__TRY(qlora__parquet_dictionary(env, p, leaf, &page));
        } else if (used) {
            QLORA__TRY(first ? qlora__parquet_first_version(env, p, leaf, &page)
                             : qlora__parquet_second_version(env, p, leaf, &page));
            QLORA__TRY(qlora__parquet_values(env, p, leaf, page.encoding));
            if (page.entries > leaf->left) {
                return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                       "its pages have more entries than the footer announces");
            }
            leaf->entries = (uint64_t)page.entries;
            leaf->left -= page.entries;
        }
        leaf->at += page.stored;
    }
    return QLORA_OK;
}

// Makes the next entry available: its levels, not yet its value.
static qlora_result qlora__parquet_peek(qlora__env* env, qlora__parquet* p,
                                        qlora__parquet_leaf* leaf) {
    if (leaf->ready) {
        return QLORA_OK;
    }
    leaf->repetition = 0;
    leaf->definition = 0;
    if (leaf->entries == 0 && leaf->left == 0) {
        leaf->ended = true;
        leaf->ready = true;
        return QLORA_OK;
    }
    if (leaf->entries == 0) {
        qlora_result r = qlora__parquet_turn(env, p, leaf);
        if (r != QLORA_OK) {
            return qlora__parquet_at(env, p, leaf, r);
        }
    }
    if (!qlora__parquet_runs_next(&leaf->repetitions, &leaf->repetition) ||
        !qlora__parquet_runs_next(&leaf->definitions, &leaf->definition) ||
        leaf->repetition > leaf->max_repetition || leaf->definition > leaf->max_definition) {
        return qlora__parquet_at(
            env, p, leaf, qlora__env_fail(env, QLORA_ERR_FORMAT, "invalid levels in a page"));
    }
    leaf->entries--;
    leaf->ready = true;
    return QLORA_OK;
}
