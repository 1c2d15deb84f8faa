// Declarations only, as in most files of a program. two_b has the implementation.
#include "qlora.h"

#include <stdio.h>

// Declared with C linkage in both languages, so that the two halves can be C and C++ in
// any combination.
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
