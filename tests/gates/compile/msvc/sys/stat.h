#include "../crt.h"
