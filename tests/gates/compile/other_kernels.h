// Represents a user's renamed copy; see QLORA_KERNELS_HEADER in check.sh.
#include "kernels_ptx.h"
