// ---- what a build has ---------------------------------------------------------------------------
//
// Rooms that a macro leaves out are not included; code of other rooms that would call them asks
// these, so that the compiler drops it, and what only it calls.

#ifdef QLORA_NO_TRAIN
#define QLORA__TRAINS false
#else
#define QLORA__TRAINS true
#endif

#ifdef QLORA_NO_GENERATE
#define QLORA__GENERATES false
#else
#define QLORA__GENERATES true
#endif

#ifdef QLORA_NO_GGUF
#define QLORA__GGUF false
#else
#define QLORA__GGUF true
#endif
