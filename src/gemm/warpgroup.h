// ---- products with warpgroup instructions -------------------------------------------------------
//
// On devices of compute capability 9.0, gemm_wg.cu computes bf16 products of all but the smallest
// sizes. Operands come as tensor maps, which are parameters of the launch.

#ifndef QLORA_NO_CUDA

#define QLORA__TENSOR_MAP_BYTES 128
#define QLORA__TENSOR_MAP_ALIGN 64
#define QLORA__WARPGROUP_THREADS 384

// Whether kernels for exactly compute capability 9.0 can run, and the driver can describe tensors.
static bool qlora__has_warpgroups(const qlora_ctx* ctx) {
    const qlora__gpu* gpu = ctx->gpu;
    return gpu != NULL && gpu->capability == 90 && gpu->target_number == 90 &&
           gpu->ptx_version >= 80 && gpu->cu.TensorMapEncodeTiled != NULL;
}

// A tensor map, and room to align it.
typedef struct qlora__tensor_map {
    unsigned char bytes[QLORA__TENSOR_MAP_BYTES + QLORA__TENSOR_MAP_ALIGN];
} qlora__tensor_map;

static void* qlora__tensor_map_place(qlora__tensor_map* map) {
    uintptr_t at = (uintptr_t)map->bytes;
    return map->bytes + (QLORA__TENSOR_MAP_ALIGN - at % QLORA__TENSOR_MAP_ALIGN);
}

// Describes a bf16 matrix that is copied in boxes of 64 columns.
static qlora_result qlora__tensor_map_make(qlora_ctx* ctx, const void* data, int64_t rows,
                                           int64_t cols, int64_t ld, int64_t box_rows,
                                           qlora__tensor_map* map) {
    uint64_t size[2] = {(uint64_t)cols, (uint64_t)rows};
    uint64_t stride[1] = {(uint64_t)ld * 2};
    uint32_t box[2] = {64, (uint32_t)box_rows};
    uint32_t steps[2] = {1, 1};
    int code = ctx->gpu->cu.TensorMapEncodeTiled(
        qlora__tensor_map_place(map), QLORA__CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)data, size,
        stride, box, steps, 0, QLORA__CU_TENSOR_MAP_SWIZZLE_128B,
        QLORA__CU_TENSOR_MAP_L2_PROMOTION_L2_256B, 0);
    return qlora__cu(ctx, code, "cuTensorMapEncodeTiled");
}

// Kernels with tiles of 128 rows and `width` columns. The times are in hundredths of a microsecond,
// measured on an H200.
typedef struct qlora__warpgroup_tile {
    int64_t width;
    int64_t slice_time;         // of 64 steps along K
    int64_t tile_time;          // and once per tile
    bool all_types;             // otherwise bf16 results, and f32 ones with A transposed
    qlora__kernel_id kernel[3]; // nn, nt, tn; QLORA__K_COUNT: none
} qlora__warpgroup_tile;

// clang-format off
static const qlora__warpgroup_tile qlora__warpgroup_tiles[] = {
    {256, 75, 250, false,
     {QLORA__K_gemm_wg_nn_256, QLORA__K_gemm_wg_nt_256, QLORA__K_gemm_wg_tn_256}},
    {128, 40, 150, false, {QLORA__K_gemm_wg_nn_128, QLORA__K_gemm_wg_nt_128, QLORA__K_COUNT}},
    {64, 26, 100, true, {QLORA__K_gemm_wg_nn_64, QLORA__K_gemm_wg_nt_64, QLORA__K_gemm_wg_tn_64}},
};
// clang-format on

static int qlora__warpgroup_form(const qlora__gemm* g) {
    return g->ta ? 2 : g->tb ? 1 : 0;
}

// The tile with which the device needs the least time. Blocks work on their tiles in rounds.
static const qlora__warpgroup_tile* qlora__warpgroup_choose(const qlora_ctx* ctx,
                                                            const qlora__gemm* g) {
    const qlora__warpgroup_tile* best = NULL;
    int64_t least = 0;
    for (size_t i = 0; i < sizeof qlora__warpgroup_tiles / sizeof qlora__warpgroup_tiles[0]; i++) {
        const qlora__warpgroup_tile* t = &qlora__warpgroup_tiles[i];
        int64_t tiles = qlora__ceil_div(g->M, 128) * qlora__ceil_div(g->N, t->width);
        int64_t time = qlora__ceil_div(tiles, ctx->gpu->sm_count) *
                       (qlora__ceil_div(g->K, 64) * t->slice_time + t->tile_time);
        bool takes = t->all_types || g->out == (g->ta ? QLORA_F32 : QLORA_BF16);
        if (takes && t->kernel[qlora__warpgroup_form(g)] != QLORA__K_COUNT &&
            (best == NULL || time < least)) {
            best = t;
            least = time;
        }
    }
    return best;
}

// Below this many multiplications per multiprocessor, the kernels with more and smaller blocks are
// faster.
#define QLORA__WARPGROUP_LEAST (1 << 17)

static bool qlora__gemm_takes_warpgroups(const qlora_ctx* ctx, const qlora__gemm* g) {
    uintptr_t operands = (uintptr_t)g->A | (uintptr_t)g->B;
    size_t pair = 2 * qlora_dtype_bytes(g->out);
    bool aligned = operands % 16 == 0 && (g->lda | g->ldb) % 8 == 0 && (g->N | g->ldc) % 2 == 0 &&
                   (uintptr_t)g->C % pair == 0;
    return g->a_type == QLORA_BF16 && g->b_type == QLORA_BF16 && g->batch == 1 &&
           g->alpha_dev == NULL && aligned && !(g->ta && g->tb) && g->K >= 64 &&
           qlora__has_warpgroups(ctx) &&
           g->M * g->N >= ctx->gpu->sm_count * (int64_t)QLORA__WARPGROUP_LEAST / g->K;
}

// Into how many parts K is split: with few tiles, more blocks share the work. The parts are in
// scratch memory, so only plain products are split: those with a transposed operand are also used
// beside the stream that owns it, where they must give the same bits.
static qlora_result qlora__warpgroup_split(qlora_ctx* ctx, const qlora__gemm* g,
                                           const qlora__warpgroup_tile* tile, int32_t* splits,
                                           void** parts) {
    int64_t tiles = qlora__ceil_div(g->M, 128) * qlora__ceil_div(g->N, tile->width);
    int64_t size = g->M * g->N * (int64_t)sizeof(float);
    int64_t slices = qlora__ceil_div(g->K, 64);
    int64_t fit = (int64_t)qlora__scratch_free(ctx) / size;
    int64_t most = qlora__min(qlora__min(ctx->gpu->sm_count / tiles, slices / 8), fit);
    *splits = 1;
    *parts = NULL;
    if (!tile->all_types || g->ta || g->tb || most < 2) {
        return QLORA_OK;
    }
    QLORA_ASSERT(ctx->gpu->beside == NULL || ctx->gpu->beside->first == NULL);
    // No part is empty.
    *splits = (int32_t)qlora__ceil_div(slices, qlora__ceil_div(slices, most));
    return qlora__scratch(ctx, (size_t)(*splits * size), parts);
}

static qlora_result qlora__warpgroup_sum(qlora_ctx* ctx, const qlora__gemm* g, const void* parts,
                                         int32_t splits) {
    qlora__gemm c = *g;
    int32_t M = (int32_t)g->M;
    int32_t N = (int32_t)g->N;
    int32_t flags = g->out == QLORA_BF16 ? 1 : 0;
    void* args[] = {(void*)&parts, &splits, &c.C, &M, &N, &c.ldc, &c.alpha, &c.beta, &flags};
    return qlora__launch(ctx, QLORA__K_gemm_wg_sum, qlora__ceil_div(g->M * g->N, 512), 1, 1, 256, 0,
                         args);
}

static qlora_result qlora__gemm_warpgroups(qlora_ctx* ctx, const qlora__gemm* g) {
    const qlora__warpgroup_tile* tile = qlora__warpgroup_choose(ctx, g);
    qlora__kernel_id kernel = tile->kernel[qlora__warpgroup_form(g)];
    int64_t width = tile->width;
    qlora__tensor_map maps[2];
    QLORA__TRY(qlora__tensor_map_make(ctx, g->A, g->ta ? g->K : g->M, g->ta ? g->M : g->K, g->lda,
                                      g->ta ? 64 : 128, &maps[0]));
    QLORA__TRY(qlora__tensor_map_make(ctx, g->B, g->tb ? g->N : g->K, g->tb ? g->K : g->N, g->ldb,
                                      g->tb ? width : 64, &maps[1]));
    size_t scratch_before = qlora__scratch_mark(ctx);
    int32_t splits = 1;
    void* parts = NULL;
    QLORA__TRY(qlora__warpgroup_split(ctx, g, tile, &splits, &parts));
    bool split = splits > 1;
    void* C = split ? parts : g->C;
    int32_t M = (int32_t)g->M;
    int32_t N = (int32_t)g->N;
    int32_t K = (int32_t)g->K;
    int64_t ldc = split ? g->N : g->ldc;
    float alpha = split ? 1.0f : g->alpha;
    float beta = split ? 0.0f : g->beta;
    bool chunks = g->N % 8 == 0 && g->ldc % 8 == 0 && (uintptr_t)g->C % 16 == 0;
    bool plain = !(alpha < 1.0f) && !(alpha > 1.0f) && beta == 0.0f;
    int32_t flags = (g->out == QLORA_BF16 && !split ? 1 : 0) | (chunks && plain ? 2 : 0);
    void* args[] = {qlora__tensor_map_place(&maps[0]),
                    qlora__tensor_map_place(&maps[1]),
                    &C,
                    &M,
                    &N,
                    &K,
                    &ldc,
                    &alpha,
                    &beta,
                    &flags,
                    &splits};
    int64_t tiles = qlora__ceil_div(g->M, 128) * qlora__ceil_div(g->N, width) * splits;
    QLORA__TRY(qlora__launch(ctx, kernel, qlora__min(tiles, ctx->gpu->sm_count), 1, 1,
                             QLORA__WARPGROUP_THREADS, qlora__kernel_rows[kernel].shared, args));
    if (split) {
        QLORA__TRY(qlora__warpgroup_sum(ctx, g, parts, splits));
    }
    qlora__scratch_release(ctx, scratch_before);
    return QLORA_OK;
}

#endif // QLORA_NO_CUDA
