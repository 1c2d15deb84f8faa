// The one file with the implementation; a second include, with the macro still set, adds nothing.
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"
#include "qlora_text.h"
