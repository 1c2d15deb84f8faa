// A header of the program may have included the declarations before the implementation is wanted.
#define _POSIX_C_SOURCE 200809L
#include "qlora.h"
#define QLORA_IMPLEMENTATION
#include "qlora.h"

int main(void) {
    return qlora_version() == QLORA_VERSION ? 0 : 1;
}
