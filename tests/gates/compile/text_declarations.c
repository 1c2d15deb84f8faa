// The declarations of qlora_text.h need no header before them.
#include "qlora_text.h"

typedef qlora_text_desc use_it;
