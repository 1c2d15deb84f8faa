#ifndef QLORA__PART_GGUF_PATH
#define QLORA__PART_GGUF_PATH

// Whether a path names a GGUF file, by its ending.
static QLORA__UNUSED bool qlora__gguf_path(const char* path) {
    size_t n = strlen(path);
    return n >= 5 &&
           (memcmp(path + n - 5, ".gguf", 5) == 0 || memcmp(path + n - 5, ".GGUF", 5) == 0);
}

#endif // QLORA__PART_GGUF_PATH
