// library.c - the implementation, and behind it every suite that looks inside: one compilation
// instead of one for each. The other suites link this object as their library.
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include "internal/formats.c"

#include "internal/adapter.c"

#include "internal/model.c"
