// The implementation with the configuration macros defined on the command line.
#define QLORA_IMPLEMENTATION
#include "qlora.h"
