// mutants.c - injects known bugs into the shipped PTX; a test of another suite must detect each.
//
// A mutant is a new process of this program on the fake GPU, with one edit to one kernel's PTX (see
// fakecuda/mutate.h), running one test. It is caught if that test fails, and survives otherwise.
#define _POSIX_C_SOURCE 200809L // fork, setenv

#include "machines.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __linux__
#include <sys/wait.h>
#include <unistd.h>
#endif

typedef struct mutant {
    const char* bug;
    const char* kernel;
    int which; // which of the matching lines; 0 is all of them
    const char* find;
    const char* replace;
    const char* test; // the test that must fail
} mutant;

static const mutant mutants[] = {
    {"a slice is read before it has come", "qlora_grouped_few_nt_16", 0, "cp.async.wait_group 1;",
     "cp.async.wait_group 2;", "products_of_experts_sm_90"},
    {"a slice is read before it has come", "qlora_grouped_few_wide_16", 0, "cp.async.wait_group 1;",
     "cp.async.wait_group 2;", "products_of_experts_sm_90"},
    {"no barrier before the sums of the warps are added", "qlora_grouped_few_tall_16", 3,
     "bar.sync 0;", "", "products_of_experts_sm_90"},
    {"no barrier before the sums of the warps are read", "qlora_routing_starts", 2, "bar.sync 0;",
     "", "routing_agrees_sm_90_reversed"},
    {"no barrier before the other choices are read", "qlora_routing_spread", 0, "bar.sync 0;", "",
     "routing_agrees_sm_90_reversed"},
    {"a slice is multiplied before it is full", "qlora_grouped_wg_nt", 2,
     "mbarrier.try_wait.parity.shared.b64 p,[*],*;", "setp.eq.u32 p,0,0;",
     "products_of_experts_sm_90"},
    {"no barrier before the tables are read", "qlora_expert_place_bf16", 0, "bar.sync 0;", "",
     "sixteen_bits_of_experts_sm_90"},
    {"a step is read before it has come", "qlora_gated_backward", 0, "cp.async.wait_group 1;",
     "cp.async.wait_group 2;", "gated_sums_are_right_sm_90"},
    {"no barrier before the sums of the warps are added", "qlora_gated_backward", 3, "bar.sync 0;",
     "", "gated_sums_are_right_sm_90"},
    {"the largest magnitudes are not found", "qlora_gated_backward", 1,
     "atom.global.max.s32 *,[*],*;", "", "gated_sums_are_right_sm_90"},
    {"the share of an adapter is not added to every other 8 rows", "qlora_gated_backward", 2,
     "ldmatrix.sync.aligned.m8n8.x2.shared.b16{*,*},[*];", "", "gated_sums_are_right_sm_90"},
    {"rows of B are read before they have come", "qlora_fp8_quantise_u", 0,
     "cp.async.wait_group 0;", "cp.async.wait_group 1;", "coded_tails_are_right_sm_90"},
    {"no barrier before rows of B are read that other threads copy", "qlora_fp8_quantise_u", 1,
     "bar.sync 0;", "", "coded_tails_are_right_sm_90"},
    {"no barrier before a tile is multiplied", "qlora_fp8_gated", 1, "bar.sync 0;", "",
     "coded_activations_are_right_sm_90"},
    {"the largest of some columns is not found", "qlora_fp8_gated", 7, "max.f32 *,*,*;",
     "mov.f32 *,*;", "coded_activations_are_right_sm_90"},
    {"no barrier before the largest of a row is read", "qlora_fp8_norm_fwd", 4, "bar.sync 0;", "",
     "coded_norms_are_right_sm_90"},
    {"no barrier before the largest of a row is read", "qlora_fp8_norm_bwd", 4, "bar.sync 0;", "",
     "coded_norms_are_right_sm_90"},
    {"no barrier before the largest of a row is read", "qlora_fp8_rope", 2, "bar.sync 0;", "",
     "coded_ropes_are_right_sm_90"},
    {"no barrier before the sums of the warps are added", "qlora_balance_rows", 1, "bar.sync 0;",
     "", "balance_agrees_sm_90"},
    {"no barrier before the sums of the warps are added", "qlora_balance_loss", 0, "bar.sync 0;",
     "", "balance_agrees_sm_90"},
    {"a step is read before it has come", "qlora_skinny_gradients", 0, "cp.async.wait_group 2;",
     "cp.async.wait_group 3;", "skinny_sums_are_right_sm_90"},
    {"no barrier before the sums of the warps are added", "qlora_skinny_gradients", 3,
     "bar.sync 0;", "", "skinny_sums_are_right_sm_90"},
    {"every other part of the rows is left out", "qlora_linear_gated_sum", 1, "add.s32 *,*,1;",
     "add.s32 *,*,2;", "gated_sums_are_right_sm_90"},
    {"the kernel before is not waited for", "qlora_decode_row_nf4", 0, "griddepcontrol.wait;", "",
     "steps_are_passes_sm_90_reversed"},
    {"the kernel before is not waited for", "qlora_decode_attention", 0, "griddepcontrol.wait;",
     "griddepcontrol.launch_dependents;", "steps_are_passes_sm_90_reversed"},
    {"a stage of x is read before it is full", "qlora_decode_many_nf4", 0,
     "cp.async.wait_group 1;", "cp.async.wait_group 2;", "steps_are_passes_sm_90_reversed"},
    {"a stage of x is read before it is full", "qlora_decode_many_wg", 0,
     "cp.async.wait_group 1;", "cp.async.wait_group 2;", "steps_of_many_are_passes_sm_90"},
    {"a stage is read before it is full", "qlora_decode_many_head", 0, "cp.async.wait_group 2;",
     "cp.async.wait_group 3;", "the_head_of_many_is_a_product_sm_90"},
    {"a later stage is read before it is full", "qlora_decode_many_wg", 2,
     "cp.async.wait_group 1;", "cp.async.wait_group 2;", "a_block_may_have_many_chunks_sm_90"},
    {"the kernel before is not waited for", "qlora_decode_many_attention_128", 0,
     "griddepcontrol.wait;", "", "steps_of_many_are_passes_sm_90"},
    {"the kernel before is not waited for", "qlora_decode_many_norm", 0, "griddepcontrol.wait;",
     "", "steps_of_many_are_passes_sm_90"},
    {"qkv is not waited for", "qlora_decode_layers", 1, "setp.gt.u32 *,*,65535;",
     "setp.gt.u32 *,*,4294967295;", "layers_in_one_launch_are_passes_sm_90_reversed"},
    {"h is not waited for", "qlora_decode_layers", 3, "setp.gt.u32 *,*,65535;",
     "setp.gt.u32 *,*,4294967295;", "layers_in_one_launch_are_passes_sm_90_reversed"},
    {"attention is not waited for", "qlora_decode_layers", 4, "setp.gt.u32 *,*,65535;",
     "setp.gt.u32 *,*,4294967295;", "layers_in_one_launch_are_passes_sm_90_reversed"},
    {"pages are not waited for", "qlora_decode_layers", 1, "vote.sync.any.pred *,*,*;",
     "setp.eq.u32 ^,0,1;", "layers_in_one_launch_are_passes_sm_90"},
    {"z is not waited for", "qlora_decode_layers", 4, "vote.sync.any.pred *,*,*;",
     "setp.eq.u32 ^,0,1;", "layers_in_one_launch_are_passes_sm_90"},
    {"sums of a shared tile are not waited for", "qlora_decode_layers", 1,
     "setp.gt.u64 *,*,4294967295;", "setp.gt.u64 *,*,-1;", "blocks_may_share_tiles_sm_90"},
    {"words of the layer before are taken", "qlora_decode_layers", 4, "setp.gt.u32 *,*,65535;",
     "setp.gt.u32 *,*,262143;", "layers_in_one_launch_are_passes_sm_90_reversed"},
    {"the rest of x is not waited for", "qlora_decode_layers", 5, "setp.gt.u32 *,*,65535;",
     "setp.gt.u32 *,*,4294967295;", "rows_may_be_long_sm_90"},
    {"values are read before they have come", "qlora_decode_layers", 2, "cp.async.wait_group 0;",
     "cp.async.wait_group 1;", "layers_in_one_launch_are_passes_sm_90"},
    {"a row of sB is read before it has come", "qlora_decode_layers", 4, "cp.async.wait_group 0;",
     "cp.async.wait_group 3;", "layers_in_one_launch_are_passes_sm_90"},
    {"a piece is read before it has come", "qlora_decode_layers", 1, "cp.async.wait_group 2;",
     "cp.async.wait_group 3;", "few_blocks_take_all_layers_sm_90"},
    {"no barrier before the sums are added", "qlora_decode_layers", 8, "bar.sync 0;", "",
     "layers_in_one_launch_are_passes_sm_90_reversed"},
    {"no barrier before x is read", "qlora_decode_row_nf4", 1, "bar.sync 0;", "",
     "steps_are_passes_sm_90_reversed"},
    {"a piece is read before it has come", "qlora_decode_row_nf4", 0, "cp.async.wait_group 1;",
     "cp.async.wait_group 2;", "a_block_may_have_many_pieces_sm_90"},
    {"keys are read before they have come", "qlora_decode_attention", 1, "cp.async.wait_group 1;",
     "cp.async.wait_group 2;", "steps_are_passes_sm_90_reversed"},
    {"no barrier before shared sums are read", "qlora_norm_rms_fwd_f32", 2, "bar.sync 0;", "",
     "cases_hold_norm_sm_90"},
    {"wrong lane in a shuffle", "qlora_norm_rms_fwd_bf16", 1, "shfl.sync.bfly.b32 *",
     "shfl.sync.down.b32 *", "cases_hold_norm_sm_90"},
    {"eps forgotten", "qlora_norm_rms_fwd_f32", 1, "ld.param.f32 *,[*];", "mov.f32 *,0f00000000;",
     "cases_hold_norm_sm_90"},
    {"rotation in the wrong direction", "qlora_rope_f32", 0, "neg.f32 *,*;", "mov.f32 *,*;",
     "cases_hold_rope_sm_90"},
    {"causal mask off by one", "qlora_softmax_scores_f32", 0, "setp.le.s64 *", "setp.lt.s64 *",
     "cases_hold_scores_sm_90"},
    {"window off by one", "qlora_softmax_scores_bf16", 0, "setp.gt.s64 *", "setp.ge.s64 *",
     "cases_hold_scores_sm_90"},
    {"no barrier before a tile is read", "qlora_softmax_transpose_b32", 1, "bar.sync 0;", "",
     "cases_hold_transpose_sm_90"},
    {"label off by one", "qlora_loss_cross_entropy_f32", 2, "ld.global.f32 *,[*];",
     "ld.global.f32 *,[*+4];", "cases_hold_cross_entropy_sm_90"},
    {"ties go to the last", "qlora_loss_arg_max_f32", 0, "setp.gt.f32 *", "setp.ge.f32 *",
     "cases_hold_argmax_sm_90"},
    {"a vector beyond the row's end", "qlora_elementwise_add_bf16", 1, "setp.gt.s64 *,7;",
     "setp.gt.s64 *,6;", "cases_hold_add_sm_90"},
    {"the last column skipped", "qlora_elementwise_silu_f32", 0, "setp.lt.s64 *,4;",
     "setp.lt.s64 *,5;", "cases_hold_silu_sm_90"},
    {"beta not read", "qlora_gemm_mid_f32", 1, "ld.param.f32 *,[_14];",
     "mov.f32 *,0f00000000;", "gemm_every_form_sm_90"},
    {"no barrier between tiles", "qlora_gemm_big_f32", 1, "bar.sync 0;", "",
     "gemm_big_tiles_sm_90"},
    {"asynchronous copies waited for too late", "qlora_gemm_tc_nt", 0, "cp.async.wait_group 1;",
     "cp.async.wait_group 2;", "gemm_tensor_cores_sm_90"},
    {"the first slice is not waited for", "qlora_gemm_tc_tn", 1, "cp.async.wait_group 2;",
     "cp.async.wait_group 3;", "gemm_tensor_cores_sm_90"},
    {"strips take the place of slices too early", "qlora_gemm_tc_nn", 4, "bar.sync 0;", "",
     "gemm_tensor_cores_sm_90"},
    {"slices waited for too late", "qlora_gemm_tc_narrow", 1, "cp.async.wait_group 4;",
     "cp.async.wait_group 5;", "gemm_tensor_cores_sm_90"},
    {"sums of warps read too early", "qlora_gemm_tc_narrow", 3, "bar.sync 0;", "",
     "gemm_tensor_cores_sm_90"},
    {"asynchronous copies not waited for", "qlora_attn64_fwd", 1, "cp.async.wait_group 0;",
     "cp.async.wait_group 1;", "attention_is_right_sm_80_no_cublas"},
    {"no barrier between blocks of keys", "qlora_attn96_bwd_kv", 2, "bar.sync 0;", "",
     "attention_is_right_sm_90"},
    {"a stage filled before it is empty", "qlora_attn64_wg_fwd", 2,
     "mbarrier.try_wait.parity.shared.b64 p,[*],*;", "setp.eq.u32 p,0,0;",
     "attention_warpgroups_sm_90"},
    {"the next tile copied before the one before it was read", "qlora_attn64_wg_fwd", 1,
     "mbarrier.try_wait.parity.shared.b64 p,[*],*;", "setp.eq.u32 p,0,0;",
     "attention_warpgroups_sm_90"},
    {"tiles computed before they have come", "qlora_attn128_wg_fwd", 5,
     "mbarrier.try_wait.parity.shared.b64 p,[*],*;", "setp.eq.u32 p,0,0;",
     "attention_warpgroups_sm_90"},
    {"the number of tiles taken left for the next launch", "qlora_attn96_wg_fwd", 1,
     "st.global.u32[forward_taken],*;", "", "attention_warpgroups_sm_90"},
    {"the number of blocks that ended left for the next launch", "qlora_attn256_wg_fwd", 1,
     "st.global.u32[forward_ended],*;", "", "attention_warpgroups_256_sm_90"},
    {"the barrier's other phase", "qlora_attn64_wg_bwd_kv", 3,
     "mbarrier.try_wait.parity.shared.b64 p,[*],*;", "mbarrier.try_wait.parity.shared.b64 p,[*],1;",
     "attention_warpgroups_sm_90"},
    {"the next scores not waited for", "qlora_attn64_wg_bwd_kv", 1,
     "wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;",
     "attention_warpgroups_sm_90"},
    {"the next queries read before they have come", "qlora_attn64_wg_bwd_kv", 3,
     "mbarrier.try_wait.parity.shared.b64 p,[*],*;", "setp.eq.u32 p,0,0;",
     "attention_warpgroups_sm_90"},
    {"no fence between registers and products", "qlora_attn128_wg_bwd_kv", 1,
     "wgmma.fence.sync.aligned;", "", "attention_warpgroups_sm_90"},
    {"products not waited for", "qlora_attn128_wg_bwd_q", 1, "wgmma.wait_group.sync.aligned 0;",
     "wgmma.wait_group.sync.aligned 1;", "attention_warpgroups_sm_90"},
    {"no fence between zeroed rows and products", "qlora_attn64_wg_fwd", 3,
     "fence.proxy.async.shared::cta;", "", "attention_warpgroups_sm_90"},
    {"no fence between a new barrier and copies", "qlora_attn128_wg_bwd_kv", 1,
     "fence.proxy.async.shared::cta;", "", "attention_warpgroups_sm_90"},
    {"rows of another tile", "qlora_attn128_wg_bwd_q", 3,
     "cp.async.bulk.tensor.2d.*[*],[*,{*,*}],[*];", "cp.async.bulk.tensor.2d.*[*],[*,{*,~0}],[*];",
     "attention_warpgroups_sm_90"},
    {"values copied before they were read", "qlora_attn256_wg_bwd_q", 2,
     "mbarrier.try_wait.parity.shared.b64 p,[*],*;", "setp.eq.u32 p,0,0;",
     "attention_warpgroups_256_sm_90"},
    {"values read before they have come", "qlora_attn256_wg_bwd_q", 5,
     "mbarrier.try_wait.parity.shared.b64 p,[*],*;", "setp.eq.u32 p,0,0;",
     "attention_warpgroups_256_sm_90"},
    {"values read before they have come", "qlora_attn256_wg_fwd", 10,
     "mbarrier.try_wait.parity.shared.b64 p,[*],*;", "setp.eq.u32 p,0,0;",
     "attention_warpgroups_256_sm_90"},
    {"dv from queries that have not come", "qlora_attn256_wg_bwd_kv", 3,
     "mbarrier.try_wait.parity.shared.b64 p,[*],*;", "setp.eq.u32 p,0,0;",
     "attention_warpgroups_256_sm_90"},
    {"dk from queries that have not come", "qlora_attn256_wg_bwd_kv", 5,
     "mbarrier.try_wait.parity.shared.b64 p,[*],*;", "setp.eq.u32 p,0,0;",
     "attention_warpgroups_256_sm_90"},
    {"no fence after rows that are zeroed for the other warpgroup", "qlora_attn256_wg_fwd", 3,
     "fence.proxy.async.shared::cta;", "", "attention_warpgroups_256_sm_90"},
    {"columns of another head", "qlora_attn96_wg_bwd_kv", 0,
     "cp.async.bulk.tensor.2d.*[*],[*,{*,*}],[*];", "cp.async.bulk.tensor.2d.*[*],[*,{~32,*}],[*];",
     "attention_warpgroups_sm_90"},
    {"a slice given back too early", "qlora_gemm_wg_tn_64", 1, "wgmma.wait_group.sync.aligned 1;",
     "wgmma.wait_group.sync.aligned 2;", "gemm_warpgroups_sm_90"},
    {"a slice read before it is full", "qlora_gemm_wg_tn_64", 2,
     "mbarrier.try_wait.parity.shared.b64 p,[*],*;", "setp.eq.u32 p,0,0;", "gemm_warpgroups_sm_90"},
    {"values waited for too late", "qlora_attn256_bwd_q", 1, "cp.async.wait_group 1;",
     "cp.async.wait_group 2;", "attention_is_right_sm_90"},
    {"the slope of negative capped scores", "qlora_attn128c_bwd_kv", 0, "mov.f32 *,0fBF800000;",
     "mov.f32 *,0f00000000;", "attention_is_right_sm_90"},
    {"halves of a byte swapped", "qlora_nf4_quantise_f32", 1, "shl.b32 *,*,4;",
     "shl.b32 *,*,0;", "nf4_bytes_equal_the_cpus_sm_90"},
    {"scale of another block", "qlora_nf4_dequantise_f32", 2, "shr.s64 *,*,*;", "shr.s64 *,*,7;",
     "nf4_widens_sm_90"},
    {"levels of the previous byte", "qlora_nf4_gemm_16", 1, "shr.u32 *,*,9;", "shr.u32 *,*,1;",
     "nf4_products_sm_90"},
    {"rows of x waited for too late", "qlora_nf4_gemm_32", 1, "cp.async.wait_group 0;",
     "cp.async.wait_group 1;", "nf4_products_sm_90"},
    {"beta1 and beta2 swapped", "qlora_optim_advance", 1, "ld.global.f64 *,[*+8];",
     "ld.global.f64 *,[*+16];", "cases_hold_adamw_sm_90"},
    {"dropout ignores the step", "qlora_dropout_f32", 1, "ld.global.u32 *,[*+8];", "mov.u64 *,0;",
     "cases_hold_dropout_sm_90"},
    {"dropout at another key", "qlora_dropout_bf16", 1, "xor.b32 *,*,*;", "mov.b32 *,*;",
     "cases_hold_dropout_sm_90"},
    {"clipping skipped", "qlora_clip_apply", 0, "setp.eq.f32 *,0f3F800000;",
     "setp.le.f32 *,0f3F800000;", "clip_one_norm_sm_90"},
    {"clipping by an infinite norm", "qlora_clip_scale", 0, "setp.ge.f32 *,0f00000000;",
     "setp.ne.f32 *,0f7F800001;", "clip_groups_and_infinity_sm_90"},
    // What a product of 32 bits would give: its lower half, extended.
    {"an offset of 32 bits", "qlora_elementwise_scale_f32", 1, "mul.lo.s64 *,*,*;",
     "mul.lo.s64 *,*,*;shl.b64 ^,^,32;shr.s64 ^,^,32;", "far_rows_are_reached_sm_90"},
    {"an offset of 32 bits", "qlora_norm_rms_fwd_bf16", 0, "mul.lo.s64 *,*,*;",
     "mul.lo.s64 *,*,*;shl.b64 ^,^,32;shr.s64 ^,^,32;", "far_rows_are_reached_sm_90"},
    {"an offset of 32 bits", "qlora_gemm_mid_f32", 0, "mul.lo.s64 *,*,*;",
     "mul.lo.s64 *,*,*;shl.b64 ^,^,32;shr.s64 ^,^,32;", "far_rows_are_reached_sm_90"},
    {"halves rounded up", "qlora_cast_f32_bf16", 0, "add.s32 *,32767;", "add.s32 *,32768;",
     "cast_rounds_to_nearest_even_sm_90"},
    {"columns of other adapters are kept", "qlora_linear_keep_own_f32", 0, "setp.eq.s32 *",
     "setp.ge.s32 *", "together_is_as_alone_sm_90"},
    {"a row that is not finite stays", "qlora_linear_keep_own_bf16", 0,
     "setp.le.f32 *,0f7F7FFFFF;", "setp.neu.f32 *,0f7F7FFFFF;", "overflow_stays_at_home_sm_90"},
    {"the gradient of such a row is used", "qlora_linear_collect", 1, "setp.eq.s32 *,2;",
     "setp.eq.s32 *,3;", "overflow_stays_at_home_sm_90"},
    {"adapters without rows have gradients", "qlora_linear_collect", 1, "setp.eq.s32 *,0;",
     "setp.eq.s32 *,4;", "shares_are_added_sm_90"},
    {"the losses of all adapters are added", "qlora_loss_sum", 0, "setp.ne.s32 *",
     "setp.lt.s32 *", "losses_are_those_of_each_sm_90"},
};

#ifdef __linux__

typedef struct verdict {
    bool edited;
    bool failed;
    char said[4096]; // the end of the mutant's output
} verdict;

// The child: this program with the edit in its environment. Does not return.
static void mutant_become(const mutant* m, int out) {
    char edit[1024];
    snprintf(edit, sizeof edit, "%s\n%d\n%s\n%s", m->kernel, m->which, m->find, m->replace);
    setenv("FAKECUDA_MUTATE", edit, 1);
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1); // failing tests leak
    dup2(out, 1);
    dup2(out, 2);
    unsetenv("QLORA_TEST_BRIEF"); // which leaves out machines that some kernels are for
    alarm(120);                   // a mutant may hang
    execl("/proc/self/exe", "tests", "--backend", "fake", "-t", m->test, (char*)NULL);
    _exit(127);
}

static bool mutant_run(const mutant* m, verdict* v) {
    int ends[2];
    memset(v, 0, sizeof *v);
    if (pipe(ends) != 0) {
        return false;
    }
    fflush(NULL);
    pid_t child = fork();
    if (child < 0) {
        return false;
    }
    if (child == 0) {
        mutant_become(m, ends[1]);
    }
    close(ends[1]);
    size_t used = 0;
    for (;;) {
        if (used + 1024 > sizeof v->said) { // keep the second half
            memmove(v->said, v->said + sizeof v->said / 2, used - sizeof v->said / 2);
            used -= sizeof v->said / 2;
        }
        ssize_t n = read(ends[0], v->said + used, 1000);
        if (n <= 0) {
            break;
        }
        used += (size_t)n;
        v->said[used] = 0;
        v->edited = v->edited || strstr(v->said, "fakecuda: ") != NULL;
    }
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    const char* last = strstr(v->said, " passed, ");
    bool counted = last != NULL && strstr(last, " passed, 0 failed, ") == last;
    bool exited = WIFEXITED(status) && WEXITSTATUS(status) != 127;
    v->failed = exited && WEXITSTATUS(status) != 0 && last != NULL && !counted;
    return exited || WIFSIGNALED(status);
}

TEST mutant_is_caught(const mutant* m) {
    verdict v;
    ASSERT(mutant_run(m, &v));
    if (!v.edited) {
        printf("    %s: %s has no line \"%s\"\n", m->bug, m->kernel, m->find);
        FAILm("the edit no longer matches the kernel");
    }
    if (!v.failed) {
        printf("    %s in %s: %s did not detect it:\n%s\n", m->bug, m->kernel, m->test, v.said);
        FAILm("an injected bug survived");
    }
    PASS();
}

SUITE(mutant_suite) {
    for (size_t i = 0; i < sizeof mutants / sizeof mutants[0]; i++) {
        if (test_fake() != NULL && test_wants("fake")) {
            static char suffix[64];
            snprintf(suffix, sizeof suffix, "%02d_%s", (int)i, mutants[i].kernel + 6);
            greatest_set_test_suffix(suffix);
            RUN_TESTp(mutant_is_caught, &mutants[i]);
        }
    }
}

#else

SUITE(mutant_suite) {
}

#endif
