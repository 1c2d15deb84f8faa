// ---- attention: the operator --------------------------------------------------------------------

#define QLORA__BESIDE_DQ (QLORA__BESIDE_SLOTS - 1)
#define QLORA__ATTENTION_GRAIN 16

static qlora_result qlora__attention_forward_cpu(qlora_ctx* ctx, qlora__attention* a) {
    QLORA__TRY(qlora__sequences_check(ctx, a));
    if (qlora__rows_of(ctx)->product != NULL) {
        return qlora__attention_forward_blocks(ctx, a);
    }
    qlora__parallel(ctx, a->heads * a->tokens, QLORA__ATTENTION_GRAIN,
                    qlora__attention_forward_items, a);
    return QLORA_OK;
}

static qlora_result qlora__attention_backward_cpu(qlora_ctx* ctx, qlora__attention* a) {
    QLORA__TRY(qlora__sequences_check(ctx, a));
    void* dots = NULL;
    QLORA__TRY(qlora__scratch(ctx, (size_t)(a->heads * a->tokens) * sizeof(QLORA__REAL), &dots));
    a->dots = (QLORA__REAL*)dots;
    if (qlora__rows_of(ctx)->product != NULL) {
        return qlora__attention_backward_blocks(ctx, a);
    }
    qlora__parallel(ctx, a->heads * a->tokens, QLORA__ATTENTION_GRAIN, qlora__attention_dq_items,
                    a);
    qlora__parallel(ctx, a->kv_heads * a->tokens, QLORA__ATTENTION_GRAIN,
                    qlora__attention_dkv_items, a);
    return QLORA_OK;
}

#ifndef QLORA_NO_CUDA

// A launch has one block per `rows` tokens, and one more per sequence if blocks do not cross
// sequences.
typedef struct qlora__attention_kernel {
    qlora__kernel_id id;
    int64_t rows;
    uint32_t threads;
    uint32_t shared;
} qlora__attention_kernel;

// What the kernels of a path take. All but the last need heads that start at multiples of 16 bytes.
typedef enum qlora__attention_takes {
    QLORA__TAKES_MAPS, // its own head size, as tensor maps, on a device with warpgroup instructions
    QLORA__TAKES_MAPS_CAPPED, // and capped scores
    QLORA__TAKES_EXACT,       // its own head size
    QLORA__TAKES_PADDED,      // and smaller ones
    QLORA__TAKES_CAPPED,      // and capped scores
    QLORA__TAKES_ALL
} qlora__attention_takes;

typedef struct qlora__attention_path {
    qlora_dtype dtype;
    int64_t hd;
    int capability; // minimum compute capability
    qlora__attention_takes takes;
    qlora__needs need; // condition in the registry, for pre-warm
    qlora__attention_kernel forward;
    qlora__attention_kernel stats;
    qlora__attention_kernel kv;
    qlora__attention_kernel q;
    qlora__attention_kernel sum; // sums the shares of kv; QLORA__K_COUNT if kv has no shares
} qlora__attention_path;

// clang-format off
// The first row that fits is used. The comments in kernels/attention/attn_tc.cuh and
// kernels/attention/attn_wg.cuh explain the shared memory.
static const qlora__attention_path qlora__attention_paths[] = {
    {QLORA_BF16, 64, 90, QLORA__TAKES_MAPS, QLORA__NEED_HEAD64WG,
     {QLORA__K_attn64_wg_fwd, 128, 384, 82944}, {QLORA__K_attn64_wg_stats, 32, 256, 0},
     {QLORA__K_attn64_wg_bwd_kv, 128, 384, 66560}, {QLORA__K_attn64_wg_bwd_q, 128, 384, 66560},
     {QLORA__K_attn64_wg_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 96, 90, QLORA__TAKES_MAPS, QLORA__NEED_HEAD96WG,
     {QLORA__K_attn96_wg_fwd, 128, 384, 164864}, {QLORA__K_attn96_wg_stats, 64, 256, 0},
     {QLORA__K_attn96_wg_bwd_kv, 128, 384, 132096}, {QLORA__K_attn96_wg_bwd_q, 128, 384, 132096},
     {QLORA__K_attn96_wg_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 128, 90, QLORA__TAKES_MAPS, QLORA__NEED_HEAD128WG,
     {QLORA__K_attn128_wg_fwd, 128, 384, 164864}, {QLORA__K_attn128_wg_stats, 16, 256, 0},
     {QLORA__K_attn128_wg_bwd_kv, 128, 384, 132096}, {QLORA__K_attn128_wg_bwd_q, 128, 384, 132096},
     {QLORA__K_attn128_wg_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 256, 90, QLORA__TAKES_MAPS_CAPPED, QLORA__NEED_HEAD256WG,
     {QLORA__K_attn256_wg_fwd, 128, 384, 197632}, {QLORA__K_attn256_wg_stats, 16, 256, 0},
     {QLORA__K_attn256_wg_bwd_kv, 64, 384, 197632}, {QLORA__K_attn256_wg_bwd_q, 128, 384, 230400},
     {QLORA__K_attn256_wg_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 32, 80, QLORA__TAKES_PADDED, QLORA__NEED_HEAD32,
     {QLORA__K_attn32_fwd, 128, 128, 30720}, {QLORA__K_attn32_stats, 64, 256, 0},
     {QLORA__K_attn32_bwd_kv, 64, 128, 39936}, {QLORA__K_attn32_bwd_q, 128, 128, 40960},
     {QLORA__K_attn32_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 64, 80, QLORA__TAKES_EXACT, QLORA__NEED_HEAD64,
     {QLORA__K_attn64_fwd, 128, 128, 49152}, {QLORA__K_attn64_stats, 32, 256, 0},
     {QLORA__K_attn64_bwd_kv, 64, 128, 58368}, {QLORA__K_attn64_bwd_q, 128, 128, 65536},
     {QLORA__K_attn64_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 80, 80, QLORA__TAKES_PADDED, QLORA__NEED_HEAD80,
     {QLORA__K_attn80_fwd, 128, 128, 45056}, {QLORA__K_attn80_stats, 128, 256, 0},
     {QLORA__K_attn80_bwd_kv, 64, 128, 76800}, {QLORA__K_attn80_bwd_q, 128, 128, 90112},
     {QLORA__K_attn80_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 96, 80, QLORA__TAKES_PADDED, QLORA__NEED_HEAD96,
     {QLORA__K_attn96_fwd, 128, 128, 79872}, {QLORA__K_attn96_stats, 64, 256, 0},
     {QLORA__K_attn96_bwd_kv, 64, 128, 89088}, {QLORA__K_attn96_bwd_q, 128, 128, 79872},
     {QLORA__K_attn96_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 128, 80, QLORA__TAKES_EXACT, QLORA__NEED_HEAD128,
     {QLORA__K_attn128_fwd, 128, 128, 65536}, {QLORA__K_attn128_stats, 16, 256, 0},
     {QLORA__K_attn128_bwd_kv, 64, 128, 70144}, {QLORA__K_attn128_bwd_q, 128, 128, 98304},
     {QLORA__K_attn128_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 128, 80, QLORA__TAKES_CAPPED, QLORA__NEED_HEAD128CAP,
     {QLORA__K_attn128c_fwd, 128, 128, 65536}, {QLORA__K_attn128c_stats, 16, 256, 0},
     {QLORA__K_attn128c_bwd_kv, 64, 128, 70144}, {QLORA__K_attn128c_bwd_q, 128, 128, 98304},
     {QLORA__K_attn128c_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 192, 80, QLORA__TAKES_PADDED, QLORA__NEED_HEAD192,
     {QLORA__K_attn192_fwd, 64, 128, 73728}, {QLORA__K_attn192_stats, 32, 256, 0},
     {QLORA__K_attn192_bwd_kv, 64, 256, 156672}, {QLORA__K_attn192_bwd_q, 64, 128, 98304},
     {QLORA__K_attn192_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 256, 80, QLORA__TAKES_CAPPED, QLORA__NEED_HEAD256,
     {QLORA__K_attn256_fwd, 64, 128, 98304}, {QLORA__K_attn256_stats, 16, 256, 0},
     {QLORA__K_attn256_bwd_kv, 32, 128, 100864}, {QLORA__K_attn256_bwd_q, 64, 128, 98304},
     {QLORA__K_attn256_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 0, 75, QLORA__TAKES_ALL, QLORA__NEED_HEADANY,
     {QLORA__K_attn_f32_fwd, 64, 256, 0}, {QLORA__K_attn_f32_stats, 8, 256, 0},
     {QLORA__K_attn_f32_bwd_kv, 64, 256, 0}, {QLORA__K_attn_f32_bwd_q, 64, 256, 0},
     {QLORA__K_COUNT, 0, 0, 0}},
    {QLORA_F32, 0, 75, QLORA__TAKES_ALL, QLORA__NEED_HEADANY,
     {QLORA__K_attn_f32_fwd, 64, 256, 0}, {QLORA__K_attn_f32_stats, 8, 256, 0},
     {QLORA__K_attn_f32_bwd_kv, 64, 256, 0}, {QLORA__K_attn_f32_bwd_q, 64, 256, 0},
     {QLORA__K_COUNT, 0, 0, 0}},
};
// clang-format on

static bool qlora__attention_aligned(const qlora_tensor* t) {
    return t == NULL || (t->ld % 8 == 0 && (uintptr_t)t->data % 16 == 0);
}

// What decides which kernels attention takes.
typedef struct qlora__attention_kind {
    qlora_dtype dtype;
    int64_t hd;
    bool aligned;
    bool capped;
    bool later; // there are keys before the first query
} qlora__attention_kind;

static bool qlora__attention_maps(const qlora__attention_path* p) {
    return p->takes == QLORA__TAKES_MAPS || p->takes == QLORA__TAKES_MAPS_CAPPED;
}

static bool qlora__attention_fits(const qlora_ctx* ctx, const qlora__attention_path* p,
                                  const qlora__attention_kind* kind) {
    if (p->takes == QLORA__TAKES_ALL) {
        return true;
    }
    bool maps = qlora__attention_maps(p);
    bool capped = p->takes == QLORA__TAKES_CAPPED || p->takes == QLORA__TAKES_MAPS_CAPPED;
    bool exact = p->takes == QLORA__TAKES_EXACT || maps;
    // No other kernel of a path needs more shared memory than kv does where it does not fit; those
    // with maps are for devices that have enough.
    return kind->aligned && (exact ? kind->hd == p->hd : kind->hd <= p->hd) &&
           (!kind->capped || capped) && (!maps || (qlora__has_warpgroups(ctx) && !kind->later)) &&
           p->kv.shared <= (uint32_t)ctx->gpu->max_shared;
}

// Finds the first row of the table that fits.
static const qlora__attention_path* qlora__attention_find(const qlora_ctx* ctx,
                                                          const qlora__attention_kind* kind) {
    const qlora__attention_path* p = qlora__attention_paths;
    while (p->dtype != kind->dtype || !qlora__gpu_takes(ctx, p->capability) ||
           !qlora__attention_fits(ctx, p, kind)) {
        p++; // the last row for each dtype always fits
    }
    return p;
}

static const qlora__attention_path* qlora__attention_choose(const qlora_ctx* ctx,
                                                            const qlora__attention* a) {
    const qlora_tensor* all[] = {a->q, a->k, a->v, a->o, a->d_o, a->dq, a->dk, a->dv};
    qlora__attention_kind kind = {a->q->dtype, a->hd, a->hd % 8 == 0, a->cap > 0.0f, a->before > 0};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        kind.aligned = kind.aligned && qlora__attention_aligned(all[i]);
    }
    return qlora__attention_find(ctx, &kind);
}

// Returns the condition of the kernels that attention needs for this type and head size, with or
// without a cap, and with or without keys before the first query.
static QLORA__UNUSED qlora__needs qlora__attention_need(const qlora_ctx* ctx, qlora_dtype dtype,
                                                    int64_t hd, bool capped, bool later) {
    qlora__attention_kind kind = {dtype, hd, hd % 8 == 0, capped, later};
    return qlora__attention_find(ctx, &kind)->need;
}

// Kernels count tokens, heads and offsets in 32 bits.
typedef struct qlora__attention_numbers {
    int32_t n_seqs;
    int32_t tokens;
    int32_t heads;
    int32_t kv_heads;
    int32_t hd;
    int32_t window;
    int32_t half;
    int32_t before;
} qlora__attention_numbers;

static qlora__attention_numbers qlora__attention_narrow(const qlora__attention* a) {
    qlora__attention_numbers n;
    n.n_seqs = (int32_t)a->n_seqs;
    n.tokens = (int32_t)a->tokens;
    n.heads = (int32_t)a->heads;
    n.kv_heads = (int32_t)a->kv_heads;
    n.hd = (int32_t)a->hd;
    n.window = (int32_t)a->window;
    n.half = a->q->dtype == QLORA_BF16;
    n.before = (int32_t)a->before;
    return n;
}

static qlora_result qlora__attention_launch(qlora_ctx* ctx, const qlora__attention_kernel* kernel,
                                            const qlora__attention* a, int64_t heads,
                                            int64_t shares, void** args) {
    int64_t blocks = a->tokens / kernel->rows + a->n_seqs + 1;
    return qlora__launch(ctx, kernel->id, blocks, heads, shares, kernel->threads, kernel->shared,
                         args);
}

// How dk and dv are computed: with few keys and few key heads, several blocks share the query heads
// of a group, `each` heads per block.
typedef struct qlora__attention_shares {
    int64_t count; // blocks per group; 1: their sums are the result
    int32_t each;
    float* parts; // [2][count][tokens][kv_heads hd]
} qlora__attention_shares;

// Aims at four blocks per multiprocessor. Two run at a time, and blocks for the last keys of a
// sequence, which few queries see, finish early. How many sequences there are, or could be, does
// not count, so that the order of a sum does not depend on the others.
static qlora_result qlora__attention_share(qlora_ctx* ctx, const qlora__attention_path* path,
                                           const qlora__attention* a,
                                           qlora__attention_shares* out) {
    int64_t group = a->heads / a->kv_heads;
    int64_t sequences = qlora__ceil_div(a->tokens, a->longest);
    int64_t blocks = (a->tokens / path->kv.rows + sequences + 1) * a->kv_heads;
    int64_t size = a->tokens * a->kv_heads * a->hd * 2 * (int64_t)sizeof(float);
    int64_t fit = (int64_t)qlora__scratch_free(ctx) / qlora__max(size, 1);
    int64_t wanted = path->sum.id != QLORA__K_COUNT
                         ? qlora__ceil_div((int64_t)ctx->gpu->sm_count * 4, blocks)
                         : 1;
    int64_t shares = qlora__max(1, qlora__min(qlora__min(wanted, group), fit));
    int64_t each = qlora__ceil_div(group, shares);
    void* parts = NULL;
    out->count = qlora__ceil_div(group, each);
    out->each = (int32_t)each;
    if (out->count > 1) {
        QLORA__TRY(qlora__scratch(ctx, (size_t)(out->count * size), &parts));
    }
    out->parts = (float*)parts;
    return QLORA_OK;
}

static qlora_result qlora__attention_sum(qlora_ctx* ctx, const qlora__attention_path* path,
                                         const qlora__attention* a,
                                         const qlora__attention_shares* shares) {
    if (shares->count == 1) {
        return QLORA_OK;
    }
    const float* parts = shares->parts;
    int32_t count = (int32_t)shares->count;
    int32_t tokens = (int32_t)a->tokens;
    int32_t width = (int32_t)(a->kv_heads * a->hd);
    qlora_tensor dk = *a->dk;
    qlora_tensor dv = *a->dv;
    void* args[] = {(void*)&parts, &count, &tokens, &width, &dk.data, &dk.ld, &dv.data, &dv.ld};
    int64_t blocks = qlora__ceil_div(a->tokens * width, 2048);
    return qlora__launch(ctx, path->sum.id, blocks, 2, 1, path->sum.threads, 0, args);
}

// The operands of a launch. Kernels that take tensor maps have them in the places of q, k, v and
// d_o, one for each number of rows that is copied at a time.
typedef struct qlora__attention_operands {
    const qlora__attention_path* path;
    qlora__attention_numbers n;
    qlora_tensor in[4];  // q, k, v, d_o
    qlora_tensor out[4]; // o, dq, dk, dv
    void* lse;
    void* seqs;
    void* stats;
    void* parts;
    int32_t each;
    qlora__tensor_map kept[4];     // boxes of 128 rows
    qlora__tensor_map streamed[4]; // boxes of 64 rows
} qlora__attention_operands;

static qlora_result qlora__attention_maps_make(qlora_ctx* ctx, const qlora__attention* a,
                                               qlora__attention_operands* x) {
    const qlora_tensor* in[4] = {a->q, a->k, a->v, a->d_o};
    for (int i = 0; i < 4 && in[i] != NULL; i++) {
        const qlora_tensor* t = in[i];
        QLORA__TRY(qlora__tensor_map_make(ctx, t->data, t->rows, t->cols, t->ld, 128, &x->kept[i]));
        QLORA__TRY(
            qlora__tensor_map_make(ctx, t->data, t->rows, t->cols, t->ld, 64, &x->streamed[i]));
    }
    return QLORA_OK;
}

static qlora_result qlora__attention_operands_make(qlora_ctx* ctx, const qlora__attention* a,
                                                   qlora__attention_operands* x) {
    const qlora_tensor* in[4] = {a->q, a->k, a->v, a->d_o};
    const qlora_tensor* out[4] = {a->o, a->dq, a->dk, a->dv};
    memset(x, 0, sizeof *x);
    x->path = qlora__attention_choose(ctx, a);
    x->n = qlora__attention_narrow(a);
    for (int i = 0; i < 4; i++) {
        if (in[i] != NULL) {
            x->in[i] = *in[i];
        }
        if (out[i] != NULL) {
            x->out[i] = *out[i];
        }
    }
    x->lse = a->lse->data;
    x->seqs = a->seqs->data;
    return qlora__attention_maps(x->path) ? qlora__attention_maps_make(ctx, a, x) : QLORA_OK;
}

// Appends the operands q, k, v and, backward, d_o to the arguments; returns their number. Bit i of
// `kept` is set if the block keeps operand i, which it copies in boxes of 128 rows; with heads of
// more than 128, boxes of k and v always have 64 rows.
static int qlora__attention_inputs(qlora__attention_operands* x, int count, unsigned kept,
                                   void** args) {
    int used = 0;
    for (int i = 0; i < count; i++) {
        if (qlora__attention_maps(x->path)) {
            bool half = x->path->hd > 128 && (i == 1 || i == 2);
            bool whole = (kept >> i & 1u) != 0 && !half;
            args[used++] = qlora__tensor_map_place(whole ? &x->kept[i] : &x->streamed[i]);
        } else {
            args[used++] = &x->in[i].data;
            args[used++] = &x->in[i].ld;
        }
    }
    return used;
}

// Appends the offsets, sizes and factors that every kernel takes after its matrices.
static int qlora__attention_sizes(qlora__attention* a, qlora__attention_operands* x, void** args) {
    bool maps = qlora__attention_maps(x->path);
    qlora__attention_numbers* n = &x->n;
    int used = 0;
    args[used++] = &x->seqs;
    args[used++] = &n->n_seqs;
    args[used++] = &n->tokens;
    args[used++] = &n->heads;
    args[used++] = &n->kv_heads;
    if (!maps) {
        args[used++] = &n->hd;
    }
    args[used++] = &n->window;
    args[used++] = &a->scale;
    if (!maps) {
        args[used++] = &n->half;
    }
    return used;
}

#define QLORA__ATTENTION_ARGS 32

// Blocks take one tile after another, or one each, which pays only with large heads and sequences
// of about 1,024 to 2,048. On an H200, 16,384 tokens with 8 heads of 256 take 144 us in sequences
// of 512 (150 with one tile each), 209 in sequences of 1,024 (199), 320 in sequences of 2,048 (301)
// and 1,027 in sequences of 8,192 (1,028); 16 heads of 128 take 186 in sequences of 1,024 (221) and
// 283 in sequences of 2,048 (313).
static int64_t qlora__attention_blocks(const qlora_ctx* ctx, const qlora__attention_path* path,
                                       const qlora__attention* a) {
    int64_t tiles = (a->tokens / path->forward.rows + a->n_seqs + 1) * a->heads;
    bool each = path->hd > 128 && a->longest >= 1024;
    return each ? tiles : qlora__min(tiles, ctx->gpu->sm_count);
}

static qlora_result qlora__attention_forward_gpu(qlora_ctx* ctx, qlora__attention* a) {
    qlora__attention_operands x;
    QLORA__TRY(qlora__attention_operands_make(ctx, a, &x));
    void* args[QLORA__ATTENTION_ARGS];
    int used = qlora__attention_inputs(&x, 3, 7, args);
    args[used++] = &x.out[0].data;
    args[used++] = &x.out[0].ld;
    args[used++] = &x.lse;
    used += qlora__attention_sizes(a, &x, args + used);
    args[used++] = &a->cap;
    const qlora__attention_kernel* kernel = &x.path->forward;
    if (qlora__attention_maps(x.path)) {
        int64_t blocks = qlora__attention_blocks(ctx, x.path, a);
        return qlora__launch(ctx, kernel->id, blocks, 1, 1, kernel->threads, kernel->shared, args);
    }
    args[used++] = &x.n.before;
    return qlora__attention_launch(ctx, kernel, a, a->heads, 1, args);
}

static qlora_result qlora__attention_stats(qlora_ctx* ctx, const qlora__attention* a,
                                           qlora__attention_operands* x) {
    const qlora__attention_kernel* kernel = &x->path->stats;
    void* args[] = {&x->out[0].data, &x->out[0].ld, &x->in[3].data, &x->in[3].ld, &x->lse,
                    &x->stats,       &x->n.tokens,  &x->n.hd,       &x->n.half};
    return qlora__launch(ctx, kernel->id, qlora__ceil_div(a->tokens, kernel->rows), a->heads, 1,
                         kernel->threads, kernel->shared, args);
}

static qlora_result qlora__attention_backward_q(qlora_ctx* ctx, qlora__attention* a,
                                                qlora__attention_operands* x) {
    void* args[QLORA__ATTENTION_ARGS];
    int used = qlora__attention_inputs(x, 4, 9, args); // keeps q and d_o
    args[used++] = &x->stats;
    args[used++] = &x->out[1].data;
    args[used++] = &x->out[1].ld;
    used += qlora__attention_sizes(a, x, args + used);
    args[used++] = &a->cap;
    return qlora__attention_launch(ctx, &x->path->q, a, a->heads, 1, args);
}

static qlora_result qlora__attention_backward_kv(qlora_ctx* ctx, qlora__attention* a,
                                                 qlora__attention_operands* x, int64_t shares) {
    void* args[QLORA__ATTENTION_ARGS];
    int used = qlora__attention_inputs(x, 4, 6, args); // keeps k and v
    args[used++] = &x->stats;
    args[used++] = &x->out[2].data;
    args[used++] = &x->out[2].ld;
    args[used++] = &x->out[3].data;
    args[used++] = &x->out[3].ld;
    used += qlora__attention_sizes(a, x, args + used);
    args[used++] = &x->parts; // attn_f32 has no shares and ignores this and the next
    args[used++] = &x->each;
    args[used++] = &a->cap;
    return qlora__attention_launch(ctx, &x->path->kv, a, a->kv_heads, shares, args);
}

static qlora_result qlora__attention_backward_gpu(qlora_ctx* ctx, qlora__attention* a) {
    qlora__attention_operands x;
    QLORA__TRY(qlora__attention_operands_make(ctx, a, &x));
    size_t bytes = (size_t)(a->heads * a->tokens) * 2 * sizeof(float);
    x.stats = a->stats;
    if (a->stats == NULL) {
        QLORA__TRY(qlora__scratch(ctx, bytes, &x.stats));
    }
    qlora__attention_shares shares;
    QLORA__TRY(qlora__attention_share(ctx, x.path, a, &shares));
    x.parts = shares.parts;
    x.each = shares.each;
    QLORA__TRY(qlora__attention_stats(ctx, a, &x));
    QLORA__TRY(qlora__beside_begin(ctx));
    QLORA__TRY(qlora__beside_end(ctx, QLORA__BESIDE_DQ, qlora__attention_backward_q(ctx, a, &x)));
    QLORA__TRY(qlora__attention_backward_kv(ctx, a, &x, shares.count));
    QLORA__TRY(qlora__attention_sum(ctx, x.path, a, &shares));
    return qlora__beside_wait(ctx, 1u << QLORA__BESIDE_DQ);
}

#endif

// The same with the separate operators, one sequence at a time. The query heads of a group are
// stacked, so that a batch of kv_heads products works for any ratio of heads.
typedef struct qlora__attention_pieces {
    int64_t length;
    qlora_tensor q; // [heads][length, hd], and so on
    qlora_tensor k;
    qlora_tensor v;
    qlora_tensor o;
    qlora_tensor p; // [heads][length, length]
    qlora_tensor d_o;
    qlora_tensor dp;
    qlora_tensor dkv;
} qlora__attention_pieces;

static qlora_result qlora__attention_piece(qlora_ctx* ctx, qlora_dtype dtype, int64_t batch,
                                           int64_t rows, int64_t cols, qlora_tensor* out) {
    QLORA__TRY(qlora__tensor_shape(ctx, dtype, batch, rows, cols, cols, out));
    return qlora__scratch(ctx, out->bytes, &out->data);
}

static qlora_result qlora__pieces_make(qlora_ctx* ctx, const qlora__attention* a,
                                       qlora__attention_pieces* x) {
    if (a->n_seqs == 0 || a->tokens % a->n_seqs != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "unfused: %lld tokens cannot be %lld sequences of equal length",
                           (long long)a->tokens, (long long)a->n_seqs);
    }
    x->length = a->tokens / a->n_seqs;
    qlora_dtype type = a->q->dtype;
    int64_t n = x->length;
    QLORA__TRY(qlora__attention_piece(ctx, type, a->heads, n, a->hd, &x->q));
    QLORA__TRY(qlora__attention_piece(ctx, type, a->kv_heads, n, a->hd, &x->k));
    QLORA__TRY(qlora__attention_piece(ctx, type, a->kv_heads, n, a->hd, &x->v));
    QLORA__TRY(qlora__attention_piece(ctx, type, a->heads, n, a->hd, &x->o));
    QLORA__TRY(qlora__attention_piece(ctx, type, a->heads, n, n, &x->p));
    if (a->d_o == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__attention_piece(ctx, type, a->heads, n, a->hd, &x->d_o));
    QLORA__TRY(qlora__attention_piece(ctx, type, a->heads, n, n, &x->dp));
    return qlora__attention_piece(ctx, type, a->kv_heads, n, a->hd, &x->dkv);
}

static qlora_result qlora__pieces_split(qlora_ctx* ctx, const qlora__attention_pieces* x,
                                        const qlora_tensor* rows, int64_t s,
                                        const qlora_tensor* y) {
    qlora_tensor view;
    QLORA__TRY(qlora__tensor_view(ctx, rows, s * x->length, x->length, 0, rows->cols, &view));
    return qlora_heads_split(ctx, &view, y);
}

static qlora_result qlora__pieces_join(qlora_ctx* ctx, const qlora__attention_pieces* x,
                                       const qlora_tensor* heads, int64_t s,
                                       const qlora_tensor* rows) {
    qlora_tensor view;
    QLORA__TRY(qlora__tensor_view(ctx, rows, s * x->length, x->length, 0, rows->cols, &view));
    return qlora_heads_join(ctx, heads, &view);
}

// c = alpha op(a) op(b) for each kv head. Operands with one matrix per query head are grouped.
static qlora_result qlora__pieces_multiply(qlora_ctx* ctx, const qlora__attention* a, float alpha,
                                           const qlora_tensor* x, bool trans_x,
                                           const qlora_tensor* y, bool trans_y,
                                           const qlora_tensor* z) {
    qlora_tensor t[3] = {*x, *y, *z};
    for (int i = 0; i < 3; i++) {
        int64_t group = t[i].batch / a->kv_heads;
        t[i].batch = a->kv_heads;
        t[i].rows *= group;
        t[i].batch_stride *= group;
    }
    qlora_gemm_desc gemm;
    memset(&gemm, 0, sizeof gemm);
    gemm.trans_a = trans_x;
    gemm.trans_b = trans_y;
    gemm.alpha = alpha;
    // exact f32, like the fused kernels
    return qlora__gemm_run(ctx, QLORA_MATH_F32, false, &gemm, &t[0], &t[1], &t[2]);
}

// Computes p for sequence s.
static qlora_result qlora__pieces_scores(qlora_ctx* ctx, const qlora__attention* a,
                                         const qlora__attention_pieces* x, int64_t s) {
    QLORA__TRY(qlora__pieces_split(ctx, x, a->q, s, &x->q));
    QLORA__TRY(qlora__pieces_split(ctx, x, a->k, s, &x->k));
    QLORA__TRY(qlora__pieces_split(ctx, x, a->v, s, &x->v));
    QLORA__TRY(qlora__pieces_multiply(ctx, a, 1.0f, &x->q, false, &x->k, true, &x->p));
    QLORA__TRY(qlora_scores_mask(ctx, &x->p, a->scale, true, a->window));
    return qlora_softmax_forward(ctx, &x->p, &x->p);
}

static qlora_result qlora__attention_forward_unfused(qlora_ctx* ctx, const qlora__attention* a) {
    qlora__attention_pieces x;
    memset(&x, 0, sizeof x);
    QLORA__TRY(qlora__pieces_make(ctx, a, &x));
    for (int64_t s = 0; s < a->n_seqs; s++) {
        QLORA__TRY(qlora__pieces_scores(ctx, a, &x, s));
        QLORA__TRY(qlora__pieces_multiply(ctx, a, 1.0f, &x.p, false, &x.v, false, &x.o));
        QLORA__TRY(qlora__pieces_join(ctx, &x, &x.o, s, a->o));
    }
    return QLORA_OK;
}

static qlora_result qlora__attention_backward_unfused(qlora_ctx* ctx, const qlora__attention* a) {
    qlora__attention_pieces x;
    memset(&x, 0, sizeof x);
    QLORA__TRY(qlora__pieces_make(ctx, a, &x));
    for (int64_t s = 0; s < a->n_seqs; s++) {
        QLORA__TRY(qlora__pieces_scores(ctx, a, &x, s));
        QLORA__TRY(qlora__pieces_split(ctx, &x, a->d_o, s, &x.d_o));
        QLORA__TRY(qlora__pieces_multiply(ctx, a, 1.0f, &x.p, true, &x.d_o, false, &x.dkv));
        QLORA__TRY(qlora__pieces_join(ctx, &x, &x.dkv, s, a->dv));
        QLORA__TRY(qlora__pieces_multiply(ctx, a, 1.0f, &x.d_o, false, &x.v, true, &x.dp));
        QLORA__TRY(qlora_softmax_backward(ctx, &x.p, &x.dp, &x.dp));
        QLORA__TRY(qlora__pieces_multiply(ctx, a, a->scale, &x.dp, true, &x.q, false, &x.dkv));
        QLORA__TRY(qlora__pieces_join(ctx, &x, &x.dkv, s, a->dk));
        QLORA__TRY(qlora__pieces_multiply(ctx, a, a->scale, &x.dp, false, &x.k, false, &x.o));
        QLORA__TRY(qlora__pieces_join(ctx, &x, &x.o, s, a->dq));
    }
    return QLORA_OK;
}

static qlora_result qlora__attention_begin(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                           qlora__attention* a) {
    if (desc == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc is NULL");
    }
    a->heads = desc->heads;
    a->kv_heads = desc->kv_heads > 0 ? desc->kv_heads : desc->heads;
    a->hd = desc->head_dim;
    a->window = desc->window;
    QLORA__TRY(qlora__need_whole(ctx, "desc.heads", a->heads, 1, 65535));
    QLORA__TRY(qlora__need_whole(ctx, "desc.kv_heads", desc->kv_heads, 0, a->heads));
    QLORA__TRY(qlora__need_whole(ctx, "desc.head_dim", a->hd, 1, QLORA__HEAD_MAX));
    QLORA__TRY(qlora__need_whole(ctx, "desc.window", a->window, 0, INT64_MAX));
    if (a->heads % a->kv_heads != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.heads is %lld; it must be a multiple of desc.kv_heads (%lld)",
                           (long long)a->heads, (long long)a->kv_heads);
    }
    a->scale = desc->scale == 0 ? 1.0f / sqrtf((float)a->hd) : desc->scale;
    a->cap = desc->cap;
    QLORA__TRY(qlora__need_real(ctx, "desc.cap", (double)desc->cap, 0.0, 1e30));
    if (desc->unfused && desc->cap > 0.0f) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "desc.cap is %g; unfused attention has no cap", (double)desc->cap);
    }
    if (!(a->scale > 0 && a->scale <= 1e30f)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.scale is %g; it must be positive and at most 1e30",
                           (double)desc->scale);
    }
    QLORA__TRY(qlora__need(ctx, a->q, "q", QLORA__IS_F32 | QLORA__IS_BF16, -1, a->heads * a->hd));
    unsigned dtype = 1u << a->q->dtype;
    a->tokens = a->q->rows;
    int64_t keys = a->before + a->tokens;
    QLORA__TRY(qlora__need(ctx, a->k, "k", dtype, keys, a->kv_heads * a->hd));
    QLORA__TRY(qlora__need(ctx, a->v, "v", dtype, keys, a->kv_heads * a->hd));
    QLORA__TRY(qlora__need(ctx, a->seqs, "seqs", QLORA__IS_I32, 1, -1));
    QLORA__TRY(qlora__need(ctx, a->o, "o", dtype, a->tokens, a->heads * a->hd));
    QLORA__TRY(qlora__need(ctx, a->lse, "lse", QLORA__IS_F32, a->heads, a->tokens));
    QLORA__TRY(qlora__need_whole(ctx, "seqs.cols", a->seqs->cols, 1, INT32_MAX / 2));
    QLORA__TRY(qlora__need_whole(ctx, "q.rows", a->tokens, 0, INT32_MAX / 2));
    if (a->lse->ld != a->tokens) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "lse.ld is %lld; it must be equal to the number of tokens, %lld",
                           (long long)a->lse->ld, (long long)a->tokens);
    }
    a->n_seqs = a->seqs->cols - 1;
    int64_t each = a->tokens / qlora__max(a->n_seqs, 1);
    int64_t longest = desc->longest > 0 ? desc->longest : each;
    a->longest = qlora__max(qlora__min(longest, a->tokens), 1);
    // A window that covers all tokens is the same as none. Kernels may then add to it safely.
    a->window = a->window >= keys ? 0 : a->window;
    return QLORA_OK;
}

static qlora_result qlora__attention_forward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                             qlora__attention* a) {
    QLORA__TRY(qlora__attention_begin(ctx, desc, a));
    QLORA__TRY(qlora__need_apart(ctx, "o", a->o, "q", a->q));
    QLORA__TRY(qlora__need_apart(ctx, "o", a->o, "k", a->k));
    QLORA__TRY(qlora__need_apart(ctx, "o", a->o, "v", a->v));
    if (a->tokens == 0) {
        return QLORA_OK;
    }
    if (desc->unfused) {
        return qlora__attention_forward_unfused(ctx, a);
    }
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        return qlora__attention_forward_gpu(ctx, a);
    }
#endif
    return qlora__attention_forward_cpu(ctx, a);
}

qlora_result qlora_attention_forward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                     const qlora_tensor* q, const qlora_tensor* k,
                                     const qlora_tensor* v, const qlora_tensor* seqs,
                                     const qlora_tensor* o, const qlora_tensor* lse) {
    QLORA__ENTER(ctx, "qlora_attention_forward");
    qlora__attention a;
    memset(&a, 0, sizeof a);
    a.q = q;
    a.k = k;
    a.v = v;
    a.seqs = seqs;
    a.o = o;
    a.lse = lse;
    return qlora__leave(ctx, qlora__attention_forward(ctx, desc, &a));
}

static qlora_result qlora__attention_backward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                              qlora__attention* a) {
    QLORA__TRY(qlora__attention_begin(ctx, desc, a));
    unsigned dtype = 1u << a->q->dtype;
    int64_t kv_cols = a->kv_heads * a->hd;
    QLORA__TRY(qlora__need(ctx, a->d_o, "d_o", dtype, a->tokens, a->heads * a->hd));
    QLORA__TRY(qlora__need(ctx, a->dq, "dq", dtype, a->tokens, a->heads * a->hd));
    QLORA__TRY(qlora__need(ctx, a->dk, "dk", dtype, a->tokens, kv_cols));
    QLORA__TRY(qlora__need(ctx, a->dv, "dv", dtype, a->tokens, kv_cols));
    const qlora_tensor* outs[] = {a->dq, a->dk, a->dv};
    const qlora_tensor* ins[] = {a->q, a->k, a->v, a->o, a->d_o};
    static const char* const out_names[] = {"dq", "dk", "dv"};
    static const char* const in_names[] = {"q", "k", "v", "o", "d_o"};
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 5; j++) {
            QLORA__TRY(qlora__need_apart(ctx, out_names[i], outs[i], in_names[j], ins[j]));
        }
        for (int j = 0; j < i; j++) {
            QLORA__TRY(qlora__need_apart(ctx, out_names[i], outs[i], out_names[j], outs[j]));
        }
    }
    if (a->tokens == 0) {
        return QLORA_OK;
    }
    if (desc->unfused) {
        return qlora__attention_backward_unfused(ctx, a);
    }
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        return qlora__attention_backward_gpu(ctx, a);
    }
#endif
    return qlora__attention_backward_cpu(ctx, a);
}

qlora_result qlora_attention_backward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                      const qlora_tensor* q, const qlora_tensor* k,
                                      const qlora_tensor* v, const qlora_tensor* seqs,
                                      const qlora_tensor* o, const qlora_tensor* lse,
                                      const qlora_tensor* d_o, const qlora_tensor* dq,
                                      const qlora_tensor* dk, const qlora_tensor* dv) {
    QLORA__ENTER(ctx, "qlora_attention_backward");
    qlora__attention a;
    memset(&a, 0, sizeof a);
    a.q = q;
    a.k = k;
    a.v = v;
    a.seqs = seqs;
    a.o = o;
    a.lse = lse;
    a.d_o = d_o;
    a.dq = dq;
    a.dk = dk;
    a.dv = dv;
    return qlora__leave(ctx, qlora__attention_backward(ctx, desc, &a));
}
