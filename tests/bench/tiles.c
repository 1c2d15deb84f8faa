// tiles.c - products of the CPU tiers with several lengths of ranges and widths of blocks in one
// run, to choose those of the tables in src/cpu:
//
//     make build/tiles && build/tiles [--threads N]
//
// Tiers with kernels for bf16 are also measured with x, and the weights, in bf16.
// A processor's speed changes from one second to the next, so every product is measured in turn
// with the multiply-adds that bound it, and the printed share is of what these reached meanwhile.
#define _POSIX_C_SOURCE 200809L
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include "bench_peak.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    int64_t steps;
    int64_t block;
} tile_sizes[] = {{96, 192},  {144, 192}, {192, 192}, {192, 384},  {256, 192}, {288, 192},
                  {384, 192}, {576, 192}, {640, 192}, {1024, 192}, {1280, 192}};

static const int64_t tile_shapes[][3] = {{1024, 1536, 576}, {1024, 576, 1536}}; // M, N, K

enum { TILE_SHAPES = 2, TILE_ROUNDS = 8 };

typedef struct tile_rig {
    qlora_ctx* ctx;
    qlora__cpu_table table; // copies of the tier's tables, with other sizes
    qlora__cpu_gemm gemm;
    qlora__cpu_bf16 bf16;
    qlora_tensor x[2][TILE_SHAPES]; // in f32, and in bf16
    qlora_tensor w[2][TILE_SHAPES];
    qlora_tensor y[TILE_SHAPES];
    qlora_nf4 nf4[TILE_SHAPES];
    int threads;
} tile_rig;

static bool tile_rig_make(tile_rig* r, const qlora__cpu_table* table, int threads) {
    qlora_ctx_desc desc;
    memset(r, 0, sizeof *r);
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.cpu_tier = table->tier;
    desc.threads = threads;
    r->threads = threads;
    bool ok = qlora_ctx_create(&desc, &r->ctx) == QLORA_OK;
    for (int i = 0; ok && i < TILE_SHAPES; i++) {
        const int64_t* shape = tile_shapes[i];
        qlora_nf4_desc nf4;
        memset(&nf4, 0, sizeof nf4);
        nf4.rows = shape[1];
        nf4.cols = shape[2];
        for (int j = 0; ok && j < 2; j++) {
            qlora_dtype dtype = j == 0 ? QLORA_F32 : QLORA_BF16;
            qlora_tensor* x = &r->x[j][i];
            qlora_tensor* w = &r->w[j][i];
            ok = qlora_tensor_create(r->ctx, dtype, shape[0], shape[2], x) == QLORA_OK &&
                 qlora_tensor_create(r->ctx, dtype, shape[1], shape[2], w) == QLORA_OK &&
                 qlora_random_normal(r->ctx, 1, 0, 1.0f, x) == QLORA_OK &&
                 qlora_random_normal(r->ctx, 2, 0, 1.0f, w) == QLORA_OK;
        }
        ok = ok &&
             qlora_tensor_create(r->ctx, QLORA_F32, shape[0], shape[1], &r->y[i]) == QLORA_OK &&
             qlora_nf4_create(r->ctx, &nf4, &r->nf4[i]) == QLORA_OK &&
             qlora_nf4_quantise(r->ctx, &r->w[0][i], &r->nf4[i]) == QLORA_OK;
    }
    return ok;
}

static void tile_rig_free(tile_rig* r) {
    for (int i = 0; i < TILE_SHAPES; i++) {
        qlora_nf4_destroy(r->ctx, &r->nf4[i]);
        for (int j = 0; j < 2; j++) {
            qlora_tensor_destroy(r->ctx, &r->x[j][i]);
            qlora_tensor_destroy(r->ctx, &r->w[j][i]);
        }
        qlora_tensor_destroy(r->ctx, &r->y[i]);
    }
    qlora_ctx_destroy(r->ctx);
}

static bool tile_run(tile_rig* r, int i, bool bf16, bool nf4) {
    qlora_gemm_desc d;
    memset(&d, 0, sizeof d);
    d.trans_b = true;
    d.alpha = 1.0f;
    const qlora_tensor* x = &r->x[bf16][i];
    return (nf4 ? qlora_nf4_gemm_forward(r->ctx, x, &r->nf4[i], &r->y[i], 0)
                : qlora_gemm(r->ctx, &d, x, &r->w[bf16][i], &r->y[i])) == QLORA_OK;
}

// Percent of the peak for one shape.
static double tile_share(tile_rig* r, int i, bool bf16, bool nf4) {
    double peak = 0.0;
    double best = 1e30;
    bool ok = tile_run(r, i, bf16, nf4);
    for (int round = 0; ok && round < TILE_ROUNDS; round++) {
        peak = fmax(peak, cpu_peak(r->table.tier, bf16, 1, bf16 ? 20000 : 100000));
        double start = cpu_seconds(true);
        ok = tile_run(r, i, bf16, nf4);
        best = fmin(best, cpu_seconds(true) - start);
    }
    const int64_t* s = tile_shapes[i];
    double flops = 2.0 * (double)s[0] * (double)s[1] * (double)s[2];
    return ok ? 100.0 * flops / best / (peak * r->threads) : 0.0;
}

// One size; bf16: that of the kernels for bf16.
static void tile_size_run(tile_rig* r, const qlora__cpu_table* table, size_t i, bool bf16) {
    r->gemm = *table->gemm;
    r->table = *table;
    r->table.gemm = &r->gemm;
    qlora__cpu_tiles* tiles = &r->gemm.tiles;
    if (bf16) {
        r->bf16 = *table->bf16;
        r->table.bf16 = &r->bf16;
        tiles = &r->bf16.tiles;
    }
    tiles->steps = tile_sizes[i].steps;
    tiles->block = tile_sizes[i].block;
    r->ctx->cpu = &r->table;
    printf("%-11s %d threads, %4d steps, %3d columns:", table->name, r->threads,
           (int)tile_sizes[i].steps, (int)tile_sizes[i].block);
    for (int j = 0; j < 2 * TILE_SHAPES; j++) {
        printf("  %s %5.1f %%",
               j % 2 != 0 ? "NF4"
               : bf16     ? "bf16"
                          : "f32",
               tile_share(r, j / 2, bf16, j % 2 != 0));
    }
    printf("\n");
    fflush(stdout);
    r->ctx->cpu = table;
}

static bool tile_tier(const qlora__cpu_table* table, int threads) {
    tile_rig r;
    bool ok = tile_rig_make(&r, table, threads);
    for (size_t i = 0; ok && i < sizeof tile_sizes / sizeof tile_sizes[0]; i++) {
        bool f32 = tile_sizes[i].steps <= 640; // what the packed products have room for
        if (f32 && table->bf16 == NULL) {
            tile_size_run(&r, table, i, false);
        } else if (table->bf16 != NULL) {
            tile_size_run(&r, table, i, true);
        }
    }
    if (!ok) {
        fprintf(stderr, "tiles: %s\n", r.ctx != NULL ? qlora_last_error(r.ctx) : "no context");
    }
    tile_rig_free(&r);
    return ok;
}

int main(int argc, char** argv) {
    int threads = argc > 2 && strcmp(argv[1], "--threads") == 0 ? atoi(argv[2]) : 1;
    bool ok = threads > 0;
    for (int i = 0; ok && i < QLORA__CPU_TABLES; i++) {
        if (qlora__cpu_tables[i].gemm != NULL && qlora__cpu_tables[i].present()) {
            ok = tile_tier(&qlora__cpu_tables[i], threads);
        }
    }
    return ok ? 0 : 1;
}
