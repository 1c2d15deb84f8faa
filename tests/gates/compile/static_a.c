// A private copy of the library here and another one in static_b.c: they must not collide in
// the linker.
#define QLORA_STATIC
#define QLORA_IMPLEMENTATION
#include "qlora.h"

int static_b_version(void);

int main(void) {
    return qlora_version() == static_b_version() ? 0 : 1;
}
