// parquet.c - libFuzzer target: any bytes as a Parquet file, as gzip, Snappy or Zstandard data, and
// valid Parquet files changed in a few places.
//
// Bytes that start with PAR1 are a file. Otherwise the first byte selects what the rest is.

#include "fuzz/mutate.h"
#include "parquet_write.h"

// What one input may take: memory for pages, and JSON.
enum { FUZZ_HELD = 1 << 24, FUZZ_TEXT = 1 << 22 };

// Reads all rows. Each must be one JSON object, and everything must be freed.
static void read_rows(const uint8_t* data, size_t size) {
    qlora__env env;
    qlora__parquet p;
    qlora__string row;
    memset(&env, 0, sizeof env);
    env.one_line = true;
    qlora__hooks_default(&env.allocator, &env.files);
    qlora__string_begin(&env, &row);
    bool found = true;
    qlora_result r = qlora__parquet_open(&env, "fuzz", data, size, &p);
    bool opened = r == QLORA_OK;
    if (opened) {
        p.held.limit = FUZZ_HELD;
        p.text_limit = FUZZ_TEXT;
        for (uint32_t i = 1; i < p.node_count && size % 2 == 1; i = p.nodes[i].end) {
            p.nodes[i].skip = p.nodes[i].why != NULL; // so that the others are read
        }
    }
    while (r == QLORA_OK && found) {
        r = qlora__parquet_next(&env, &p, &row, &found);
        if (r == QLORA_OK && found && p.row <= 100) {
            qlora__json json;
            if (qlora__text_json(&env, "row", row.data, row.size, &json) != QLORA_OK) {
                abort();
            }
            qlora__json_free(&env, &json);
        }
    }
    if (r != QLORA_OK && env.error[0] == '\0') {
        abort();
    }
    if (opened) {
        qlora__parquet_close(&env, &p);
    }
    qlora__string_free(&row);
    if (env.host_bytes != 0) {
        abort();
    }
}

static void read_gzip(const uint8_t* data, size_t size) {
    static qlora__gzip gzip;
    static uint8_t out[1 << 16];
    qlora__env env;
    memset(&env, 0, sizeof env);
    bool ended = false;
    uint64_t total = 0;
    size_t at = 0;
    qlora__gzip_begin(&gzip, data, size);
    while (!ended && total < 1 << 24) {
        if (at > sizeof out / 2) { // keep a window
            memmove(out, out + at - QLORA__INFLATE_WINDOW, QLORA__INFLATE_WINDOW);
            at = QLORA__INFLATE_WINDOW;
        }
        size_t before = at;
        if (qlora__gzip_read(&env, &gzip, out, &at, sizeof out, &ended) != QLORA_OK) {
            if (env.error[0] == '\0') {
                abort();
            }
            return;
        }
        total += at - before;
    }
}

// Exactly as much room as is announced: one byte more is found by the sanitizer.
static void read_block(const uint8_t* data, size_t size, bool snappy) {
    static qlora__zstd zstd;
    size_t wanted = size >= 2 ? data[0] + 256u * data[1] : 0;
    wanted = wanted % 8 == 7 ? wanted << 6 : wanted;
    uint8_t* out = (uint8_t*)malloc(wanted + 1);
    uint8_t* in = (uint8_t*)malloc(size + 1);
    if (out == NULL || in == NULL || size < 2) {
        free(out);
        free(in);
        return;
    }
    out = (uint8_t*)realloc(out, wanted > 0 ? wanted : 1);
    memcpy(in, data + 2, size - 2);
    if (snappy) {
        qlora__snappy_decode(in, size - 2, out, wanted);
    } else if (!qlora__zstd_decode(&zstd, in, size - 2, out, wanted) && zstd.fault == NULL) {
        abort();
    }
    free(out);
    free(in);
}

static int fuzz_parquet(const uint8_t* data, size_t size) {
    static const int codecs[4] = {0, 1, 2, 6};
    if (size >= 4 && memcmp(data, "PAR1", 4) == 0) {
        read_rows(data, size);
        return 0;
    }
    if (size < 2) {
        return 0;
    }
    switch (data[0] % 8) {
    case 0:
        read_gzip(data + 1, size - 1);
        return 0;
    case 1:
        read_block(data + 1, size - 1, true);
        return 0;
    case 2:
        read_block(data + 1, size - 1, false);
        return 0;
    default:
        break;
    }
    static pq_bytes file;
    pq_make(&file, codecs[data[0] / 8 % 4], data[0] / 32 % 2 == 1, 1 + data[0] / 64 % 2);
    choices c = choices_of(data + 1, size - 1);
    buffer b = buffer_make(file.data, file.size);
    for (size_t i = 1 + choose(&c, 4); i > 0 && b.size > 0; i--) {
        size_t at = choose(&c, b.size);
        if (choose(&c, 3) > 0) {
            b.data[at] = (unsigned char)choose(&c, 256);
        } else {
            mutate_bytes(&c, &b);
        }
    }
    read_rows(b.data, b.size);
    free(b.data);
    return 0;
}
