// double.c - the CPU loops of qlora.h compiled in double, for finite differences and as the float64
// reference for other builds.
#define _POSIX_C_SOURCE 200809L

// QLORA_CPU_TIER chooses among the tiers of the other builds.
#define QLORA__CPU_TIER_SETTING "QLORA_CPU_TIER_IN_DOUBLE"
#define QLORA__REAL double
#define QLORA_NO_CUDA
#define QLORA_STATIC
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include "ops_api.h"

#include "internal/gradient.c"

#include "internal/linear.c"

#define REFERENCE_SUITE reference_double_suite
#include "internal/reference.c"

const ops_api* ops_in_double(void) {
    static const ops_api api = {sizeof(double), OPS_API_FUNCTIONS};
    return &api;
}
