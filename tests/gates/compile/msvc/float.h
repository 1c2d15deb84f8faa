#include "crt.h"
#include_next <float.h>

#define _MCW_EM 0x0008001fu
#define _MCW_RC 0x00000300u
#define _MCW_DN 0x03000000u
#define _RC_NEAR 0x00000000u
#define _DN_SAVE 0x00000000u
#ifdef __cplusplus
extern "C" {
#endif
unsigned int _controlfp(unsigned int, unsigned int);
unsigned int _clearfp(void);
#ifdef __cplusplus
}
#endif
