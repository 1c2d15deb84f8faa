// Declarations only: what most files of a program see. two_b has the implementation.
#include "qlora.h"

#include <stdio.h>

// Declared in both languages, so that the two halves may be C and C++ in any mix.
#ifdef __cplusplus
extern "C" int two_b_version(void);
#else
int two_b_version(void);
#endif

int main(void) {
    if (qlora_version() != QLORA_VERSION || two_b_version() != QLORA_VERSION) {
        return 1;
    }
    printf("%s\n", QLORA_VERSION_STRING);
    return 0;
}
