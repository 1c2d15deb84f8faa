// variant.c - what the variants of the fake libcuda.so.1 differ in; the rest is compiled once.
//
// -DFAKE_STUB: answers 34 to every call, as the link-time stub of the toolkit does.
// -DFAKE_OMIT='"NAME", ...': symbols that an older driver lacks; the linker hides them as well.
#include "fake.h"

#ifdef FAKE_STUB
const bool fake_is_stub = true;
#else
const bool fake_is_stub = false;
#endif

bool fake_omits(const char* name) {
#ifdef FAKE_OMIT
    static const char* const names[] = {FAKE_OMIT};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(names[i], name) == 0) {
            return true;
        }
    }
#endif
    (void)name;
    return false;
}
