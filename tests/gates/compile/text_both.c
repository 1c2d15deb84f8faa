// Both implementations in one unit, in both orders (-DTEXT_FIRST).
#define QLORA_IMPLEMENTATION
#define QLORA_TEXT_IMPLEMENTATION
#ifdef TEXT_FIRST
#include "qlora_text.h"
#include "qlora.h"
#else
#include "qlora.h"
#include "qlora_text.h"
#endif

int main(void) {
    qlora_text* text = NULL;
    qlora_ctx* ctx = NULL;
    if (qlora_text_create(NULL, &text) != QLORA_OK || qlora_ctx_create(NULL, &ctx) != QLORA_OK) {
        return 1;
    }
    qlora_text_tok* tok = NULL;
    if (qlora_text_tok_load(text, "x", "{}", 2, &tok) != QLORA_ERR_FORMAT || tok != NULL) {
        return 2;
    }
    return qlora_text_destroy(text) == QLORA_OK && qlora_ctx_destroy(ctx) == QLORA_OK &&
                   qlora_version() == qlora_text_version()
               ? 0
               : 3;
}
