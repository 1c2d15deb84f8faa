// blob.h - what the programs need besides the library: growing bytes, and whole files.
#ifndef BLOB_H
#define BLOB_H

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "utf8_files.h"

// Starts from all zeros.
typedef struct blob {
    char* data; // not terminated by a zero
    size_t count;
    size_t capacity;
} blob;

static inline void blob_free(blob* b) {
    free(b->data);
    memset(b, 0, sizeof *b);
}

// False when out of memory.
static inline bool blob_add(blob* b, const void* data, size_t size) {
    if (size > b->capacity - b->count) {
        size_t capacity =
            b->capacity * 2 > b->count + size ? b->capacity * 2 : b->count + size + 64;
        char* grown = capacity > size ? (char*)realloc(b->data, capacity) : NULL;
        if (grown == NULL) {
            return false;
        }
        b->data = grown;
        b->capacity = capacity;
    }
    if (size > 0) {
        memcpy(b->data + b->count, data, size);
        b->count += size;
    }
    return true;
}

// The rest of a file, and a zero byte after it that is not counted. 0, or an errno value.
static inline int blob_read(blob* b, FILE* file) {
    char block[65536];
    size_t got = 0;
    while ((got = fread(block, 1, sizeof block, file)) > 0) {
        if (!blob_add(b, block, got)) {
            return ENOMEM;
        }
    }
    if (ferror(file)) {
        return errno != 0 ? errno : EIO;
    }
    if (!blob_add(b, "", 1)) {
        return ENOMEM;
    }
    b->count--;
    return 0;
}

static inline int blob_read_path(blob* b, const char* path) {
    FILE* file = fopen(path, "rb");
    if (file == NULL) {
        return errno;
    }
    int code = blob_read(b, file);
    fclose(file);
    return code;
}

#endif
