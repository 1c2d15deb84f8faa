// ---- pre-warm -----------------------------------------------------------------------------------

static qlora_result qlora__shape_check(qlora_ctx* ctx, qlora_prewarm_desc* s) {
    if (s->kv_heads == 0) {
        s->kv_heads = s->heads;
    }
    if (s->head_dim == 0 && s->heads > 0) {
        s->head_dim = s->hidden / s->heads;
    }
    const int64_t sizes[] = {s->hidden, s->intermediate, s->heads, s->kv_heads, s->head_dim,
                             s->max_tokens};
    static const char* const names[] = {"hidden",   "intermediate", "heads",
                                        "kv_heads", "head_dim",     "max_tokens"};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i] <= 0 || sizes[i] > (1 << 24)) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "shape.%s is %lld; it must be from 1 to %d",
                               names[i], (long long)sizes[i], 1 << 24);
        }
    }
    QLORA__TRY(qlora__need_whole(ctx, "shape.rank", s->rank, 0, 4096));
    if (s->heads % s->kv_heads != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "shape.heads is %lld; it must be a multiple of shape.kv_heads (%lld)",
                           (long long)s->heads, (long long)s->kv_heads);
    }
    if ((int)s->base < 0 || s->base > QLORA_BASE_32BIT) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "shape.base is %d; it must be one of qlora_base_format", (int)s->base);
    }
    if (s->compute != QLORA_F32 && s->compute != QLORA_BF16) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "shape.compute is %s; it must be f32 or bf16",
                           qlora_dtype_name(s->compute));
    }
    return QLORA_OK;
}

#ifndef QLORA_NO_CUDA

// One product of a layer's projections. For T tokens, a projection has y = x W^T, its gradient, and
// the four products of LoRA.
typedef struct qlora__planned_gemm {
    int64_t M;
    int64_t N;
    int64_t K;
    bool ta;
    bool tb;
    bool f32_out; // for the gradients of A and B
} qlora__planned_gemm;

static qlora_result qlora__prewarm_gemm(qlora_ctx* ctx, const qlora__planned_gemm* p,
                                        qlora_dtype compute, const qlora__buffer* memory) {
    qlora__gemm g;
    memset(&g, 0, sizeof g);
    g.M = p->M;
    g.N = p->N;
    g.K = p->K;
    g.ta = p->ta;
    g.tb = p->tb;
    g.lda = p->ta ? p->M : p->K;
    g.ldb = p->tb ? p->K : p->N;
    g.ldc = p->N;
    g.batch = 1;
    g.a_type = compute;
    g.b_type = compute;
    g.out = p->f32_out ? QLORA_F32 : compute;
    g.alpha = 1.0f;
    size_t size = qlora_dtype_bytes(compute);
    size_t a_bytes = qlora__align_up((size_t)(p->M * p->K) * size, 256);
    size_t b_bytes = qlora__align_up((size_t)(p->K * p->N) * size, 256);
    QLORA_ASSERT(a_bytes + b_bytes + (size_t)(p->M * p->N) * 4 <= memory->bytes);
    g.A = memory->data;
    g.B = (char*)memory->data + a_bytes;
    g.C = (char*)memory->data + a_bytes + b_bytes;
    return qlora__gemm_cublas(ctx, &g);
}

// Runs every planned product once, so that cuBLAS loads its kernels now, while memory is free, and
// not during a capture.
static qlora_result qlora__prewarm_cublas(qlora_ctx* ctx, const qlora_prewarm_desc* s) {
    int64_t q = s->heads * s->head_dim;
    int64_t kv = s->kv_heads * s->head_dim;
    int64_t T = s->max_tokens;
    const int64_t widths[4][3] = {{s->hidden, q + 2 * kv, 3 * s->rank}, // in, out, stacked rank
                                  {q, s->hidden, s->rank},
                                  {s->hidden, 2 * s->intermediate, 2 * s->rank},
                                  {s->intermediate, s->hidden, s->rank}};
    qlora__planned_gemm plan[24];
    int count = 0;
    size_t most = 0;
    for (int i = 0; i < 4; i++) {
        int64_t in = widths[i][0];
        int64_t out = widths[i][1];
        int64_t r = widths[i][2];
        const qlora__planned_gemm rows[] = {
            {T, out, in + r, false, true, false}, // y = [x z] [W sB]^T
            {T, in, out + r, false, false, false}, // dx = [dy u] [W ; A]
            {T, r, in, false, true, false},        // z = x A^T
            {T, r, out, false, false, false},      // u = dy sB
            {r, in, T, true, false, true},         // dA = u^T x
            {out, r, T, true, false, true},        // dB = dy^T z
        };
        int used = s->rank > 0 ? 6 : 2;
        for (int j = 0; j < used; j++) {
            const qlora__planned_gemm* p = &rows[j];
            size_t bytes = (size_t)(p->M * p->K + p->K * p->N + p->M * p->N) * 4 + 1024;
            most = bytes > most ? bytes : most;
            plan[count++] = *p;
        }
    }
    qlora__buffer* memory = NULL;
    QLORA__TRY(qlora__buffer_create(ctx, most, &memory));
    qlora_result r = qlora__zero(ctx, memory->data, most, most, 1);
    for (int i = 0; i < count && r == QLORA_OK; i++) {
        r = qlora__prewarm_gemm(ctx, &plan[i], s->compute, memory);
    }
    if (r == QLORA_OK) {
        r = qlora__sync(ctx);
    }
    qlora__buffer_destroy(ctx, memory);
    return r;
}

// Returns the conditions of the kernel registry that hold for a model. random: its weights are
// generated.
static uint32_t qlora__kernels_needed(const qlora_ctx* ctx, qlora_dtype compute, int64_t head_dim,
                                      bool capped, bool nf4, bool lora, bool random) {
    return (qlora__has_cublas(ctx) ? 0 : QLORA__NEED_GEMM) |
           (compute == QLORA_BF16 ? QLORA__NEED_BF16 : QLORA__NEED_F32) |
           (nf4 ? QLORA__NEED_NF4 : 0) | (lora ? QLORA__NEED_LORA : 0) |
           (random ? QLORA__NEED_RANDOM : 0) |
           qlora__attention_need(ctx, compute, head_dim, capped);
}

static qlora_result qlora__prewarm_gpu(qlora_ctx* ctx, const qlora_prewarm_desc* s) {
    double start = qlora__clock_ms();
    uint32_t have = qlora__kernels_needed(ctx, s->compute, s->head_dim, false,
                                          s->base == QLORA_BASE_NF4, s->rank > 0, false);
    bool was_sealed = qlora__cache_set_sealed(ctx, false);
    qlora_result r = qlora__cache_warm(ctx, have);
    if (r == QLORA_OK && qlora__has_cublas(ctx)) {
        r = qlora__prewarm_cublas(ctx, s);
    }
    qlora__cache_set_sealed(ctx, r == QLORA_OK || was_sealed);
    QLORA__TRY(r);
    qlora_cache_info info = qlora__cache_facts(ctx);
    QLORA__LOG(ctx, INFO, PREWARM, "%u modules, %u kernels, %u cuBLAS shapes in %.1f ms",
               info.modules, info.kernels, info.cublas_shapes, qlora__clock_ms() - start);
    return QLORA_OK;
}

#endif

static qlora_result qlora__prewarm(qlora_ctx* ctx, const qlora_prewarm_desc* shape) {
    if (shape == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "shape is NULL");
    }
    qlora_prewarm_desc s = *shape;
    QLORA__TRY(qlora__shape_check(ctx, &s));
    QLORA__TRY(qlora__not_in_capture(ctx, "pre-warming"));
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        return qlora__prewarm_gpu(ctx, &s);
    }
#endif
    return QLORA_OK; // nothing is compiled on the CPU
}

qlora_result qlora_prewarm(qlora_ctx* ctx, const qlora_prewarm_desc* shape) {
    QLORA__ENTER(ctx, "qlora_prewarm");
    return qlora__leave(ctx, qlora__prewarm(ctx, shape));
}
