// cublaslt.c - the test double that qlora.h loads as libcublasLt.so.13: products of e4m3 matrices
// with a scale per row, on the CPU, queued on the fake driver's streams like a kernel.
//
// It accepts what was seen to work on compute capability 9.0 and refuses the rest as the library
// does: A transposed, B not, both e4m3, C = D in bf16, scales of both in mode 3 (one per row), with
// K and leading dimensions of multiples of 16 bytes, and attributes of their exact size. The exact
// sum of a product is rounded once to f32, so results do not depend on an order. Build with
// -ffp-contract=off.
#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>

#define FAKE_PROTOTYPE(name, kind, release, args) int name args;
FAKE_CUBLASLT_FUNCTIONS(FAKE_PROTOTYPE)
size_t cublasLtGetVersion(void);

enum {
    SUCCESS = 0,
    NOT_INITIALIZED = 1,
    INVALID_VALUE = 7,
    EXECUTION_FAILED = 13,
    INTERNAL_ERROR = 14,
    NOT_SUPPORTED = 15
};
enum { R_16BF = 14, R_8F_E4M3 = 28, COMPUTE_32F = 68, OUTER_VEC_32F = 3 };
enum { ILLEGAL_ADDRESS = 700, MISALIGNED_ADDRESS = 716 };
enum { HANDLE = 1, DESC, LAYOUT, PREFERENCE };

typedef struct item {
    int kind;
    // DESC
    int transposed[2];
    int mode[2]; // of the scales of A and B
    uint64_t scales[2];
    // LAYOUT
    int type;
    int64_t rows;
    int64_t cols;
    int64_t ld;
    // PREFERENCE
    uint64_t workspace;
} item;

typedef struct result {
    uint64_t algo[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} result;

typedef struct product {
    int64_t m;
    int64_t n;
    int64_t k;
    int64_t ldd;
    uint64_t a;
    uint64_t b;
    uint64_t d;
    uint64_t a_scales;
    uint64_t b_scales;
    uint64_t workspace;
    size_t bytes;
    float alpha;
    float beta;
} product;

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

static int leave(const char* name, int status, const char* said) {
    return inside() ? inside()->leave(name, status, said) : status;
}

static item* item_of(void* opaque, int kind) {
    item* x = opaque ? (item*)inside()->object_data(opaque) : NULL;
    return x && x->kind == kind ? x : NULL;
}

static int make(const char* name, void** out, int kind, item** made) {
    int late = 0;
    void* ctx = NULL;
    if (!inside()) {
        return NOT_INITIALIZED;
    }
    int status = inside()->enter(name, &late);
    if (!status && !out) {
        status = INVALID_VALUE;
    }
    if (!status && inside()->current(&ctx)) {
        status = NOT_INITIALIZED;
    }
    if (!status && kind == HANDLE && inside()->unsafe(name)) {
        status = INTERNAL_ERROR; // the call would allocate memory
    }
    if (!status) {
        *out = inside()->object_make(sizeof(item), ctx);
        *made = (item*)inside()->object_data(*out);
        (*made)->kind = kind;
    }
    return status;
}

static int drop(const char* name, void* opaque, int kind) {
    int late = 0;
    if (!inside()) {
        return NOT_INITIALIZED;
    }
    int status = inside()->enter(name, &late);
    if (!status && !item_of(opaque, kind)) {
        status = INVALID_VALUE;
    }
    if (!status) {
        inside()->object_drop(opaque);
        status = late;
    }
    return leave(name, status, "");
}

//@@ OBJECTS

int cublasLtCreate(void** out) {
    item* x = NULL;
    int status = make("cublasLtCreate", out, HANDLE, &x);
    return leave("cublasLtCreate", status, "");
}

int cublasLtDestroy(void* handle) {
    return drop("cublasLtDestroy", handle, HANDLE);
}

size_t cublasLtGetVersion(void) {
    return inside() ? (size_t)inside()->config()->cublas_version : 0;
}

int cublasLtMatmulDescCreate(void** out, int compute, int scale) {
    item* x = NULL;
    int status = make("cublasLtMatmulDescCreate", out, DESC, &x);
    if (!status && (compute != COMPUTE_32F || scale != 0)) {
        inside()->object_drop(*out);
        status = INVALID_VALUE;
    }
    return leave("cublasLtMatmulDescCreate", status, "");
}

int cublasLtMatmulDescDestroy(void* desc) {
    return drop("cublasLtMatmulDescDestroy", desc, DESC);
}

// Any value is accepted, as in the library: what is not supported shows in the heuristic.
int cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* value, size_t bytes) {
    const char* name = "cublasLtMatmulDescSetAttribute";
    int late = 0;
    char said[32];
    int status = inside() ? inside()->enter(name, &late) : NOT_INITIALIZED;
    item* x = status ? NULL : item_of(desc, DESC);
    const struct {
        int attribute;
        size_t bytes;
        void* to;
    } rows[] = {{3, 4, x ? &x->transposed[0] : NULL},
                {4, 4, x ? &x->transposed[1] : NULL},
                {17, 8, x ? &x->scales[0] : NULL},
                {18, 8, x ? &x->scales[1] : NULL},
                {25, 1, NULL},
                {31, 4, x ? &x->mode[0] : NULL},
                {32, 4, x ? &x->mode[1] : NULL}};
    bool known = false;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0] && !status && x && value; i++) {
        if (rows[i].attribute == attribute && rows[i].bytes == bytes) {
            known = true;
            if (rows[i].to) {
                memcpy(rows[i].to, value, bytes);
            }
        }
    }
    if (!status && !known) {
        status = INVALID_VALUE;
    }
    snprintf(said, sizeof said, "%d", attribute);
    return leave(name, status, said);
}

int cublasLtMatrixLayoutCreate(void** out, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    item* x = NULL;
    int status = make("cublasLtMatrixLayoutCreate", out, LAYOUT, &x);
    if (!status) {
        x->type = type;
        x->rows = (int64_t)rows;
        x->cols = (int64_t)cols;
        x->ld = ld;
    }
    return leave("cublasLtMatrixLayoutCreate", status, "");
}

int cublasLtMatrixLayoutDestroy(void* layout) {
    return drop("cublasLtMatrixLayoutDestroy", layout, LAYOUT);
}

int cublasLtMatmulPreferenceCreate(void** out) {
    item* x = NULL;
    int status = make("cublasLtMatmulPreferenceCreate", out, PREFERENCE, &x);
    return leave("cublasLtMatmulPreferenceCreate", status, "");
}

int cublasLtMatmulPreferenceDestroy(void* preference) {
    return drop("cublasLtMatmulPreferenceDestroy", preference, PREFERENCE);
}

int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value,
                                         size_t bytes) {
    const char* name = "cublasLtMatmulPreferenceSetAttribute";
    int late = 0;
    int status = inside() ? inside()->enter(name, &late) : NOT_INITIALIZED;
    item* x = status ? NULL : item_of(preference, PREFERENCE);
    if (!status && (!x || !value || attribute != 1 || bytes != 8)) {
        status = INVALID_VALUE;
    }
    if (!status) {
        memcpy(&x->workspace, value, sizeof x->workspace);
    }
    return leave(name, status, "");
}

//@@ PRODUCTS - D = alpha A^T B * scales + beta D, column-major

static float e4m3_to(unsigned char code) {
    int exponent = code >> 3 & 15;
    int mantissa = code & 7;
    uint32_t bits = 0x7FC00000u;
    float x = 0.0f;
    if ((code & 0x7F) == 0x7F) {
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    x = exponent ? (float)(8 + mantissa) : (float)mantissa;
    for (int e = exponent ? exponent : 1; e < 10; e++) { // (8 + m) 2^(exponent - 10)
        x *= 0.5f;
    }
    for (int e = exponent; e > 10; e--) {
        x *= 2.0f;
    }
    return (code & 0x80) != 0 ? -x : x;
}

static float bf16_to(const unsigned char* from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void bf16_put(unsigned char* to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    uint16_t half = (uint16_t)(nan ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    memcpy(to, &half, sizeof half);
}

// e4m3 values are multiples of 2^-9 below 2^9, so a sum of doubles is exact.
static void multiply(const product* p, const unsigned char* a, const unsigned char* b,
                     const unsigned char* a_scales, const unsigned char* b_scales,
                     unsigned char* d) {
    float values[256];
    for (int i = 0; i < 256; i++) {
        values[i] = e4m3_to((unsigned char)i);
    }
    for (int64_t j = 0; j < p->n; j++) {
        for (int64_t i = 0; i < p->m; i++) {
            double sum = 0.0;
            float scale_a;
            float scale_b;
            unsigned char* at = d + (size_t)(j * p->ldd + i) * 2;
            for (int64_t k = 0; k < p->k; k++) {
                sum += (double)values[a[i * p->k + k]] * (double)values[b[j * p->k + k]];
            }
            memcpy(&scale_a, a_scales + (size_t)i * 4, 4);
            memcpy(&scale_b, b_scales + (size_t)j * 4, 4);
            float x = (float)sum * scale_a * scale_b * p->alpha;
            x = p->beta != 0.0f ? x + p->beta * bf16_to(at) : x; // with beta 0, D may be NaN
            bf16_put(at, x);
        }
    }
}

static int run(void* ctx, const void* payload) {
    const product* p = (const product*)payload;
    const fake_inside* in = inside();
    size_t d_bytes = (size_t)((p->n - 1) * p->ldd + p->m) * 2;
    unsigned char* a = (unsigned char*)in->resolve(ctx, p->a, (size_t)(p->m * p->k), false);
    unsigned char* b = (unsigned char*)in->resolve(ctx, p->b, (size_t)(p->n * p->k), false);
    unsigned char* d = (unsigned char*)in->resolve(ctx, p->d, d_bytes, true);
    unsigned char* x = (unsigned char*)in->resolve(ctx, p->a_scales, (size_t)p->m * 4, false);
    unsigned char* y = (unsigned char*)in->resolve(ctx, p->b_scales, (size_t)p->n * 4, false);
    unsigned char* room = (unsigned char*)in->resolve(ctx, p->workspace, p->bytes, true);
    if (!a || !b || !d || !x || !y || !room) {
        return ILLEGAL_ADDRESS;
    }
    if ((p->a | p->b | p->d) % 16 || (p->a_scales | p->b_scales) % 4) {
        return MISALIGNED_ADDRESS;
    }
    in->touch(p->a, (size_t)(p->m * p->k), 1, 0, false);
    in->touch(p->b, (size_t)(p->n * p->k), 1, 0, false);
    in->touch(p->a_scales, (size_t)p->m * 4, 1, 0, false);
    in->touch(p->b_scales, (size_t)p->n * 4, 1, 0, false);
    in->touch(p->d, (size_t)p->m * 2, (size_t)p->n, (size_t)p->ldd * 2, true);
    in->touch(p->workspace, 64, 1, 0, true); // that much stands for all of it
    memset(room, 0xD5, p->bytes < 65536 ? p->bytes : 65536); // the library may use all of it
    multiply(p, a, b, x, y, d);
    in->count_gemm();
    return 0;
}

// Status of a product as the heuristic reports it.
static int supported(const item* desc, const item* a, const item* b, const item* c, const item* d) {
    if (!desc || !a || !b || !c || !d) {
        return INVALID_VALUE;
    }
    if (a->rows != b->rows || d->rows != a->cols || d->cols != b->cols || c->rows != d->rows ||
        c->cols != d->cols || a->ld < a->rows || b->ld < b->rows || d->ld < d->rows) {
        return INVALID_VALUE;
    }
    bool types =
        a->type == R_8F_E4M3 && b->type == R_8F_E4M3 && c->type == R_16BF && d->type == R_16BF;
    bool layout = desc->transposed[0] == 1 && desc->transposed[1] == 0;
    bool scales = desc->mode[0] == OUTER_VEC_32F && desc->mode[1] == OUTER_VEC_32F &&
                  desc->scales[0] && desc->scales[1];
    bool sizes = a->rows % 16 == 0 && a->ld == a->rows && b->ld == b->rows && d->ld * 2 % 16 == 0 &&
                 c->ld == d->ld && d->rows % 8 == 0 && d->cols > 0 && a->rows > 0;
    return types && layout && scales && sizes ? SUCCESS : NOT_SUPPORTED;
}

// The mark of an algorithm: it may only be used for the shape it was chosen for.
static void algo_of(const item* a, const item* d, uint64_t algo[8]) {
    memset(algo, 0, 8 * sizeof algo[0]);
    algo[0] = 0xF8F8;
    algo[1] = (uint64_t)a->rows;
    algo[2] = (uint64_t)d->rows;
    algo[3] = (uint64_t)d->cols;
    algo[4] = (uint64_t)d->ld;
}

int cublasLtMatmulAlgoGetHeuristic(void* handle, void* desc, void* a, void* b, void* c, void* d,
                                   void* preference, int wanted, void* results, int* found) {
    const char* name = "cublasLtMatmulAlgoGetHeuristic";
    int late = 0;
    int status = inside() ? inside()->enter(name, &late) : NOT_INITIALIZED;
    if (!status && (!item_of(handle, HANDLE) || !item_of(preference, PREFERENCE) || wanted < 1 ||
                    !results || !found)) {
        status = INVALID_VALUE;
    }
    if (!status) {
        status = supported(item_of(desc, DESC), item_of(a, LAYOUT), item_of(b, LAYOUT),
                           item_of(c, LAYOUT), item_of(d, LAYOUT));
        *found = status ? 0 : 1;
    }
    if (!status) {
        result one;
        memset(&one, 0, sizeof one);
        algo_of(item_of(a, LAYOUT), item_of(d, LAYOUT), one.algo);
        one.workspace = 4096;
        memcpy(results, &one, sizeof one);
    }
    return leave(name, status, "");
}

int cublasLtMatmul(void* handle, void* desc, const void* alpha, const void* a, void* a_layout,
                   const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
                   void* d, void* d_layout, const void* algo, void* workspace, size_t bytes,
                   void* stream) {
    const char* name = "cublasLtMatmul";
    int late = 0;
    char said[96] = "";
    void* ctx = NULL;
    bool capturing = false;
    int status = inside() ? inside()->enter(name, &late) : NOT_INITIALIZED;
    const item* of[4] = {NULL, NULL, NULL, NULL};
    if (!status) {
        of[0] = item_of(desc, DESC);
        of[1] = item_of(a_layout, LAYOUT);
        of[2] = item_of(b_layout, LAYOUT);
        of[3] = item_of(d_layout, LAYOUT);
        status = item_of(handle, HANDLE) && alpha && beta && a && b && c == d && algo
                     ? supported(of[0], of[1], of[2], item_of(c_layout, LAYOUT), of[3])
                     : INVALID_VALUE;
    }
    if (!status) {
        uint64_t mark[8];
        algo_of(of[1], of[3], mark);
        if (memcmp(mark, algo, sizeof mark) != 0) {
            inside()->broken("cublasLtMatmul: the algorithm was chosen for another shape");
            status = INVALID_VALUE;
        } else if (bytes < 4096 || (uint64_t)(uintptr_t)workspace % 256) {
            inside()->broken("cublasLtMatmul: the workspace is too small or not aligned");
            status = INVALID_VALUE;
        } else if (inside()->current(&ctx) || !inside()->stream_valid(ctx, stream, &capturing)) {
            status = EXECUTION_FAILED;
        }
    }
    if (!status) {
        product p;
        memset(&p, 0, sizeof p);
        p.m = of[3]->rows;
        p.n = of[3]->cols;
        p.k = of[1]->rows;
        p.ldd = of[3]->ld;
        p.a = (uint64_t)(uintptr_t)a;
        p.b = (uint64_t)(uintptr_t)b;
        p.d = (uint64_t)(uintptr_t)d;
        p.a_scales = of[0]->scales[0];
        p.b_scales = of[0]->scales[1];
        p.workspace = (uint64_t)(uintptr_t)workspace;
        p.bytes = bytes;
        memcpy(&p.alpha, alpha, sizeof p.alpha);
        memcpy(&p.beta, beta, sizeof p.beta);
        snprintf(said, sizeof said, "%lld %lld %lld", (long long)p.m, (long long)p.n,
                 (long long)p.k);
        status = inside()->submit(ctx, stream, run, &p, sizeof p) ? EXECUTION_FAILED : SUCCESS;
    }
    return leave(name, status, said);
}
