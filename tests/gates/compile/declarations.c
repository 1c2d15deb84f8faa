// The declarations need no header before them.
#include "qlora.h"

typedef qlora_result use_it;
