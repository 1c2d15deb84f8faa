// ---- products of all experts on a GPU -----------------------------------------------------------
//
// The rows of the experts follow each other in one matrix; where those of each expert begin is
// known to the device alone (ops/experts.h). One launch does the products of all experts:
//
//   rows   C = A op(B_e)                        for the rows of every expert
//   sums   C_e += alpha A^T B                   over the rows of expert e
//
// B_e, or C_e, are the matrices of a batch. On the CPU, experts run one after the other.

// Rows of an operand, of which `used` are not zeros: the slices of a product along them end within
// it.
static int64_t qlora__expert_height(int64_t used) {
    return (used + 63) / 64 * 64;
}

#define QLORA__GROUPED_TILE 128 // rows, at most; TILE_ROWS in kernels/experts

// Tiles of `rows` rows that there can be: each expert may have one that is not full.
static int64_t qlora__grouped_tiles(int64_t experts, int64_t rows) {
    return rows / QLORA__GROUPED_TILE + qlora__min(experts, rows);
}

#ifndef QLORA_NO_CUDA

// The rows of the experts of a layer.
typedef struct qlora__groups {
    const int32_t* starts; // [experts + 1]
    const int32_t* tiles;
    int64_t experts;
    int64_t rows;
} qlora__groups;

// Same layout as grouped in kernels/experts/grouped.cuh.
typedef struct qlora__grouped_args {
    const void* A;
    const void* B;
    void* C;
    const int32_t* starts;
    const int32_t* tiles;
    const int32_t* list;
    int64_t lda;
    int64_t ldb;
    int64_t ldc;
    int64_t stride;
    int32_t M;
    int32_t N;
    int32_t K;
    int32_t flags;
    float alpha;
    float beta;
} qlora__grouped_args;

typedef char qlora__grouped_size[sizeof(qlora__grouped_args) == 104 ? 1 : -1];

// Same layout as grouped_wide in kernels/experts/grouped_wg.cu.
typedef struct qlora__grouped_wide {
    void* c;
    const int32_t* starts;
    const int32_t* tiles;
    int64_t ldc;
    int32_t N;
    int32_t K;
    int32_t apart;
    int32_t flags;
} qlora__grouped_wide;

static bool qlora__grouped_aligned(const qlora_tensor* t) {
    return (uintptr_t)t->data % 16 == 0 && t->ld % 8 == 0 && t->batch_stride % 8 == 0;
}

static bool qlora__grouped_takes_tensor_cores(const qlora_ctx* ctx, const qlora_tensor* a,
                                              const qlora_tensor* b) {
    return a->dtype == QLORA_BF16 && qlora__gpu_takes(ctx, 80) && qlora__grouped_aligned(a) &&
           qlora__grouped_aligned(b);
}

// The narrowest result for which tiles of 128 columns pay.
#define QLORA__GROUPED_NARROW 64
#define QLORA__GROUPED_FEW 32 // rows or columns up to which kernels/experts/grouped_few.cu has it

// turned: B is [N,K].
static qlora_result qlora__grouped_warpgroups(qlora_ctx* ctx, const qlora__groups* g, bool turned,
                                              const qlora_tensor* a, const qlora_tensor* b,
                                              const qlora_tensor* c) {
    qlora__grouped_wide args;
    memset(&args, 0, sizeof args);
    args.c = c->data;
    args.starts = g->starts;
    args.tiles = g->tiles;
    args.ldc = c->ld;
    args.N = (int32_t)c->cols;
    args.K = (int32_t)a->cols;
    args.apart = (int32_t)(b->batch_stride / b->ld);
    args.flags = c->cols % 8 == 0 && c->ld % 8 == 0 && (uintptr_t)c->data % 16 == 0 ? 2 : 0;
    qlora__tensor_map maps[2];
    QLORA__TRY(qlora__tensor_map_make(ctx, a->data, g->rows, a->cols, a->ld, 128, &maps[0]));
    QLORA__TRY(qlora__tensor_map_make(ctx, b->data, (g->experts - 1) * args.apart + b->rows,
                                      b->cols, b->ld, turned ? 256 : 64, &maps[1]));
    void* all[] = {qlora__tensor_map_place(&maps[0]), qlora__tensor_map_place(&maps[1]), &args};
    qlora__kernel_id kernel = turned ? QLORA__K_grouped_wg_nt : QLORA__K_grouped_wg_nn;
    return qlora__launch(ctx, kernel, ctx->gpu->sm_count, 1, 1, QLORA__WARPGROUP_THREADS,
                         qlora__kernel_rows[kernel].shared, all);
}

static bool qlora__grouped_takes_warpgroups(const qlora_ctx* ctx, const qlora_tensor* b,
                                            const qlora_tensor* c) {
    return qlora__has_warpgroups(ctx) && c->dtype == QLORA_BF16 && c->cols % 2 == 0 &&
           c->ld % 2 == 0 && (uintptr_t)c->data % 4 == 0 && b->batch_stride % b->ld == 0;
}

static qlora_result qlora__grouped_rows(qlora_ctx* ctx, const qlora__groups* g, bool turned,
                                        const qlora_tensor* a, const qlora_tensor* b,
                                        const qlora_tensor* c) {
    qlora__grouped_args args;
    memset(&args, 0, sizeof args);
    args.A = a->data;
    args.B = b->data;
    args.C = c->data;
    args.starts = g->starts;
    args.tiles = g->tiles;
    args.lda = a->ld;
    args.ldb = b->ld;
    args.ldc = c->ld;
    args.stride = b->batch_stride;
    args.N = (int32_t)c->cols;
    args.K = (int32_t)a->cols;
    args.flags = (c->dtype == QLORA_BF16 ? 1 : 0) | (turned ? 4 : 0);
    if (c->cols == 0 || g->rows == 0) {
        return QLORA_OK;
    }
    int64_t tiles = qlora__grouped_tiles(g->experts, g->rows);
    void* all[] = {&args};
    if (!qlora__grouped_takes_tensor_cores(ctx, a, b)) {
        return qlora__launch(
            ctx, a->dtype == QLORA_F32 ? QLORA__K_grouped_rows_f32 : QLORA__K_grouped_rows_half,
            2 * tiles, qlora__ceil_div(c->cols, 64), 1, 256, 0, all);
    }
    if (c->cols <= QLORA__GROUPED_NARROW) {
        static const qlora__kernel_id few[2][3] = {
            {QLORA__K_grouped_few_nn_16, QLORA__K_grouped_few_nn_32, QLORA__K_grouped_few_nn_64},
            {QLORA__K_grouped_few_nt_16, QLORA__K_grouped_few_nt_32, QLORA__K_grouped_few_nt_64}};
        qlora__kernel_id own = few[turned ? 1 : 0][c->cols <= 16 ? 0 : c->cols <= 32 ? 1 : 2];
        return qlora__launch(ctx, own, 2 * tiles, 1, 1, 128, qlora__kernel_rows[own].shared, all);
    }
    if (qlora__grouped_takes_warpgroups(ctx, b, c)) {
        return qlora__grouped_warpgroups(ctx, g, turned, a, b, c);
    }
    qlora__kernel_id kernel = turned ? QLORA__K_grouped_tc_nt : QLORA__K_grouped_tc_nn;
    return qlora__launch(ctx, kernel, tiles, qlora__ceil_div(c->cols, 128), 1, 128,
                         qlora__kernel_rows[kernel].shared, all);
}

// With few rows or columns of the result.
static qlora_result qlora__grouped_few_sums(qlora_ctx* ctx, const qlora__groups* g, int64_t M,
                                            int64_t N, void** args) {
    static const qlora__kernel_id kernels[2][2] = {
        {QLORA__K_grouped_few_tall_16, QLORA__K_grouped_few_tall_32},
        {QLORA__K_grouped_few_wide_16, QLORA__K_grouped_few_wide_32}};
    bool tall = N <= M;
    qlora__kernel_id kernel = kernels[tall ? 0 : 1][qlora__min(M, N) <= 16 ? 0 : 1];
    return qlora__launch(ctx, kernel, tall ? qlora__ceil_div(M, 64) : 1,
                         tall ? 1 : qlora__ceil_div(N, 64), g->experts, 128,
                         qlora__kernel_rows[kernel].shared, args);
}

// Whether sums with A as narrow as a rank can read rows of B by a list.
static bool qlora__grouped_takes_list(const qlora_ctx* ctx, const qlora_tensor* a,
                                      const qlora_tensor* b) {
    return qlora__grouped_takes_tensor_cores(ctx, a, b) && a->cols <= QLORA__GROUPED_FEW &&
           b->cols > a->cols;
}

// c: f32 [M,N] of the first expert, a batch of them. With a list, row i of B is its row list[i],
// where qlora__grouped_takes_list holds; NULL: row i.
static qlora_result qlora__grouped_sums(qlora_ctx* ctx, const qlora__groups* g, float alpha,
                                        const int32_t* list, const qlora_tensor* a,
                                        const qlora_tensor* b, const qlora_tensor* c) {
    qlora__grouped_args args;
    memset(&args, 0, sizeof args);
    args.list = list;
    args.A = a->data;
    args.B = b->data;
    args.C = c->data;
    args.starts = g->starts;
    args.lda = a->ld;
    args.ldb = b->ld;
    args.ldc = c->ld;
    args.stride = c->batch_stride;
    args.M = (int32_t)c->rows;
    args.N = (int32_t)c->cols;
    args.flags = 2;
    args.alpha = alpha;
    args.beta = 1.0f;
    void* all[] = {&args};
    bool tensor = qlora__grouped_takes_tensor_cores(ctx, a, b);
    QLORA_ASSERT(list == NULL || qlora__grouped_takes_list(ctx, a, b));
    if (tensor && qlora__min(c->rows, c->cols) <= QLORA__GROUPED_FEW) {
        return qlora__grouped_few_sums(ctx, g, c->rows, c->cols, all);
    }
    qlora__kernel_id kernel = tensor                  ? QLORA__K_grouped_tc_sums
                              : a->dtype == QLORA_F32 ? QLORA__K_grouped_sums_f32
                                                      : QLORA__K_grouped_sums_half;
    return qlora__launch(ctx, kernel, qlora__ceil_div(c->rows, 64), qlora__ceil_div(c->cols, 64),
                         g->experts, tensor ? 128 : 256, qlora__kernel_rows[kernel].shared, all);
}

// ---- operands of all experts --------------------------------------------------------------------

// Same layout as expert_weight in kernels/experts/expert_place.cuh.
typedef struct qlora__expert_weight {
    const void* codes;
    const void* absmax;
    const void* q;
    const void* scales;
    const void* offset;
    const void* maps;
    const void* dense;
    int64_t stride;
    int32_t out;
    int32_t block_shift;
    int32_t group_shift;
    int32_t first;
} qlora__expert_weight;

// Same layout as expert_operand.
typedef struct qlora__expert_operand {
    qlora__expert_weight parts[2];
    void* operand;
    const int32_t* starts;
    const void* a;
    const void* sb;
    int64_t in;
    int32_t out;
    int32_t rank;
    int32_t pad;
    int32_t width;
    int32_t across;
    int32_t adapters;
    int32_t via_bf16;
    int32_t height;
} qlora__expert_operand;

typedef char qlora__expert_operand_size[sizeof(qlora__expert_operand) == 232 ? 1 : -1];

// A matrix of the first expert; those of the others are as far apart as that of the second one.
static void qlora__expert_weight_of(const qlora_linear_part* first, const qlora_linear_part* second,
                                    qlora__expert_weight* out) {
    memset(out, 0, sizeof *out);
    out->out = (int32_t)first->out;
    if (first->nf4 == NULL) {
        out->dense = first->dense->data;
        out->stride = (const char*)second->dense->data - (const char*)first->dense->data;
        return;
    }
    out->codes = first->nf4->codes;
    out->absmax = first->nf4->absmax;
    out->q = first->nf4->absmax_codes;
    out->scales = first->nf4->absmax_scales;
    out->offset = first->nf4->offset;
    out->maps = first->nf4->maps;
    out->block_shift = qlora__log2(first->nf4->block);
    out->group_shift = qlora__log2(first->nf4->block2);
    out->stride = (const char*)second->nf4->codes - (const char*)first->nf4->codes;
}

#define QLORA__PLACE_ROWS (16 * 256) // of a block, divided by its width

// What is placed, of experts with a rank.
typedef struct qlora__expert_place {
    const qlora_linear_desc* first;  // of the first expert
    const qlora_linear_desc* second; // of the next one, or the same again if there is only one
    int64_t rank;
} qlora__expert_place;

// Writes [W sB; A] of every expert that has rows to `operand`, a batch of them with pad columns
// beside W.
static qlora_result qlora__experts_place(qlora_ctx* ctx, const qlora__groups* g,
                                         const qlora__expert_place* place,
                                         const qlora_tensor* operand) {
    const qlora_linear_desc* first = place->first;
    int64_t rank = place->rank;
    qlora__expert_operand args;
    memset(&args, 0, sizeof args);
    int64_t out = qlora_linear_out(first);
    int64_t blocks = 0;
    int64_t pad = operand->cols - first->in;
    int64_t adapters = out * pad + (operand->rows - out) * operand->cols;
    if (adapters > INT32_MAX) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT,
                           "the adapter of an expert has %lld elements with those that pad it; the "
                           "maximum is %d",
                           (long long)adapters, INT32_MAX);
    }
    args.starts = g->starts;
    args.height = (int32_t)operand->rows;
    args.operand = operand->data;
    args.in = first->in;
    args.out = (int32_t)out;
    args.rank = (int32_t)rank;
    args.pad = (int32_t)pad;
    args.width = qlora__nf4_width(first->in);
    args.across = (int32_t)qlora__ceil_div(first->in, 8 * args.width);
    args.via_bf16 = operand->dtype == QLORA_F32;
    args.parts[1].first = INT32_MAX;
    for (int32_t i = 0; i < first->count; i++) {
        qlora__expert_weight_of(&first->parts[i], &place->second->parts[i], &args.parts[i]);
        args.parts[i].first = (int32_t)blocks;
        blocks +=
            qlora__ceil_div(first->parts[i].out, QLORA__PLACE_ROWS / args.width) * args.across;
    }
    args.adapters = (int32_t)blocks;
    if (rank > 0) {
        args.a = first->parts[0].a->data;
        args.sb = first->parts[0].sb->data;
    }
    blocks += qlora__ceil_div(adapters, 2048);
    void* all[] = {&args};
    return qlora__launch(
        ctx, operand->dtype == QLORA_F32 ? QLORA__K_expert_place_f32 : QLORA__K_expert_place_bf16,
        blocks, operand->batch, 1, 256, 0, all);
}

#endif // QLORA_NO_CUDA
