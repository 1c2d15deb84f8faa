// The declarations must compile without any header before them.
#include "qlora.h"

typedef qlora_result use_it;
