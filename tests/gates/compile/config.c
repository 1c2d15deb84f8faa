// The implementation under whatever configuration macros the command line defines.
#define QLORA_IMPLEMENTATION
#include "qlora.h"
