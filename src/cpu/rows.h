// ---- rows on the CPU ----------------------------------------------------------------------------
//
// The operators convert a row to QLORA__REAL once, compute with the functions of a table, and
// convert back once. Each tier has a table. The portable one is the specification; the others
// evaluate e^x and its relatives by polynomials, fuse products with sums, and sum in several lanes.

// Columns that an operator has converted at a time.
#define QLORA__ROW_CHUNK 512

typedef enum qlora__point_kind {
    QLORA__POINT_SILU,
    QLORA__POINT_SILU_GRAD,
    QLORA__POINT_SWIGLU,
    QLORA__POINT_GEGLU,
    QLORA__POINT_CAP,
    QLORA__POINT_MUL,
    QLORA__POINT_ADD,
    QLORA__POINT_SCALE,
    QLORA__POINT_FILL,
    QLORA__POINT_KINDS
} qlora__point_kind;

// y = op(a, b, alpha); y may be a or b. Inputs that the operator does not read may be NULL.
typedef void (*qlora__point_fn)(const QLORA__REAL* a, const QLORA__REAL* b, QLORA__REAL alpha,
                                int64_t n, QLORA__REAL* y);

// The backward pass of SwiGLU and GeGLU; h may be NULL.
typedef struct qlora__gated_row {
    const QLORA__REAL* dh;
    const QLORA__REAL* gate;
    const QLORA__REAL* up;
    QLORA__REAL* dgate;
    QLORA__REAL* dup;
    QLORA__REAL* h;
    int64_t n;
} qlora__gated_row;

// dx = dres + rstd (w dy - x pull); dres may be NULL.
typedef struct qlora__norm_row {
    const QLORA__REAL* dy;
    const QLORA__REAL* w;
    const QLORA__REAL* x;
    const QLORA__REAL* dres;
    QLORA__REAL rstd;
    QLORA__REAL pull;
    int64_t n;
    QLORA__REAL* dx;
} qlora__norm_row;

// One update of AdamW; the gradient becomes 0.
typedef struct qlora__adamw_row {
    QLORA__REAL* param;
    QLORA__REAL* grad;
    QLORA__REAL* m;
    QLORA__REAL* v;
    int64_t n;
    QLORA__REAL clip;
    QLORA__REAL decay;
    QLORA__REAL beta2;
    QLORA__REAL one_minus_beta1;
    QLORA__REAL one_minus_beta2;
    QLORA__REAL step_size;
    QLORA__REAL root_correction;
    QLORA__REAL eps;
} qlora__adamw_row;

// Which elements dropout keeps: factor[4 i + j] is `scale` if word j of philox(counter, key) is at
// least `threshold`, otherwise 0, with counter[0] + i as the first word of the counter.
typedef struct qlora__keep_row {
    uint32_t counter[4];
    uint32_t key[2];
    uint32_t threshold;
    float scale;
    int64_t n;
    QLORA__REAL* factor;
} qlora__keep_row;

// c[m, n] = a[m, k] b[k, n], added to c if `add` is true; with `transposed`, a is stored [k, m]. m
// is a multiple of QLORA__BLOCK_ROWS, n of QLORA__BLOCK_COLS; each element is one sum in ascending
// k.
#define QLORA__BLOCK 64 // rows of a block of queries, and keys of a block
#define QLORA__BLOCK_ROWS 8
#define QLORA__BLOCK_COLS 16
typedef struct qlora__block_product {
    int64_t m;
    int64_t n;
    int64_t k;
    const QLORA__REAL* a;
    int64_t lda;
    const QLORA__REAL* b;
    int64_t ldb;
    QLORA__REAL* c;
    int64_t ldc;
    bool add;
    bool transposed;
    int64_t ahead; // elements after those of b that are multiplied: memory that is soon read
} qlora__block_product;

// Probabilities of attention and the gradients of the scores of one query:
//   p = e^(s - lse),  ds = p (dp - dot) (1 - (s / cap)^2), without the last factor if cap is 0
// p may be s, ds may be dp.
typedef struct qlora__score_row {
    const QLORA__REAL* s;
    const QLORA__REAL* dp;
    QLORA__REAL lse;
    QLORA__REAL dot;
    QLORA__REAL cap;
    int64_t n;
    QLORA__REAL* p;
    QLORA__REAL* ds;
} qlora__score_row;

// One block of keys in the softmax of a block of queries. The queries are next to each other: a key
// has a row of QLORA__BLOCK scores. A query sees the keys [from, to) of the block; the rest get 0.
typedef struct qlora__soften_block {
    QLORA__REAL* s; // [keys][QLORA__BLOCK]: scores, then e^(s - top)
    int64_t keys;
    int64_t queries; // a multiple of QLORA__BLOCK_COLS
    const int32_t* from;
    const int32_t* to;
    QLORA__REAL* top;    // the largest score so far; then with those of the block
    QLORA__REAL* shrink; // e^(top before - top)
    QLORA__REAL* sum;    // of e^(s - top) over the block
} qlora__soften_block;

#if defined(QLORA__NEON) || defined(QLORA__X86)
// Of a vector of queries: one sees keys of [first, last), all see those of [all_first, all_last).
typedef struct qlora__soften_range {
    int64_t first;
    int64_t all_first;
    int64_t all_last;
    int64_t last;
} qlora__soften_range;

// The ranges of `width` queries from i on; the keys outside of them get 0.
static qlora__soften_range qlora__soften_begin(const qlora__soften_block* b, int64_t i, int width) {
    int32_t first = b->from[i];
    int32_t all_first = b->from[i];
    int32_t all_last = b->to[i];
    int32_t last = b->to[i];
    for (int64_t j = i + 1; j < i + width; j++) {
        first = b->from[j] < first ? b->from[j] : first;
        all_first = b->from[j] > all_first ? b->from[j] : all_first;
        all_last = b->to[j] < all_last ? b->to[j] : all_last;
        last = b->to[j] > last ? b->to[j] : last;
    }
    qlora__soften_range r;
    r.first = first;
    r.last = last;
    r.all_first = all_first < last ? all_first : last;
    r.all_last = all_last > r.all_first ? all_last : r.all_first;
    for (int64_t k = 0; k < b->keys; k++) {
        if (k < r.first || k >= r.last) {
            memset(b->s + k * QLORA__BLOCK + i, 0, (size_t)width * sizeof *b->s);
        }
    }
    return r;
}
#endif

// Functions that return a sum add it to the argument `sum`, so that a row can be summed in pieces.
struct qlora__cpu_rows {
    void (*load)(const void* from, qlora_dtype dtype, int64_t n, QLORA__REAL* to);
    void (*store)(const QLORA__REAL* from, int64_t n, void* to, qlora_dtype dtype);
    qlora__point_fn point[QLORA__POINT_KINDS];
    void (*swiglu_grad)(const qlora__gated_row* r);
    void (*geglu_grad)(const qlora__gated_row* r);
    double (*squares)(const QLORA__REAL* x, int64_t n, double sum);
    double (*dot)(const QLORA__REAL* x, const QLORA__REAL* y, int64_t n, double sum);
    double (*dot3)(const QLORA__REAL* x, const QLORA__REAL* y, const QLORA__REAL* z, int64_t n,
                   double sum);
    void (*norm)(const QLORA__REAL* x, QLORA__REAL rstd, const QLORA__REAL* w, int64_t n,
                 QLORA__REAL* y); // y = x rstd w
    void (*norm_grad)(const qlora__norm_row* r);
    void (*rope)(QLORA__REAL* a, QLORA__REAL* b, const QLORA__REAL* cosine, const QLORA__REAL* sine,
                 QLORA__REAL sign, int64_t n); // (a, b) = (a c - b s, b c + a s), s = sign sine
    QLORA__REAL (*top)(const QLORA__REAL* x, int64_t n, QLORA__REAL top); // largest of x and top
    double (*exps)(const QLORA__REAL* x, QLORA__REAL top, int64_t n, QLORA__REAL* y,
                   double sum); // y = e^(x - top), unless y is NULL
    void (*shares)(const QLORA__REAL* e, QLORA__REAL sum, QLORA__REAL scale, QLORA__REAL weight,
                   int64_t n, QLORA__REAL* y); // y = e / sum scale weight
    void (*softmax_grad)(const QLORA__REAL* p, const QLORA__REAL* dy, QLORA__REAL dot, int64_t n,
                         QLORA__REAL* dx); // dx = p (dy - dot)
    void (*cap_grad)(const QLORA__REAL* y, QLORA__REAL cap, int64_t n,
                     QLORA__REAL* g); // g *= 1 - (y / cap)^2
    void (*adamw)(const qlora__adamw_row* r);
    // y[i] = level of code i times scale; the first code is in the high half of codes[0]
    void (*nf4)(const uint8_t* codes, const float* levels, float scale, int64_t n, QLORA__REAL* y);
    void (*keep)(const qlora__keep_row* r);
    // For attention in blocks; NULL in the portable tier, which has no blocks.
    void (*product)(const qlora__block_product* p);
    // y[c * QLORA__BLOCK + r] = x[r * ld + c]
    void (*transpose)(const QLORA__REAL* x, int64_t ld, int64_t rows, int64_t cols, QLORA__REAL* y);
    void (*scores)(const qlora__score_row* r);
    void (*soften)(const qlora__soften_block* b);
};

// Returns columns [col, col + n) of a row: in place for f32, otherwise converted into `room`.
static const QLORA__REAL* qlora__row_in(const qlora__cpu_rows* rows, const qlora_tensor* t,
                                        int64_t row, int64_t col, int64_t n, QLORA__REAL* room) {
    int64_t at = row * t->ld + col;
    if (t->dtype == QLORA_F32) {
        return (const QLORA__REAL*)t->data + at;
    }
    rows->load((const uint16_t*)t->data + at, t->dtype, n, room);
    return room;
}

// Returns where to write the columns from `col` on: in place for f32, otherwise in `room`.
static QLORA__REAL* qlora__row_target(const qlora_tensor* t, int64_t row, int64_t col,
                                    QLORA__REAL* room) {
    return t->dtype == QLORA_F32 ? (QLORA__REAL*)t->data + row * t->ld + col : room;
}

// Completes what was written to qlora__row_target.
static void qlora__row_done(const qlora__cpu_rows* rows, const qlora_tensor* t, int64_t row,
                            int64_t col, int64_t n, const QLORA__REAL* from) {
    if (t->dtype != QLORA_F32) {
        rows->store(from, n, (uint16_t*)t->data + row * t->ld + col, t->dtype);
    }
}

// Converts n columns of a row of x, from column x_col on, into a row of y, from y_col on.
static void qlora__row_convert(const qlora__cpu_rows* rows, const qlora_tensor* x, int64_t x_row,
                               int64_t x_col, int64_t n, const qlora_tensor* y, int64_t y_row,
                               int64_t y_col) {
    QLORA__REAL room[QLORA__ROW_CHUNK];
    for (int64_t c = 0; c < n; c += QLORA__ROW_CHUNK) {
        int64_t part = qlora__min(QLORA__ROW_CHUNK, n - c);
        const QLORA__REAL* from = qlora__row_in(rows, x, x_row, x_col + c, part, room);
        if (y->dtype == QLORA_F32) {
            memcpy(qlora__row_target(y, y_row, y_col + c, room), from, (size_t)part * sizeof *from);
        } else {
            qlora__row_done(rows, y, y_row, y_col + c, part, from);
        }
    }
}

// The functions of the context's tier.
static const qlora__cpu_rows* qlora__rows_of(const qlora_ctx* ctx) {
    return ctx->cpu->rows;
}
