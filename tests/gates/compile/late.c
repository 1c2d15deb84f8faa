// A system header comes first: with only -std=c99, this must stop at qlora.h's own #error, which
// names the remedy; with -D_POSIX_C_SOURCE=200809L it must compile.
#include <stdio.h>
#define QLORA_IMPLEMENTATION
#include "qlora.h"

int main(void) {
    printf("%d\n", qlora_version());
    return 0;
}
