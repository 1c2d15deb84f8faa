// ---- the registry of the library's kernels ------------------------------------------------------

// clang-format off
// When a model needs a kernel: all conditions in its set must hold.
typedef uint64_t qlora__needs;
#define QLORA__NEED(bit) ((qlora__needs)1 << (bit))
#define QLORA__NEED_ALWAYS ((qlora__needs)0)
#define QLORA__NEED_GEMM   QLORA__NEED(0) // runs without cuBLAS
#define QLORA__NEED_BF16   QLORA__NEED(1) // computes in bf16
#define QLORA__NEED_F32    QLORA__NEED(2) // computes in f32
#define QLORA__NEED_NF4    QLORA__NEED(3) // has an NF4 base
#define QLORA__NEED_LORA  QLORA__NEED(4) // trains adapters
#define QLORA__NEED_HEAD64  QLORA__NEED(5)  // tensor-core attention, head size 64
#define QLORA__NEED_HEAD128 QLORA__NEED(6)  // the same, head size 128, and so on
#define QLORA__NEED_HEADANY QLORA__NEED(7) // attention in f32 arithmetic
#define QLORA__NEED_HEAD32  QLORA__NEED(9)
#define QLORA__NEED_HEAD80  QLORA__NEED(10)
#define QLORA__NEED_HEAD96  QLORA__NEED(11)
#define QLORA__NEED_HEAD192 QLORA__NEED(12)
#define QLORA__NEED_HEAD256 QLORA__NEED(13)
#define QLORA__NEED_HEAD128CAP QLORA__NEED(14) // capped scores, and head sizes below 128
#define QLORA__NEED_WARPGROUP QLORA__NEED(15) // has the warpgroup instructions of sm_90a
#define QLORA__NEED_HEAD64WG  QLORA__NEED(16) // attention with them, head size 64
#define QLORA__NEED_HEAD128WG QLORA__NEED(17)
#define QLORA__NEED_GEMM_WG (QLORA__NEED_GEMM | QLORA__NEED_BF16 | QLORA__NEED_WARPGROUP)
#define QLORA__NEED_FP8_MODE QLORA__NEED(18) // computes base products in FP8
#define QLORA__NEED_FP8 (QLORA__NEED_BF16 | QLORA__NEED_FP8_MODE)
#define QLORA__NEED_GEMM16 (QLORA__NEED_GEMM | QLORA__NEED_BF16)
#define QLORA__NEED_NF4_BF16 (QLORA__NEED_NF4 | QLORA__NEED_BF16)
#define QLORA__NEED_LORA_BF16 (QLORA__NEED_LORA | QLORA__NEED_BF16)
#define QLORA__NEED_TEXTS QLORA__NEED(19) // generates, with the kernels of a decoding step
#define QLORA__NEED_FP8_BASE QLORA__NEED(20) // has an FP8 base
#define QLORA__NEED_FP8_BASE_BF16 (QLORA__NEED_FP8_BASE | QLORA__NEED_BF16)
#define QLORA__NEED_STEP (QLORA__NEED_TEXTS | QLORA__NEED_BF16)
#define QLORA__NEED_STEP_NF4 (QLORA__NEED_STEP | QLORA__NEED_NF4)
#define QLORA__NEED_STEP_WG (QLORA__NEED_STEP_NF4 | QLORA__NEED_WARPGROUP)
#define QLORA__NEED_STEP_HEAD (QLORA__NEED_STEP | QLORA__NEED_WARPGROUP)
#define QLORA__NEED_LAYERS QLORA__NEED(21) // generates one text at a time, in blocks that large:
#define QLORA__LAYERS_BYTES 232448
#define QLORA__NEED_STEP_LAYERS (QLORA__NEED_STEP_NF4 | QLORA__NEED_LAYERS)
#define QLORA__NEED_GATED QLORA__NEED(22) // trains adapters of an MLP as ops/gated.h does
#define QLORA__NEED_HEAD96WG QLORA__NEED(23)
#define QLORA__NEED_HEAD256WG QLORA__NEED(24)
#define QLORA__NEED_LORA_F32 (QLORA__NEED_LORA | QLORA__NEED_F32)
#define QLORA__NEED_NOISE QLORA__NEED(25) // its trainer has NEFTune's noise
#define QLORA__NEED_NOISE_F32 (QLORA__NEED_NOISE | QLORA__NEED_F32)
#define QLORA__NEED_NOISE_BF16 (QLORA__NEED_NOISE | QLORA__NEED_BF16)
#define QLORA__NEED_PAIRS QLORA__NEED(26) // its trainer has a method with preferences
#define QLORA__NEED_PAIRS_F32 (QLORA__NEED_PAIRS | QLORA__NEED_F32)
#define QLORA__NEED_PAIRS_BF16 (QLORA__NEED_PAIRS | QLORA__NEED_BF16)
// An operator that programs call. A model that uses it runs it when it is opened, so that it is
// compiled then: what may run for the first time later has no such condition.
#define QLORA__NEED_CALL QLORA__NEED(27)
#define QLORA__NEED_CALL_F32 (QLORA__NEED_CALL | QLORA__NEED_F32)
#define QLORA__NEED_CALL_BF16 (QLORA__NEED_CALL | QLORA__NEED_BF16)
#define QLORA__NEED_CALL_NF4 (QLORA__NEED_CALL | QLORA__NEED_NF4)
#define QLORA__NEED_CALL_NF4_BF16 (QLORA__NEED_CALL | QLORA__NEED_NF4_BF16)
#define QLORA__NEED_CALL_LORA (QLORA__NEED_CALL | QLORA__NEED_LORA)
#define QLORA__NEED_CALL_LORA_BF16 (QLORA__NEED_CALL | QLORA__NEED_LORA_BF16)
#define QLORA__NEED_CAP QLORA__NEED(28) // has a cap of logits
#define QLORA__NEED_CAP_F32 (QLORA__NEED_CAP | QLORA__NEED_F32)
#define QLORA__NEED_CAP_BF16 (QLORA__NEED_CAP | QLORA__NEED_BF16)
#define QLORA__NEED_HEAD_NF4 QLORA__NEED(29) // has a 4-bit head
#define QLORA__NEED_HEAD_NF4_BF16 (QLORA__NEED_HEAD_NF4 | QLORA__NEED_NF4_BF16)
#define QLORA__NEED_MEAN_NORM QLORA__NEED(30) // its norms subtract the mean
#define QLORA__NEED_MEAN_NORM_F32 (QLORA__NEED_MEAN_NORM | QLORA__NEED_F32)
#define QLORA__NEED_MEAN_NORM_BF16 (QLORA__NEED_MEAN_NORM | QLORA__NEED_BF16)
#define QLORA__NEED_RELU2 QLORA__NEED(31) // its MLP has squared ReLU and no gate
#define QLORA__NEED_RELU2_F32 (QLORA__NEED_RELU2 | QLORA__NEED_F32)
#define QLORA__NEED_RELU2_BF16 (QLORA__NEED_RELU2 | QLORA__NEED_BF16)
#define QLORA__NEED_EXPERTS QLORA__NEED(33) // has experts
#define QLORA__NEED_EXPERTS_F32 (QLORA__NEED_EXPERTS | QLORA__NEED_F32)
#define QLORA__NEED_EXPERTS_BF16 (QLORA__NEED_EXPERTS | QLORA__NEED_BF16)
#define QLORA__NEED_EXPERTS_WG (QLORA__NEED_EXPERTS_BF16 | QLORA__NEED_WARPGROUP)
// Only training runs it: the modules of such kernels are in the group train.
#define QLORA__NEED_TRAIN QLORA__NEED(32)
#define QLORA__NEED_CALL_BF16_TRAIN (QLORA__NEED_CALL_BF16 | QLORA__NEED_TRAIN)
#define QLORA__NEED_CALL_F32_TRAIN (QLORA__NEED_CALL_F32 | QLORA__NEED_TRAIN)
#define QLORA__NEED_CALL_LORA_BF16_TRAIN (QLORA__NEED_CALL_LORA_BF16 | QLORA__NEED_TRAIN)
#define QLORA__NEED_CALL_LORA_TRAIN (QLORA__NEED_CALL_LORA | QLORA__NEED_TRAIN)
#define QLORA__NEED_EXPERTS_BF16_TRAIN (QLORA__NEED_EXPERTS_BF16 | QLORA__NEED_TRAIN)
#define QLORA__NEED_EXPERTS_F32_TRAIN (QLORA__NEED_EXPERTS_F32 | QLORA__NEED_TRAIN)
#define QLORA__NEED_EXPERTS_TRAIN (QLORA__NEED_EXPERTS | QLORA__NEED_TRAIN)
#define QLORA__NEED_EXPERTS_WG_TRAIN (QLORA__NEED_EXPERTS_WG | QLORA__NEED_TRAIN)
#define QLORA__NEED_GATED_TRAIN (QLORA__NEED_GATED | QLORA__NEED_TRAIN)
#define QLORA__NEED_HEAD128CAP_TRAIN (QLORA__NEED_HEAD128CAP | QLORA__NEED_TRAIN)
#define QLORA__NEED_HEAD128WG_TRAIN (QLORA__NEED_HEAD128WG | QLORA__NEED_TRAIN)
#define QLORA__NEED_HEAD128_TRAIN (QLORA__NEED_HEAD128 | QLORA__NEED_TRAIN)
#define QLORA__NEED_HEAD192_TRAIN (QLORA__NEED_HEAD192 | QLORA__NEED_TRAIN)
#define QLORA__NEED_HEAD256WG_TRAIN (QLORA__NEED_HEAD256WG | QLORA__NEED_TRAIN)
#define QLORA__NEED_HEAD256_TRAIN (QLORA__NEED_HEAD256 | QLORA__NEED_TRAIN)
#define QLORA__NEED_HEAD32_TRAIN (QLORA__NEED_HEAD32 | QLORA__NEED_TRAIN)
#define QLORA__NEED_HEAD64WG_TRAIN (QLORA__NEED_HEAD64WG | QLORA__NEED_TRAIN)
#define QLORA__NEED_HEAD64_TRAIN (QLORA__NEED_HEAD64 | QLORA__NEED_TRAIN)
#define QLORA__NEED_HEAD80_TRAIN (QLORA__NEED_HEAD80 | QLORA__NEED_TRAIN)
#define QLORA__NEED_HEAD96WG_TRAIN (QLORA__NEED_HEAD96WG | QLORA__NEED_TRAIN)
#define QLORA__NEED_HEAD96_TRAIN (QLORA__NEED_HEAD96 | QLORA__NEED_TRAIN)
#define QLORA__NEED_HEADANY_TRAIN (QLORA__NEED_HEADANY | QLORA__NEED_TRAIN)
#define QLORA__NEED_LORA_BF16_TRAIN (QLORA__NEED_LORA_BF16 | QLORA__NEED_TRAIN)
#define QLORA__NEED_LORA_F32_TRAIN (QLORA__NEED_LORA_F32 | QLORA__NEED_TRAIN)
#define QLORA__NEED_LORA_TRAIN (QLORA__NEED_LORA | QLORA__NEED_TRAIN)
#define QLORA__NEED_NOISE_BF16_TRAIN (QLORA__NEED_NOISE_BF16 | QLORA__NEED_TRAIN)
#define QLORA__NEED_NOISE_F32_TRAIN (QLORA__NEED_NOISE_F32 | QLORA__NEED_TRAIN)
#define QLORA__NEED_PAIRS_BF16_TRAIN (QLORA__NEED_PAIRS_BF16 | QLORA__NEED_TRAIN)
#define QLORA__NEED_PAIRS_F32_TRAIN (QLORA__NEED_PAIRS_F32 | QLORA__NEED_TRAIN)
#define QLORA__NEED_PAIRS_TRAIN (QLORA__NEED_PAIRS | QLORA__NEED_TRAIN)
// What programs may have besides.
#define QLORA__NEED_ANY (QLORA__NEED_CALL | QLORA__NEED_CAP | QLORA__NEED_HEAD_NF4)
#define QLORA__NEED_ANY_TRAINER (QLORA__NEED_NOISE | QLORA__NEED_PAIRS)

// The only table of kernels; pre-warm, launches and tests all use it. Columns: name (the entry
// point is "qlora_" name), module (kernels/FOLDER/MODULE.cu), maximum dynamic shared memory in
// bytes, condition. Shapes are run-time parameters of the kernels.
#define QLORA__KERNELS(X)                                                                          \
    QLORA__KERNELS_RUNTIME(X)                                                                      \
    QLORA__KERNELS_OPS(X)                                                                          \
    QLORA__KERNELS_ATTENTION(X)                                                                    \
    QLORA__KERNELS_STEP(X)                                                                         \
    QLORA__KERNELS_EXPERTS(X)                                                                      \
    QLORA__KERNELS_NF4(X)

// Every kernel of a decoding step waits for the one before it by itself (kernels/early.cuh).
#define QLORA__KERNELS_STEP(X)                                                                     \
    X(decode_layers, decode_layers, QLORA__LAYERS_BYTES, STEP_LAYERS)                              \
    X(decode_row_nf4, decode_row_nf4, 98304, STEP_NF4)                                             \
    X(decode_many_nf4, decode_many_nf4, 99328, STEP_NF4)                                           \
    X(decode_many_wg, decode_many_wg, 216064, STEP_WG)                                             \
    X(decode_many_dense, decode_many, 99328, STEP)                                                 \
    X(decode_many_head, decode_many_head, 198656, STEP_HEAD)                                       \
    X(decode_many_attention_64, decode_many_attention, 50176, STEP)                                \
    X(decode_many_attention_128, decode_many_attention, 98304, STEP)                               \
    X(decode_many_norm, decode_many_norm, 69632, STEP)                                             \
    X(decode_nf4, decode_nf4, 50688, STEP_NF4)                                                     \
    X(decode_dense, decode, 16896, STEP)                                                           \
    X(decode_head, decode, 65536, STEP)                                                            \
    X(decode_norm, decode, 69632, STEP)                                                            \
    X(decode_attention, decode, 69632, STEP)                                                       \
    X(sample_parts, sample, 0, STEP)                                                               \
    X(sample_choose, sample, 0, STEP)

#define QLORA__KERNELS_EXPERTS(X)                                                                  \
    X(routing_choose, routing, 49152, EXPERTS)                                                     \
    X(routing_count, routing, 4096, EXPERTS)                                                       \
    X(routing_totals, routing, 0, EXPERTS)                                                         \
    X(routing_starts, routing, 0, EXPERTS)                                                         \
    X(routing_spread, routing, 0, EXPERTS)                                                         \
    X(routing_bwd_f32, routing_bwd, 16384, EXPERTS_TRAIN)                                          \
    X(routing_bwd_bf16, routing_bwd, 16384, EXPERTS_TRAIN)                                         \
    X(balance_rows, balance, 20480, EXPERTS_TRAIN)                                                 \
    X(balance_gather, balance, 0, EXPERTS_TRAIN)                                                   \
    X(balance_loss, balance, 0, EXPERTS_TRAIN)                                                     \
    X(balance_report, balance, 0, EXPERTS_TRAIN)                                                   \
    X(routed_gather_f32, routed, 0, EXPERTS_F32)                                                   \
    X(routed_gather_bf16, routed_bf16, 0, EXPERTS_BF16)                                            \
    X(routed_sum_f32, routed, 0, EXPERTS_F32)                                                      \
    X(routed_sum_bf16, routed_bf16, 0, EXPERTS_BF16)                                               \
    X(routed_gated_f32, routed, 0, EXPERTS_F32)                                                    \
    X(routed_gated_bf16, routed_bf16, 0, EXPERTS_BF16)                                             \
    X(routed_factors_f32, routed, 0, EXPERTS_F32)                                                  \
    X(routed_factors_bf16, routed_bf16, 0, EXPERTS_BF16)                                           \
    X(routed_bwd_gated_f32, routed_bwd, 0, EXPERTS_F32_TRAIN)                                      \
    X(routed_bwd_gated_bf16, routed_bwd_bf16, 0, EXPERTS_BF16_TRAIN)                               \
    X(routed_bwd_factors_f32, routed_bwd, 0, EXPERTS_F32_TRAIN)                                    \
    X(routed_bwd_factors_bf16, routed_bwd_bf16, 0, EXPERTS_BF16_TRAIN)                             \
    X(expert_place_f32, expert_place, 0, EXPERTS_F32)                                              \
    X(expert_place_bf16, expert_place_bf16, 0, EXPERTS_BF16)                                       \
    X(grouped_rows_f32, grouped, 0, EXPERTS)                                                       \
    X(grouped_rows_half, grouped, 0, EXPERTS)                                                      \
    X(grouped_sums_f32, grouped_sums, 0, EXPERTS_TRAIN)                                            \
    X(grouped_sums_half, grouped_sums, 0, EXPERTS_TRAIN)                                           \
    X(grouped_tc_nn, grouped_tc_bwd, 65536, EXPERTS_BF16_TRAIN)                                    \
    X(grouped_tc_nt, grouped_tc, 65536, EXPERTS_BF16)                                              \
    X(grouped_tc_narrow, grouped_tc, 98304, EXPERTS_BF16)                                          \
    X(grouped_tc_sums, grouped_tc_bwd, 98304, EXPERTS_BF16_TRAIN)                                  \
    X(grouped_few_rows_16, grouped_few, 49152, EXPERTS_BF16)                                       \
    X(grouped_few_rows_32, grouped_few, 49152, EXPERTS_BF16)                                       \
    X(grouped_few_tall_16, grouped_few_bwd, 49152, EXPERTS_BF16_TRAIN)                             \
    X(grouped_few_tall_32, grouped_few_bwd, 49152, EXPERTS_BF16_TRAIN)                             \
    X(grouped_few_wide_16, grouped_few_bwd, 49152, EXPERTS_BF16_TRAIN)                             \
    X(grouped_few_wide_32, grouped_few_bwd, 49152, EXPERTS_BF16_TRAIN)                             \
    X(grouped_wg_nn, grouped_wg_bwd, 230400, EXPERTS_WG_TRAIN)                                     \
    X(grouped_wg_nt, grouped_wg, 230400, EXPERTS_WG)

#define QLORA__KERNELS_NF4(X)                                                                      \
    X(nf4_quantise_f32, nf4, 0, CALL_NF4)                                                          \
    X(nf4_quantise_bf16, nf4, 0, NF4)                                                              \
    X(nf4_quantise_f16, nf4, 0, CALL_NF4)                                                          \
    X(nf4_offset, nf4, 0, NF4)                                                                     \
    X(nf4_quantise_scales, nf4, 0, NF4)                                                            \
    X(nf4_dequantise_f32, nf4, 0, CALL_NF4)                                                        \
    X(nf4_dequantise_bf16, nf4_bf16, 0, CALL_NF4_BF16)                                             \
    X(nf4_dequantise_f16, nf4_bf16, 0, CALL_NF4_BF16)                                              \
    X(nf4_place_bf16, nf4_bf16, 0, NF4_BF16)                                                       \
    X(nf4_gemm_16, nf4_gemm, 70656, HEAD_NF4_BF16)                                                 \
    X(nf4_gemm_32, nf4_gemm, 66560, HEAD_NF4_BF16)                                                 \
    X(nf4_gemm_reduce, nf4_gemm, 0, HEAD_NF4_BF16)                                                 \
    X(fp8_quantise, fp8, 0, FP8)                                                                   \
    X(fp8_quantise_u, fp8_tails, 0, FP8)                                                           \
    X(fp8_u_sum, fp8_tails, 0, FP8)                                                                \
    X(fp8_gated, fp8_tails, 229376, FP8)                                                           \
    X(fp8_norm_fwd, fp8_norm, 0, FP8)                                                              \
    X(fp8_norm_bwd, fp8_norm, 0, FP8)                                                              \
    X(fp8_rope, fp8_norm, 0, FP8)                                                                  \
    X(fp8_measure, fp8, 0, FP8)                                                                    \
    X(fp8_widen, fp8, 0, FP8)                                                                      \
    X(fp8_widen_turned, fp8, 0, FP8)                                                               \
    X(fp8_base_quantise_f32, fp8_base, 0, FP8_BASE)                                                \
    X(fp8_base_quantise_bf16, fp8_base, 0, FP8_BASE)                                               \
    X(fp8_base_quantise_f16, fp8_base, 0, FP8_BASE)                                                \
    X(fp8_base_dequantise_f32, fp8_base, 0, FP8_BASE)                                              \
    X(fp8_base_dequantise_bf16, fp8_base_bf16, 0, FP8_BASE_BF16)                                   \
    X(linear_place_f32, linear, 0, LORA_F32)                                                       \
    X(linear_place_bf16, linear_bf16, 0, LORA_BF16)                                                \
    X(linear_bias_f32, linear, 0, CALL)                                                            \
    X(linear_bias_bf16, linear_bf16, 0, BF16)                                                      \
    X(linear_keep_own_f32, linear, 0, CALL_LORA)                                                   \
    X(linear_keep_own_bf16, linear_bf16, 0, CALL_LORA_BF16)                                        \
    X(linear_collect, linear, 0, CALL_LORA)                                                        \
    X(skinny_sum, skinny, 0, LORA_BF16_TRAIN)                                                      \
    X(skinny_gradients, skinny, 65536, LORA_BF16_TRAIN)                                            \
    X(linear_gated_sum, linear, 0, GATED)                                                          \
    X(gated_backward, gated, 87296, GATED_TRAIN)                                                   \
    X(tails_gated, tails, 32768, CALL_LORA_BF16)                                                   \
    X(tails_gated_bwd, tails_bwd, 90112, CALL_LORA_BF16_TRAIN)

#define QLORA__KERNELS_RUNTIME(X)                                                                  \
    X(gemm_big_f32, gemm, 0, GEMM)                                                                 \
    X(gemm_big_half, gemm, 0, GEMM)                                                                \
    X(gemm_mid_f32, gemm, 0, GEMM)                                                                 \
    X(gemm_mid_half, gemm, 0, GEMM)                                                                \
    X(gemm_skinny_f32, gemm, 0, GEMM)                                                              \
    X(gemm_skinny_half, gemm, 0, GEMM)                                                             \
    X(gemm_tc_nn, gemm_tc, 65536, GEMM16)                                                          \
    X(gemm_tc_nt, gemm_tc, 65536, GEMM16)                                                          \
    X(gemm_tc_tn, gemm_tc, 65536, GEMM16)                                                          \
    X(gemm_tc_narrow, gemm_tc, 98304, GEMM16)                                                      \
    X(gemm_wg_nn_256, gemm_wg, 230400, GEMM_WG)                                                    \
    X(gemm_wg_nt_256, gemm_wg, 230400, GEMM_WG)                                                    \
    X(gemm_wg_tn_256, gemm_wg, 197632, GEMM_WG)                                                    \
    X(gemm_wg_nn_128, gemm_wg, 230400, GEMM_WG)                                                    \
    X(gemm_wg_nt_128, gemm_wg, 230400, GEMM_WG)                                                    \
    X(gemm_wg_nn_64, gemm_wg, 197632, GEMM_WG)                                                     \
    X(gemm_wg_nt_64, gemm_wg, 197632, GEMM_WG)                                                     \
    X(gemm_wg_tn_64, gemm_wg, 197632, GEMM_WG)                                                     \
    X(gemm_wg_sum, gemm_wg, 0, GEMM_WG)                                                            \
    X(cast_f32_bf16, cast, 0, F32)                                                                 \
    X(cast_f32_f16, cast, 0, F32)                                                                  \
    X(cast_bf16_f32, cast, 0, CALL)                                                                \
    X(cast_f16_f32, cast, 0, CALL)                                                                 \
    X(cast_bf16_f16, cast, 0, CALL)                                                                \
    X(cast_f16_bf16, cast, 0, CALL)                                                                \
    X(cast_absmax_f32, cast, 0, F32)                                                               \
    X(cast_scale, cast, 0, F32)                                                                    \
    X(random_normal_f32, random, 0, CALL)                                                          \
    X(random_normal_bf16, random, 0, CALL)                                                         \
    X(clip_squares, clip, 0, TRAIN)                                                                \
    X(clip_scale, clip, 0, TRAIN)                                                                  \
    X(clip_apply, clip, 0, TRAIN)

#define QLORA__KERNELS_OPS(X)                                                                      \
    X(elementwise_silu_f32, elementwise, 0, CALL_F32)                                              \
    X(elementwise_silu_bf16, elementwise_bf16, 0, CALL_BF16)                                       \
    X(elementwise_silu_bwd_f32, elementwise, 0, CALL_F32)                                          \
    X(elementwise_silu_bwd_bf16, elementwise_bf16, 0, CALL_BF16)                                   \
    X(elementwise_swiglu_f32, elementwise, 0, F32)                                                 \
    X(elementwise_swiglu_bf16, elementwise_bf16, 0, BF16)                                          \
    X(elementwise_swiglu_bwd_f32, elementwise, 0, CALL_F32)                                        \
    X(elementwise_swiglu_bwd_bf16, elementwise_bf16, 0, CALL_BF16)                                 \
    X(elementwise_geglu_f32, elementwise, 0, CALL_F32)                                             \
    X(elementwise_geglu_bf16, elementwise_bf16, 0, CALL_BF16)                                      \
    X(elementwise_geglu_bwd_f32, elementwise, 0, CALL_F32)                                         \
    X(elementwise_geglu_bwd_bf16, elementwise_bf16, 0, CALL_BF16)                                  \
    X(elementwise_cap_f32, elementwise, 0, CAP_F32)                                                \
    X(elementwise_cap_bf16, elementwise_bf16, 0, CAP_BF16)                                         \
    X(elementwise_mul_f32, elementwise, 0, CALL_F32)                                               \
    X(elementwise_mul_bf16, elementwise_bf16, 0, CALL_BF16)                                        \
    X(elementwise_add_f32, shared, 0, ALWAYS)                                                      \
    X(elementwise_add_bf16, elementwise_bf16, 0, BF16)                                             \
    X(elementwise_scale_f32, shared, 0, ALWAYS)                                                    \
    X(elementwise_scale_bf16, elementwise_bf16, 0, BF16)                                           \
    X(elementwise_narrow_bf16, elementwise_bf16, 0, BF16)                                          \
    X(elementwise_fill_f32, shared, 0, ALWAYS)                                                     \
    X(elementwise_fill_bf16, elementwise_bf16, 0, BF16)                                            \
    X(elementwise_gather_f32_f32, elementwise, 0, F32)                                             \
    X(elementwise_gather_f32_bf16, elementwise_bf16, 0, CALL_BF16)                                 \
    X(elementwise_gather_bf16_f32, elementwise, 0, CALL_F32)                                       \
    X(elementwise_gather_bf16_bf16, elementwise_bf16, 0, BF16)                                     \
    X(elementwise_gather_f16_f32, elementwise, 0, CALL_F32)                                        \
    X(elementwise_gather_f16_bf16, elementwise_bf16, 0, CALL_BF16)                                 \
    X(norm_rms_fwd_f32, norm, 0, F32)                                                              \
    X(norm_rms_fwd_bf16, norm_bf16, 0, BF16)                                                       \
    X(norm_rms_bwd_f32, norm, 0, F32)                                                              \
    X(norm_rms_bwd_bf16, norm_bf16, 0, BF16)                                                       \
    X(norm_rms_dw_f32, norm, 0, CALL_F32)                                                          \
    X(norm_rms_dw_bf16, norm_bf16, 0, CALL_BF16)                                                   \
    X(norm_rms_dw_sum, shared, 0, CALL)                                                            \
    X(mean_norm_fwd_f32, mean_norm, 0, MEAN_NORM_F32)                                              \
    X(mean_norm_fwd_bf16, mean_norm_bf16, 0, MEAN_NORM_BF16)                                       \
    X(mean_norm_bwd_f32, mean_norm, 0, MEAN_NORM_F32)                                              \
    X(mean_norm_bwd_bf16, mean_norm_bf16, 0, MEAN_NORM_BF16)                                       \
    X(mean_norm_dw_f32, mean_norm, 0, MEAN_NORM_F32)                                               \
    X(mean_norm_dw_bf16, mean_norm_bf16, 0, MEAN_NORM_BF16)                                        \
    X(plain_relu2_f32, plain, 0, RELU2_F32)                                                        \
    X(plain_relu2_bf16, plain_bf16, 0, RELU2_BF16)                                                 \
    X(plain_relu2_bwd_f32, plain, 0, RELU2_F32)                                                    \
    X(plain_relu2_bwd_bf16, plain_bf16, 0, RELU2_BF16)                                             \
    X(rope_f32, rope, 0, F32)                                                                      \
    X(rope_bf16, rope_bf16, 0, BF16)                                                               \
    X(softmax_copy_b16, softmax_bf16, 0, CALL_BF16)                                                \
    X(softmax_copy_b32, shared, 0, CALL)                                                           \
    X(softmax_transpose_b16, softmax_bf16, 0, CALL_BF16)                                           \
    X(softmax_transpose_b32, shared, 0, CALL)                                                      \
    X(softmax_scores_f32, softmax, 0, CALL_F32)                                                    \
    X(softmax_scores_bf16, softmax_bf16, 0, CALL_BF16)                                             \
    X(softmax_fwd_f32, softmax, 0, CALL_F32)                                                       \
    X(softmax_fwd_bf16, softmax_bf16, 0, CALL_BF16)                                                \
    X(softmax_bwd_f32, softmax_bwd, 0, CALL_F32_TRAIN)                                             \
    X(softmax_bwd_bf16, softmax_bwd_bf16, 0, CALL_BF16_TRAIN)                                      \
    X(loss_cross_entropy_f32, loss, 0, F32)                                                        \
    X(loss_cross_entropy_bf16, loss_bf16, 0, BF16)                                                 \
    X(loss_capped_f32, loss, 0, CALL_F32)                                                          \
    X(loss_capped_bf16, loss_bf16, 0, CALL_BF16)                                                   \
    X(loss_sum, shared, 0, ALWAYS)                                                                 \
    X(loss_arg_max_f32, loss, 0, CALL_F32)                                                         \
    X(loss_arg_max_bf16, loss_bf16, 0, CALL_BF16)                                                  \
    X(optim_advance, optim, 0, LORA_TRAIN)                                                         \
    X(optim_adamw_f32, optim, 0, LORA_F32_TRAIN)                                                   \
    X(optim_adamw_bf16, optim, 0, LORA_BF16_TRAIN)                                                 \
    X(optim_adamw8_f32, optim, 0, CALL_LORA_TRAIN)                                                 \
    X(optim_adamw8_bf16, optim, 0, CALL_LORA_BF16_TRAIN)                                           \
    X(optim_shadow_f32, shadow, 0, LORA_F32)                                                       \
    X(optim_shadow_bf16, shadow, 0, LORA_BF16)                                                     \
    X(optim_tree, optim, 0, LORA_TRAIN)                                                            \
    X(dropout_f32, dropout, 0, CALL_LORA_TRAIN)                                                    \
    X(dropout_bf16, dropout_bf16, 0, CALL_LORA_BF16_TRAIN)                                         \
    X(dropout_noise_f32, dropout, 0, NOISE_F32_TRAIN)                                              \
    X(dropout_noise_bf16, dropout_bf16, 0, NOISE_BF16_TRAIN)                                       \
    X(preference_logps, logps, 0, LORA)                                                            \
    X(preference_factors, preference, 0, PAIRS_TRAIN)                                              \
    X(preference_scale_f32, preference, 0, PAIRS_F32_TRAIN)                                        \
    X(preference_scale_bf16, preference, 0, PAIRS_BF16_TRAIN)                                      \
    X(methods_row_norms_f32, methods, 0, CALL_LORA)                                                \
    X(methods_row_norms_bf16, methods, 0, CALL_LORA_BF16)                                          \
    X(methods_scale_columns_f32, methods, 0, CALL_LORA)                                            \
    X(methods_scale_columns_bf16, methods, 0, CALL_LORA_BF16)                                      \
    X(methods_dot_columns_f32, methods_bwd, 0, CALL_LORA_TRAIN)                                    \
    X(methods_dot_columns_bf16, methods_bwd, 0, CALL_LORA_BF16_TRAIN)                              \
    X(methods_put_rows_f32, methods, 0, CALL_LORA)                                                 \
    X(methods_put_rows_bf16, methods, 0, CALL_LORA_BF16)                                           \
    X(methods_embed_gradient_f32, methods_bwd, 0, CALL_LORA_TRAIN)                                 \
    X(methods_embed_gradient_bf16, methods_bwd, 0, CALL_LORA_BF16_TRAIN)                           \
    X(methods_head_gradient_f32, methods_bwd, 0, CALL_LORA_TRAIN)                                  \
    X(methods_head_gradient_bf16, methods_bwd, 0, CALL_LORA_BF16_TRAIN)

#define QLORA__KERNELS_ATTENTION(X)                                                                \
    X(attn32_fwd, attn32, 30720, HEAD32)                                                           \
    X(attn32_stats, attn32_bwd, 0, HEAD32_TRAIN)                                                   \
    X(attn32_bwd_kv, attn32_bwd, 39936, HEAD32_TRAIN)                                              \
    X(attn32_bwd_sum, attn32_bwd, 0, HEAD32_TRAIN)                                                 \
    X(attn32_bwd_q, attn32_bwd, 40960, HEAD32_TRAIN)                                               \
    X(attn64_fwd, attn64, 49152, HEAD64)                                                           \
    X(attn64_stats, attn64_bwd, 0, HEAD64_TRAIN)                                                   \
    X(attn64_bwd_kv, attn64_bwd, 58368, HEAD64_TRAIN)                                              \
    X(attn64_bwd_sum, attn64_bwd, 0, HEAD64_TRAIN)                                                 \
    X(attn64_bwd_q, attn64_bwd, 65536, HEAD64_TRAIN)                                               \
    X(attn80_fwd, attn80, 45056, HEAD80)                                                           \
    X(attn80_stats, attn80_bwd, 0, HEAD80_TRAIN)                                                   \
    X(attn80_bwd_kv, attn80_bwd, 76800, HEAD80_TRAIN)                                              \
    X(attn80_bwd_sum, attn80_bwd, 0, HEAD80_TRAIN)                                                 \
    X(attn80_bwd_q, attn80_bwd, 90112, HEAD80_TRAIN)                                               \
    X(attn96_fwd, attn96, 79872, HEAD96)                                                           \
    X(attn96_stats, attn96_bwd, 0, HEAD96_TRAIN)                                                   \
    X(attn96_bwd_kv, attn96_bwd, 89088, HEAD96_TRAIN)                                              \
    X(attn96_bwd_sum, attn96_bwd, 0, HEAD96_TRAIN)                                                 \
    X(attn96_bwd_q, attn96_bwd, 79872, HEAD96_TRAIN)                                               \
    X(attn128_fwd, attn128, 65536, HEAD128)                                                        \
    X(attn128_stats, attn128_bwd, 0, HEAD128_TRAIN)                                                \
    X(attn128_bwd_kv, attn128_bwd, 70144, HEAD128_TRAIN)                                           \
    X(attn128_bwd_sum, attn128_bwd, 0, HEAD128_TRAIN)                                              \
    X(attn128_bwd_q, attn128_bwd, 98304, HEAD128_TRAIN)                                            \
    X(attn128c_fwd, attn128c, 65536, HEAD128CAP)                                                   \
    X(attn128c_stats, attn128c_bwd, 0, HEAD128CAP_TRAIN)                                           \
    X(attn128c_bwd_kv, attn128c_bwd, 70144, HEAD128CAP_TRAIN)                                      \
    X(attn128c_bwd_sum, attn128c_bwd, 0, HEAD128CAP_TRAIN)                                         \
    X(attn128c_bwd_q, attn128c_bwd, 98304, HEAD128CAP_TRAIN)                                       \
    X(attn192_fwd, attn192, 73728, HEAD192)                                                        \
    X(attn192_stats, attn192_bwd, 0, HEAD192_TRAIN)                                                \
    X(attn192_bwd_kv, attn192_bwd, 156672, HEAD192_TRAIN)                                          \
    X(attn192_bwd_sum, attn192_bwd, 0, HEAD192_TRAIN)                                              \
    X(attn192_bwd_q, attn192_bwd, 98304, HEAD192_TRAIN)                                            \
    X(attn256_fwd, attn256, 98304, HEAD256)                                                        \
    X(attn256_stats, attn256_bwd, 0, HEAD256_TRAIN)                                                \
    X(attn256_bwd_kv, attn256_bwd, 100864, HEAD256_TRAIN)                                          \
    X(attn256_bwd_sum, attn256_bwd, 0, HEAD256_TRAIN)                                              \
    X(attn256_bwd_q, attn256_bwd, 98304, HEAD256_TRAIN)                                            \
    X(attn64_wg_fwd, attn64_wg, 82944, HEAD64WG)                                                   \
    X(attn64_wg_stats, attn64_wg_bwd, 0, HEAD64WG_TRAIN)                                           \
    X(attn64_wg_bwd_kv, attn64_wg_bwd, 66560, HEAD64WG_TRAIN)                                      \
    X(attn64_wg_bwd_sum, attn64_wg_bwd, 0, HEAD64WG_TRAIN)                                         \
    X(attn64_wg_bwd_q, attn64_wg_bwd, 66560, HEAD64WG_TRAIN)                                       \
    X(attn96_wg_fwd, attn96_wg, 164864, HEAD96WG)                                                  \
    X(attn96_wg_stats, attn96_wg_bwd, 0, HEAD96WG_TRAIN)                                           \
    X(attn96_wg_bwd_kv, attn96_wg_bwd, 132096, HEAD96WG_TRAIN)                                     \
    X(attn96_wg_bwd_sum, attn96_wg_bwd, 0, HEAD96WG_TRAIN)                                         \
    X(attn96_wg_bwd_q, attn96_wg_bwd, 132096, HEAD96WG_TRAIN)                                      \
    X(attn128_wg_fwd, attn128_wg, 164864, HEAD128WG)                                               \
    X(attn128_wg_stats, attn128_wg_bwd, 0, HEAD128WG_TRAIN)                                        \
    X(attn128_wg_bwd_kv, attn128_wg_bwd, 132096, HEAD128WG_TRAIN)                                  \
    X(attn128_wg_bwd_sum, attn128_wg_bwd, 0, HEAD128WG_TRAIN)                                      \
    X(attn128_wg_bwd_q, attn128_wg_bwd, 132096, HEAD128WG_TRAIN)                                   \
    X(attn256_wg_fwd, attn256_wg, 197632, HEAD256WG)                                               \
    X(attn256_wg_stats, attn256_wg_bwd, 0, HEAD256WG_TRAIN)                                        \
    X(attn256_wg_bwd_kv, attn256_wg_bwd, 197632, HEAD256WG_TRAIN)                                  \
    X(attn256_wg_bwd_sum, attn256_wg_bwd, 0, HEAD256WG_TRAIN)                                      \
    X(attn256_wg_bwd_q, attn256_wg_bwd, 230400, HEAD256WG_TRAIN)                                   \
    X(attn_f32_fwd, attn_f32, 0, HEADANY)                                                          \
    X(attn_f32_stats, attn_f32_bwd, 0, HEADANY_TRAIN)                                              \
    X(attn_f32_bwd_kv, attn_f32_bwd, 0, HEADANY_TRAIN)                                             \
    X(attn_f32_bwd_q, attn_f32_bwd, 0, HEADANY_TRAIN)

// clang-format on

#define QLORA__X(name, module, shared, need) QLORA__K_##name,
typedef enum qlora__kernel_id { QLORA__KERNELS(QLORA__X) QLORA__K_COUNT } qlora__kernel_id;
#undef QLORA__X

typedef struct qlora__kernel_row {
    const char* name;
    const char* module;
    uint32_t shared;
    qlora__needs need;
} qlora__kernel_row;

#define QLORA__X(name, module, shared, need) {#name, #module, shared, QLORA__NEED_##need},
static const qlora__kernel_row qlora__kernel_rows[] = {QLORA__KERNELS(QLORA__X)};
#undef QLORA__X

struct qlora_kernel {
    qlora_ctx* owner;
    const char* key;
    void* function; // CUfunction; NULL until it is compiled
    uint32_t shared_allowed;
    bool waits; // it may begin before the kernel before it has ended, and waits where it must
    // Only for kernels of the caller:
    qlora_kernel* next;
    void* module;
    uint64_t text_hash;
    size_t block; // bytes of this struct and its key
};

const char* qlora_kernel_name(size_t index) {
    return index < QLORA__K_COUNT ? qlora__kernel_rows[index].name : NULL;
}

// The error of every call that needs a kernel, on the CPU.
static qlora_result qlora__no_kernels(qlora_ctx* ctx) {
    return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                       "kernels need CUDA, but this context runs on the CPU (%s)", ctx->reason);
}
