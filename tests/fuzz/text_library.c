// text_library.c - the implementation of qlora_text.h, followed by all fuzz targets of it.
#define QLORA_STATIC // the compiler leaves out what is not used
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"

static qlora_text* lib(void) {
    static qlora_text* text;
    if (text == NULL && qlora_text_create(NULL, &text) != QLORA_OK) {
        abort();
    }
    return text;
}

// For what can only fail for lack of memory.
static void must(qlora_result result) {
    if (result != QLORA_OK) {
        abort();
    }
}

#include "fuzz/data.c"

#include "fuzz/files.c"

#include "fuzz/parquet.c"

#include "fuzz/template.c"

#include "fuzz/tokenizer.c"

#define FUZZ_TARGETS(X)                                                                            \
    X(data, false) X(files, true) X(parquet, true) X(template, false) X(tokenizer, false)
#include "fuzz/main.h"
