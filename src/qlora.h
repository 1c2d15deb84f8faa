#include "api/manual.h"

#ifndef QLORA_H
#define QLORA_H

#include "api/linkage.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "api/base.h"
#include "api/context.h"
// What is left out is declared and never defined, which only extern functions may be.
#if defined(QLORA_STATIC) && defined(QLORA_NO_MODEL)
#undef QLORA_API
#define QLORA_API extern
#endif

#include "api/model.h"
#include "api/adapter.h"
#if defined(QLORA_STATIC) && defined(QLORA_NO_TRAIN)
#undef QLORA_API
#define QLORA_API extern
#endif

#include "api/comm.h"
#include "api/train.h"
#if defined(QLORA_STATIC) && !defined(QLORA_NO_MODEL)
#undef QLORA_API
#ifdef QLORA_NO_GENERATE
#define QLORA_API extern
#else
#define QLORA_API QLORA_STATIC_API
#endif
#endif

#include "api/generate.h"
#if defined(QLORA_STATIC) && !defined(QLORA_NO_MODEL)
#undef QLORA_API
#ifdef QLORA_NO_MERGE
#define QLORA_API extern
#else
#define QLORA_API QLORA_STATIC_API
#endif
#endif

#include "api/merge.h"
#ifdef QLORA_STATIC
#undef QLORA_API
#define QLORA_API QLORA_STATIC_API
#endif

#include "api/gemm.h"
#include "api/ops.h"
#include "api/cache.h"
#include "api/abi.h"

#ifdef __cplusplus
}
#endif

#endif // QLORA_H

// Let editors colour the implementation.
#if defined(__INTELLISENSE__) || defined(__JETBRAINS_IDE__) || defined(Q_CREATOR_RUN) ||           \
    defined(__CDT_PARSER__)
#ifndef QLORA_IMPLEMENTATION
#define QLORA_IMPLEMENTATION
#endif
#endif

#ifdef QLORA_IMPLEMENTATION
#ifndef QLORA_IMPLEMENTATION_DONE
#define QLORA_IMPLEMENTATION_DONE

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wunknown-warning-option"
#pragma clang diagnostic ignored "-Wreserved-identifier"
#endif

#include "platform/base.h"
#ifdef _WIN32
#include "platform/windows.h"
#else // POSIX
#include "platform/posix.h"
#endif // _WIN32

#include "platform/system.h"
#include "platform/floating.h"
#include "core/parts.h"
#include "core/env.h"
#include "core/files.h"
#include "core/tools.h"
#include "core/base.h"
#include "core/scope.h"
#include "core/errand.h"
#include "core/threads.h"
#include "core/random.h"
#include "numbers/floats.h"
#include "numbers/e4m3.h"
#include "numbers/fp8_weight.h"
#include "numbers/nf4.h"
#include "cpu/table.h"
#include "cpu/rows.h"
#include "cpu/rows_portable.h"
#include "cpu/rows_neon.h"
#include "cpu/rows_avx2.h"
#include "cpu/rows_avx512.h"
#include "cpu/neon.h"
#include "cpu/neon_bf16.h"
#include "cpu/avx2.h"
#include "cpu/avx512.h"
#include "cpu/avx512_bf16.h"
#include "cpu/amx.h"
#include "cpu/stream.h"
#include "cpu/stream_neon.h"
#include "cpu/stream_avx2.h"
#include "cpu/stream_avx512.h"
#include "cpu/tiers.h"
#include "cpu/gemm.h"
#include "cpu/operands.h"
#include "cpu/operands_bf16.h"
#include "cpu/panels.h"
#include "cpu/packed.h"
#include "cpu/outer.h"
#include "cpu/few.h"
#include "cpu/errands.h"
QLORA__ONCE_PER_CALL
#ifndef QLORA_NO_MODEL
#include "arch.h"
#include "formats/decimal.h"
#include "formats/json_read.h"
#include "formats/json_write.h"
#include "formats/stop_ids.h"
#include "formats/splits.h"
#include "formats/gguf_path.h"
#include "formats/gguf_read.h"
#include "formats/gguf_vocab.h"
#include "formats/gguf_blocks.h"
#include "formats/gguf_tensors.h"
#include "formats/gguf_view.h"
#include "formats/safetensors.h"
QLORA__ONCE_END
QLORA__ONCE_PER_FILE
#include "formats/config_values.h"
#include "formats/config_rope.h"
#include "formats/config_experts.h"
#include "formats/config.h"
#include "formats/config_scale.h"
#include "formats/folder.h"
#include "formats/gguf_folder.h"
#include "formats/gguf_config.h"
#include "formats/regex.h"
#include "formats/peft.h"
#include "formats/gguf.h"
#endif // QLORA_NO_MODEL

QLORA__ONCE_END
QLORA__ONCE_PER_CALL
#ifndef QLORA_NO_CUDA
#include "formats/inflate.h"
#include "driver/driver.h"
#include "driver/device.h"
#include "driver/cublaslt.h"
#else // QLORA_NO_CUDA
#include "driver/none.h"
#endif // QLORA_NO_CUDA

#include "tensor/capture.h"
#include "tensor/checks.h"
#include "tensor/tensor.h"
#include "tensor/staging.h"
#include "tensor/beside.h"
#include "tensor/away.h"
#include "cache/registry.h"
#include "cache/unpack.h"
#include "cache/ptx.h"
#include "cache/modules.h"
#include "context.h"
#include "gemm/warpgroup.h"
#include "gemm/dense.h"
#include "gemm/nf4.h"
#include "gemm/fp8_weight.h"
#include "gemm/nf4_product.h"
#include "gemm/fp8.h"
QLORA__ONCE_END
#include "ops/clip.h"
#include "ops/elementwise.h"
#include "ops/norm.h"
#include "ops/mean_norm.h"
#include "ops/plain.h"
#include "ops/rope.h"
#include "ops/pieces.h"
#include "ops/loss.h"
#include "ops/adamw.h"
#ifndef QLORA_NO_MODEL
#include "ops/adamw8.h"
#include "ops/preference.h"
#ifndef QLORA_NO_TRAIN
#include "ops/tree.h"
#endif // QLORA_NO_TRAIN

#include "ops/dora.h"
#include "ops/token_rows.h"
#endif // QLORA_NO_MODEL

#include "ops/dropout.h"
#ifndef QLORA_NO_MODEL
#include "ops/noise.h"
#endif // QLORA_NO_MODEL

#include "ops/owners.h"
#include "ops/linear_cpu.h"
QLORA__ONCE_PER_CALL
#include "ops/linear.h"
#include "ops/skinny.h"
#include "ops/linear_gradients.h"
#ifndef QLORA_NO_MODEL
#include "ops/experts.h"
#include "ops/grouped.h"
#include "ops/routed.h"
#include "ops/balance.h"
#include "ops/gated.h"
#include "ops/tails.h"
#include "ops/fp8_tails.h"
#endif // QLORA_NO_MODEL

QLORA__ONCE_END
#include "ops/attention_cpu.h"
#include "ops/attention_blocks.h"
#include "ops/cast.h"
QLORA__ONCE_PER_CALL
#include "ops/attention.h"
#include "ops/prewarm.h"
#include "graph.h"
QLORA__ONCE_END
QLORA__ONCE_PER_FILE
#ifndef QLORA_NO_MODEL
#include "model/structure.h"
#include "model/adapters.h"
#include "model/errands.h"
#include "model/wide.h"
#include "model/arena.h"
#include "model/slots.h"
#include "model/cost.h"
#include "model/mixers/plans.h"
#include "model/ffns/plans.h"
#include "model/activations.h"
#include "model/workspace.h"
#include "model/layout.h"
#include "model/mapped.h"
#include "model/peft_copies.h"
#include "model/expert_layout.h"
#include "model/trained.h"
#include "model/plan.h"
#include "model/work.h"
#include "model/choose.h"
#include "model/identity.h"
#include "model/kept.h"
#include "model/load.h"
#include "model/dora.h"
#include "model/new_rows.h"
#include "model/parameters.h"
#include "model/moments.h"
QLORA__ONCE_END
QLORA__ONCE_PER_CALL
#include "model/labelled.h"
#include "model/batch.h"
#include "model/pass.h"
#include "model/stacks.h"
#include "model/branch.h"
#include "model/offload.h"
#include "model/decode.h"
#include "model/step_kernels.h"
#include "model/mixers/softmax.h"
#include "model/mixers/softmax_text.h"
#include "model/mixers/kinds.h"
#include "model/ffns/gated.h"
#include "model/ffns/plain.h"
#include "model/ffns/experts.h"
#include "model/ffns/balance.h"
#include "model/ffns/experts_gpu.h"
#include "model/ffns/experts_passes.h"
#include "model/ffns/kinds.h"
#include "model/forward.h"
#include "model/head.h"
#include "model/backward.h"
#include "model/step_layers.h"
#include "model/step.h"
QLORA__ONCE_END
QLORA__ONCE_PER_FILE
#include "model/prepare.h"
#include "model/expert_values.h"
#include "model/adapter.h"
#include "model/open.h"
QLORA__ONCE_END
QLORA__ONCE_PER_CALL
#include "model/evaluate.h"
#include "adapter/check.h"
#include "adapter/save.h"
#ifndef QLORA_NO_MERGE
#include "adapter/merge_template.h"
#include "adapter/merge.h"
#include "adapter/merge_gguf.h"
#include "adapter/merge_tokens.h"
#include "adapter/merge_folder.h"
#include "adapter/merge_config.h"
#include "adapter/merge_vocab.h"
#include "adapter/merge_verify.h"
#include "adapter/merge_save.h"
#endif // QLORA_NO_MERGE

#ifndef QLORA_NO_TRAIN
#include "trainer/structure.h"
#include "trainer/methods.h"
#include "trainer/leaves.h"
#include "trainer/rows.h"
#ifndef QLORA_NO_COMM
#include "comm/share.h"
#include "comm/exchange.h"
#include "comm/agree.h"
#include "comm/captured.h"
#include "comm/mpi.h"
#else // QLORA_NO_COMM
#include "comm/none.h"
#endif // QLORA_NO_COMM

#if !defined(QLORA_NO_COMM) && !defined(QLORA_NO_CUDA)
#include "comm/nccl.h"
#else // QLORA_NO_COMM or QLORA_NO_CUDA
#include "comm/no_nccl.h"
#endif // QLORA_NO_COMM or QLORA_NO_CUDA

#include "train/trainer.h"
#include "train/preference.h"
#include "train/step.h"
#include "train/slice.h"
#include "train/each.h"
#include "train/checkpoint.h"
#endif // QLORA_NO_TRAIN

#ifndef QLORA_NO_GENERATE
#include "generate/choice.h"
#include "generate/paging.h"
#include "generate/shared.h"
#include "generate/ahead.h"
#include "generate/texts.h"
#include "generate/slices.h"
#endif // QLORA_NO_GENERATE
#endif // QLORA_NO_MODEL

QLORA__ONCE_END

#if defined(__clang__)
#pragma clang diagnostic pop
#endif

#endif // QLORA_IMPLEMENTATION_DONE
#endif // QLORA_IMPLEMENTATION

/*
    Licence: MIT No Attribution, or the Unlicense, at your choice. See LICENSE for the texts.
*/
