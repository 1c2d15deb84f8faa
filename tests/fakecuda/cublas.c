// cublas.c - the test double that qlora.h loads as libcublas.so.13: GEMM on the CPU, queued on the
// fake driver's streams like a kernel.
//
// It gets everything it needs from the fake libcuda.so.1, which is already loaded; with the real
// driver, or none, cublasCreate returns NOT_INITIALIZED. Sums run over k in ascending order in f32,
// one product at a time, so results do not depend on shape, tiling or machine. Build with
// -ffp-contract=off.
#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>

#define FAKE_PROTOTYPE(name, kind, release, args) int name args;
FAKE_CUBLAS_FUNCTIONS(FAKE_PROTOTYPE)
const char* cublasGetStatusName(int status);
const char* cublasGetStatusString(int status);

enum {
    SUCCESS = 0,
    NOT_INITIALIZED = 1,
    ALLOC_FAILED = 3,
    INVALID_VALUE = 7,
    EXECUTION_FAILED = 13,
    INTERNAL_ERROR = 14,
    NOT_SUPPORTED = 15
};

enum { R_32F = 0, R_16F = 2, R_16BF = 14 };
enum { COMPUTE_32F = 68, COMPUTE_FAST_16F = 74, COMPUTE_FAST_16BF = 75, COMPUTE_FAST_TF32 = 77 };
enum { MATH_TF32 = 3 };
enum { ILLEGAL_ADDRESS = 700, MISALIGNED_ADDRESS = 716 };

typedef struct handle {
    void* stream;
    int math;
    int pointer_mode;
    bool workspace_set;
    uint64_t workspace;
    size_t workspace_bytes;
} handle;

typedef struct matrix {
    uint64_t address;
    int type;
    int ld;
    int transposed;
    long long stride; // elements between batches
} matrix;

typedef struct gemm {
    int m;
    int n;
    int k;
    int batch;
    int compute; // after applying the math mode
    matrix a;
    matrix b;
    matrix c;
    bool device_scalars;
    float alpha;
    float beta;
    uint64_t alpha_at;
    uint64_t beta_at;
    uint64_t workspace;
    size_t workspace_bytes;
} gemm;

//@@ DRIVER - access to the fake driver

static const fake_inside* inside(void) {
    static const fake_inside* found = NULL; // every thread finds the same value
    if (!found) {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        void* symbol = library ? dlsym(library, "fake_get_inside") : NULL;
        const fake_inside* (*get)(void);
        if (symbol) {
            memcpy(&get, &symbol, sizeof get);
            found = get();
        }
    }
    return found;
}

// For most calls: the live data of a handle, to be used between enter and leave.
static int enter(const char* name, void* opaque, handle** h, int* late) {
    if (!inside()) {
        *h = NULL;
        return NOT_INITIALIZED;
    }
    int status = inside()->enter(name, late);
    *h = (handle*)inside()->object_data(opaque);
    return status ? status : *h ? SUCCESS : NOT_INITIALIZED;
}

static int leave(const char* name, int status, const char* said) {
    return inside() ? inside()->leave(name, status, said) : status;
}

//@@ NUMBERS - f32, f16, bf16, tf32

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Rounds to nearest even, dropping that many bits of the mantissa. A NaN stays a NaN.
static float round_bits(float x, unsigned drop) {
    uint32_t bits = bits_of(x);
    if ((bits & 0x7F800000u) == 0x7F800000u) {
        return x;
    }
    uint32_t half = (1u << (drop - 1)) - 1;
    bits += half + ((bits >> drop) & 1u);
    return float_of(bits & ~((1u << drop) - 1));
}

static uint16_t bf16_from(float x) {
    uint32_t bits = bits_of(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return (uint16_t)((bits >> 16) | 0x40u);
    }
    return (uint16_t)(bits_of(round_bits(x, 16)) >> 16);
}

static float f16_to(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 31u;
    uint32_t mantissa = h & 1023u;
    if (exponent == 31) {
        return float_of(sign | 0x7F800000u | (mantissa << 13));
    }
    if (exponent) {
        return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
    }
    float small = (float)mantissa * (1.0f / 16777216.0f); // 2^-24
    return sign ? -small : small;
}

static uint16_t f16_from(float x) {
    uint32_t bits = bits_of(x);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
    float magnitude = float_of(bits & 0x7FFFFFFFu);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return (uint16_t)(sign | 0x7E00u);
    }
    if (magnitude >= 65520.0f) {
        return (uint16_t)(sign | 0x7C00u);
    }
    if (magnitude < 6.103515625e-05f) { // below 2^-14: steps of 2^-24, rounded by the adder
        float shifted = magnitude + 0.5f;
        return (uint16_t)(sign | (bits_of(shifted) - bits_of(0.5f)));
    }
    uint32_t rounded = bits_of(round_bits(magnitude, 13));
    return (uint16_t)(sign | ((rounded >> 13) - (112u << 10)));
}

static size_t type_size(int type) {
    return type == R_32F ? 4 : 2;
}

static float load(const unsigned char* base, int type, size_t index) {
    if (type == R_32F) {
        float x;
        memcpy(&x, base + index * 4, 4);
        return x;
    }
    uint16_t half;
    memcpy(&half, base + index * 2, 2);
    return type == R_16BF ? float_of((uint32_t)half << 16) : f16_to(half);
}

static void store(unsigned char* base, int type, size_t index, float x) {
    if (type == R_32F) {
        memcpy(base + index * 4, &x, 4);
    } else {
        uint16_t half = type == R_16BF ? bf16_from(x) : f16_from(x);
        memcpy(base + index * 2, &half, 2);
    }
}

// The value of an f32 input on tensor cores in each compute mode.
static float round_input(float x, int compute) {
    switch (compute) {
    case COMPUTE_FAST_TF32:
        return round_bits(x, 13);
    case COMPUTE_FAST_16BF:
        return round_bits(x, 16);
    case COMPUTE_FAST_16F:
        return f16_to(f16_from(x));
    default:
        return x;
    }
}

//@@ GEMM - C = alpha op(A) op(B) + beta C, column-major

// Number of elements from the first to the last of a column-major rows x cols matrix, inclusive.
static size_t span(int rows, int cols, int ld) {
    return rows && cols ? (size_t)(cols - 1) * (size_t)ld + (size_t)rows : 0;
}

enum { TILE_M = 8, TILE_N = 4 };

static size_t round_up(int count, int tile) {
    return ((size_t)count + (size_t)tile - 1) / (size_t)tile * (size_t)tile;
}

// Reads a run of stored elements as the values that are multiplied.
static void decode(float* out, const unsigned char* from, int type, size_t count, int compute) {
    if (type == R_32F && compute == COMPUTE_32F) {
        memcpy(out, from, count * sizeof *out);
    } else if (type == R_16BF) {
        for (size_t i = 0; i < count; i++) {
            uint16_t half;
            memcpy(&half, from + i * 2, 2);
            out[i] = float_of((uint32_t)half << 16);
        }
    } else {
        for (size_t i = 0; i < count; i++) {
            out[i] = round_input(load(from, type, i), compute);
        }
    }
}

// Packs X for multiply: outer runs over its m or n side in tiles, inner over k:
// out[tile][inner][outer % tile]. along: the outer side is contiguous in memory.
static void pack(float* out, const unsigned char* base, const matrix* x, bool along, int outer,
                 int inner, int tile, int compute, float* line) {
    size_t run = (size_t)(along ? outer : inner);
    int runs = along ? inner : outer;
    size_t width = (size_t)tile;
    memset(out, 0, round_up(outer, tile) * (size_t)inner * sizeof *out);
    for (int r = 0; r < runs; r++) {
        decode(line, base + (size_t)r * (size_t)x->ld * type_size(x->type), x->type, run, compute);
        for (size_t i = 0; i < run; i++) {
            size_t o = along ? i : (size_t)r;
            size_t k = along ? (size_t)r : i;
            out[(o / width * (size_t)inner + k) * width + o % width] = line[i];
        }
    }
}

typedef float four __attribute__((vector_size(16)));

// An 8 x 4 tile of the result: its column j goes to out[j * rows ...]. Every sum runs k = 0, 1, 2
// ...
static void multiply_tile(float* out, size_t rows, const float* a, const float* b, int depth) {
    four sum[TILE_N][2];
    memset(sum, 0, sizeof sum);
    for (int k = 0; k < depth; k++) {
        four low;
        four high;
        memcpy(&low, a, sizeof low);
        memcpy(&high, a + 4, sizeof high);
        for (int j = 0; j < TILE_N; j++) {
            four value = {b[j], b[j], b[j], b[j]};
            sum[j][0] += low * value;
            sum[j][1] += high * value;
        }
        a += TILE_M;
        b += TILE_N;
    }
    for (size_t j = 0; j < TILE_N; j++) {
        memcpy(out + j * rows, sum[j], sizeof sum[j]);
    }
}

// sum[j * rows + i], where rows is m rounded up to whole tiles.
static void multiply(float* sum, const float* a, const float* b, int m, int n, int depth) {
    size_t rows = round_up(m, TILE_M);
    for (size_t j = 0; j < round_up(n, TILE_N); j += TILE_N) {
        for (size_t i = 0; i < rows; i += TILE_M) {
            multiply_tile(sum + j * rows + i, rows, a + i * (size_t)depth, b + j * (size_t)depth,
                          depth);
        }
    }
}

static void write_out(const gemm* g, unsigned char* base, const float* sum, float alpha,
                      float beta) {
    size_t rows = round_up(g->m, TILE_M);
    for (int col = 0; col < g->n; col++) {
        for (int row = 0; row < g->m; row++) {
            size_t at = (size_t)col * (size_t)g->c.ld + (size_t)row;
            float x = alpha * sum[(size_t)col * rows + (size_t)row];
            if (beta != 0.0f) { // with beta 0, C is never read: it may be NaN
                x += beta * load(base, g->c.type, at);
            }
            store(base, g->c.type, at, x);
        }
    }
}

static unsigned char* find(void* ctx, const matrix* x, int index, size_t elements) {
    uint64_t offset = (uint64_t)(x->stride * index) * (uint64_t)type_size(x->type);
    return (unsigned char*)inside()->resolve(ctx, x->address + offset,
                                             elements * type_size(x->type), true);
}

typedef struct gemm_room {
    float* memory;
    float* a;
    float* b;
    float* sum;
    float* line;
} gemm_room;

static bool room_make(const gemm* g, gemm_room* room) {
    size_t m = round_up(g->m, TILE_M);
    size_t n = round_up(g->n, TILE_N);
    size_t k = (size_t)g->k;
    room->memory = (float*)malloc((m * k + k * n + m * n + m + n + k) * sizeof(float));
    room->a = room->memory;
    room->b = room->a + m * k;
    room->sum = room->b + k * n;
    room->line = room->sum + m * n;
    return room->memory != NULL;
}

// Reports what the product uses of a matrix with columns of `rows` elements.
static void touch(const matrix* x, int index, int rows, int columns, bool write) {
    size_t size = type_size(x->type);
    if (rows > 0 && columns > 0) {
        inside()->touch(x->address + (uint64_t)(x->stride * index) * size, (size_t)rows * size,
                        (size_t)columns, (size_t)x->ld * size, write);
    }
}

// One matrix of the batch; returns 0 or a CUresult.
static int gemm_one(void* ctx, const gemm* g, int index, const gemm_room* room, float alpha,
                    float beta) {
    size_t a_span = g->a.transposed ? span(g->k, g->m, g->a.ld) : span(g->m, g->k, g->a.ld);
    size_t b_span = g->b.transposed ? span(g->n, g->k, g->b.ld) : span(g->k, g->n, g->b.ld);
    unsigned char* c_base = find(ctx, &g->c, index, span(g->m, g->n, g->c.ld));
    unsigned char* a_base = g->k ? find(ctx, &g->a, index, a_span) : c_base;
    unsigned char* b_base = g->k ? find(ctx, &g->b, index, b_span) : c_base;
    if (!a_base || !b_base || !c_base) {
        return ILLEGAL_ADDRESS;
    }
    touch(&g->c, index, g->m, g->n, true);
    if (g->k) {
        touch(&g->a, index, g->a.transposed ? g->k : g->m, g->a.transposed ? g->m : g->k, false);
        touch(&g->b, index, g->b.transposed ? g->n : g->k, g->b.transposed ? g->k : g->n, false);
        pack(room->a, a_base, &g->a, !g->a.transposed, g->m, g->k, TILE_M, g->compute, room->line);
        pack(room->b, b_base, &g->b, g->b.transposed != 0, g->n, g->k, TILE_N, g->compute,
             room->line);
    }
    multiply(room->sum, room->a, room->b, g->m, g->n, g->k);
    write_out(g, c_base, room->sum, alpha, beta);
    return 0;
}

// The library may overwrite its workspace, so nothing else may use that memory.
static int workspace_use(void* ctx, const gemm* g) {
    if (!g->workspace_bytes) {
        return 0;
    }
    unsigned char* base =
        (unsigned char*)inside()->resolve(ctx, g->workspace, g->workspace_bytes, true);
    if (!base) {
        inside()->broken("cuBLAS: the workspace was freed while a GEMM needs it");
        return ILLEGAL_ADDRESS;
    }
    inside()->touch(g->workspace, 64, 1, 0, true); // that much stands for all of it
    size_t bytes = g->workspace_bytes < 65536 ? g->workspace_bytes : 65536;
    memset(base, 0xD5, bytes);
    memset(base + g->workspace_bytes - bytes % 256, 0xD5, bytes % 256);
    return 0;
}

static int gemm_run(void* ctx, const void* payload) {
    const gemm* g = (const gemm*)payload;
    float alpha = g->alpha;
    float beta = g->beta;
    if (g->device_scalars) {
        const void* first = inside()->resolve(ctx, g->alpha_at, 4, false);
        const void* second = inside()->resolve(ctx, g->beta_at, 4, false);
        if (!first || !second) {
            return ILLEGAL_ADDRESS;
        }
        memcpy(&alpha, first, 4);
        memcpy(&beta, second, 4);
    }
    if (g->a.address % type_size(g->a.type) || g->b.address % type_size(g->b.type) ||
        g->c.address % type_size(g->c.type)) {
        return MISALIGNED_ADDRESS;
    }
    int code = workspace_use(ctx, g);
    gemm_room room;
    if (code || !room_make(g, &room)) {
        return code ? code : ILLEGAL_ADDRESS;
    }
    for (int i = 0; i < g->batch && !code; i++) {
        code = gemm_one(ctx, g, i, &room, alpha, beta);
    }
    free(room.memory);
    inside()->count_gemm();
    return code;
}

static bool types_supported(const gemm* g) {
    if (g->a.type != g->b.type) {
        return false;
    }
    switch (g->compute) {
    case COMPUTE_32F:
        return g->a.type == R_32F ? g->c.type == R_32F
                                  : (g->a.type == R_16F || g->a.type == R_16BF) &&
                                        (g->c.type == R_32F || g->c.type == g->a.type);
    case COMPUTE_FAST_16F:
    case COMPUTE_FAST_16BF:
    case COMPUTE_FAST_TF32:
        return g->a.type == R_32F && g->c.type == R_32F;
    default:
        return false;
    }
}

static bool shape_valid(const gemm* g) {
    int a_rows = g->a.transposed ? g->k : g->m;
    int b_rows = g->b.transposed ? g->n : g->k;
    return g->m >= 0 && g->n >= 0 && g->k >= 0 && g->batch >= 0 && g->a.ld >= 1 && g->b.ld >= 1 &&
           g->c.ld >= 1 && g->a.ld >= a_rows && g->b.ld >= b_rows && g->c.ld >= g->m;
}

// The checks that need the driver, then the queueing. The lock is held.
static int gemm_submit(void* opaque, const handle* h, gemm* g) {
    void* ctx = NULL;
    bool capturing = false;
    if (inside()->current(&ctx)) {
        return EXECUTION_FAILED;
    }
    if (ctx != inside()->object_owner(opaque)) {
        inside()->broken("cuBLAS: the handle belongs to another context");
        return INTERNAL_ERROR;
    }
    if (!inside()->stream_valid(ctx, h->stream, &capturing)) {
        inside()->broken("cuBLAS: the handle's stream is destroyed or belongs to another context");
        return EXECUTION_FAILED;
    }
    if (capturing && !h->workspace_set) {
        inside()->broken("cuBLAS: a GEMM was captured without a caller-provided workspace");
        inside()->capture_break(ctx, h->stream, "a GEMM without workspace");
        return INTERNAL_ERROR;
    }
    if (!g->m || !g->n || !g->batch) {
        return SUCCESS;
    }
    if (h->math == MATH_TF32 && g->compute == COMPUTE_32F && g->a.type == R_32F) {
        g->compute = COMPUTE_FAST_TF32;
    }
    g->workspace = h->workspace;
    g->workspace_bytes = h->workspace_set ? h->workspace_bytes : 0;
    return inside()->submit(ctx, h->stream, gemm_run, g, sizeof *g) ? EXECUTION_FAILED : SUCCESS;
}

static int gemm_call(const char* name, void* opaque, gemm* g, const void* alpha, const void* beta) {
    handle* h = NULL;
    int late = 0;
    char said[160];
    int status = enter(name, opaque, &h, &late);
    if (!status && (!shape_valid(g) || !alpha || !beta)) {
        status = INVALID_VALUE;
    }
    if (!status && !types_supported(g)) {
        status = NOT_SUPPORTED;
    }
    if (!status && g->m && g->n && g->batch &&
        (!g->c.address || (g->k && (!g->a.address || !g->b.address)))) {
        status = INVALID_VALUE;
    }
    if (!status) {
        g->device_scalars = h->pointer_mode == 1;
        if (g->device_scalars) {
            g->alpha_at = (uint64_t)(uintptr_t)alpha;
            g->beta_at = (uint64_t)(uintptr_t)beta;
        } else {
            memcpy(&g->alpha, alpha, sizeof g->alpha);
            memcpy(&g->beta, beta, sizeof g->beta);
        }
        status = gemm_submit(opaque, h, g);
    }
    snprintf(said, sizeof said, "%c%c %d %d %d x%d, types %d %d %d, compute %d",
             g->a.transposed ? 'T' : 'N', g->b.transposed ? 'T' : 'N', g->m, g->n, g->k, g->batch,
             g->a.type, g->b.type, g->c.type, g->compute);
    return leave(name, status, said);
}

static matrix matrix_of(const void* data, int type, int ld, int operation, long long stride) {
    matrix x;
    memset(&x, 0, sizeof x);
    x.address = (uint64_t)(uintptr_t)data;
    x.type = type;
    x.ld = ld;
    x.transposed = operation != 0;
    x.stride = stride;
    return x;
}

int cublasGemmStridedBatchedEx(void* opaque, int ta, int tb, int m, int n, int k, const void* alpha,
                               const void* a, int atype, int lda, long long stride_a, const void* b,
                               int btype, int ldb, long long stride_b, const void* beta, void* c,
                               int ctype, int ldc, long long stride_c, int batch, int compute,
                               int algo) {
    gemm g;
    (void)algo;
    memset(&g, 0, sizeof g);
    g.m = m;
    g.n = n;
    g.k = k;
    g.batch = batch;
    g.compute = compute;
    g.a = matrix_of(a, atype, lda, ta, stride_a);
    g.b = matrix_of(b, btype, ldb, tb, stride_b);
    g.c = matrix_of(c, ctype, ldc, 0, stride_c);
    return gemm_call("cublasGemmStridedBatchedEx", opaque, &g, alpha, beta);
}

int cublasGemmEx(void* opaque, int ta, int tb, int m, int n, int k, const void* alpha,
                 const void* a, int atype, int lda, const void* b, int btype, int ldb,
                 const void* beta, void* c, int ctype, int ldc, int compute, int algo) {
    gemm g;
    (void)algo;
    memset(&g, 0, sizeof g);
    g.m = m;
    g.n = n;
    g.k = k;
    g.batch = 1;
    g.compute = compute;
    g.a = matrix_of(a, atype, lda, ta, 0);
    g.b = matrix_of(b, btype, ldb, tb, 0);
    g.c = matrix_of(c, ctype, ldc, 0, 0);
    return gemm_call("cublasGemmEx", opaque, &g, alpha, beta);
}

//@@ HANDLES

int cublasCreate_v2(void** out) {
    int late = 0;
    void* ctx = NULL;
    if (!inside()) {
        return NOT_INITIALIZED;
    }
    int status = inside()->enter("cublasCreate_v2", &late);
    if (!status && !out) {
        status = INVALID_VALUE;
    }
    if (!status) {
        status = inside()->config()->cublas_create;
    }
    if (!status && inside()->current(&ctx)) {
        status = NOT_INITIALIZED;
    }
    if (!status && inside()->unsafe("cublasCreate_v2")) {
        status = INTERNAL_ERROR; // the call would allocate memory
    }
    if (!status) {
        *out = inside()->object_make(sizeof(handle), ctx);
    }
    return leave("cublasCreate_v2", status, status ? "" : inside()->tag(*out));
}

int cublasDestroy_v2(void* opaque) {
    handle* h = NULL;
    int late = 0;
    int status = enter("cublasDestroy_v2", opaque, &h, &late);
    const char* name = inside() ? inside()->tag(opaque) : "";
    if (!status && inside()->unsafe("cublasDestroy_v2")) {
        status = INTERNAL_ERROR;
    }
    if (!status) {
        inside()->object_drop(opaque);
        status = late;
    }
    return leave("cublasDestroy_v2", status, name);
}

int cublasGetVersion_v2(void* opaque, int* version) {
    int late = 0;
    (void)opaque; // the real one also works without a handle
    int status = inside() ? inside()->enter("cublasGetVersion_v2", &late) : NOT_INITIALIZED;
    if (!status && !version) {
        status = INVALID_VALUE;
    }
    if (!status) {
        *version = inside()->config()->cublas_version;
    }
    return leave("cublasGetVersion_v2", status, "");
}

// As in the real library, setting a stream, even the same one, discards the caller's workspace.
int cublasSetStream_v2(void* opaque, void* stream) {
    handle* h = NULL;
    int late = 0;
    bool capturing = false;
    int status = enter("cublasSetStream_v2", opaque, &h, &late);
    if (!status && !inside()->stream_valid(inside()->object_owner(opaque), stream, &capturing)) {
        inside()->broken("cublasSetStream: the stream is destroyed or belongs to another context");
        status = INVALID_VALUE;
    }
    if (!status) {
        h->stream = stream;
        h->workspace_set = false;
    }
    return leave("cublasSetStream_v2", status, inside() ? inside()->tag(stream) : "");
}

int cublasGetStream_v2(void* opaque, void** stream) {
    handle* h = NULL;
    int late = 0;
    int status = enter("cublasGetStream_v2", opaque, &h, &late);
    if (!status && !stream) {
        status = INVALID_VALUE;
    }
    if (!status) {
        *stream = h->stream;
    }
    return leave("cublasGetStream_v2", status, "");
}

int cublasSetWorkspace_v2(void* opaque, void* workspace, size_t bytes) {
    handle* h = NULL;
    int late = 0;
    char said[80];
    uint64_t address = (uint64_t)(uintptr_t)workspace;
    int status = enter("cublasSetWorkspace_v2", opaque, &h, &late);
    if (!status &&
        (address % 256 || (bytes && !workspace) ||
         (bytes && !inside()->resolve(inside()->object_owner(opaque), address, bytes, true)))) {
        inside()->broken("cublasSetWorkspace: not live device memory on a 256-byte boundary");
        status = INVALID_VALUE;
    }
    if (!status) {
        h->workspace_set = true;
        h->workspace = address;
        h->workspace_bytes = bytes;
    }
    snprintf(said, sizeof said, "%s, %zu", inside() ? inside()->tag_address(address) : "", bytes);
    return leave("cublasSetWorkspace_v2", status, said);
}

static int set_member(const char* name, void* opaque, size_t offset, int value, int limit) {
    handle* h = NULL;
    int late = 0;
    char said[16];
    int status = enter(name, opaque, &h, &late);
    if (!status && (value < 0 || value > limit)) {
        status = INVALID_VALUE;
    }
    if (!status) {
        memcpy((unsigned char*)h + offset, &value, sizeof value);
    }
    snprintf(said, sizeof said, "%d", value);
    return leave(name, status, said);
}

static int get_member(const char* name, void* opaque, size_t offset, int* value) {
    handle* h = NULL;
    int late = 0;
    int status = enter(name, opaque, &h, &late);
    if (!status && !value) {
        status = INVALID_VALUE;
    }
    if (!status) {
        memcpy(value, (unsigned char*)h + offset, sizeof *value);
    }
    return leave(name, status, "");
}

// The mode, with a flag that forbids reduced-precision reductions (16).
int cublasSetMathMode(void* opaque, int mode) {
    return set_member("cublasSetMathMode", opaque, offsetof(handle, math), mode & ~16, 8);
}

int cublasGetMathMode(void* opaque, int* mode) {
    return get_member("cublasGetMathMode", opaque, offsetof(handle, math), mode);
}

int cublasSetPointerMode_v2(void* opaque, int mode) {
    return set_member("cublasSetPointerMode_v2", opaque, offsetof(handle, pointer_mode), mode, 1);
}

int cublasGetPointerMode_v2(void* opaque, int* mode) {
    return get_member("cublasGetPointerMode_v2", opaque, offsetof(handle, pointer_mode), mode);
}

int cublasSetAtomicsMode(void* opaque, int mode) {
    handle* h = NULL;
    int late = 0;
    int status = enter("cublasSetAtomicsMode", opaque, &h, &late);
    if (!status && mode) {
        inside()->broken("cublasSetAtomicsMode allows atomics: results would not repeat");
    }
    return leave("cublasSetAtomicsMode", status, mode ? "1" : "0");
}

const char* cublasGetStatusName(int status) {
    switch (status) {
    case SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case NOT_INITIALIZED:
        return "CUBLAS_STATUS_NOT_INITIALIZED";
    case ALLOC_FAILED:
        return "CUBLAS_STATUS_ALLOC_FAILED";
    case INVALID_VALUE:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case EXECUTION_FAILED:
        return "CUBLAS_STATUS_EXECUTION_FAILED";
    case INTERNAL_ERROR:
        return "CUBLAS_STATUS_INTERNAL_ERROR";
    case NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
        return "unknown status";
    }
}

const char* cublasGetStatusString(int status) {
    return status ? "the fake cuBLAS refused the call" : "success";
}
