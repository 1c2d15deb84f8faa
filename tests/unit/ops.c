// ops.c - the operators, verified in three ways: the CPU loops in double by finite differences, the
// CPU loops in float and bf16 against those in double, and the kernels against both.
//
// A case runs one operator call on a rig (a build of the library, a context, a dtype, a memory
// layout) with inputs that every dtype holds exactly, and collects the outputs as doubles. Memory
// outside the elements (guards, padding between rows) and outputs before they are written are NaN;
// the memory outside must be unchanged afterwards.
#include "machines.h"
#include "ops_api.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- rigs and matrices ----

typedef enum layout {
    TIGHT,  // allocations of the exact size: one element too far traps
    PADDED, // rows on 16-byte boundaries, followed by padding, guards around
    ODD,    // misaligned data, odd leading dimensions, guards around
    LAYOUTS
} layout;

typedef struct matrix {
    qlora_tensor t;
    qlora_tensor store;   // the allocation, as bytes
    unsigned char* image; // what was uploaded
    size_t bytes;
    size_t offset; // offset of the first element
    size_t element;
    struct matrix* next;
} matrix;

typedef struct rig {
    const ops_api* api;
    qlora_ctx* ctx;
    qlora_dtype dtype; // dtype of the operator's main tensors
    layout place;
    matrix* all;
    bool ok;
} rig;

static const ops_api as_built = {sizeof(float), OPS_API_FUNCTIONS};

static void complain(rig* r, const char* format, ...) {
    va_list args;
    va_start(args, format);
    printf("    ");
    vprintf(format, args);
    printf("\n");
    va_end(args);
    r->ok = false;
}

static void expect_ok(rig* r, qlora_result result, const char* what) {
    if (result != QLORA_OK) {
        complain(r, "%s: %s", what, r->api->last_error(r->ctx));
    }
}
#define DO(r, call) expect_ok((r), (r)->api->call, #call)

static uint16_t bf16_bits(double value) {
    float x = (float)value;
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static double bf16_value(uint16_t bits) {
    uint32_t u = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return (double)x;
}

// Only for values that f16 holds exactly.
static uint16_t f16_bits(double value) {
    float x = (float)value;
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    uint32_t sign = u >> 16 & 0x8000u;
    int exponent = (int)(u >> 23 & 255u) - 112;
    if (exponent <= 0) {
        return (uint16_t)sign;
    }
    return (uint16_t)(sign | (uint32_t)exponent << 10 | (u >> 13 & 0x3ffu));
}

static void put_element(const matrix* m, unsigned char* at, double value) {
    if (m->t.dtype == QLORA_BF16 || m->t.dtype == QLORA_F16) {
        uint16_t bits = m->t.dtype == QLORA_BF16 ? bf16_bits(value) : f16_bits(value);
        memcpy(at, &bits, sizeof bits);
    } else if (m->t.dtype == QLORA_I32) {
        int32_t i = (int32_t)value;
        memcpy(at, &i, sizeof i);
    } else if (m->element == sizeof(double)) {
        memcpy(at, &value, sizeof value);
    } else {
        float x = (float)value;
        memcpy(at, &x, sizeof x);
    }
}

static double get_element(const matrix* m, const unsigned char* at) {
    if (m->t.dtype == QLORA_BF16) {
        uint16_t bits;
        memcpy(&bits, at, sizeof bits);
        return bf16_value(bits);
    }
    if (m->t.dtype == QLORA_I32) {
        int32_t i;
        memcpy(&i, at, sizeof i);
        return (double)i;
    }
    if (m->element == sizeof(double)) {
        double x;
        memcpy(&x, at, sizeof x);
        return x;
    }
    float x;
    memcpy(&x, at, sizeof x);
    return (double)x;
}

static size_t element_at(const matrix* m, int64_t b, int64_t row, int64_t c) {
    return m->offset + (size_t)(b * m->t.batch_stride + row * m->t.ld + c) * m->element;
}

static size_t element_bytes(const rig* r, qlora_dtype dtype) {
    switch (dtype) {
    case QLORA_F32:
        return r->api->real_bytes;
    case QLORA_BF16:
    case QLORA_F16:
        return 2;
    case QLORA_I32:
        return 4;
    default:
        return 1;
    }
}

// values may be NULL: then the elements are also NaN.
static matrix* make_batch(rig* r, qlora_dtype dtype, int64_t batch, int64_t rows, int64_t cols,
                          const double* values) {
    matrix* m = (matrix*)calloc(1, sizeof *m);
    if (m == NULL) {
        abort();
    }
    m->next = r->all;
    r->all = m;
    m->element = element_bytes(r, dtype);
    bool vector = rows == 1 && batch == 1; // operators do not constrain a vector's ld
    int64_t lanes = 16 / (int64_t)m->element > 0 ? 16 / (int64_t)m->element : 1;
    int64_t ld = cols;
    size_t guard = 0;
    if (r->place == PADDED) {
        ld = vector ? cols : (cols / lanes + 1) * lanes;
        guard = 256;
        m->offset = 256;
    } else if (r->place == ODD) {
        ld = vector ? cols : cols + 3;
        guard = 64;
        m->offset = 64 + m->element;
    }
    int64_t stride = batch > 1 ? rows * ld + (r->place == TIGHT ? 0 : 2 * lanes) : 0;
    int64_t span =
        rows > 0 && cols > 0 && batch > 0 ? (batch - 1) * stride + (rows - 1) * ld + cols : 0;
    m->bytes = m->offset + (size_t)span * m->element + guard;
    m->bytes = m->bytes > 0 ? m->bytes : 1;
    m->image = (unsigned char*)malloc(m->bytes);
    if (m->image == NULL) {
        abort();
    }
    memset(m->image, 0xff, m->bytes);
    m->t.dtype = dtype;
    m->t.rows = rows;
    m->t.cols = cols;
    m->t.ld = ld;
    m->t.batch = batch;
    m->t.batch_stride = stride;
    m->t.owner = r->ctx;
    m->t.bytes = (size_t)span * m->element;
    for (int64_t i = 0; values != NULL && i < batch * rows * cols; i++) {
        put_element(m, m->image + element_at(m, i / (rows * cols), i / cols % rows, i % cols),
                    values[i]);
    }
    DO(r, tensor_create(r->ctx, QLORA_U8, 1, (int64_t)m->bytes, &m->store));
    if (r->ok) {
        DO(r, tensor_write(r->ctx, &m->store, m->image, m->bytes));
        m->t.data = (char*)m->store.data + m->offset;
    }
    return m;
}

static matrix* make(rig* r, qlora_dtype dtype, int64_t rows, int64_t cols, const double* values) {
    return make_batch(r, dtype, 1, rows, cols, values);
}

static void free_all(rig* r) {
    while (r->all != NULL) {
        matrix* m = r->all;
        r->all = m->next;
        if (m->store.data != NULL) {
            DO(r, tensor_destroy(r->ctx, &m->store));
        }
        free(m->image);
        free(m);
    }
}

// ---- outputs ----

typedef struct segment {
    size_t begin;
    size_t count;
    qlora_dtype dtype; // as stored
} segment;

typedef struct outputs {
    double* values;
    size_t count;
    size_t capacity;
    segment segments[8];
    int segment_count;
    uint64_t hash; // hash of the elements' bytes
} outputs;

static void outputs_free(outputs* out) {
    free(out->values);
    memset(out, 0, sizeof *out);
}

// Appends a matrix and checks that nothing around its elements has changed.
static void take(rig* r, outputs* out, matrix* m) {
    unsigned char* now = (unsigned char*)malloc(m->bytes);
    size_t count = (size_t)(m->t.batch * m->t.rows * m->t.cols);
    if (out->count + count > out->capacity) {
        out->capacity = 2 * (out->count + count);
        out->values = (double*)realloc(out->values, out->capacity * sizeof(double));
    }
    if (now == NULL || (out->values == NULL && count > 0) || out->segment_count == 8) {
        abort();
    }
    DO(r, tensor_read(r->ctx, &m->store, now, m->bytes));
    segment* s = &out->segments[out->segment_count++];
    s->begin = out->count;
    s->count = count;
    s->dtype = m->t.dtype;
    uint64_t hash = out->hash != 0 ? out->hash : 14695981039346656037u;
    for (int64_t b = 0; b < m->t.batch; b++) {
        for (int64_t row = 0; row < m->t.rows; row++) {
            for (int64_t c = 0; c < m->t.cols; c++) {
                size_t at = element_at(m, b, row, c);
                out->values[out->count++] = get_element(m, now + at);
                for (size_t i = 0; i < m->element; i++) {
                    hash = (hash ^ now[at + i]) * 1099511628211u;
                }
                memcpy(now + at, m->image + at, m->element);
            }
        }
    }
    out->hash = hash;
    for (size_t i = 0; i < m->bytes; i++) {
        if (now[i] != m->image[i]) {
            complain(r, "byte %zu of %zu, outside the matrix at %zu, was written", i, m->bytes,
                     m->offset);
            break;
        }
    }
    free(now);
}

// ---- inputs ----

typedef struct op_case op_case;
typedef void run_fn(rig* r, const op_case* c, outputs* out);

struct op_case {
    const char* name;
    run_fn* run;
    int64_t rows;
    int64_t cols;
    int64_t a; // further arguments, depending on the operator
    int64_t b;
    bool backward;
};

// Normally distributed numbers that bf16 holds exactly; the same for every rig of a case.
static double* numbers(test_random* random, int64_t n, double scale) {
    double* v = (double*)malloc((size_t)(n > 0 ? n : 1) * sizeof(double));
    if (v == NULL) {
        abort();
    }
    for (int64_t i = 0; i < n; i++) {
        v[i] = bf16_value(bf16_bits(test_random_normal(random) * scale));
    }
    return v;
}

static matrix* input_batch(rig* r, qlora_dtype dtype, int64_t batch, int64_t rows, int64_t cols,
                           test_random* random, double scale) {
    double* v = numbers(random, batch * rows * cols, scale);
    matrix* m = make_batch(r, dtype, batch, rows, cols, v);
    free(v);
    return m;
}

static matrix* input(rig* r, qlora_dtype dtype, int64_t rows, int64_t cols, test_random* random,
                     double scale) {
    return input_batch(r, dtype, 1, rows, cols, random, scale);
}

static matrix* blank(rig* r, qlora_dtype dtype, int64_t rows, int64_t cols) {
    return make(r, dtype, rows, cols, NULL);
}

// Integers in [0, limit); every `hole`-th is `instead` when hole > 0.
static matrix* indices(rig* r, int64_t n, int64_t limit, test_random* random, int64_t hole,
                       int32_t instead) {
    double* v = (double*)malloc((size_t)(n > 0 ? n : 1) * sizeof(double));
    if (v == NULL) {
        abort();
    }
    for (int64_t i = 0; i < n; i++) {
        v[i] = (double)test_random_below(random, (uint64_t)(limit > 0 ? limit : 1));
        if (hole > 0 && i % hole == hole - 1) {
            v[i] = (double)instead;
        }
    }
    matrix* m = make(r, QLORA_I32, 1, n, v);
    free(v);
    return m;
}

// ---- the cases' calls ----

enum { OP_SILU, OP_MUL, OP_ADD, OP_SCALE, OP_FILL, OP_SILU_BACKWARD, OP_SWIGLU, OP_GEGLU, OP_CAP };

// c->a: the operation; c->b: 1 overwrites the first input, 2 the second.
static void run_pointwise(rig* r, const op_case* c, outputs* out) {
    test_random random = test_random_start(c->name);
    matrix* a = input(r, r->dtype, c->rows, c->cols, &random, 2);
    matrix* b = input(r, r->dtype, c->rows, c->cols, &random, 1);
    matrix* y = c->b == 1 ? a : c->b == 2 ? b : blank(r, r->dtype, c->rows, c->cols);
    switch (c->a) {
    case OP_SILU:
        DO(r, silu_forward(r->ctx, &a->t, &y->t));
        break;
    case OP_MUL:
        DO(r, mul(r->ctx, &a->t, &b->t, &y->t));
        break;
    case OP_ADD:
        DO(r, add(r->ctx, &a->t, &b->t, &y->t));
        break;
    case OP_SCALE:
        DO(r, scale(r->ctx, -1.75f, &a->t, &y->t));
        break;
    case OP_FILL:
        DO(r, fill(r->ctx, -0.375f, &y->t));
        break;
    case OP_SILU_BACKWARD:
        DO(r, silu_backward(r->ctx, &a->t, &b->t, &y->t));
        break;
    case OP_GEGLU:
        DO(r, geglu_forward(r->ctx, &a->t, &b->t, &y->t));
        break;
    case OP_CAP:
        DO(r, cap(r->ctx, 1.5f, &a->t, &y->t));
        break;
    default:
        DO(r, swiglu_forward(r->ctx, &a->t, &b->t, &y->t));
    }
    take(r, out, y);
    if (y != a) {
        take(r, out, a);
    }
    if (y != b) {
        take(r, out, b);
    }
}

// gate and up as two column ranges of one buffer, as in the model. c->a & 1: also h, & 2: GELU;
// c->b: in place.
static void run_swiglu_backward(rig* r, const op_case* c, outputs* out) {
    test_random random = test_random_start(c->name);
    matrix* both = input(r, r->dtype, c->rows, 2 * c->cols, &random, 2);
    matrix* dh = input(r, r->dtype, c->rows, c->cols, &random, 1);
    matrix* dboth = c->b ? both : blank(r, r->dtype, c->rows, 2 * c->cols);
    matrix* h = c->a & 1 ? (c->b ? dh : blank(r, r->dtype, c->rows, c->cols)) : NULL;
    qlora_tensor t[4] = {both->t, both->t, dboth->t, dboth->t};
    for (int i = 0; i < 4; i++) {
        t[i].cols = c->cols;
        if (i % 2 == 1) {
            t[i].data = (char*)t[i].data + (size_t)c->cols * both->element;
            t[i].bytes -= t[i].bytes > 0 ? (size_t)c->cols * both->element : 0;
        }
    }
    const qlora_tensor* to = h != NULL ? &h->t : NULL;
    if ((c->a & 2) != 0) {
        DO(r, geglu_backward(r->ctx, &dh->t, &t[0], &t[1], &t[2], &t[3], to));
    } else {
        DO(r, swiglu_backward(r->ctx, &dh->t, &t[0], &t[1], &t[2], &t[3], to));
    }
    take(r, out, dboth);
    take(r, out, dh);
    if (h != NULL && h != dh) {
        take(r, out, h);
    }
}

// c->a: columns of the weight; c->b & 1: residual, & 2: weight in bf16, & 4: in place.
static void run_norm(rig* r, const op_case* c, outputs* out) {
    test_random random = test_random_start(c->name);
    matrix* x = input(r, r->dtype, c->rows, c->cols, &random, 3);
    matrix* delta = input(r, r->dtype, c->rows, c->cols, &random, 0.5);
    matrix* w = input(r, (c->b & 2) != 0 ? QLORA_BF16 : QLORA_F32, 1, c->a, &random, 1);
    bool in_place = (c->b & 4) != 0;
    if ((c->b & 1) != 0) {
        matrix* sum = in_place ? x : blank(r, r->dtype, c->rows, c->cols);
        matrix* y = blank(r, r->dtype, c->rows, c->cols);
        DO(r, rmsnorm_residual_forward(r->ctx, &x->t, &delta->t, &w->t, 1e-5f, &sum->t, &y->t));
        take(r, out, sum);
        take(r, out, y);
        take(r, out, delta);
    } else {
        matrix* y = in_place ? x : blank(r, r->dtype, c->rows, c->cols);
        DO(r, rmsnorm_forward(r->ctx, &x->t, &w->t, 1e-5f, &y->t));
        take(r, out, y);
    }
}

// c->a: columns of the weight; c->b & 1: dres, & 2: weight in bf16, & 4: dx over dres (or dy), &
// 8: dw.
static void run_norm_backward(rig* r, const op_case* c, outputs* out) {
    test_random random = test_random_start(c->name);
    matrix* x = input(r, r->dtype, c->rows, c->cols, &random, 3);
    matrix* dy = input(r, r->dtype, c->rows, c->cols, &random, 1);
    matrix* dres = input(r, r->dtype, c->rows, c->cols, &random, 0.5);
    matrix* w = input(r, (c->b & 2) != 0 ? QLORA_BF16 : QLORA_F32, 1, c->a, &random, 1);
    matrix* dw = input(r, QLORA_F32, 1, c->a, &random, 1);
    bool residual = (c->b & 1) != 0;
    matrix* dx = (c->b & 4) == 0 ? blank(r, r->dtype, c->rows, c->cols) : residual ? dres : dy;
    DO(r, rmsnorm_backward(r->ctx, &dy->t, &x->t, &w->t, 1e-5f, residual ? &dres->t : NULL, &dx->t,
                           (c->b & 8) != 0 ? &dw->t : NULL));
    take(r, out, dx);
    take(r, out, dw);
    take(r, out, x);
}

// c->a: rotated columns of a head; c->b & 1: bias in f32, & 2: in bf16, & 4: only the first half of
// the heads, & 8: pairs of neighbours, & 16: heads twice as wide as the table.
static void run_rope(rig* r, const op_case* c, outputs* out) {
    test_random random = test_random_start(c->name);
    int64_t positions = 37;
    qlora_rope_desc desc;
    memset(&desc, 0, sizeof desc);
    float* angles = (float*)malloc((size_t)(positions * c->a) * sizeof(float));
    double* table_values = (double*)malloc((size_t)(positions * c->a) * sizeof(double));
    if (angles == NULL || table_values == NULL) {
        abort();
    }
    expect_ok(r, qlora_rope_table(NULL, &desc, c->a, positions, angles), "qlora_rope_table");
    for (int64_t i = 0; i < positions * c->a; i++) {
        table_values[i] = (double)angles[i];
    }
    matrix* table = make(r, QLORA_F32, positions, c->a, table_values);
    matrix* x = input(r, r->dtype, c->rows, c->cols, &random, 2);
    matrix* where = indices(r, c->rows, positions, &random, 0, 0);
    matrix* bias = input(r, (c->b & 2) != 0 ? QLORA_BF16 : QLORA_F32, 1, c->cols, &random, 1);
    matrix* flag = make(r, QLORA_I32, 1, 1, &(double){0});
    int64_t head_dim = c->a * ((c->b & 16) != 0 ? 2 : 1);
    int64_t heads = c->cols / head_dim;
    int64_t rotated = (c->b & 4) != 0 ? heads / 2 : heads;
    if ((c->b & 24) != 0) {
        qlora_rotation_desc turn;
        memset(&turn, 0, sizeof turn);
        turn.head_dim = head_dim;
        turn.heads = rotated;
        turn.neighbours = (c->b & 8) != 0;
        turn.backward = c->backward;
        DO(r, rope_apply(r->ctx, &turn, &x->t, &where->t, &table->t,
                         (c->b & 3) != 0 ? &bias->t : NULL, &flag->t));
    } else if (c->backward) {
        DO(r, rope_backward(r->ctx, &x->t, rotated, &where->t, &table->t, &flag->t));
    } else {
        DO(r, rope_forward(r->ctx, &x->t, rotated, &where->t, &table->t,
                           (c->b & 3) != 0 ? &bias->t : NULL, &flag->t));
    }
    take(r, out, x);
    take(r, out, flag);
    free(angles);
    free(table_values);
}

// rows = positions, cols = head size, c->a = heads; c->b: 0 split, 1 join, 2 transpose.
static void run_layout(rig* r, const op_case* c, outputs* out) {
    test_random random = test_random_start(c->name);
    if (c->b == 0) {
        matrix* x = input(r, r->dtype, c->rows, c->a * c->cols, &random, 1);
        matrix* y = make_batch(r, r->dtype, c->a, c->rows, c->cols, NULL);
        DO(r, heads_split(r->ctx, &x->t, &y->t));
        take(r, out, y);
    } else if (c->b == 1) {
        matrix* x = input_batch(r, r->dtype, c->a, c->rows, c->cols, &random, 1);
        matrix* y = blank(r, r->dtype, c->rows, c->a * c->cols);
        DO(r, heads_join(r->ctx, &x->t, &y->t));
        take(r, out, y);
    } else {
        matrix* x = input_batch(r, r->dtype, c->a, c->rows, c->cols, &random, 1);
        matrix* y = make_batch(r, r->dtype, c->a, c->cols, c->rows, NULL);
        DO(r, transpose(r->ctx, &x->t, &y->t));
        take(r, out, y);
    }
}

// c->a: batch; c->b: window, -1 without causal mask.
static void run_scores(rig* r, const op_case* c, outputs* out) {
    test_random random = test_random_start(c->name);
    matrix* s = input_batch(r, r->dtype, c->a, c->rows, c->cols, &random, 4);
    DO(r, scores_mask(r->ctx, &s->t, 0.25f, c->b >= 0, c->b));
    take(r, out, s);
}

// c->a: batch; c->b: 1 in place (over dy in the backward pass), 2 over y there.
static void run_softmax(rig* r, const op_case* c, outputs* out) {
    test_random random = test_random_start(c->name);
    if (c->backward) {
        matrix* y = input_batch(r, r->dtype, c->a, c->rows, c->cols, &random, 0.3);
        matrix* dy = input_batch(r, r->dtype, c->a, c->rows, c->cols, &random, 1);
        matrix* dx = c->b == 1   ? dy
                     : c->b == 2 ? y
                                 : make_batch(r, r->dtype, c->a, c->rows, c->cols, NULL);
        DO(r, softmax_backward(r->ctx, &y->t, &dy->t, &dx->t));
        take(r, out, dx);
    } else {
        matrix* x = input_batch(r, r->dtype, c->a, c->rows, c->cols, &random, 4);
        matrix* y = c->b == 1 ? x : make_batch(r, r->dtype, c->a, c->rows, c->cols, NULL);
        DO(r, softmax_forward(r->ctx, &x->t, &y->t));
        take(r, out, y);
    }
}

// c->a: rows of the table; c->b: its dtype.
static void run_embed(rig* r, const op_case* c, outputs* out) {
    test_random random = test_random_start(c->name);
    matrix* table = input(r, (qlora_dtype)c->b, c->a, c->cols, &random, 1);
    matrix* ids = indices(r, c->rows, c->a, &random, 0, 0);
    matrix* y = blank(r, r->dtype, c->rows, c->cols);
    matrix* flag = make(r, QLORA_I32, 1, 1, &(double){0});
    DO(r, embed(r->ctx, &table->t, &ids->t, &y->t, &flag->t));
    take(r, out, y);
    take(r, out, flag);
}

// c->a & 1: weights, & 2: scale, & 4: forward only, & 8: total, & 16: cap; c->b: every c->b-th row
// has no label.
static void run_cross_entropy(rig* r, const op_case* c, outputs* out) {
    test_random random = test_random_start(c->name);
    matrix* logits = input(r, r->dtype, c->rows, c->cols, &random, 5);
    matrix* labels = indices(r, c->rows, c->cols, &random, c->b, -100);
    matrix* weights = input(r, QLORA_F32, 1, c->rows, &random, 1);
    matrix* scale = make(r, QLORA_F32, 1, 1, &(double){0.375});
    matrix* losses = blank(r, QLORA_F32, 1, c->rows);
    matrix* total = make(r, QLORA_F32, 1, 3, (double[]){1000, 0.00001, 7});
    matrix* flag = make(r, QLORA_I32, 1, 1, &(double){0});
    qlora_cross_entropy_desc args;
    memset(&args, 0, sizeof args);
    args.logits = &logits->t;
    args.labels = &labels->t;
    args.losses = &losses->t;
    args.flag = &flag->t;
    args.weights = (c->a & 1) != 0 ? &weights->t : NULL;
    args.scale = (c->a & 2) != 0 ? &scale->t : NULL;
    args.forward_only = (c->a & 4) != 0;
    args.total = (c->a & 8) != 0 ? &total->t : NULL;
    args.cap = (c->a & 16) != 0 ? 6.0f : 0.0f;
    DO(r, cross_entropy(r->ctx, &args));
    take(r, out, logits);
    take(r, out, losses);
    take(r, out, flag);
    // The sum is split into two floats differently in float and in double.
    outputs sums;
    memset(&sums, 0, sizeof sums);
    take(r, &sums, total);
    double both[2] = {sums.values[0] + sums.values[1], sums.values[2]};
    matrix* shown = make(r, QLORA_F32, 1, 2, both);
    take(r, out, shown);
    outputs_free(&sums);
}

static void run_argmax(rig* r, const op_case* c, outputs* out) {
    test_random random = test_random_start(c->name);
    double* v = numbers(&random, c->rows * c->cols, 1);
    for (int64_t i = 0; i < c->rows * c->cols; i++) {
        v[i] = floor(v[i]); // many equal values
    }
    v[0] = c->a != 0 ? NAN : v[0];
    matrix* x = make(r, r->dtype, c->rows, c->cols, v);
    matrix* ids = blank(r, QLORA_I32, 1, c->rows);
    DO(r, argmax(r->ctx, &x->t, &ids->t));
    take(r, out, ids);
    free(v);
}

// Bytes that are the same on every rig.
static matrix* make_bytes(rig* r, const void* data, size_t bytes) {
    layout place = r->place;
    r->place = TIGHT; // tables of structs are aligned
    matrix* m = make(r, QLORA_U8, 1, (int64_t)bytes, NULL);
    r->place = place;
    memcpy(m->image, data, bytes);
    DO(r, tensor_write(r->ctx, &m->store, m->image, m->bytes));
    return m;
}

// Different numbers in the same place.
static void new_gradient(rig* r, matrix* g, test_random* random) {
    double* fresh = numbers(random, g->t.cols, 1);
    for (int64_t i = 0; i < g->t.cols; i++) {
        put_element(g, g->image + element_at(g, 0, 0, i), fresh[i]);
    }
    DO(r, tensor_write(r->ctx, &g->store, g->image, g->bytes));
    free(fresh);
}

// rows = updates, cols = elements; c->a & 1: shadow, & 2: clip scale, & 4: the second update is
// skipped, & 8: two ranges have copies, one of them with rows that no vector fits, & 16: the shadow
// is written again at the end; c->b: offset of the ranges.
static void run_adamw(rig* r, const op_case* c, outputs* out) {
    test_random random = test_random_start(c->name);
    int64_t n = c->cols;
    matrix* p = input(r, QLORA_F32, 1, n, &random, 1);
    matrix* m = input(r, QLORA_F32, 1, n, &random, 0.1);
    double* squares = numbers(&random, n, 0.1);
    for (int64_t i = 0; i < n; i++) {
        squares[i] = fabs(squares[i]);
    }
    matrix* v = make(r, QLORA_F32, 1, n, squares);
    free(squares);
    matrix* g = input(r, QLORA_F32, 1, n, &random, 1);
    matrix* shadow = blank(r, r->dtype, 1, n);
    int64_t third = n / 3 / 4 * 4;
    qlora_adamw_range ranges[3];
    memset(ranges, 0, sizeof ranges);
    for (int i = 0; i < 3; i++) {
        ranges[i].begin = i * third + c->b;
        ranges[i].count = i < 2 ? third : n - 2 * third - c->b;
        ranges[i].decay = i == 1 ? 0.0f : 1.0f;
        ranges[i].shadow_scale = i == 1 ? 2.5f : 1.0f;
        ranges[i].lr = i == 2 ? 1.75 : 0.0;
    }
    // Filled, so that a store outside the rows is detected.
    matrix* wide = input(r, r->dtype, third / 4, 12, &random, 1);
    matrix* odd = input(r, r->dtype, third / 7 + 1, 9, &random, 1);
    if ((c->a & 8) != 0) {
        ranges[0].copy = (char*)wide->t.data + 4 * wide->element;
        ranges[0].copy_cols = 4;
        ranges[0].copy_ld = wide->t.ld;
        ranges[1].copy = odd->t.data;
        ranges[1].copy_cols = 7;
        ranges[1].copy_ld = odd->t.ld;
    }
    qlora_adamw_state state;
    memset(&state, 0, sizeof state);
    state.lr = 0.0123;
    state.beta1 = 0.9;
    state.beta2 = 0.999;
    state.eps = 1e-8;
    state.weight_decay = 0.1;
    state.updates = 3;
    matrix* table = make_bytes(r, ranges, sizeof ranges);
    matrix* memory = make_bytes(r, &state, sizeof state);
    matrix* clip = make(r, QLORA_F32, 1, 1, &(double){0.625});
    matrix* flag = make(r, QLORA_I32, 1, 1, &(double){0});
    matrix* raised = make(r, QLORA_I32, 1, 1, &(double){1});
    qlora_adamw_desc args;
    memset(&args, 0, sizeof args);
    args.param = &p->t;
    args.grad = &g->t;
    args.m = &m->t;
    args.v = &v->t;
    args.shadow = (c->a & 1) != 0 ? &shadow->t : NULL;
    args.ranges = &table->t;
    args.state = &memory->t;
    args.clip_scale = (c->a & 2) != 0 ? &clip->t : NULL;
    for (int64_t step = 0; step < c->rows && r->ok; step++) {
        args.not_finite = (c->a & 4) != 0 && step == 1 ? &raised->t : &flag->t;
        DO(r, adamw_step(r->ctx, &args));
        if (step + 1 < c->rows) {
            new_gradient(r, g, &random);
        }
    }
    if ((c->a & 16) != 0) {
        DO(r, adamw_shadow(r->ctx, &args));
    }
    take(r, out, p);
    take(r, out, m);
    take(r, out, v);
    take(r, out, g);
    take(r, out, wide);
    take(r, out, odd);
    if (args.shadow != NULL) {
        take(r, out, shadow);
    }
    DO(r, tensor_read(r->ctx, &memory->store, &state, sizeof state));
    double counts[2] = {(double)state.updates, (double)state.skipped};
    take(r, out, make(r, QLORA_F32, 1, 2, counts));
}

// c->a: projection; c->b & 1: accumulate, & 2: in place.
static void run_dropout(rig* r, const op_case* c, outputs* out) {
    test_random random = test_random_start(c->name);
    matrix* x = input(r, r->dtype, c->rows, c->cols, &random, 1);
    matrix* y = (c->b & 2) != 0 ? x : input(r, r->dtype, c->rows, c->cols, &random, 1);
    matrix* positions = indices(r, c->rows, 1000, &random, 0, 0);
    matrix* sequences = indices(r, c->rows, 1000, &random, 0, 0);
    matrix* state = make(r, QLORA_I32, 1, 4, (double[]){-123456789, 1999999999, 77, 0});
    qlora_dropout_desc args;
    memset(&args, 0, sizeof args);
    args.x = &x->t;
    args.y = &y->t;
    args.positions = &positions->t;
    args.sequences = &sequences->t;
    args.state = &state->t;
    args.p = 0.3f;
    args.layer = 5;
    args.projection = (int32_t)c->a;
    args.accumulate = (c->b & 1) != 0;
    DO(r, dropout(r->ctx, &args));
    take(r, out, y);
}

static const op_case cases[] = {
    {"silu_7x33", run_pointwise, 7, 33, OP_SILU, 0, false},
    {"silu_over_x", run_pointwise, 5, 64, OP_SILU, 1, false},
    {"silu_1x1", run_pointwise, 1, 1, OP_SILU, 0, false},
    {"silu_wide", run_pointwise, 2, 2500, OP_SILU, 0, false},
    {"silu_backward_7x33", run_pointwise, 7, 33, OP_SILU_BACKWARD, 0, true},
    {"silu_backward_over_x", run_pointwise, 7, 32, OP_SILU_BACKWARD, 1, true},
    {"silu_backward_over_dy", run_pointwise, 7, 31, OP_SILU_BACKWARD, 2, true},
    {"swiglu_9x40", run_pointwise, 9, 40, OP_SWIGLU, 0, false},
    {"swiglu_over_gate", run_pointwise, 3, 17, OP_SWIGLU, 1, false},
    {"swiglu_over_up", run_pointwise, 3, 16, OP_SWIGLU, 2, false},
    {"geglu_9x40", run_pointwise, 9, 40, OP_GEGLU, 0, false},
    {"geglu_over_gate", run_pointwise, 3, 17, OP_GEGLU, 1, false},
    {"cap_5x33", run_pointwise, 5, 33, OP_CAP, 0, false},
    {"cap_over_x", run_pointwise, 6, 40, OP_CAP, 1, false},
    {"mul_6x19", run_pointwise, 6, 19, OP_MUL, 0, false},
    {"mul_over_b", run_pointwise, 6, 24, OP_MUL, 2, false},
    {"add_6x19", run_pointwise, 6, 19, OP_ADD, 0, false},
    {"add_6x23", run_pointwise, 6, 23, OP_ADD, 0, false}, // one short of a vector
    {"add_over_a", run_pointwise, 6, 24, OP_ADD, 1, false},
    {"scale_5x9", run_pointwise, 5, 9, OP_SCALE, 0, false},
    {"fill_5x9", run_pointwise, 5, 9, OP_FILL, 0, false},
    {"fill_many_rows", run_pointwise, 70000, 1, OP_FILL, 0, false},
    {"swiglu_backward_7x33", run_swiglu_backward, 7, 33, 0, 0, true},
    {"swiglu_backward_with_h", run_swiglu_backward, 7, 40, 1, 0, true},
    {"swiglu_backward_in_place", run_swiglu_backward, 7, 40, 1, 1, true},
    {"swiglu_backward_odd_in_place", run_swiglu_backward, 5, 13, 1, 1, true},
    {"geglu_backward_7x33", run_swiglu_backward, 7, 33, 2, 0, true},
    {"geglu_backward_in_place", run_swiglu_backward, 7, 40, 2 + 1, 1, true},
    {"norm_5x64", run_norm, 5, 64, 64, 0, false},
    {"norm_5x1", run_norm, 5, 1, 1, 0, false},
    {"norm_3x37_bf16_weight", run_norm, 3, 37, 37, 2, false},
    {"norm_in_place", run_norm, 3, 896, 896, 4 + 2, false},
    {"norm_3x4096", run_norm, 3, 4096, 4096, 2, false},
    {"norm_2x9001", run_norm, 2, 9001, 9001, 0, false}, // longer than the registers can hold
    {"norm_residual_7x48", run_norm, 7, 48, 48, 1, false},
    {"norm_residual_in_place", run_norm, 4, 1030, 1030, 1 + 2 + 4, false},
    {"norm_residual_2x9001", run_norm, 2, 9001, 9001, 1, false},
    {"norm_heads_6x(5*16)", run_norm, 6, 80, 16, 0, false},
    {"norm_heads_11x(3*128)", run_norm, 11, 384, 128, 2 + 4, false},
    {"norm_heads_4x(3*7)", run_norm, 4, 21, 7, 0, false},
    {"norm_backward_5x64", run_norm_backward, 5, 64, 64, 0, true},
    {"norm_backward_5x1", run_norm_backward, 5, 1, 1, 1 + 8, true},
    {"norm_backward_residual", run_norm_backward, 3, 37, 37, 1 + 2, true},
    {"norm_backward_over_dres", run_norm_backward, 4, 1030, 1030, 1 + 4, true},
    {"norm_backward_over_dy", run_norm_backward, 4, 72, 72, 4, true},
    {"norm_backward_2x9001", run_norm_backward, 2, 9001, 9001, 1, true},
    {"norm_backward_weight", run_norm_backward, 70, 72, 72, 1 + 8, true},
    {"norm_backward_weight_rows", run_norm_backward, 200, 5, 5, 8, true},
    {"norm_backward_heads", run_norm_backward, 9, 80, 16, 8 + 2, true},
    {"norm_backward_heads_odd", run_norm_backward, 9, 21, 7, 1 + 8, true},
    {"rope_8x(5*16)", run_rope, 8, 80, 16, 0, false},
    {"rope_half_bias", run_rope, 6, 6 * 64, 64, 1 + 4, false},
    {"rope_half_bias_bf16", run_rope, 6, 6 * 12, 12, 2 + 4, false},
    {"rope_half", run_rope, 6, 6 * 2, 2, 4, false},
    {"rope_many_heads", run_rope, 2, 48 * 128, 128, 0, false},
    {"rope_partial", run_rope, 6, 6 * 32, 16, 16, false},
    {"rope_partial_bias", run_rope, 6, 6 * 32, 16, 16 + 4 + 1, false},
    {"rope_partial_odd_bias_bf16", run_rope, 5, 4 * 20, 10, 16 + 4 + 2, false},
    {"rope_neighbours", run_rope, 6, 5 * 16, 16, 8, false},
    {"rope_neighbours_partial_bias", run_rope, 6, 6 * 32, 16, 8 + 16 + 4 + 1, false},
    {"rope_partial_backward", run_rope, 6, 6 * 32, 16, 16 + 4, true},
    {"rope_neighbours_backward", run_rope, 6, 6 * 12, 6, 8 + 16, true},
    {"rope_backward_8x(5*16)", run_rope, 8, 80, 16, 0, true},
    {"rope_backward_half", run_rope, 6, 6 * 10, 10, 4, true},
    {"split_7x(3*16)", run_layout, 7, 16, 3, 0, false},
    {"split_7x(3*5)", run_layout, 7, 5, 3, 0, false},
    {"join_7x(3*16)", run_layout, 7, 16, 3, 1, false},
    {"join_7x(3*5)", run_layout, 7, 5, 3, 1, false},
    {"transpose_2x33x65", run_layout, 33, 65, 2, 2, false},
    {"transpose_1x1x40", run_layout, 1, 40, 1, 2, false},
    {"scores_causal_2x9x9", run_scores, 9, 9, 2, 0, false},
    {"scores_window_2x9x300", run_scores, 9, 300, 2, 3, false},
    {"scores_open_1x5x7", run_scores, 5, 7, 1, -1, false},
    {"softmax_2x5x7", run_softmax, 5, 7, 2, 0, false},
    {"softmax_3x1x1", run_softmax, 1, 1, 3, 0, false},
    {"softmax_in_place", run_softmax, 6, 260, 2, 1, false},
    {"softmax_3x3000", run_softmax, 3, 3000, 1, 0, false},
    {"softmax_backward_2x5x7", run_softmax, 5, 7, 2, 0, true},
    {"softmax_backward_over_dy", run_softmax, 6, 260, 2, 1, true},
    {"softmax_backward_over_y", run_softmax, 3, 3000, 1, 2, true},
    {"embed_f32", run_embed, 9, 24, 11, QLORA_F32, false},
    {"embed_bf16", run_embed, 9, 29, 11, QLORA_BF16, false},
    {"embed_f16", run_embed, 9, 2100, 11, QLORA_F16, false},
    {"cross_entropy_6x40", run_cross_entropy, 6, 40, 8, 0, true},
    {"cross_entropy_masked", run_cross_entropy, 7, 33, 2 + 8, 2, true},
    {"cross_entropy_weighted", run_cross_entropy, 7, 1500, 1 + 2 + 8, 3, true},
    {"cross_entropy_forward", run_cross_entropy, 7, 33, 1 + 2 + 4 + 8, 3, true},
    {"cross_entropy_3x1", run_cross_entropy, 3, 1, 2 + 8, 0, true},
    {"cross_entropy_2x20001", run_cross_entropy, 2, 20001, 2, 0, true},
    {"cross_entropy_300x8", run_cross_entropy, 300, 8, 2 + 8, 5, true},
    {"cross_entropy_capped", run_cross_entropy, 6, 40, 2 + 8 + 16, 0, true},
    {"cross_entropy_capped_odd", run_cross_entropy, 7, 1501, 1 + 2 + 8 + 16, 3, true},
    {"cross_entropy_capped_forward", run_cross_entropy, 3, 37, 4 + 8 + 16, 0, true},
    {"argmax_5x37", run_argmax, 5, 37, 0, 0, false},
    {"argmax_3x700_nan", run_argmax, 3, 700, 1, 0, false},
    {"adamw_1x100", run_adamw, 1, 100, 0, 0, false},
    {"adamw_3x1000_shadow", run_adamw, 3, 1000, 1 + 2, 0, false},
    {"adamw_3x103_skip", run_adamw, 3, 103, 1 + 2 + 4, 1, false},
    {"adamw_2x1000_copies", run_adamw, 2, 1000, 1 + 2 + 8, 0, false},
    {"adamw_2x103_copies", run_adamw, 2, 103, 1 + 8 + 16, 1, false},
    {"dropout_6x40", run_dropout, 6, 40, 3, 0, false},
    {"dropout_accumulate", run_dropout, 6, 33, 255, 1, false},
    {"dropout_in_place", run_dropout, 3, 300, 0, 2, false},
};
#define CASES (sizeof cases / sizeof cases[0])

// ---- comparisons ----

static double rel_l2(const double* expected, const double* got, size_t n) {
    double error = 0;
    double norm = 0;
    for (size_t i = 0; i < n; i++) {
        if (isnan(expected[i]) && isnan(got[i])) {
            continue; // never written
        }
        error += (expected[i] - got[i]) * (expected[i] - got[i]);
        norm += expected[i] * expected[i];
    }
    return error == 0 ? 0 : sqrt(error / (norm > 0 ? norm : 1e-300));
}

static double largest(const double* v, size_t n) {
    double top = 0;
    for (size_t i = 0; i < n; i++) {
        top = fabs(v[i]) > top ? fabs(v[i]) : top;
    }
    return top;
}

static outputs run_on(rig* r, const op_case* c) {
    outputs out;
    memset(&out, 0, sizeof out);
    c->run(r, c, &out);
    free_all(r);
    return out;
}

// The allowed distance of the CPU from float64 for a segment of a case in a dtype.
static bool cpu_segment_close(const double* truth, const double* got, const segment* s) {
    // One rounding of a result, or of an intermediate sum, to 8 bits: each up to 2^-9.
    double limit = s->dtype == QLORA_F32 ? 2e-6 : s->dtype == QLORA_BF16 ? 4e-3 : 0;
    return rel_l2(truth, got, s->count) <= limit;
}

// Compares the kernel with float64 and with the CPU's loop in the same dtype.
static bool gpu_segment_close(const double* truth, const double* cpu, const double* gpu,
                              const segment* s, bool backward) {
    double error = rel_l2(truth, gpu, s->count);
    double naive = rel_l2(truth, cpu, s->count);
    double top = largest(truth, s->count);
    bool wide = s->dtype != QLORA_BF16;
    double limit = wide ? 2e-6 : (backward ? 3 : 2) * naive + 1e-7;
    if (s->dtype == QLORA_I32) {
        limit = 0;
    }
    if (!(error <= limit)) {
        printf("    error %.3g against float64, limit %.3g (the loop's %.3g)\n", error, limit,
               naive);
        return false;
    }
    for (size_t i = 0; i < s->count; i++) {
        double allowed = wide ? 4e-6 * top : fabs(cpu[i]) / 128 + 4e-6 * top;
        bool both_nan = isnan(cpu[i]) && isnan(gpu[i]); // never written
        if (!both_nan && !(fabs(cpu[i] - gpu[i]) <= allowed)) {
            printf("    element %zu: CPU %.9g, kernel %.9g\n", i, cpu[i], gpu[i]);
            return false;
        }
    }
    return true;
}

static rig rig_of(const ops_api* api, qlora_ctx* ctx, qlora_dtype dtype, layout place) {
    rig r;
    memset(&r, 0, sizeof r);
    r.api = api;
    r.ctx = ctx;
    r.dtype = dtype;
    r.place = place;
    r.ok = true;
    return r;
}

static qlora_ctx* cpu_context(const ops_api* api) {
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.threads = 2;
    qlora_ctx* ctx = NULL;
    return api->ctx_create(&desc, &ctx, QLORA_VERSION, QLORA_ABI) == QLORA_OK ? ctx : NULL;
}

static const char* const layout_names[LAYOUTS] = {"tight", "padded", "odd"};

// Bits of the first fake machine; the others must match them, whatever their order of warps.
static uint64_t first_hash[CASES][2][LAYOUTS];

static bool same_bits_everywhere(const test_machine* machine, size_t index, qlora_dtype dtype,
                                 layout place, uint64_t hash) {
    if (strcmp(machine->backend, "fake") != 0) {
        return true;
    }
    uint64_t* first = &first_hash[index][dtype == QLORA_BF16][place];
    if (*first == 0) {
        *first = hash;
    }
    return *first == hash;
}

// One case on one machine, every dtype and layout.
static bool case_holds(const test_machine* machine, qlora_ctx* ctx, qlora_ctx* exact_ctx,
                       qlora_ctx* loop_ctx, size_t index) {
    const op_case* c = &cases[index];
    bool ok = true;
    uint64_t first_layout[2] = {0, 0}; // bits must not depend on alignment and padding
    for (int place = 0; place < LAYOUTS && ok; place++) {
        rig exact = rig_of(ops_in_double(), exact_ctx, QLORA_F32, (layout)place);
        outputs truth = run_on(&exact, c);
        ok = ok && exact.ok;
        for (int bits = 0; bits < (test_has_bf16(machine) ? 2 : 1) && ok; bits++) {
            qlora_dtype dtype = bits == 0 ? QLORA_F32 : QLORA_BF16;
            rig loop = rig_of(&as_built, loop_ctx, dtype, (layout)place);
            rig here = rig_of(&as_built, ctx, dtype, (layout)place);
            outputs expected = run_on(&loop, c);
            outputs got = run_on(&here, c);
            outputs again = run_on(&here, c);
            bool device = strcmp(machine->backend, "cpu") != 0;
            ok = loop.ok && here.ok && expected.count == truth.count && got.count == truth.count;
            for (int s = 0; s < truth.segment_count && ok; s++) {
                const segment* part = &expected.segments[s];
                size_t at = part->begin;
                ok = device ? gpu_segment_close(truth.values + at, expected.values + at,
                                                got.values + at, part, c->backward)
                            : cpu_segment_close(truth.values + at, got.values + at, part);
            }
            first_layout[bits] = place == 0 ? got.hash : first_layout[bits];
            ok = ok && again.hash == got.hash && first_layout[bits] == got.hash &&
                 same_bits_everywhere(machine, index, dtype, (layout)place, got.hash);
            if (!ok) {
                printf("    in %s, %s, on %s\n", dtype == QLORA_F32 ? "f32" : "bf16",
                       layout_names[place], machine->name);
            }
            outputs_free(&expected);
            outputs_free(&got);
            outputs_free(&again);
        }
        outputs_free(&truth);
    }
    return ok;
}

TEST cases_hold(const test_machine* machine, const char* prefix) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    qlora_ctx* exact = cpu_context(ops_in_double());
    qlora_ctx* loop = cpu_context(&as_built);
    ASSERT(exact != NULL && loop != NULL);
    int run = 0;
    int failed = 0;
    for (size_t i = 0; i < CASES; i++) {
        if (strncmp(cases[i].name, prefix, strlen(prefix)) != 0) {
            continue;
        }
        run++;
        if (!case_holds(machine, ctx, exact, loop, i)) {
            printf("    case %s\n", cases[i].name);
            failed++;
        }
    }
    ASSERT_EQ(QLORA_OK, ops_in_double()->ctx_destroy(exact));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(loop));
    ASSERT(test_close_ctx(machine, ctx));
    ASSERT(run > 0);
    ASSERT_EQ_FMT(0, failed, "%d");
    PASS();
}

// ---- finite differences ----

// The sum of outputs times fixed random numbers, as a function of all inputs in one array; if
// `gradient` is not NULL, also the result of the backward operator. The inputs are concatenated.
typedef struct gradient_case gradient_case;
struct gradient_case {
    const char* name;
    double (*value)(rig* r, const gradient_case* g, const double* x, double* gradient);
    int64_t rows;
    int64_t cols;
    int64_t a;
    int64_t b;
    int64_t inputs; // number of arrays of rows * cols
    int64_t more;   // additional elements after them
};

static double dot(const outputs* out, const double* by) {
    double sum = 0;
    for (size_t i = 0; i < out->segments[0].count; i++) {
        sum += out->values[i] * by[i];
    }
    return sum;
}

static void copy_out(rig* r, matrix* m, double* to) {
    outputs out;
    memset(&out, 0, sizeof out);
    take(r, &out, m);
    memcpy(to, out.values, out.count * sizeof(double));
    outputs_free(&out);
}

// The sum of y times the weights that the gradient starts from.
static double weighed(rig* r, matrix* y, const double* by) {
    outputs out;
    memset(&out, 0, sizeof out);
    take(r, &out, y);
    double sum = dot(&out, by);
    outputs_free(&out);
    return sum;
}

static double silu_value(rig* r, const gradient_case* g, const double* x, double* gradient) {
    test_random random = test_random_start("silu weights");
    double* by = numbers(&random, g->rows * g->cols, 1);
    matrix* in = make(r, QLORA_F32, g->rows, g->cols, x);
    matrix* y = blank(r, QLORA_F32, g->rows, g->cols);
    DO(r, silu_forward(r->ctx, &in->t, &y->t));
    if (gradient != NULL) {
        matrix* dy = make(r, QLORA_F32, g->rows, g->cols, by);
        DO(r, silu_backward(r->ctx, &in->t, &dy->t, &dy->t));
        copy_out(r, dy, gradient);
    }
    double sum = weighed(r, y, by);
    free(by);
    return sum;
}

// a: GELU instead of SiLU.
static double swiglu_value(rig* r, const gradient_case* g, const double* x, double* gradient) {
    int64_t n = g->rows * g->cols;
    test_random random = test_random_start("swiglu weights");
    double* by = numbers(&random, n, 1);
    matrix* gate = make(r, QLORA_F32, g->rows, g->cols, x);
    matrix* up = make(r, QLORA_F32, g->rows, g->cols, x + n);
    matrix* h = blank(r, QLORA_F32, g->rows, g->cols);
    if (g->a != 0) {
        DO(r, geglu_forward(r->ctx, &gate->t, &up->t, &h->t));
    } else {
        DO(r, swiglu_forward(r->ctx, &gate->t, &up->t, &h->t));
    }
    double sum = weighed(r, h, by);
    if (gradient != NULL) {
        matrix* dh = make(r, QLORA_F32, g->rows, g->cols, by);
        if (g->a != 0) {
            DO(r, geglu_backward(r->ctx, &dh->t, &gate->t, &up->t, &gate->t, &up->t, &dh->t));
        } else {
            DO(r, swiglu_backward(r->ctx, &dh->t, &gate->t, &up->t, &gate->t, &up->t, &dh->t));
        }
        copy_out(r, gate, gradient);
        copy_out(r, up, gradient + n);
        if (weighed(r, dh, by) != sum) {
            complain(r, "h of the backward pass is not h of the forward pass");
        }
    }
    free(by);
    return sum;
}

// a: columns of the weight, which follows the inputs; b & 1: x = h + delta, and the sum itself also
// has a gradient.
static double norm_value(rig* r, const gradient_case* g, const double* x, double* gradient) {
    int64_t n = g->rows * g->cols;
    test_random random = test_random_start("norm weights");
    double* by = numbers(&random, n, 1);
    double* by_sum = numbers(&random, n, 1);
    matrix* h = make(r, QLORA_F32, g->rows, g->cols, x);
    matrix* w = make(r, QLORA_F32, 1, g->a, x + g->inputs * n);
    matrix* y = blank(r, QLORA_F32, g->rows, g->cols);
    double sum = 0;
    bool residual = g->b != 0;
    if (residual) {
        matrix* delta = make(r, QLORA_F32, g->rows, g->cols, x + n);
        DO(r, rmsnorm_residual_forward(r->ctx, &h->t, &delta->t, &w->t, 0.3f, &h->t, &y->t));
        sum += weighed(r, h, by_sum);
    } else {
        DO(r, rmsnorm_forward(r->ctx, &h->t, &w->t, 0.3f, &y->t));
    }
    sum += weighed(r, y, by);
    if (gradient != NULL) {
        matrix* dy = make(r, QLORA_F32, g->rows, g->cols, by);
        matrix* dres = make(r, QLORA_F32, g->rows, g->cols, by_sum);
        double* zero = (double*)calloc((size_t)g->a, sizeof(double));
        matrix* dw = make(r, QLORA_F32, 1, g->a, zero);
        free(zero);
        matrix* dx = blank(r, QLORA_F32, g->rows, g->cols);
        DO(r, rmsnorm_backward(r->ctx, &dy->t, &h->t, &w->t, 0.3f, residual ? &dres->t : NULL,
                               &dx->t, &dw->t));
        copy_out(r, dx, gradient);
        if (residual) {
            copy_out(r, dx, gradient + n);
        }
        copy_out(r, dw, gradient + g->inputs * n);
    }
    free(by);
    free(by_sum);
    return sum;
}

// a: rotated columns; b & 15: rotated heads, & 16: pairs of neighbours, & 32: heads twice as wide.
static double rope_value(rig* r, const gradient_case* g, const double* x, double* gradient) {
    test_random random = test_random_start("rope weights");
    double* by = numbers(&random, g->rows * g->cols, 1);
    double* angles = numbers(&random, 20 * g->a, 1);
    for (int64_t i = 0; i < 20 * g->a; i++) {
        double angle = angles[i / g->a * g->a + i % (g->a / 2)];
        angles[i] = i % g->a < g->a / 2 ? angle : sin(angle);
    }
    for (int64_t i = 0; i < 20 * g->a; i++) {
        angles[i] = i % g->a < g->a / 2 ? cos(angles[i]) : angles[i];
    }
    matrix* table = make(r, QLORA_F32, 20, g->a, angles);
    matrix* positions = indices(r, g->rows, 20, &random, 0, 0);
    matrix* y = make(r, QLORA_F32, g->rows, g->cols, x);
    qlora_rotation_desc turn;
    memset(&turn, 0, sizeof turn);
    turn.head_dim = g->a * ((g->b & 32) != 0 ? 2 : 1);
    turn.heads = g->b & 15;
    turn.neighbours = (g->b & 16) != 0;
    DO(r, rope_apply(r->ctx, &turn, &y->t, &positions->t, &table->t, NULL, NULL));
    if (gradient != NULL) {
        matrix* dy = make(r, QLORA_F32, g->rows, g->cols, by);
        turn.backward = true;
        DO(r, rope_apply(r->ctx, &turn, &dy->t, &positions->t, &table->t, NULL, NULL));
        copy_out(r, dy, gradient);
    }
    double sum = weighed(r, y, by);
    free(by);
    free(angles);
    return sum;
}

static double softmax_value(rig* r, const gradient_case* g, const double* x, double* gradient) {
    test_random random = test_random_start("softmax weights");
    double* by = numbers(&random, g->rows * g->cols, 1);
    matrix* y = make(r, QLORA_F32, g->rows, g->cols, x);
    DO(r, softmax_forward(r->ctx, &y->t, &y->t));
    if (gradient != NULL) {
        matrix* dy = make(r, QLORA_F32, g->rows, g->cols, by);
        DO(r, softmax_backward(r->ctx, &y->t, &dy->t, &dy->t));
        copy_out(r, dy, gradient);
    }
    double sum = weighed(r, y, by);
    free(by);
    return sum;
}

// a & 1: with row weights, & 2: with a cap; b: every b-th row has no label.
static double cross_entropy_value(rig* r, const gradient_case* g, const double* x,
                                  double* gradient) {
    test_random random = test_random_start("cross-entropy weights");
    double scale = 0.35;
    matrix* logits = make(r, QLORA_F32, g->rows, g->cols, x);
    matrix* labels = indices(r, g->rows, g->cols, &random, g->b, -100);
    matrix* weights = input(r, QLORA_F32, 1, g->rows, &random, 1);
    matrix* scales = make(r, QLORA_F32, 1, 1, &scale);
    matrix* losses = blank(r, QLORA_F32, 1, g->rows);
    matrix* total = make(r, QLORA_F32, 1, 3, (double[]){0, 0, 0});
    qlora_cross_entropy_desc args;
    memset(&args, 0, sizeof args);
    args.logits = &logits->t;
    args.labels = &labels->t;
    args.weights = (g->a & 1) != 0 ? &weights->t : NULL;
    args.cap = (g->a & 2) != 0 ? 1.25f : 0.0f;
    args.scale = &scales->t;
    args.losses = &losses->t;
    args.total = &total->t;
    args.forward_only = gradient == NULL;
    DO(r, cross_entropy(r->ctx, &args));
    if (gradient != NULL) {
        copy_out(r, logits, gradient);
    }
    return weighed(r, total, (double[]){scale, scale, 0});
}

static const gradient_case gradient_cases[] = {
    {"silu", silu_value, 3, 5, 0, 0, 1, 0},
    {"swiglu", swiglu_value, 3, 5, 0, 0, 2, 0},
    {"geglu", swiglu_value, 3, 5, 1, 0, 2, 0},
    {"norm", norm_value, 3, 7, 7, 0, 1, 7},
    {"norm of one column", norm_value, 3, 1, 1, 0, 1, 1},
    {"norm with residual", norm_value, 4, 6, 6, 1, 2, 6},
    {"norm of heads", norm_value, 3, 12, 4, 0, 1, 4},
    {"rope", rope_value, 3, 18, 6, 3, 1, 0},
    {"rope of some heads", rope_value, 3, 18, 6, 2, 1, 0},
    {"rope of part of a head", rope_value, 3, 24, 6, 2 + 32, 1, 0},
    {"rope of neighbours", rope_value, 3, 18, 6, 2 + 16, 1, 0},
    {"rope of neighbours in part of a head", rope_value, 3, 24, 6, 1 + 16 + 32, 1, 0},
    {"softmax", softmax_value, 3, 7, 0, 0, 1, 0},
    {"softmax of one", softmax_value, 3, 1, 0, 0, 1, 0},
    {"cross-entropy", cross_entropy_value, 4, 9, 0, 0, 1, 0},
    {"cross-entropy with a cap", cross_entropy_value, 4, 9, 2, 0, 1, 0},
    {"cross-entropy with a cap, weighted and masked", cross_entropy_value, 5, 4, 3, 2, 1, 0},
    {"cross-entropy, weighted and masked", cross_entropy_value, 5, 4, 1, 2, 1, 0},
};

// |analytic - (f(x + h) - f(x - h)) / 2h| is within 1e-5 of the element and 1e-8 of the largest.
static bool gradient_holds(const gradient_case* g, qlora_ctx* ctx) {
    const double h = 1e-4;
    int64_t n = g->rows * g->cols * g->inputs + g->more;
    test_random random = test_random_start(g->name);
    double* x = numbers(&random, n, 1);
    double* analytic = numbers(&random, n, 0);
    rig r = rig_of(ops_in_double(), ctx, QLORA_F32, ODD);
    g->value(&r, g, x, analytic);
    double top = largest(analytic, (size_t)n);
    for (int64_t i = 0; i < n && r.ok; i++) {
        double at = x[i];
        x[i] = at + h;
        double above = g->value(&r, g, x, NULL);
        x[i] = at - h;
        double below = g->value(&r, g, x, NULL);
        x[i] = at;
        free_all(&r);
        double difference = (above - below) / (2 * h);
        if (!(fabs(difference - analytic[i]) <= 1e-5 * fabs(analytic[i]) + 1e-8 * top + 1e-9)) {
            complain(&r, "%s: element %d: backward %.10g, difference %.10g", g->name, (int)i,
                     analytic[i], difference);
        }
    }
    free_all(&r);
    free(x);
    free(analytic);
    return r.ok;
}

TEST gradients_are_differences(void) {
    qlora_ctx* ctx = cpu_context(ops_in_double());
    ASSERT(ctx != NULL);
    int failed = 0;
    for (size_t i = 0; i < sizeof gradient_cases / sizeof gradient_cases[0]; i++) {
        failed += gradient_holds(&gradient_cases[i], ctx) ? 0 : 1;
    }
    ASSERT_EQ(QLORA_OK, ops_in_double()->ctx_destroy(ctx));
    ASSERT_EQ_FMT(0, failed, "%d");
    PASS();
}

// ---- rope tables ----

static const double two_pi = 6.283185307179586;

// Frequency i of a table, from its first positions: the angle of position 1.
static double frequency_of(const float* table, int64_t head_dim, int64_t i) {
    return atan2((double)table[head_dim + head_dim / 2 + i], (double)table[head_dim + i]);
}

TEST rope_default_table(void) {
    float table[5 * 8];
    qlora_rope_desc desc;
    memset(&desc, 0, sizeof desc);
    ASSERT_EQ(QLORA_OK, qlora_rope_table(NULL, &desc, 8, 5, table));
    for (int p = 0; p < 5; p++) {
        for (int i = 0; i < 4; i++) {
            double angle = p / pow(10000, 2 * i / 8.0);
            ASSERT(fabs((double)table[p * 8 + i] - cos(angle)) < 3e-7);
            ASSERT(fabs((double)table[p * 8 + 4 + i] - sin(angle)) < 3e-7);
        }
    }
    // The angle is an fp32 product: at a high position, it is far from the exact value.
    desc.theta = 500000;
    int64_t positions = 131072;
    float* big = (float*)malloc((size_t)positions * 4 * sizeof(float));
    ASSERT(big != NULL);
    ASSERT_EQ(QLORA_OK, qlora_rope_table(NULL, &desc, 4, positions, big));
    float frequency = 1.0f / (float)pow(500000.0, 0.5);
    float angle = (float)(positions - 1) * frequency;
    ASSERT_EQ((float)cos((double)angle), big[(positions - 1) * 4 + 1]);
    ASSERT_EQ((float)sin((double)angle), big[(positions - 1) * 4 + 3]);
    free(big);
    PASS();
}

TEST rope_linear_table_slows_down(void) {
    float plain[9 * 8];
    float slow[9 * 8];
    qlora_rope_desc desc;
    memset(&desc, 0, sizeof desc);
    ASSERT_EQ(QLORA_OK, qlora_rope_table(NULL, &desc, 8, 9, plain));
    desc.type = QLORA_ROPE_LINEAR;
    desc.factor = 4;
    ASSERT_EQ(QLORA_OK, qlora_rope_table(NULL, &desc, 8, 9, slow));
    ASSERT_CLOSE(plain + 8, slow + 4 * 8, 8, 1e-6, 1e-6);
    ASSERT_CLOSE(plain + 16, slow + 8 * 8, 8, 1e-6, 1e-6);
    PASS();
}

// Llama-3.1: theta 500000, factor 8, low 1, high 4, original 8192; head size 128.
TEST rope_llama3_table(void) {
    float* plain = (float*)malloc(2 * 128 * sizeof(float));
    float* scaled = (float*)malloc(2 * 128 * sizeof(float));
    ASSERT(plain != NULL && scaled != NULL);
    qlora_rope_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.theta = 500000;
    ASSERT_EQ(QLORA_OK, qlora_rope_table(NULL, &desc, 128, 2, plain));
    desc.type = QLORA_ROPE_LLAMA3;
    desc.factor = 8;
    desc.low_freq_factor = 1;
    desc.high_freq_factor = 4;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_rope_table(NULL, &desc, 128, 2, scaled));
    desc.original_max_position = 8192;
    ASSERT_EQ(QLORA_OK, qlora_rope_table(NULL, &desc, 128, 2, scaled));
    int kept = 0;
    int blended = 0;
    int stretched = 0;
    for (int64_t i = 0; i < 64; i++) {
        double before = 1 / pow(500000, (double)i / 64);
        double after = frequency_of(scaled, 128, i);
        double wavelength = two_pi / before;
        double expected = before;
        if (wavelength > 8192) {
            expected = before / 8;
            stretched++;
        } else if (wavelength > 8192 / 4) {
            double smooth = (8192 / wavelength - 1) / 3;
            expected = (1 - smooth) * before / 8 + smooth * before;
            blended++;
        } else {
            kept++;
        }
        ASSERT(fabs(after - expected) <= 1e-6 * expected);
        ASSERT(fabs(frequency_of(plain, 128, i) - before) <= 1e-6 * before);
    }
    ASSERT_EQ_FMT(29, kept, "%d"); // counted by hand from the formula
    ASSERT_EQ_FMT(6, blended, "%d");
    ASSERT_EQ_FMT(29, stretched, "%d");
    free(plain);
    free(scaled);
    PASS();
}

// theta 10000, factor 4, original 4096, head size 64: the ramp runs from dimension 10 to 23, and
// the cosines and sines are multiplied by 0.1 ln 4 + 1.
TEST rope_yarn_table(void) {
    float table[2 * 64];
    qlora_rope_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.type = QLORA_ROPE_YARN;
    desc.factor = 4;
    desc.original_max_position = 4096;
    ASSERT_EQ(QLORA_OK, qlora_rope_table(NULL, &desc, 64, 2, table));
    double attention = 0.1 * log(4) + 1;
    ASSERT(fabs((double)table[0] - attention) < 1e-6); // cosine of 0
    double low = floor(64 * log(4096 / (32 * two_pi)) / (2 * log(10000)));
    double high = ceil(64 * log(4096 / (1 * two_pi)) / (2 * log(10000)));
    ASSERT_EQ_FMT(10, (int)low, "%d");
    ASSERT_EQ_FMT(23, (int)high, "%d");
    for (int64_t i = 0; i < 32; i++) {
        double before = 1 / pow(10000, (double)i / 32);
        double ramp = ((double)i - low) / (high - low);
        ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
        double expected = before / 4 * ramp + before * (1 - ramp);
        ASSERT(fabs(frequency_of(table, 64, i) - expected) <= 2e-6 * expected);
    }
    desc.attention_factor = 0.5;
    ASSERT_EQ(QLORA_OK, qlora_rope_table(NULL, &desc, 64, 2, table));
    ASSERT(fabs((double)table[0] - 0.5) < 1e-6);
    desc.attention_factor = 0;
    desc.mscale = 0.707;
    desc.mscale_all_dim = 1;
    ASSERT_EQ(QLORA_OK, qlora_rope_table(NULL, &desc, 64, 2, table));
    ASSERT(fabs((double)table[0] - (0.0707 * log(4) + 1) / attention) < 1e-6);
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_rope_table(NULL, &desc, 63, 2, table));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_rope_table(NULL, NULL, 64, 2, table));
    PASS();
}

// ---- correctness, beyond agreement ----

// The forward formulas, written out again, on a row of four.
TEST forwards_follow_their_formulas(void) {
    qlora_ctx* ctx = cpu_context(ops_in_double());
    ASSERT(ctx != NULL);
    rig r = rig_of(ops_in_double(), ctx, QLORA_F32, TIGHT);
    const double x[4] = {0.5, -1.25, 2, 0.125};
    const double u[4] = {1.5, 2, -0.5, 3};
    double expected[4][4];
    double got[4][4];
    double squares = 0;
    double sum = 0;
    for (int i = 0; i < 4; i++) {
        squares += x[i] * x[i];
        sum += exp(x[i]);
    }
    for (int i = 0; i < 4; i++) {
        double silu = x[i] / (1 + exp(-x[i]));
        expected[0][i] = silu;
        expected[1][i] = silu * u[i];
        expected[2][i] = x[i] / sqrt(squares / 4 + 0.25) * u[i];
        expected[3][i] = exp(x[i]) / sum;
    }
    matrix* in = make(&r, QLORA_F32, 1, 4, x);
    matrix* other = make(&r, QLORA_F32, 1, 4, u);
    matrix* y = blank(&r, QLORA_F32, 1, 4);
    DO(&r, silu_forward(ctx, &in->t, &y->t));
    copy_out(&r, y, got[0]);
    DO(&r, swiglu_forward(ctx, &in->t, &other->t, &y->t));
    copy_out(&r, y, got[1]);
    DO(&r, rmsnorm_forward(ctx, &in->t, &other->t, 0.25f, &y->t));
    copy_out(&r, y, got[2]);
    DO(&r, softmax_forward(ctx, &in->t, &y->t));
    copy_out(&r, y, got[3]);
    ASSERT_CLOSE_DOUBLE(expected[0], got[0], 16, 0, 1e-14);

    matrix* labels = make(&r, QLORA_I32, 1, 1, &(double){2});
    matrix* losses = blank(&r, QLORA_F32, 1, 1);
    qlora_cross_entropy_desc args;
    memset(&args, 0, sizeof args);
    args.logits = &in->t;
    args.labels = &labels->t;
    args.losses = &losses->t;
    args.forward_only = true;
    DO(&r, cross_entropy(ctx, &args));
    double loss = log(sum) - 2;
    copy_out(&r, losses, got[0]);
    ASSERT_CLOSE_DOUBLE(&loss, got[0], 1, 0, 1e-14);
    ASSERT(r.ok);
    free_all(&r);
    ASSERT_EQ(QLORA_OK, ops_in_double()->ctx_destroy(ctx));
    PASS();
}

TEST rope_turns_pairs(void) {
    qlora_ctx* ctx = cpu_context(ops_in_double());
    ASSERT(ctx != NULL);
    rig r = rig_of(ops_in_double(), ctx, QLORA_F32, TIGHT);
    const double x[4] = {0.5, -1.25, 2, 0.125};
    double got[4];
    matrix* in = make(&r, QLORA_F32, 1, 4, x);
    // One head of four, position 3: pairs (0, 2) and (1, 3), angles 3 and 0.03.
    double table[16] = {0};
    table[12] = cos(3.0);
    table[13] = cos(0.03);
    table[14] = sin(3.0);
    table[15] = sin(0.03);
    double turned[4] = {x[0] * cos(3.0) - x[2] * sin(3.0), x[1] * cos(0.03) - x[3] * sin(0.03),
                        x[2] * cos(3.0) + x[0] * sin(3.0), x[3] * cos(0.03) + x[1] * sin(0.03)};
    matrix* angles = make(&r, QLORA_F32, 4, 4, table);
    matrix* position = make(&r, QLORA_I32, 1, 1, &(double){3});
    DO(&r, rope_forward(ctx, &in->t, 1, &position->t, &angles->t, NULL, NULL));
    copy_out(&r, in, got);
    ASSERT_CLOSE_DOUBLE(turned, got, 4, 0, 1e-14);
    ASSERT(r.ok);
    free_all(&r);
    ASSERT_EQ(QLORA_OK, ops_in_double()->ctx_destroy(ctx));
    PASS();
}

// AdamW against the formula in torch's documentation, in double, for several updates.
TEST adamw_follows_the_formula(void) {
    qlora_ctx* ctx = cpu_context(ops_in_double());
    ASSERT(ctx != NULL);
    rig r = rig_of(ops_in_double(), ctx, QLORA_F32, TIGHT);
    double p = 0.7;
    double m = 0;
    double v = 0;
    matrix* tensors[4];
    for (int i = 0; i < 4; i++) {
        tensors[i] = make(&r, QLORA_F32, 1, 1, &(double){0});
    }
    ((double*)tensors[0]->t.data)[0] = p;
    qlora_adamw_range range = {0, 1, 1, 1, NULL, 0, 0, 4.0}; // multiplies lr
    qlora_adamw_state state;
    memset(&state, 0, sizeof state);
    state.lr = 0.0025;
    state.beta1 = 0.9;
    state.beta2 = 0.999;
    state.eps = 1e-8;
    state.weight_decay = 0.05;
    matrix* table = make_bytes(&r, &range, sizeof range);
    matrix* memory = make_bytes(&r, &state, sizeof state);
    qlora_adamw_desc args;
    memset(&args, 0, sizeof args);
    args.param = &tensors[0]->t;
    args.grad = &tensors[1]->t;
    args.m = &tensors[2]->t;
    args.v = &tensors[3]->t;
    args.ranges = &table->t;
    args.state = &memory->t;
    for (int t = 1; t <= 5; t++) {
        double g = sin((double)t);
        ((double*)tensors[1]->t.data)[0] = g;
        DO(&r, adamw_step(ctx, &args));
        p *= 1 - 0.01 * 0.05;
        m = 0.9 * m + 0.1 * g;
        v = 0.999 * v + 0.001 * g * g;
        double m_hat = m / (1 - pow(0.9, t));
        double v_hat = v / (1 - pow(0.999, t));
        p -= 0.01 * m_hat / (sqrt(v_hat) + 1e-8);
        double got[3] = {((double*)tensors[0]->t.data)[0], ((double*)tensors[2]->t.data)[0],
                         ((double*)tensors[3]->t.data)[0]};
        double expected[3] = {p, m, v};
        ASSERT_CLOSE_DOUBLE(expected, got, 3, 0, 1e-12);
        ASSERT_EQ(0.0, ((double*)tensors[1]->t.data)[0]);
    }
    // Ranges that exceed the arena, copies without a shape and factors that are not numbers are
    // rejected and change nothing.
    const qlora_adamw_range wrong[] = {
        {0, 2, 1, 1, NULL, 0, 0, 0.0},
        {-1, 1, 1, 1, NULL, 0, 0, 0.0},
        {0, 1, 1, 1, tensors[1]->t.data, 0, 1, 0.0},
        {0, 1, 1, 1, tensors[1]->t.data, 2, 1, 0.0},
        {0, 1, 1, 1, NULL, 0, 0, -1.0},
        {0, 1, 1, 1, NULL, 0, 0, INFINITY},
    };
    double before = ((double*)tensors[0]->t.data)[0];
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        memcpy(table->t.data, &wrong[i], sizeof wrong[i]);
        ASSERT_EQ(QLORA_ERR_ARGUMENT, ops_in_double()->adamw_step(ctx, &args));
        ASSERT(strstr(ops_in_double()->last_error(ctx), "range 0") != NULL);
        ASSERT_EQ(before, ((double*)tensors[0]->t.data)[0]);
    }
    ASSERT(r.ok);
    free_all(&r);
    ASSERT_EQ(QLORA_OK, ops_in_double()->ctx_destroy(ctx));
    PASS();
}

static outputs drop(rig* r, const op_case* c, int32_t seed, int32_t step, int32_t layer,
                    int32_t projection, int64_t first, int64_t rows) {
    outputs out;
    memset(&out, 0, sizeof out);
    double* ones = (double*)malloc((size_t)(rows * c->cols) * sizeof(double));
    double* where = (double*)malloc((size_t)(2 * rows) * sizeof(double));
    if (ones == NULL || where == NULL) {
        abort();
    }
    for (int64_t i = 0; i < rows * c->cols; i++) {
        ones[i] = 1;
    }
    for (int64_t i = 0; i < rows; i++) {
        where[i] = (double)((first + i) % 5); // position
        where[rows + i] = (double)((first + i) / 5);
    }
    matrix* x = make(r, r->dtype, rows, c->cols, ones);
    matrix* positions = make(r, QLORA_I32, 1, rows, where);
    matrix* sequences = make(r, QLORA_I32, 1, rows, where + rows);
    matrix* state = make(r, QLORA_I32, 1, 4, (double[]){(double)seed, 0, (double)step, 0});
    qlora_dropout_desc args;
    memset(&args, 0, sizeof args);
    args.x = &x->t;
    args.y = &x->t;
    args.positions = &positions->t;
    args.sequences = &sequences->t;
    args.state = &state->t;
    args.p = 0.25f;
    args.layer = layer;
    args.projection = projection;
    DO(r, dropout(r->ctx, &args));
    take(r, &out, x);
    free_all(r);
    free(ones);
    free(where);
    return out;
}

static double share_equal(const outputs* a, const outputs* b) {
    size_t equal = 0;
    for (size_t i = 0; i < a->count; i++) {
        equal += a->values[i] == b->values[i];
    }
    return (double)equal / (double)a->count;
}

// The mask depends on an element's identity, not on the call that computes it; every part of the
// counter matters.
TEST dropout_is_a_function_of_its_counter(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    rig r = rig_of(&as_built, ctx, QLORA_F32, TIGHT);
    op_case c = {"", NULL, 40, 50, 0, 0, false};
    outputs whole = drop(&r, &c, 7, 3, 2, 1, 0, 40);
    outputs tail = drop(&r, &c, 7, 3, 2, 1, 13, 27);
    ASSERT(r.ok);
    ASSERT_MEM_EQ(whole.values + 13 * 50, tail.values, 27 * 50 * sizeof(double));
    size_t kept = 0;
    for (size_t i = 0; i < whole.count; i++) {
        ASSERT(whole.values[i] == 0 || whole.values[i] == (double)(float)(1 / 0.75));
        kept += whole.values[i] != 0;
    }
    double rate = (double)kept / (double)whole.count; // 2000 draws: sigma 0.0097
    ASSERT(rate > 0.75 - 0.04 && rate < 0.75 + 0.04);
    outputs others[4] = {drop(&r, &c, 8, 3, 2, 1, 0, 40), drop(&r, &c, 7, 4, 2, 1, 0, 40),
                         drop(&r, &c, 7, 3, 3, 1, 0, 40), drop(&r, &c, 7, 3, 2, 2, 0, 40)};
    for (int i = 0; i < 4; i++) {
        double same = share_equal(&whole, &others[i]); // independent: 0.75^2 + 0.25^2 = 0.625
        ASSERT(same > 0.55 && same < 0.70);
        outputs_free(&others[i]);
    }
    outputs next = drop(&r, &c, 7, 3, 2, 1, 5, 40); // the next sequence, same positions
    double same = share_equal(&whole, &next);
    ASSERT(same > 0.55 && same < 0.70);
    outputs_free(&whole);
    outputs_free(&tail);
    outputs_free(&next);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Small losses added to a large sum: without the second float, each of them would be lost.
TEST total_carries_its_rest(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    rig r = rig_of(&as_built, ctx, QLORA_F32, TIGHT);
    matrix* logits = make(&r, QLORA_F32, 1, 2, (double[]){0, 0});
    matrix* labels = make(&r, QLORA_I32, 1, 1, (double[]){1});
    matrix* losses = blank(&r, QLORA_F32, 1, 1);
    matrix* total = make(&r, QLORA_F32, 1, 3, (double[]){33554432, 0, 0});
    qlora_cross_entropy_desc args;
    memset(&args, 0, sizeof args);
    args.logits = &logits->t;
    args.labels = &labels->t;
    args.losses = &losses->t;
    args.total = &total->t;
    args.forward_only = true;
    for (int i = 0; i < 10; i++) {
        DO(&r, cross_entropy(ctx, &args));
    }
    outputs out;
    memset(&out, 0, sizeof out);
    take(&r, &out, total);
    ASSERT(fabs(out.values[0] + out.values[1] - 33554432 - 10 * log(2)) < 1e-5);
    ASSERT_EQ(10.0, out.values[2]);
    outputs_free(&out);
    free_all(&r);
    ASSERT(r.ok);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Sizes of zero are valid and access nothing; rows with a label out of range are flagged on
// the device.
TEST empty_tensors_are_fine(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    for (int shape = 0; shape < 2; shape++) {
        rig r = rig_of(&as_built, ctx, QLORA_BF16, PADDED);
        int64_t rows = shape == 0 ? 0 : 3;
        int64_t cols = shape == 0 ? 8 : 0;
        matrix* x = blank(&r, QLORA_BF16, rows, cols);
        matrix* y = blank(&r, QLORA_BF16, rows, cols);
        matrix* z = blank(&r, QLORA_BF16, rows, cols);
        matrix* w = blank(&r, QLORA_F32, 1, cols);
        matrix* dw = make(&r, QLORA_F32, 1, cols, (double[8]){0});
        matrix* ids = blank(&r, QLORA_I32, 1, rows);
        matrix* state = make(&r, QLORA_I32, 1, 4, (double[]){0, 0, 0, 0});
        DO(&r, silu_forward(ctx, &x->t, &y->t));
        DO(&r, swiglu_backward(ctx, &x->t, &y->t, &z->t, &y->t, &z->t, &x->t));
        DO(&r, fill(ctx, 1, &y->t));
        DO(&r, rmsnorm_forward(ctx, &x->t, &w->t, 1e-5f, &y->t));
        DO(&r, rmsnorm_residual_forward(ctx, &x->t, &z->t, &w->t, 1e-5f, &x->t, &y->t));
        DO(&r, rmsnorm_backward(ctx, &x->t, &y->t, &w->t, 1e-5f, NULL, &z->t, &dw->t));
        DO(&r, transpose(ctx, &x->t, &blank(&r, QLORA_BF16, cols, rows)->t));
        DO(&r, scores_mask(ctx, &x->t, 1, true, 0));
        DO(&r, softmax_forward(ctx, &x->t, &y->t));
        qlora_dropout_desc args;
        memset(&args, 0, sizeof args);
        args.x = &x->t;
        args.y = &y->t;
        args.positions = &ids->t;
        args.sequences = &ids->t;
        args.state = &state->t;
        if (rows == 0) {
            DO(&r, dropout(ctx, &args));
        }
        outputs out;
        memset(&out, 0, sizeof out);
        take(&r, &out, dw);
        for (size_t i = 0; i < out.count; i++) {
            ASSERT_EQ(0.0, out.values[i]);
        }
        outputs_free(&out);
        free_all(&r);
        ASSERT(r.ok);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// A bad id, position or label is an error on the CPU and sets a flag on the device; the other rows
// are correct.
TEST bad_indices_are_reported(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    bool device = strcmp(machine->backend, "cpu") != 0;
    static const double bad[3] = {-1, 4, 1};
    for (int i = 0; i < 2; i++) {
        for (int which = 0; which < 3; which++) {
            rig r = rig_of(&as_built, ctx, QLORA_F32, TIGHT);
            test_random random = test_random_start("bad");
            matrix* table = input(&r, QLORA_F32, 4, 4, &random, 1);
            matrix* x = input(&r, QLORA_F32, 2, 4, &random, 1);
            matrix* ids = make(&r, QLORA_I32, 1, 2, (double[]){bad[i], bad[2]});
            matrix* losses = blank(&r, QLORA_F32, 1, 2);
            matrix* flag = make(&r, QLORA_I32, 1, 1, &(double){0});
            qlora_result result = QLORA_OK;
            if (which == 0) {
                result = qlora_embed(ctx, &table->t, &ids->t, &x->t, &flag->t);
            } else if (which == 1) {
                result = qlora_rope_forward(ctx, &x->t, 1, &ids->t, &table->t, NULL, &flag->t);
            } else {
                qlora_cross_entropy_desc args;
                memset(&args, 0, sizeof args);
                args.logits = &x->t;
                args.labels = &ids->t;
                args.losses = &losses->t;
                args.flag = &flag->t;
                result = qlora_cross_entropy(ctx, &args);
            }
            ASSERT_EQ(device ? QLORA_OK : QLORA_ERR_ARGUMENT, result);
            ASSERT(device || qlora_last_error(ctx)[0] != '\0');
            outputs out;
            memset(&out, 0, sizeof out);
            take(&r, &out, flag);
            ASSERT_EQ(device ? 1.0 : 0.0, out.values[0]);
            outputs_free(&out);
            free_all(&r);
            ASSERT(r.ok);
        }
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Invalid arguments are rejected with a message.
TEST wrong_arguments_are_refused(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    rig r = rig_of(&as_built, ctx, QLORA_F32, TIGHT);
    test_random random = test_random_start("wrong");
    matrix* a = input(&r, QLORA_F32, 4, 6, &random, 1);
    matrix* b = input(&r, QLORA_F32, 4, 6, &random, 1);
    matrix* narrow = input(&r, QLORA_F32, 4, 5, &random, 1);
    matrix* half = input(&r, QLORA_BF16, 4, 6, &random, 1);
    matrix* w = input(&r, QLORA_F32, 1, 4, &random, 1);
    matrix* ids = indices(&r, 4, 4, &random, 0, 0);
    qlora_tensor shifted = a->t;
    shifted.rows = 3;
    shifted.data = (char*)shifted.data + sizeof(float);
    shifted.bytes -= sizeof(float);
    qlora_tensor rest = a->t;
    rest.rows = 3;
    qlora_dropout_desc drops;
    memset(&drops, 0, sizeof drops);
    drops.x = &a->t;
    drops.y = &a->t;
    drops.positions = &ids->t;
    drops.sequences = &ids->t;
    drops.state = &ids->t;
    drops.p = 1;
#define REFUSED(call)                                                                              \
    do {                                                                                           \
        ASSERT_EQ(QLORA_ERR_ARGUMENT, (call));                                                     \
        ASSERT(qlora_last_error(ctx)[0] != '\0');                                                  \
    } while (0)
    REFUSED(qlora_silu_forward(ctx, NULL, &a->t));
    REFUSED(qlora_silu_forward(ctx, &a->t, NULL));
    REFUSED(qlora_add(ctx, &a->t, &narrow->t, &b->t));
    REFUSED(qlora_add(ctx, &a->t, &half->t, &b->t));
    REFUSED(qlora_add(ctx, &rest, &rest, &shifted));                 // overlaps, one element apart
    REFUSED(qlora_rmsnorm_forward(ctx, &a->t, &w->t, 1e-5f, &b->t)); // 4 does not divide 6
    REFUSED(qlora_rmsnorm_backward(ctx, &a->t, &b->t, &w->t, 1e-5f, NULL, &b->t, NULL));
    REFUSED(qlora_rope_forward(ctx, &a->t, 2, &ids->t, &a->t, NULL, NULL));
    REFUSED(qlora_rope_forward(ctx, &a->t, 2, &ids->t, &b->t, NULL, NULL)); // there is one head
    REFUSED(qlora_heads_split(ctx, &a->t, &b->t) == QLORA_OK ? qlora_heads_split(ctx, &a->t, &w->t)
                                                             : QLORA_OK);
    REFUSED(qlora_transpose(ctx, &a->t, &b->t));
    REFUSED(qlora_embed(ctx, &a->t, &ids->t, &narrow->t, NULL));
    REFUSED(qlora_cross_entropy(ctx, NULL));
    REFUSED(qlora_adamw_step(ctx, NULL));
    REFUSED(qlora_dropout(ctx, NULL));
    REFUSED(qlora_dropout(ctx, &drops));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_silu_forward(NULL, &a->t, &b->t));
#undef REFUSED
    free_all(&r);
    ASSERT(r.ok);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(ops_suite) {
    RUN_TEST(gradients_are_differences);
    RUN_TEST(rope_default_table);
    RUN_TEST(rope_linear_table_slows_down);
    RUN_TEST(rope_llama3_table);
    RUN_TEST(rope_yarn_table);
    RUN_TEST(forwards_follow_their_formulas);
    RUN_TEST(rope_turns_pairs);
    RUN_TEST(adamw_follows_the_formula);
    RUN_ON(TEST_ONE_EACH, dropout_is_a_function_of_its_counter);
    RUN_ON(TEST_ONE_EACH, total_carries_its_rest);
    RUN_ON(TEST_ONE_EACH, empty_tensors_are_fine);
    RUN_ON(TEST_ONE_EACH, bad_indices_are_reported);
    RUN_ON(TEST_ONE_EACH, wrong_arguments_are_refused);
    static const char* const groups[] = {"silu",      "swiglu", "mul",     "add",   "scale",
                                         "fill",      "norm",   "rope",    "split", "join",
                                         "transpose", "scores", "softmax", "embed", "cross_entropy",
                                         "argmax",    "adamw",  "dropout"};
    for (size_t i = 0; i < test_machine_count(); i++) {
        const test_machine* machine = test_machine_at(i);
        for (size_t g = 0; g < sizeof groups / sizeof groups[0]; g++) {
            if ((machine->sets & TEST_EVERYWHERE) != 0 && test_machine_wanted(machine)) {
                char suffix[64];
                snprintf(suffix, sizeof suffix, "%s_%s", groups[g], machine->name);
                greatest_set_test_suffix(suffix);
                RUN_TESTp(cases_hold, machine, groups[g]);
            }
        }
    }
}
