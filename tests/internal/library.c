// library.c - the implementation, followed by all white-box suites: one compilation instead of one
// per suite. The other suites link this object as their library.
static long long test_gated_from = 1; // models of the tests are small
static int test_gated_share = 1;
static long long test_coded_width = 9216;

#define QLORA__GATED_FROM test_gated_from
#define QLORA__GATED_SHARE (test_gated_share != 0)
#define QLORA__FP8_GATED_WIDTH test_coded_width
#define QLORA__SKINNY_FROM 1
#define QLORA__TAILS_FULL 0
#define QLORA__AWAY_OPERATIONS 0
static long place_extra = 1000;
#define QLORA__PLACE_EXTRA place_extra
static long layers_split_from = 12;
#define QLORA__LAYERS_SPLIT_FROM layers_split_from
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include "tests_from_here.h"

#include "internal/formats.c"

#include "internal/gguf.c"
#include "internal/gguf_experts.c"

#include "internal/adapter.c"
#include "internal/expert_layouts.c"

#include "internal/model.c"

#define REFERENCE_SUITE reference_suite
#include "internal/reference.c"

#include "internal/system.c"

#include "internal/rows.c"

#include "internal/stream.c"
#include "internal/fp8.c"
#include "internal/fp8_base.c"
#include "internal/bf16.c"
#include "internal/head.c"
#include "internal/labelled.c"
#include "internal/away.c"
#include "internal/later.c"
#include "internal/step.c"
#include "internal/step_layers.c"
#include "internal/texts.c"
#include "internal/ahead.c"
#include "internal/paging.c"
#include "internal/optimizer.c"
#include "internal/tree.c"
#include "internal/owners.c"
#include "internal/gated.c"
#include "internal/blocks.c"
#include "internal/experts.c"
#include "internal/experts_gpu.c"
#include "internal/tails.c"
#include "internal/fp8_tails.c"
#include "internal/skinny.c"
#include "internal/place.c"
#include "internal/packed.c"
