// text_library.c - the implementation of qlora_text.h, followed by the white-box suites of it. The
// suites of its public functions link this object.
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"

#include "tests_from_here.h"

#include "internal/text.c"

#include "internal/tokens.c"
