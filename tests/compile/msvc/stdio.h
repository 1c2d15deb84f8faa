#include "crt.h"
