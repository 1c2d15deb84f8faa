// parquet_rows.c - prints the rows of Parquet files as JSON lines, every column, for
// tests/parquet_check.py.
//
//     build/parquet_rows FILE...

#ifndef QLORA_TEXT_IMPLEMENTATION
#define QLORA_STATIC
#define QLORA_TEXT_IMPLEMENTATION
#endif
#include "qlora_text.h"

// The rows of one file; false and a message if it cannot be read.
static bool print_rows(qlora__env* env, const char* path) {
    qlora__map map;
    qlora__parquet file;
    qlora__string row;
    bool found = true;
    qlora__string_begin(env, &row);
    qlora_result r = qlora__map_open(env, path, &map);
    bool mapped = r == QLORA_OK;
    r = mapped ? qlora__parquet_open(env, path, map.data, map.size, &file) : r;
    bool opened = r == QLORA_OK;
    while (r == QLORA_OK && found) {
        r = qlora__parquet_next(env, &file, &row, &found);
        if (r == QLORA_OK && found) {
            printf("%.*s\n", (int)row.size, row.data);
        }
    }
    if (r != QLORA_OK) {
        fprintf(stderr, "%s\n", env->error);
    }
    if (opened) {
        qlora__parquet_close(env, &file);
    }
    if (mapped) {
        qlora__map_close(env, &map);
    }
    qlora__string_free(&row);
    return r == QLORA_OK;
}

int main(int argc, char** argv) {
    qlora__env env;
    memset(&env, 0, sizeof env);
    env.one_line = true;
    qlora__hooks_default(&env.allocator, &env.files);
    bool ok = argc > 1;
    for (int i = 1; i < argc; i++) {
        ok = print_rows(&env, argv[i]) && ok;
    }
    return ok ? 0 : 1;
}
