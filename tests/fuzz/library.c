// library.c - the implementation of qlora.h, followed by all fuzz targets of it: one compilation
// instead of one per target.
#define QLORA_STATIC // the compiler leaves out what is not used
#define QLORA_NO_CUDA
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include "fuzz/config.c"

#include "fuzz/folders.c"

#include "fuzz/gguf.c"

#include "fuzz/json.c"

#include "fuzz/safetensors.c"

#define FUZZ_TARGETS(X)                                                                            \
    X(config, false) X(folders, true) X(gguf, false) X(json, false) X(safetensors, false)
#include "fuzz/main.h"
