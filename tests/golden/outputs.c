// outputs.c - writes the results of every kernel for fixed inputs to a file, and compares two
// such files.
//
//   build/outputs --write FILE          runs every kernel of the registry on the CUDA device
//   build/outputs --compare FILE FILE   prints the differences, operator by operator
//
// Run it once with LD_LIBRARY_PATH=build/fake and once with the real driver: the table shows how
// far the PTX interpreter is from the hardware. Exit status 1 if a difference is larger than
// rounding can explain.
#define QLORA_STATIC
#define QLORA_IMPLEMENTATION
#include "qlora.h"

typedef struct run {
    qlora_ctx* ctx;
    FILE* file;
    uint32_t stream; // number of the random stream
    int failures;
} run;

static qlora_tensor make(run* r, qlora_dtype dtype, int64_t rows, int64_t cols, float deviation) {
    qlora_tensor t;
    qlora_tensor wide;
    memset(&t, 0, sizeof t);
    bool ok = qlora_tensor_create(r->ctx, dtype, rows, cols, &t) == QLORA_OK;
    if (dtype == QLORA_F16) {
        ok = ok && qlora_tensor_create(r->ctx, QLORA_F32, rows, cols, &wide) == QLORA_OK;
        ok = ok && qlora_random_normal(r->ctx, 5, r->stream++, deviation, &wide) == QLORA_OK;
        ok = ok && qlora_cast(r->ctx, &wide, &t) == QLORA_OK;
        ok = ok && qlora_tensor_destroy(r->ctx, &wide) == QLORA_OK;
    } else if (dtype == QLORA_F32 || dtype == QLORA_BF16) {
        ok = ok && qlora_random_normal(r->ctx, 5, r->stream++, deviation, &t) == QLORA_OK;
    } else {
        ok = ok && qlora_tensor_zero(r->ctx, &t) == QLORA_OK;
    }
    if (!ok) {
        printf("cannot create a tensor: %s\n", qlora_last_error(r->ctx));
        r->failures++;
    }
    return t;
}

static void keep(run* r, const char* name, const qlora_tensor* t) {
    size_t n = (size_t)(t->rows * t->cols * t->batch);
    size_t bytes = n * qlora_dtype_bytes(t->dtype);
    void* raw = malloc(bytes + 1);
    float* values = (float*)malloc(n * 4 + 4);
    if (qlora_tensor_read(r->ctx, t, raw, bytes) != QLORA_OK) {
        printf("%s: %s\n", name, qlora_last_error(r->ctx));
        r->failures++;
    }
    for (size_t i = 0; i < n; i++) {
        values[i] = (float)qlora__load(raw, t->dtype, (int64_t)i);
    }
    fprintf(r->file, "%s %llu\n", name, (unsigned long long)n);
    fwrite(values, 4, n, r->file);
    free(raw);
    free(values);
}

static void must(run* r, const char* name, qlora_result result) {
    if (result != QLORA_OK) {
        printf("%s: %s\n", name, qlora_last_error(r->ctx));
        r->failures++;
    }
}

static const char* suffixed(const char* name, qlora_dtype dtype, char out[64]) {
    snprintf(out, 64, "%s_%s", name, qlora_dtype_name(dtype));
    return out;
}

static void drop(run* r, qlora_tensor* list, int count) {
    for (int i = 0; i < count; i++) {
        qlora_tensor_destroy(r->ctx, &list[i]);
    }
}

// ---- products -----------------------------------------------------------------------------------

static void run_gemm(run* r) {
    static const struct {
        const char* name;
        int64_t M, N, K;
        bool ta, tb;
        qlora_dtype in;
    } cases[] = {{"gemm_skinny", 48, 16, 160, false, true, QLORA_F32},
                 {"gemm_mid", 70, 65, 24, true, false, QLORA_F32},
                 {"gemm_big", 1290, 1290, 40, false, false, QLORA_F32},
                 {"gemm_skinny", 48, 16, 160, false, false, QLORA_F16},
                 {"gemm_mid", 70, 65, 24, true, true, QLORA_BF16},
                 {"gemm_big", 1290, 1290, 40, true, true, QLORA_BF16},
                 {"gemm_tc_nn", 136, 144, 72, false, false, QLORA_BF16},
                 {"gemm_tc_nt", 136, 144, 72, false, true, QLORA_BF16},
                 {"gemm_tc_tn", 136, 144, 72, true, false, QLORA_BF16},
                 {"gemm_tc_nn", 136, 144, 72, false, false, QLORA_F16},
                 {"gemm_tc_nt", 136, 144, 72, false, true, QLORA_F16},
                 {"gemm_tc_tn", 136, 144, 72, true, false, QLORA_F16},
                 {"gemm_tc_narrow_nn", 136, 48, 328, false, false, QLORA_BF16},
                 {"gemm_tc_narrow_nt", 136, 48, 328, false, true, QLORA_BF16},
                 {"gemm_tc_narrow_tn", 48, 144, 328, true, false, QLORA_BF16}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char name[64];
        suffixed(cases[i].name, cases[i].in, name);
        int64_t M = cases[i].M;
        int64_t N = cases[i].N;
        int64_t K = cases[i].K;
        qlora_tensor t[3];
        t[0] = make(r, cases[i].in, cases[i].ta ? K : M, cases[i].ta ? M : K, 1.0f);
        t[1] = make(r, cases[i].in, cases[i].tb ? N : K, cases[i].tb ? K : N, 1.0f);
        t[2] = make(r, QLORA_F32, M, N, 1.0f);
        qlora_gemm_desc d = {cases[i].ta, cases[i].tb, 0.5f, 1.0f, QLORA_PATH_PTX};
        must(r, name, qlora_gemm(r->ctx, &d, &t[0], &t[1], &t[2]));
        keep(r, name, &t[2]);
        drop(r, t, 3);
    }
    // An f32 gradient with f16 weights: absmax, scale, cast, product.
    qlora_tensor t[3];
    t[0] = make(r, QLORA_F32, 33, 40, 3e5f);
    t[1] = make(r, QLORA_F16, 24, 40, 0.02f);
    t[2] = make(r, QLORA_F32, 33, 24, 1.0f);
    must(r, "gemm_mixed_f16", qlora_gemm_backward_a(r->ctx, &t[0], &t[1], &t[2], QLORA_PRODUCT_PTX));
    keep(r, "gemm_mixed_f16", &t[2]);
    drop(r, t, 3);
}

static void run_casts(run* r) {
    for (int from = 0; from < 3; from++) {
        for (int to = 0; to < 3; to++) {
            if (from == to) {
                continue;
            }
            char name[64];
            snprintf(name, sizeof name, "cast_%s_%s", qlora_dtype_name((qlora_dtype)from),
                     qlora_dtype_name((qlora_dtype)to));
            qlora_tensor t[2];
            t[0] = make(r, (qlora_dtype)from, 9, 37, 30.0f);
            t[1] = make(r, (qlora_dtype)to, 9, 37, 1.0f);
            must(r, name, qlora_cast(r->ctx, &t[0], &t[1]));
            keep(r, name, &t[1]);
            drop(r, t, 2);
        }
    }
}

static void run_nf4(run* r) {
    static const qlora_dtype types[] = {QLORA_F32, QLORA_BF16, QLORA_F16};
    for (int i = 0; i < 3; i++) {
        char name[64];
        qlora_nf4_desc d;
        memset(&d, 0, sizeof d);
        d.rows = 96;
        d.cols = 192;
        qlora_nf4 w;
        qlora_tensor t[2];
        t[0] = make(r, types[i], d.rows, d.cols, 0.05f);
        t[1] = make(r, types[i], d.rows, d.cols, 1.0f);
        must(r, "nf4", qlora_nf4_create(r->ctx, &d, &w));
        must(r, "nf4", qlora_nf4_quantise(r->ctx, &t[0], &w));
        must(r, "nf4", qlora_nf4_dequantise(r->ctx, &w, &t[1], 0));
        keep(r, suffixed("nf4_quantise_dequantise", types[i], name), &t[1]);
        static const int64_t rows[] = {7, 30};
        for (int k = 0; k < 2 && types[i] == QLORA_BF16; k++) {
            qlora_tensor y[2];
            y[0] = make(r, QLORA_BF16, rows[k], d.cols, 1.0f);
            y[1] = make(r, QLORA_BF16, rows[k], d.rows, 1.0f);
            snprintf(name, sizeof name, "nf4_gemm_%d", k == 0 ? 16 : 32);
            must(r, name, qlora_nf4_gemm_forward(r->ctx, &y[0], &w, &y[1], QLORA_PRODUCT_FUSED));
            keep(r, name, &y[1]);
            drop(r, y, 2);
        }
        qlora_nf4_destroy(r->ctx, &w);
        drop(r, t, 2);
    }
    // A long K is split and reduced.
    qlora_nf4_desc d;
    memset(&d, 0, sizeof d);
    d.rows = 64;
    d.cols = 4352;
    qlora_nf4 w;
    qlora_tensor t[3];
    t[0] = make(r, QLORA_BF16, d.rows, d.cols, 0.05f);
    t[1] = make(r, QLORA_BF16, 5, d.cols, 1.0f);
    t[2] = make(r, QLORA_BF16, 5, d.rows, 1.0f);
    must(r, "nf4", qlora_nf4_create(r->ctx, &d, &w));
    must(r, "nf4", qlora_nf4_quantise(r->ctx, &t[0], &w));
    must(r, "nf4_gemm_reduce", qlora_nf4_gemm_forward(r->ctx, &t[1], &w, &t[2], QLORA_PRODUCT_FUSED));
    keep(r, "nf4_gemm_reduce", &t[2]);
    qlora_nf4_destroy(r->ctx, &w);
    drop(r, t, 3);
}

static void run_linear(run* r, qlora_dtype dtype) {
    enum { T = 20, IN = 64, OUT = 48, RANK = 8 };
    char name[64];
    qlora_nf4_desc d;
    memset(&d, 0, sizeof d);
    d.rows = OUT;
    d.cols = IN;
    qlora_nf4 w;
    qlora_tensor t[11];
    t[0] = make(r, dtype, T, IN + RANK, 1.0f);           // x
    t[1] = make(r, dtype, T, OUT, 1.0f);                 // y
    t[2] = make(r, dtype, RANK, IN, 0.1f);               // A
    t[3] = make(r, dtype, OUT, RANK, 0.1f);              // s B
    t[4] = make(r, dtype, OUT + RANK, IN + RANK, 1.0f);  // operand
    t[5] = make(r, dtype, T, OUT + RANK, 1.0f);          // dy
    t[6] = make(r, dtype, T, IN, 1.0f);                  // dx
    t[7] = make(r, QLORA_F32, RANK, IN, 1.0f);           // dA
    t[8] = make(r, QLORA_F32, OUT, RANK, 1.0f);          // dB
    t[9] = make(r, dtype, OUT, IN, 0.05f);               // weights
    t[10] = make(r, dtype, 1, OUT, 1.0f);                // bias
    must(r, "linear", qlora_nf4_create(r->ctx, &d, &w));
    must(r, "linear", qlora_nf4_quantise(r->ctx, &t[9], &w));
    qlora_linear_desc l;
    memset(&l, 0, sizeof l);
    l.in = IN;
    l.count = 1;
    l.parts[0].out = OUT;
    l.parts[0].rank = RANK;
    l.parts[0].scale = 2.0f;
    l.parts[0].nf4 = &w;
    l.parts[0].bias = &t[10];
    l.parts[0].a = &t[2];
    l.parts[0].sb = &t[3];
    l.parts[0].da = &t[7];
    l.parts[0].db = &t[8];
    l.operand = &t[4];
    must(r, "linear", qlora_linear_place(r->ctx, &l, QLORA_LINEAR_WEIGHTS | QLORA_LINEAR_ADAPTERS));
    must(r, "linear", qlora_linear_forward(r->ctx, &l, &t[0], &t[1]));
    must(r, "linear", qlora_linear_backward(r->ctx, &l, &t[0], &t[5], &t[6], 0));
    keep(r, suffixed("linear_operand", dtype, name), &t[4]);
    keep(r, suffixed("linear_y", dtype, name), &t[1]);
    keep(r, suffixed("linear_dx", dtype, name), &t[6]);
    keep(r, suffixed("linear_dA", dtype, name), &t[7]);
    keep(r, suffixed("linear_dB", dtype, name), &t[8]);
    qlora_nf4_destroy(r->ctx, &w);
    drop(r, t, 11);
}

// ---- operators ----------------------------------------------------------------------------------

static void run_points(run* r, qlora_dtype dtype) {
    char name[64];
    qlora_tensor t[6];
    for (int i = 0; i < 6; i++) {
        t[i] = make(r, dtype, 11, 72, 2.0f);
    }
    qlora_ctx* ctx = r->ctx;
    must(r, "silu", qlora_silu_forward(ctx, &t[0], &t[2]));
    keep(r, suffixed("silu", dtype, name), &t[2]);
    must(r, "silu_bwd", qlora_silu_backward(ctx, &t[0], &t[1], &t[2]));
    keep(r, suffixed("silu_bwd", dtype, name), &t[2]);
    must(r, "swiglu", qlora_swiglu_forward(ctx, &t[0], &t[1], &t[2]));
    keep(r, suffixed("swiglu", dtype, name), &t[2]);
    must(r, "swiglu_bwd", qlora_swiglu_backward(ctx, &t[2], &t[0], &t[1], &t[3], &t[4], &t[5]));
    keep(r, suffixed("swiglu_bwd", dtype, name), &t[3]);
    must(r, "mul", qlora_mul(ctx, &t[0], &t[1], &t[2]));
    keep(r, suffixed("mul", dtype, name), &t[2]);
    must(r, "add", qlora_add(ctx, &t[0], &t[1], &t[2]));
    keep(r, suffixed("add", dtype, name), &t[2]);
    must(r, "scale", qlora_scale(ctx, 0.3f, &t[0], &t[2]));
    keep(r, suffixed("scale", dtype, name), &t[2]);
    must(r, "fill", qlora_fill(ctx, 0.3f, &t[2]));
    keep(r, suffixed("fill", dtype, name), &t[2]);
    drop(r, t, 6);
}

static qlora_tensor make_ints(run* r, int64_t count, int32_t modulus) {
    qlora_tensor t = make(r, QLORA_I32, 1, count, 0.0f);
    int32_t* values = (int32_t*)malloc((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) {
        values[i] = (int32_t)(i * 7 % modulus);
    }
    must(r, "ints", qlora_tensor_write(r->ctx, &t, values, (size_t)count * 4));
    free(values);
    return t;
}

static void run_rows(run* r, qlora_dtype dtype) {
    enum { T = 13, H = 96 };
    char name[64];
    qlora_ctx* ctx = r->ctx;
    qlora_tensor t[8];
    for (int i = 0; i < 5; i++) {
        t[i] = make(r, dtype, T, H, 1.0f);
    }
    t[5] = make(r, QLORA_F32, 1, H, 1.0f);
    t[6] = make(r, QLORA_F32, 1, H, 1.0f);
    t[7] = make_ints(r, T, 29);
    must(r, "norm", qlora_rmsnorm_residual_forward(ctx, &t[0], &t[1], &t[5], 1e-5f, &t[2], &t[3]));
    keep(r, suffixed("norm_rms_fwd", dtype, name), &t[3]);
    must(r, "norm", qlora_rmsnorm_backward(ctx, &t[1], &t[0], &t[5], 1e-5f, NULL, &t[4], &t[6]));
    keep(r, suffixed("norm_rms_bwd", dtype, name), &t[4]);
    keep(r, suffixed("norm_rms_dw", dtype, name), &t[6]);
    static float table[32 * 16];
    qlora_rope_desc rope;
    memset(&rope, 0, sizeof rope);
    must(r, "rope", qlora_rope_table(NULL, &rope, 16, 32, table));
    qlora_tensor turn;
    must(r, "rope", qlora_tensor_create(ctx, QLORA_F32, 32, 16, &turn));
    must(r, "rope", qlora_tensor_write(ctx, &turn, table, sizeof table));
    must(r, "rope", qlora_rope_forward(ctx, &t[0], 5, &t[7], &turn, &t[5], NULL));
    keep(r, suffixed("rope", dtype, name), &t[0]);
    must(r, "rope", qlora_rope_backward(ctx, &t[1], 6, &t[7], &turn, NULL));
    keep(r, suffixed("rope_bwd", dtype, name), &t[1]);
    static const qlora_dtype tables[] = {QLORA_F32, QLORA_BF16, QLORA_F16};
    for (int i = 0; i < 3; i++) {
        qlora_tensor from = make(r, tables[i], 30, H, 1.0f);
        must(r, "gather", qlora_embed(ctx, &from, &t[7], &t[2], NULL));
        snprintf(name, sizeof name, "gather_%s_%s", qlora_dtype_name(tables[i]),
                 qlora_dtype_name(dtype));
        keep(r, name, &t[2]);
        qlora_tensor_destroy(ctx, &from);
    }
    qlora_tensor_destroy(ctx, &turn);
    drop(r, t, 8);
}

static void run_pieces(run* r, qlora_dtype dtype) {
    enum { S = 12, H = 3, D = 8 };
    char name[64];
    qlora_ctx* ctx = r->ctx;
    qlora_tensor t[5];
    t[0] = make(r, dtype, S, H * D, 1.0f);
    must(r, "pieces", qlora_tensor_create_batched(ctx, dtype, H, S, D, &t[1]));
    must(r, "pieces", qlora_tensor_create_batched(ctx, dtype, H, D, S, &t[2]));
    t[3] = make(r, dtype, S, S, 2.0f);
    t[4] = make(r, dtype, S, S, 2.0f);
    must(r, "heads_split", qlora_heads_split(ctx, &t[0], &t[1]));
    keep(r, suffixed("heads_split", dtype, name), &t[1]);
    must(r, "transpose", qlora_transpose(ctx, &t[1], &t[2]));
    keep(r, suffixed("transpose", dtype, name), &t[2]);
    must(r, "heads_join", qlora_heads_join(ctx, &t[1], &t[0]));
    keep(r, suffixed("heads_join", dtype, name), &t[0]);
    must(r, "scores", qlora_scores_mask(ctx, &t[3], 0.3f, true, 5));
    must(r, "softmax", qlora_softmax_forward(ctx, &t[3], &t[3]));
    keep(r, suffixed("softmax", dtype, name), &t[3]);
    must(r, "softmax_bwd", qlora_softmax_backward(ctx, &t[3], &t[4], &t[4]));
    keep(r, suffixed("softmax_bwd", dtype, name), &t[4]);
    drop(r, t, 5);
}

static void run_loss(run* r, qlora_dtype dtype) {
    enum { R = 9, V = 300 };
    char name[64];
    qlora_tensor t[5];
    t[0] = make(r, dtype, R, V, 2.0f);
    t[1] = make_ints(r, R, V);
    t[2] = make(r, QLORA_F32, 1, R, 1.0f);
    t[3] = make(r, QLORA_F32, 1, 3, 1.0f);
    t[4] = make(r, QLORA_I32, 1, R, 0.0f);
    must(r, "loss", qlora_tensor_zero(r->ctx, &t[3]));
    must(r, "arg_max", qlora_argmax(r->ctx, &t[0], &t[4]));
    keep(r, suffixed("arg_max", dtype, name), &t[4]);
    qlora_cross_entropy_desc args;
    memset(&args, 0, sizeof args);
    args.logits = &t[0];
    args.labels = &t[1];
    args.losses = &t[2];
    args.total = &t[3];
    must(r, "loss", qlora_cross_entropy(r->ctx, &args));
    keep(r, suffixed("loss_gradient", dtype, name), &t[0]);
    keep(r, suffixed("loss_losses", dtype, name), &t[2]);
    keep(r, suffixed("loss_sum", dtype, name), &t[3]);
    drop(r, t, 5);
}

static void run_step(run* r, qlora_dtype shadow) {
    enum { N = 1000 };
    char name[64];
    qlora_tensor t[7];
    for (int i = 0; i < 4; i++) {
        t[i] = make(r, QLORA_F32, 1, N, 0.1f);
    }
    must(r, "adamw", qlora_mul(r->ctx, &t[3], &t[3], &t[3])); // the second moment is not negative
    t[4] = make(r, shadow, 1, N, 1.0f);
    t[5] = make(r, QLORA_U8, 1, (int64_t)sizeof(qlora_adamw_range), 0.0f);
    t[6] = make(r, QLORA_U8, 1, (int64_t)sizeof(qlora_adamw_state), 0.0f);
    qlora_adamw_range range = {0, N, 1.0f, 2.0f, NULL, 0, 0, 0.0};
    qlora_adamw_state state;
    memset(&state, 0, sizeof state);
    state.lr = 1e-3;
    state.beta1 = 0.9;
    state.beta2 = 0.999;
    state.eps = 1e-8;
    state.weight_decay = 0.01;
    state.updates = 5;
    must(r, "adamw", qlora_tensor_write(r->ctx, &t[5], &range, sizeof range));
    must(r, "adamw", qlora_tensor_write(r->ctx, &t[6], &state, sizeof state));
    const qlora_tensor* list[] = {&t[1]};
    qlora_clip* clip = NULL;
    must(r, "clip", qlora_clip_create(r->ctx, list, NULL, 1, &clip));
    must(r, "clip", qlora_clip_apply(clip));
    keep(r, suffixed("clip", shadow, name), &t[1]);
    must(r, "clip", qlora_clip_destroy(clip));
    qlora_adamw_desc args;
    memset(&args, 0, sizeof args);
    args.param = &t[0];
    args.grad = &t[1];
    args.m = &t[2];
    args.v = &t[3];
    args.shadow = &t[4];
    args.ranges = &t[5];
    args.state = &t[6];
    must(r, "shadow", qlora_adamw_shadow(r->ctx, &args));
    keep(r, suffixed("optim_shadow", shadow, name), &t[4]);
    must(r, "adamw", qlora_adamw_step(r->ctx, &args));
    keep(r, suffixed("optim_adamw", shadow, name), &t[0]);
    drop(r, t, 7);
}

static void run_dropout(run* r, qlora_dtype dtype) {
    char name[64];
    qlora_tensor t[5];
    t[0] = make(r, dtype, 7, 40, 1.0f);
    t[1] = make(r, dtype, 7, 40, 1.0f);
    t[2] = make_ints(r, 7, 50);
    t[3] = make_ints(r, 7, 3);
    t[4] = make_ints(r, 4, 100);
    qlora_dropout_desc args;
    memset(&args, 0, sizeof args);
    args.x = &t[0];
    args.y = &t[1];
    args.positions = &t[2];
    args.sequences = &t[3];
    args.state = &t[4];
    args.p = 0.25f;
    must(r, "dropout", qlora_dropout(r->ctx, &args));
    keep(r, suffixed("dropout", dtype, name), &t[1]);
    drop(r, t, 5);
}

static void run_attention(run* r, qlora_dtype dtype, int64_t head_dim) {
    enum { T = 75, HEADS = 4, KV = 2 };
    static const int32_t bounds[] = {0, 40, 41, 70};
    char name[64];
    qlora_tensor t[10];
    for (int i = 0; i < 8; i++) {
        bool key = i == 1 || i == 2 || i == 6 || i == 7;
        t[i] = make(r, dtype, T, (key ? KV : HEADS) * head_dim, 1.0f); // q k v o do dq dk dv
    }
    t[8] = make(r, QLORA_F32, HEADS, T, 1.0f);
    t[9] = make(r, QLORA_I32, 1, 4, 0.0f);
    must(r, "attention", qlora_tensor_write(r->ctx, &t[9], bounds, sizeof bounds));
    qlora_attention_desc d;
    memset(&d, 0, sizeof d);
    d.heads = HEADS;
    d.kv_heads = KV;
    d.head_dim = head_dim;
    d.window = 33;
    must(r, "attention",
         qlora_attention_forward(r->ctx, &d, &t[0], &t[1], &t[2], &t[9], &t[3], &t[8]));
    must(r, "attention",
         qlora_attention_backward(r->ctx, &d, &t[0], &t[1], &t[2], &t[9], &t[3], &t[8], &t[4],
                                  &t[5], &t[6], &t[7]));
    static const char* const names[] = {"o", "dq", "dk", "dv", "lse"};
    static const int which[] = {3, 5, 6, 7, 8};
    for (int i = 0; i < 5; i++) {
        snprintf(name, sizeof name, "attention%d_%s_%s", (int)head_dim, names[i],
                 qlora_dtype_name(dtype));
        keep(r, name, &t[which[i]]);
    }
    drop(r, t, 10);
}

static int write_outputs(const char* path) {
    char why[512] = "";
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CUDA;
    desc.cublas_library = "none"; // always use the built-in kernels
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    run r;
    memset(&r, 0, sizeof r);
    if (qlora_ctx_create(&desc, &r.ctx) != QLORA_OK) {
        fprintf(stderr, "outputs: %s\n", why);
        return 1;
    }
    r.file = fopen(path, "wb");
    if (r.file == NULL) {
        fprintf(stderr, "outputs: cannot write %s\n", path);
        return 1;
    }
    run_gemm(&r);
    run_casts(&r);
    run_nf4(&r);
    for (int i = 0; i < 2; i++) {
        qlora_dtype dtype = i == 0 ? QLORA_F32 : QLORA_BF16;
        run_linear(&r, dtype);
        run_points(&r, dtype);
        run_rows(&r, dtype);
        run_pieces(&r, dtype);
        run_loss(&r, dtype);
        run_step(&r, dtype);
        run_dropout(&r, dtype);
        run_attention(&r, dtype, 48);
    }
    run_attention(&r, QLORA_BF16, 64);
    run_attention(&r, QLORA_BF16, 128);
    for (int i = 0; i < QLORA__K_COUNT; i++) {
        if (r.ctx->gpu->cache->kernels[i].function == NULL) {
            printf("kernel %s was not loaded\n", qlora__kernel_rows[i].name);
            r.failures++;
        }
    }
    fclose(r.file);
    if (qlora_ctx_destroy(r.ctx) != QLORA_OK) {
        printf("%s\n", qlora_last_error(r.ctx));
        r.failures++;
    }
    printf("%s: %s\n", path, r.failures == 0 ? "written" : "FAILED");
    return r.failures == 0 ? 0 : 1;
}

static float* next_values(FILE* f, char name[64], unsigned long long* n) {
    if (fscanf(f, "%63s %llu", name, n) != 2 || fgetc(f) != '\n') {
        return NULL;
    }
    float* v = (float*)malloc((size_t)*n * 4 + 4);
    if (fread(v, 4, (size_t)*n, f) != *n) {
        free(v);
        return NULL;
    }
    return v;
}

// A bf16 result may occasionally differ by one unit in the last place; an f32 result by a few of
// its own units.
static int compare(const char* a_path, const char* b_path) {
    FILE* a = fopen(a_path, "rb");
    FILE* b = fopen(b_path, "rb");
    if (a == NULL || b == NULL) {
        fprintf(stderr, "outputs: cannot read %s\n", a == NULL ? a_path : b_path);
        return 1;
    }
    int failures = 0;
    printf("%-34s %10s %12s %12s %12s\n", "output", "elements", "different", "largest",
           "relative L2");
    for (;;) {
        char name[64];
        char other[64];
        unsigned long long n = 0;
        unsigned long long m = 0;
        float* x = next_values(a, name, &n);
        float* y = next_values(b, other, &m);
        if (x == NULL || y == NULL || strcmp(name, other) != 0 || n != m) {
            failures += x != NULL || y != NULL ? 1 : 0;
            free(x);
            free(y);
            break;
        }
        unsigned long long different = 0;
        double largest = 0.0;
        double difference = 0.0;
        double norm = 0.0;
        for (size_t i = 0; i < n; i++) {
            double d = fabs((double)x[i] - (double)y[i]);
            different += memcmp(&x[i], &y[i], 4) != 0 ? 1 : 0;
            largest = d <= largest ? largest : d;
            difference += d * d;
            norm += (double)x[i] * (double)x[i];
        }
        double relative = norm > 0.0 ? sqrt(difference / norm) : sqrt(difference);
        double limit =
            strstr(name, "bf16") != NULL || strstr(name, "nf4_gemm") != NULL ? 2e-3 : 3e-6;
        bool ok = relative <= limit;
        printf("%-34s %10llu %12llu %12.3g %12.3g%s\n", name, n, different, largest, relative,
               ok ? "" : "  TOO FAR");
        failures += ok ? 0 : 1;
        free(x);
        free(y);
    }
    fclose(a);
    fclose(b);
    printf("%s\n", failures == 0 ? "all outputs agree" : "FAILED");
    return failures == 0 ? 0 : 1;
}

int main(int argc, char** argv) {
    if (argc == 3 && strcmp(argv[1], "--write") == 0) {
        return write_outputs(argv[2]);
    }
    if (argc == 4 && strcmp(argv[1], "--compare") == 0) {
        return compare(argv[2], argv[3]);
    }
    printf("usage: outputs --write FILE | --compare FILE FILE\n");
    return argc == 2 && strcmp(argv[1], "--help") == 0 ? 0 : 2;
}
