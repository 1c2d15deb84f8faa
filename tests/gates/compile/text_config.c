// The implementation of qlora_text.h alone, under whatever macros the command line defines.
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"
