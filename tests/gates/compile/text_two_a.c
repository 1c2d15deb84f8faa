// Declarations of both headers; two_b.c and text_two_b.c have one implementation each.
#include "qlora.h"
#include "qlora_text.h"

#include <stdio.h>

int main(void) {
    qlora_text_desc desc;
    qlora_text* text = NULL;
    qlora_text_desc* zero = &desc;
    for (size_t i = 0; i < sizeof desc; i++) {
        ((char*)zero)[i] = 0;
    }
    desc.log = qlora_log_stderr; // one hook for both headers
    qlora_result r = qlora_text_create(&desc, &text);
    printf("%s %d\n", qlora_result_name(r), qlora_text_version());
    return r == QLORA_OK && qlora_text_version() == QLORA_VERSION &&
                   qlora_text_destroy(text) == QLORA_OK
               ? 0
               : 1;
}
