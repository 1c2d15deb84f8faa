#define QLORA_STATIC
#define QLORA_IMPLEMENTATION
#include "qlora.h"

int static_b_version(void);

int static_b_version(void) {
    return qlora_version();
}
