// The implementations after headers that define short names as macros: <complex.h>, and those of
// Windows, some of which are repeated here.
#define _POSIX_C_SOURCE 200809L
#include <complex.h>
#define small char
#define near
#define far
#define interface struct
#define IN
#define OUT
#define ERROR 0
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define QLORA_IMPLEMENTATION
#include "qlora.h"
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"
