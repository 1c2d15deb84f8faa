// ---- pre-warm -----------------------------------------------------------------------------------

// Checks one product of the caller's list.
static qlora_result qlora__product_check(qlora_ctx* ctx, const qlora_prewarm_product* p,
                                         int64_t index) {
    const struct {
        const char* name;
        int64_t value;
        int64_t least;
        int64_t most;
    } fields[] = {{"kind", (int64_t)p->kind, 0, QLORA_PREWARM_BACKWARD_B},
                  {"m", p->m, 1, 1 << 24},
                  {"k", p->k, 1, 1 << 24},
                  {"n", p->n, 1, 1 << 24},
                  {"batch", p->batch, 0, 1 << 24}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "shape.products[%lld].%s", (long long)index, fields[i].name);
        QLORA__TRY(qlora__need_whole(ctx, name, fields[i].value, fields[i].least, fields[i].most));
    }
    qlora_tensor t[3];
    memset(t, 0, sizeof t);
    t[0].dtype = p->a;
    t[1].dtype = p->b;
    t[2].dtype = p->out;
    for (int i = 0; i < 3; i++) {
        if (t[i].dtype != QLORA_F32 && t[i].dtype != QLORA_BF16 && t[i].dtype != QLORA_F16) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "shape.products[%lld] has type %s; it must be f32, bf16 or f16",
                               (long long)index, qlora_dtype_name(t[i].dtype));
        }
    }
    if (p->batch > 1 && p->a != p->b) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "shape.products[%lld]: a batched product of %s and %s is not supported",
                           (long long)index, qlora_dtype_name(p->a), qlora_dtype_name(p->b));
    }
    return qlora__gemm_check_types(ctx, &t[0], &t[1], &t[2]);
}

static qlora_result qlora__shape_check(qlora_ctx* ctx, qlora_prewarm_desc* s) {
    if (s->kv_heads == 0) {
        s->kv_heads = s->heads;
    }
    if (s->head_dim == 0 && s->heads > 0) {
        s->head_dim = s->hidden / s->heads;
    }
    const int64_t sizes[] = {s->hidden,   s->intermediate, s->heads,
                             s->kv_heads, s->head_dim,     s->max_tokens};
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
    if ((int)s->base < 0 || s->base > QLORA_BASE_FP8) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "shape.base is %d; it must be one of qlora_base_format", (int)s->base);
    }
    if (s->compute != QLORA_F32 && s->compute != QLORA_BF16) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "shape.compute is %s; it must be f32 or bf16",
                           qlora_dtype_name(s->compute));
    }
    if (s->product_count < 0 || (s->products == NULL && s->product_count > 0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "shape.products is %s and shape.product_count is %lld",
                           s->products == NULL ? "NULL" : "set", (long long)s->product_count);
    }
    for (int64_t i = 0; i < s->product_count; i++) {
        QLORA__TRY(qlora__product_check(ctx, &s->products[i], i));
    }
    return QLORA_OK;
}

#ifndef QLORA_NO_CUDA

// The products to run, and the memory that the largest of them needs.
typedef struct qlora__warm_list {
    qlora_prewarm_product products[160];
    int count;
    size_t bytes;
} qlora__warm_list;

// The three matrices of a product in one block: the operands of the kind, then the result.
static size_t qlora__warm_places(const qlora_prewarm_product* p, size_t at[3]) {
    const int64_t a = p->m * p->k;
    const int64_t b = p->k * p->n;
    const int64_t c = p->m * p->n;
    const int64_t sizes[3][3] = {{a, b, c}, {c, b, a}, {a, c, b}};
    const size_t bytes[3] = {qlora_dtype_bytes(p->a), qlora_dtype_bytes(p->b),
                             qlora_dtype_bytes(p->out)};
    size_t end = 0;
    for (int i = 0; i < 3; i++) {
        at[i] = end;
        end += qlora__align_up((size_t)sizes[p->kind][i] * bytes[i], 256);
    }
    return end;
}

static void qlora__warm_add(qlora__warm_list* list, qlora_prewarm_kind kind, int64_t m, int64_t k,
                            int64_t n, qlora_dtype a, qlora_dtype b, qlora_dtype out) {
    QLORA_ASSERT(list->count < (int)(sizeof list->products / sizeof list->products[0]));
    qlora_prewarm_product* p = &list->products[list->count++];
    size_t at[3];
    memset(p, 0, sizeof *p);
    p->kind = kind;
    p->m = m;
    p->k = k;
    p->n = n;
    p->a = a;
    p->b = b;
    p->out = out;
    size_t bytes = qlora__warm_places(p, at);
    list->bytes = bytes > list->bytes ? bytes : list->bytes;
}

// All three kinds of a product in the compute type; 16-bit ones also with f32 results.
static void qlora__warm_add_all(qlora__warm_list* list, qlora_dtype type, int64_t m, int64_t k,
                                int64_t n) {
    for (int kind = 0; kind < 3; kind++) {
        qlora__warm_add(list, (qlora_prewarm_kind)kind, m, k, n, type, type, QLORA_F32);
        if (type == QLORA_BF16) {
            qlora__warm_add(list, (qlora_prewarm_kind)kind, m, k, n, type, type, type);
        }
    }
}

// The products of a model's stacks, as qlora_linear runs them.
static void qlora__warm_stacks(const qlora_prewarm_desc* s, qlora__warm_list* list) {
    int64_t q = s->heads * s->head_dim;
    int64_t kv = s->kv_heads * s->head_dim;
    int64_t T = s->max_tokens;
    const int64_t widths[4][3] = {{s->hidden, q + 2 * kv, 3 * s->rank}, // in, out, stacked rank
                                  {q, s->hidden, s->rank},
                                  {s->hidden, 2 * s->intermediate, 2 * s->rank},
                                  {s->intermediate, s->hidden, s->rank}};
    qlora_dtype c = s->compute;
    for (int i = 0; i < 4; i++) {
        int64_t in = widths[i][0];
        int64_t out = widths[i][1];
        int64_t r = widths[i][2];
        qlora__warm_add(list, QLORA_PREWARM_BACKWARD_A, T, out, in + r, c, c, c); // [x z] [W sB]^T
        qlora__warm_add(list, QLORA_PREWARM_FORWARD, T, out + r, in, c, c, c);    // [dy u] [W ; A]
        if (r > 0) {
            qlora__warm_add(list, QLORA_PREWARM_BACKWARD_A, T, r, in, c, c, c);         // z = x A^T
            qlora__warm_add(list, QLORA_PREWARM_FORWARD, T, out, r, c, c, c);           // u = dy sB
            qlora__warm_add(list, QLORA_PREWARM_BACKWARD_B, T, r, in, c, c, QLORA_F32); // u^T x
            qlora__warm_add(list, QLORA_PREWARM_BACKWARD_B, T, out, r, c, c, QLORA_F32); // dy^T z
        }
    }
}

// Whether the weights of the base have codes.
static bool qlora__warm_coded(const qlora_prewarm_desc* s) {
    return s->base == QLORA_BASE_NF4 || s->base == QLORA_BASE_FP8;
}

// What a program runs that trains such a model by the products of the public API, matrix by matrix:
// those with LoRA's matrices, and without 4-bit or FP8 weights also those with the base and its
// gradient.
static void qlora__warm_matrices(const qlora_prewarm_desc* s, qlora__warm_list* list) {
    int64_t T = s->max_tokens;
    int64_t r = s->rank;
    const int64_t widths[4] = {s->hidden, s->heads * s->head_dim, s->kv_heads * s->head_dim,
                               s->intermediate};
    for (int i = 0; i < 4; i++) {
        int64_t x = widths[i];
        bool again = i > 0 && x == widths[i - 1];
        if (r > 0 && !again) {
            qlora__warm_add_all(list, s->compute, T, x, r);
            qlora__warm_add_all(list, s->compute, T, r, x);
            qlora__warm_add(list, QLORA_PREWARM_FORWARD, r, T, x, s->compute, s->compute,
                            QLORA_F32);
            qlora__warm_add(list, QLORA_PREWARM_FORWARD, x, T, r, s->compute, s->compute,
                            QLORA_F32);
        }
        for (int way = 0; way < 2 && !qlora__warm_coded(s) && !again; way++) {
            int64_t k = way == 0 ? s->hidden : x;
            int64_t n = way == 0 ? x : s->hidden;
            qlora__warm_add_all(list, s->compute, T, k, n);
            // f32 activations with 16-bit weights
            for (int half = 0; half < 2 && s->base == QLORA_BASE_16BIT && s->compute == QLORA_F32;
                 half++) {
                qlora_dtype weight = half == 0 ? QLORA_BF16 : QLORA_F16;
                qlora__warm_add(list, QLORA_PREWARM_FORWARD, T, k, n, QLORA_F32, weight, QLORA_F32);
                qlora__warm_add(list, QLORA_PREWARM_BACKWARD_A, T, k, n, QLORA_F32, weight,
                                QLORA_F32);
            }
        }
    }
    // Attention from separate operators: scores, their product with v, and its transpose.
    const int64_t heads[3][3] = {{T, s->head_dim, T}, {T, T, s->head_dim}, {s->head_dim, T, T}};
    for (int i = 0; i < 3; i++) {
        qlora__warm_add(list, QLORA_PREWARM_FORWARD, heads[i][0], heads[i][1], heads[i][2],
                        s->compute, s->compute, s->compute);
        list->products[list->count - 1].batch = s->heads;
    }
}

// Runs one product. The matrices of a batch share their memory: only the shape matters.
static qlora_result qlora__warm_run(qlora_ctx* ctx, const qlora_prewarm_product* p, bool tf32,
                                    const qlora__buffer* memory) {
    qlora__gemm g;
    size_t at[3];
    memset(&g, 0, sizeof g);
    size_t bytes = qlora__warm_places(p, at);
    QLORA_ASSERT(bytes <= memory->bytes);
    g.M = p->kind == QLORA_PREWARM_BACKWARD_B ? p->k : p->m;
    g.N = p->kind == QLORA_PREWARM_BACKWARD_A ? p->k : p->n;
    g.K = p->kind == QLORA_PREWARM_FORWARD      ? p->k
          : p->kind == QLORA_PREWARM_BACKWARD_A ? p->n
                                                : p->m;
    g.ta = p->kind == QLORA_PREWARM_BACKWARD_B;
    g.tb = p->kind == QLORA_PREWARM_BACKWARD_A;
    g.lda = g.ta ? g.M : g.K;
    g.ldb = g.tb ? g.K : g.N;
    g.ldc = g.N;
    g.batch = p->batch > 1 ? p->batch : 1;
    g.a_type = p->a;
    g.b_type = p->b;
    g.out = p->out;
    g.alpha = 1.0f;
    g.tf32 = tf32;
    g.A = (char*)memory->data + at[0];
    g.B = (char*)memory->data + at[1];
    g.C = (char*)memory->data + at[2];
    size_t mark = qlora__scratch_mark(ctx);
    qlora_result r = qlora__gemm_gpu(ctx, &g, QLORA_PATH_CUBLAS);
    qlora__scratch_release(ctx, mark);
    return r;
}

// Runs the products of one 4-bit weight, whose slices depend on the scratch buffer.
static qlora_result qlora__warm_nf4(qlora_ctx* ctx, const qlora_prewarm_desc* s, int64_t in,
                                    int64_t out, const qlora__buffer* memory) {
    qlora_nf4_desc desc;
    qlora_nf4 weight;
    qlora_tensor codes;
    qlora_tensor x;
    qlora_tensor y;
    memset(&desc, 0, sizeof desc);
    desc.rows = out;
    desc.cols = in;
    size_t first = qlora__align_up(qlora_nf4_bytes(&desc), 256);
    size_t unit = qlora_dtype_bytes(s->compute);
    size_t second = qlora__align_up((size_t)(s->max_tokens * in) * unit, 256);
    char* base = (char*)memory->data;
    QLORA__TRY(qlora_tensor_wrap(ctx, base, first, QLORA_U8, 1, (int64_t)first, 0, &codes));
    QLORA__TRY(qlora_nf4_wrap(ctx, &desc, &codes, &weight));
    QLORA__TRY(qlora_tensor_wrap(ctx, base + first, second, s->compute, s->max_tokens, in, 0, &x));
    QLORA__TRY(qlora_tensor_wrap(ctx, base + first + second, memory->bytes - first - second,
                                 s->compute, s->max_tokens, out, 0, &y));
    for (int i = 0; i < 4; i++) { // exact and TF32, forward and backward
        bool backward = i % 2 == 1;
        size_t mark = qlora__scratch_mark(ctx);
        qlora_result r =
            qlora__nf4_gemm(ctx, i < 2 ? QLORA_MATH_F32 : QLORA_MATH_TF32_ALL, backward,
                            backward ? &y : &x, &weight, backward ? &x : &y, QLORA_PRODUCT_UNFUSED);
        qlora__scratch_release(ctx, mark);
        QLORA__TRY(r);
    }
    return QLORA_OK;
}

static qlora_result qlora__warm_all(qlora_ctx* ctx, const qlora_prewarm_desc* s,
                                    const qlora__warm_list* list, const qlora__buffer* memory) {
    int64_t q = s->heads * s->head_dim;
    int64_t kv = s->kv_heads * s->head_dim;
    const int64_t weights[5][2] = {{s->hidden, q},
                                   {q, s->hidden},
                                   {s->hidden, kv},
                                   {s->hidden, s->intermediate},
                                   {s->intermediate, s->hidden}};
    QLORA__TRY(qlora__zero(ctx, memory->data, memory->bytes, memory->bytes, 1));
    for (int64_t i = 0; i < list->count + s->product_count; i++) {
        const qlora_prewarm_product* p =
            i < list->count ? &list->products[i] : &s->products[i - list->count];
        QLORA__TRY(qlora__warm_run(ctx, p, false, memory));
        if (p->a == QLORA_F32 && p->b == QLORA_F32) { // the context's math may change later
            QLORA__TRY(qlora__warm_run(ctx, p, true, memory));
        }
    }
    for (int i = 0; i < 5 && s->base == QLORA_BASE_NF4; i++) {
        QLORA__TRY(qlora__warm_nf4(ctx, s, weights[i][0], weights[i][1], memory));
    }
    return qlora__sync(ctx);
}

// Runs every product once, so that cuBLAS loads its kernels now, while memory is free, and not
// during a capture.
static qlora_result qlora__prewarm_cublas(qlora_ctx* ctx, const qlora_prewarm_desc* s) {
    qlora__warm_list list;
    size_t at[3];
    list.count = 0;
    list.bytes = 0;
    qlora__warm_stacks(s, &list);
    qlora__warm_matrices(s, &list);
    for (int64_t i = 0; i < s->product_count; i++) {
        size_t bytes = qlora__warm_places(&s->products[i], at);
        list.bytes = bytes > list.bytes ? bytes : list.bytes;
    }
    // Any 4-bit product fits: W takes less than the same matrix of floats.
    size_t most = (size_t)qlora__max(s->heads * s->head_dim, s->intermediate);
    size_t nf4 =
        (most * (size_t)s->hidden + (most + (size_t)s->hidden) * (size_t)s->max_tokens) * 4;
    list.bytes = (nf4 > list.bytes ? nf4 : list.bytes) + (1 << 16); // and the ends of its parts
    qlora__buffer* memory = NULL;
    QLORA__TRY(qlora__buffer_create(ctx, list.bytes, &memory));
    qlora_result r = qlora__warm_all(ctx, s, &list, memory);
    qlora__buffer_destroy(ctx, memory);
    return r;
}

// Returns the conditions of the kernel registry that hold for a model.
static qlora__needs qlora__kernels_needed(const qlora_ctx* ctx, qlora_dtype compute,
                                          int64_t head_dim, bool capped, bool nf4, bool lora) {
    return (qlora__has_cublas(ctx) ? 0 : QLORA__NEED_GEMM) |
           (qlora__has_warpgroups(ctx) ? QLORA__NEED_WARPGROUP : 0) |
           (compute == QLORA_BF16 ? QLORA__NEED_BF16 : QLORA__NEED_F32) |
           (nf4 ? QLORA__NEED_NF4 : 0) | (lora ? QLORA__NEED_LORA : 0) |
           (QLORA__TRAINS ? QLORA__NEED_TRAIN : 0) |
           qlora__attention_need(ctx, compute, head_dim, capped, false);
}

static qlora_result qlora__prewarm_gpu(qlora_ctx* ctx, const qlora_prewarm_desc* s) {
    double start = qlora__clock_ms();
    // Without 4-bit or FP8 weights, the base itself can be trained, and mixed products also need
    // the 16-bit kernels.
    bool trains = s->rank > 0 || !qlora__warm_coded(s);
    qlora__needs have = qlora__kernels_needed(ctx, s->compute, s->head_dim, false,
                                          s->base == QLORA_BASE_NF4, trains) |
                    QLORA__NEED_ANY | (trains ? QLORA__NEED_ANY_TRAINER : 0);
    if (s->base == QLORA_BASE_16BIT && qlora__gpu_takes(ctx, 80)) {
        have |= QLORA__NEED_BF16;
    }
    have |= s->base == QLORA_BASE_FP8 ? QLORA__NEED_FP8_BASE : 0;
    bool was_sealed = qlora__cache_set_sealed(ctx, false);
    qlora_result r = qlora__cache_warm(ctx, have, true); // for any operator
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
