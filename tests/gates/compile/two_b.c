// The one file with the implementation; a second include, with the macro still defined, must
// add nothing.
#define QLORA_IMPLEMENTATION
#include "qlora.h"
#include "qlora.h"

#ifdef __cplusplus
extern "C" int two_b_version(void);
#else
int two_b_version(void);
#endif

int two_b_version(void) {
    return qlora_version();
}
