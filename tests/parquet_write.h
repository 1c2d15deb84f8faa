// parquet_write.h - a small Parquet file made in memory, with every encoding that is read: for the
// tests and the fuzzer, which need files without another program.
//
// Nothing is really compressed: the codecs get their simplest form (literals, stored blocks).
#ifndef QLORA_PARQUET_WRITE_H
#define QLORA_PARQUET_WRITE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef struct pq_bytes {
    unsigned char data[16384];
    size_t size;
} pq_bytes;

static void pq_put(pq_bytes* b, const void* data, size_t size) {
    if (size <= sizeof b->data - b->size) {
        memcpy(b->data + b->size, data, size);
        b->size += size;
    }
}

static void pq_byte(pq_bytes* b, unsigned value) {
    unsigned char byte = (unsigned char)value;
    pq_put(b, &byte, 1);
}

static void pq_u32(pq_bytes* b, uint32_t value) {
    for (int i = 0; i < 4; i++) {
        pq_byte(b, value >> (8 * i) & 255);
    }
}

static void pq_varint(pq_bytes* b, uint64_t value) {
    for (; value >= 128; value >>= 7) {
        pq_byte(b, (unsigned)(value & 127) | 128);
    }
    pq_byte(b, (unsigned)value);
}

static void pq_zigzag(pq_bytes* b, int64_t value) {
    pq_varint(b, (uint64_t)value << 1 ^ (value < 0 ? UINT64_MAX : 0));
}

// ---- Thrift: a field is its id (the difference to the last one) and its value

static void pq_field(pq_bytes* b, unsigned step, unsigned type) {
    pq_byte(b, step << 4 | type);
}

static void pq_int(pq_bytes* b, unsigned step, unsigned type, int64_t value) {
    pq_field(b, step, type);
    pq_zigzag(b, value);
}

static void pq_string(pq_bytes* b, unsigned step, const char* text) {
    pq_field(b, step, 8);
    pq_varint(b, strlen(text));
    pq_put(b, text, strlen(text));
}

// ---- the columns

enum { PQ_NONE = -1, PQ_UTF8 = 0, PQ_LIST = 3, PQ_INT8 = 15 };

// An element of the schema. type -1: a group.
typedef struct pq_element {
    const char* name;
    int type;
    int repetition;
    int children;
    int converted;
} pq_element;

static const pq_element pq_schema[] = {
    {"schema", -1, 0, 7, PQ_NONE},
    {"prompt", 6, 1, 0, PQ_UTF8}, // PLAIN
    {"messages", -1, 1, 1, PQ_LIST},
    {"list", -1, 2, 1, PQ_NONE},
    {"element", -1, 1, 2, PQ_NONE},
    {"role", 6, 1, 0, PQ_UTF8},    // a dictionary
    {"content", 6, 1, 0, PQ_UTF8}, // DELTA_BYTE_ARRAY
    {"score", 5, 0, 0, PQ_NONE},   // BYTE_STREAM_SPLIT
    {"ids", -1, 1, 1, PQ_LIST},
    {"list", -1, 2, 1, PQ_NONE},
    {"item", 2, 0, 0, PQ_NONE}, // DELTA_BINARY_PACKED
    {"old", 1, 2, 0, PQ_INT8},  // repeated without a LIST
    {"flag", 0, 1, 0, PQ_NONE}, // RLE
    {"tags", -1, 0, 1, PQ_LIST},
    {"item", 6, 2, 0, PQ_UTF8}}; // two levels; DELTA_LENGTH_BYTE_ARRAY

#define PQ_ROWS 3

// The rows, as JSON.
static const char* const pq_rows[PQ_ROWS] = {
    "{\"prompt\":\"one\",\"messages\":[{\"role\":\"user\",\"content\":\"alpha\"},{\"role\":"
    "\"assistant\",\"content\":\"alphabet\"}],\"score\":0.5,\"ids\":[1,2,400],\"old\":[7,8],"
    "\"flag\":true,\"tags\":[\"a\",\"\"]}",
    "{\"prompt\":null,\"messages\":null,\"score\":-2.0,\"ids\":[],\"old\":[],\"flag\":null,"
    "\"tags\":[]}",
    "{\"prompt\":\"\\\"\\u0009\",\"messages\":[null,{\"role\":\"user\",\"content\":null}],"
    "\"score\":1e+100,\"ids\":[-5],\"old\":[-1],\"flag\":false,\"tags\":[\"bc\"]}"};

// A column: its levels as digits, one per entry, and its values. "" = the maximum is 0.
typedef struct pq_column {
    const char* path[4];
    int type;
    int encoding;
    const char* repetitions;
    const char* definitions;
    const char* entries; // how many there are: one character each
} pq_column;

static const pq_column pq_columns[] = {
    {{"prompt", NULL}, 6, 0, "", "101", "..."},
    {{"messages", "list", "element", "role"}, 6, 8, "01001", "44024", "....."},
    {{"messages", "list", "element", "content"}, 6, 7, "01001", "44023", "....."},
    {{"score", NULL}, 5, 9, "", "", "..."},
    {{"ids", "list", "item", NULL}, 2, 5, "01100", "22212", "....."},
    {{"old", NULL}, 1, 0, "0100", "1101", "...."},
    {{"flag", NULL}, 0, 3, "", "101", "..."},
    {{"tags", "item", NULL}, 6, 6, "0100", "1101", "...."}};

#define PQ_COLUMNS 8

// DELTA_BINARY_PACKED with one block of four packs; values differ by less than 2^16.
static void pq_delta(pq_bytes* b, const int64_t* values, size_t count) {
    pq_varint(b, 128);
    pq_varint(b, 4);
    pq_varint(b, count);
    pq_zigzag(b, count > 0 ? values[0] : 0);
    if (count < 2) {
        return;
    }
    int64_t least = values[1] - values[0];
    for (size_t i = 2; i < count; i++) {
        least = values[i] - values[i - 1] < least ? values[i] - values[i - 1] : least;
    }
    pq_zigzag(b, least);
    pq_u32(b, 16); // the width of the first pack; the others are not stored
    for (size_t i = 1; i <= 32; i++) {
        uint64_t value = i < count ? (uint64_t)(values[i] - values[i - 1] - least) : 0;
        pq_byte(b, value & 255);
        pq_byte(b, value >> 8 & 255);
    }
}

static void pq_plain_string(pq_bytes* b, const char* text) {
    pq_u32(b, (uint32_t)strlen(text));
    pq_put(b, text, strlen(text));
}

static double pq_scores[PQ_ROWS] = {0.5, -2.0, 1e100}; // a test may change them

static void pq_values(pq_bytes* b, size_t column) {
    static const int64_t prefixes[2] = {0, 5};
    static const int64_t suffixes[2] = {5, 3};
    static const int64_t ids[4] = {1, 2, 400, -5};
    static const int64_t lengths[3] = {1, 0, 2};
    unsigned char raw[3][8];
    switch (column) {
    case 0:
        pq_plain_string(b, "one");
        pq_plain_string(b, "\"\t");
        break;
    case 1: // 0 1 0, in bits
        pq_byte(b, 1);
        pq_byte(b, 1 << 1 | 1);
        pq_byte(b, 2);
        break;
    case 2:
        pq_delta(b, prefixes, 2);
        pq_delta(b, suffixes, 2);
        pq_put(b, "alphabet", 8);
        break;
    case 3:
        memcpy(raw, pq_scores, sizeof raw);
        for (int i = 0; i < 8; i++) {
            for (int k = 0; k < 3; k++) {
                pq_byte(b, raw[k][i]);
            }
        }
        break;
    case 4:
        pq_delta(b, ids, 4);
        break;
    case 5:
        pq_u32(b, 7);
        pq_u32(b, 8);
        pq_u32(b, UINT32_MAX);
        break;
    case 6: // a run of one true, a run of one false
        pq_u32(b, 4);
        pq_put(b, "\2\1\2\0", 4);
        break;
    default:
        pq_delta(b, lengths, 3);
        pq_put(b, "abc", 3);
    }
}

// Levels as runs of one entry each.
static void pq_levels(pq_bytes* b, const char* levels, bool prefixed) {
    if (levels[0] == '\0') {
        return;
    }
    if (prefixed) {
        pq_u32(b, 2 * (uint32_t)strlen(levels));
    }
    for (; *levels != '\0'; levels++) {
        pq_byte(b, 1 << 1);
        pq_byte(b, (unsigned)(*levels - '0'));
    }
}

// ---- codecs

static uint32_t pq_crc(const unsigned char* p, size_t size) {
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < size; i++) {
        crc ^= p[i];
        for (int k = 0; k < 8; k++) {
            crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xEDB88320u : 0u);
        }
    }
    return ~crc;
}

static void pq_compress(pq_bytes* b, int codec, const pq_bytes* page, size_t from) {
    uint32_t size = (uint32_t)(page->size - from);
    if (codec == 1) {
        pq_varint(b, size);
        pq_byte(b, 61 << 2); // a literal whose length has two bytes
        pq_byte(b, (size - 1) & 255);
        pq_byte(b, (size - 1) >> 8);
    } else if (codec == 2) {
        pq_put(b, "\x1F\x8B\x08\0\0\0\0\0\0\xFF\x01", 11);
        pq_u32(b, size | (~size & 0xFFFF) << 16);
    } else if (codec == 6) {
        pq_put(b, "\x28\xB5\x2F\xFD\x80\x58", 6); // a window, a size of four bytes
        pq_u32(b, size);
        pq_byte(b, (size << 3 | 1) & 255);
        pq_byte(b, size >> 5 & 255);
        pq_byte(b, size >> 13 & 255);
    }
    pq_put(b, page->data + from, size);
    if (codec == 2) {
        pq_u32(b, pq_crc(page->data + from, size));
        pq_u32(b, size);
    }
}

// ---- pages

// The numbers of a page header before those of its type.
static void pq_header(pq_bytes* b, int type, size_t size, size_t stored, uint32_t crc) {
    pq_int(b, 1, 5, type);
    pq_int(b, 1, 5, (int64_t)size);
    pq_int(b, 1, 5, (int64_t)stored);
    pq_int(b, 1, 5, (int32_t)crc);
}

static void pq_page(pq_bytes* file, const pq_column* c, size_t column, int codec, bool second) {
    static pq_bytes page;
    static pq_bytes packed;
    size_t entries = strlen(c->entries);
    page.size = 0;
    packed.size = 0;
    pq_levels(&page, c->repetitions, !second);
    pq_levels(&page, c->definitions, !second);
    size_t levels = second ? page.size : 0;
    pq_values(&page, column);
    pq_put(&packed, page.data, levels);
    pq_compress(&packed, codec, &page, levels);
    pq_header(file, second ? 3 : 0, page.size, packed.size, pq_crc(packed.data, packed.size));
    pq_field(file, second ? 4 : 1, 12);
    pq_int(file, 1, 5, (int64_t)entries);
    if (second) {
        pq_int(file, 1, 5, 0);
        pq_int(file, 1, 5, PQ_ROWS);
        pq_int(file, 1, 5, c->encoding);
        pq_int(file, 1, 5, (int64_t)(2 * strlen(c->definitions)));
        pq_int(file, 1, 5, (int64_t)(2 * strlen(c->repetitions)));
        pq_field(file, 1, codec == 0 ? 2 : 1);
    } else {
        pq_int(file, 1, 5, c->encoding);
        pq_int(file, 1, 5, 3);
        pq_int(file, 1, 5, 3);
    }
    pq_byte(file, 0);
    pq_byte(file, 0);
    pq_put(file, packed.data, packed.size);
}

static void pq_dictionary(pq_bytes* file, int codec) {
    static pq_bytes page;
    static pq_bytes packed;
    page.size = 0;
    packed.size = 0;
    pq_plain_string(&page, "user");
    pq_plain_string(&page, "assistant");
    pq_compress(&packed, codec, &page, 0);
    pq_header(file, 2, page.size, packed.size, pq_crc(packed.data, packed.size));
    pq_field(file, 3, 12);
    pq_int(file, 1, 5, 2);
    pq_int(file, 1, 5, 0);
    pq_byte(file, 0);
    pq_byte(file, 0);
    pq_put(file, packed.data, packed.size);
}

// ---- the file

static void pq_footer_schema(pq_bytes* b) {
    size_t count = sizeof pq_schema / sizeof pq_schema[0];
    pq_field(b, 1, 9);
    pq_byte(b, 15 << 4 | 12);
    pq_varint(b, count);
    for (size_t i = 0; i < count; i++) {
        const pq_element* e = &pq_schema[i];
        unsigned last = 0;
        if (e->type >= 0) {
            pq_int(b, 1, 5, e->type);
            last = 1;
        }
        pq_int(b, 3 - last, 5, e->repetition);
        pq_string(b, 1, e->name);
        last = 4;
        if (e->children > 0) {
            pq_int(b, 1, 5, e->children);
            last = 5;
        }
        if (e->converted != PQ_NONE) {
            pq_int(b, 6 - last, 5, e->converted);
        }
        pq_byte(b, 0);
    }
}

// A column in a row group: where its pages are.
static void pq_footer_column(pq_bytes* b, const pq_column* c, int codec, const size_t place[3]) {
    size_t names = 0;
    while (names < 4 && c->path[names] != NULL) {
        names++;
    }
    pq_int(b, 2, 6, 0);
    pq_field(b, 1, 12);
    pq_int(b, 1, 5, c->type);
    pq_field(b, 1, 9);
    pq_byte(b, 1 << 4 | 5);
    pq_zigzag(b, c->encoding);
    pq_field(b, 1, 9);
    pq_byte(b, (unsigned)names << 4 | 8);
    for (size_t i = 0; i < names; i++) {
        pq_varint(b, strlen(c->path[i]));
        pq_put(b, c->path[i], strlen(c->path[i]));
    }
    pq_int(b, 1, 5, codec);
    pq_int(b, 1, 6, (int64_t)strlen(c->entries));
    pq_int(b, 1, 6, 0);
    pq_int(b, 1, 6, (int64_t)(place[2] - place[0]));
    pq_int(b, 2, 6, (int64_t)place[1]);
    if (place[1] != place[0]) {
        pq_int(b, 2, 6, (int64_t)place[0]);
    }
    if (strcmp(c->path[0], "prompt") == 0) { // one null and two values
        pq_field(b, 7, 12);
        pq_field(b, 3, 9);
        pq_byte(b, 2 << 4 | 6);
        pq_zigzag(b, 1);
        pq_zigzag(b, 2);
        pq_byte(b, 0);
    }
    pq_byte(b, 0);
    pq_byte(b, 0);
}

// Writes a file with the rows of pq_rows, `groups` times.
static void pq_make(pq_bytes* file, int codec, bool second, unsigned groups) {
    static pq_bytes footer;
    footer.size = 0;
    file->size = 0;
    pq_put(file, "PAR1", 4);
    pq_int(&footer, 1, 5, 1);
    pq_footer_schema(&footer);
    pq_int(&footer, 1, 6, (int64_t)groups * PQ_ROWS);
    pq_field(&footer, 1, 9);
    pq_byte(&footer, groups << 4 | 12);
    for (unsigned group = 0; group < groups; group++) {
        pq_field(&footer, 1, 9);
        pq_byte(&footer, PQ_COLUMNS << 4 | 12);
        for (size_t i = 0; i < PQ_COLUMNS; i++) {
            size_t place[3];
            place[0] = file->size;
            if (pq_columns[i].encoding == 8) {
                pq_dictionary(file, codec);
            }
            place[1] = file->size;
            pq_page(file, &pq_columns[i], i, codec, second);
            place[2] = file->size;
            pq_footer_column(&footer, &pq_columns[i], codec, place);
        }
        pq_int(&footer, 1, 6, 0);
        pq_int(&footer, 1, 6, PQ_ROWS);
        pq_byte(&footer, 0);
    }
    pq_byte(&footer, 0);
    pq_put(file, footer.data, footer.size);
    pq_u32(file, (uint32_t)footer.size);
    pq_put(file, "PAR1", 4);
}

#endif // QLORA_PARQUET_WRITE_H
