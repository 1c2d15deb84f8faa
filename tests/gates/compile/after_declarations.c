// A program's header may already have included the declarations when the implementation
// is included.
#define _POSIX_C_SOURCE 200809L
#include "qlora.h"
#define QLORA_IMPLEMENTATION
#include "qlora.h"

int main(void) {
    return qlora_version() == QLORA_VERSION ? 0 : 1;
}
