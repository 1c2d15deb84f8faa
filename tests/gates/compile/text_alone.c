// qlora_text.h and the C library, nothing else: the QUICK START of its manual.
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"

#include <stdio.h>

int main(int argc, char** argv) {
    qlora_text* text = NULL;
    qlora_text_tok* tok = NULL;
    qlora_text_ids ids = {0};
    if (qlora_text_create(NULL, &text) != QLORA_OK ||
        qlora_text_tok_open(text, argc > 1 ? argv[1] : "", &tok) != QLORA_OK ||
        qlora_text_encode(tok, "Hello", 5, QLORA_TEXT_SPECIAL, &ids) != QLORA_OK) {
        puts(qlora_text_last_error(text));
    }
    bool ok = ids.count > 0;
    qlora_text_ids_free(text, &ids);
    return qlora_text_tok_close(tok) == QLORA_OK && qlora_text_destroy(text) == QLORA_OK && ok ? 0
                                                                                              : 1;
}
