// ---- attention in blocks ------------------------------------------------------------------------
//
// For tiers with a block product. A block has up to 64 rows: the queries of one or several heads
// that share keys, one head after another. It meets 64 keys at a time, and all of it stays in the
// cache. Blocks start at the first token of a sequence, so packing changes no bits. Every output
// has one task that computes it: o and dq a block of queries, dk and dv a block of keys.

#define QLORA__BLOCK_HEADS 8 // heads in a block, at most

// The memory of a lane: matrices of QLORA__BLOCK by `width`, and the scores.
typedef struct qlora__attention_room {
    int64_t width; // head size, a multiple of QLORA__BLOCK_COLS
    QLORA__REAL* at[8];
    QLORA__REAL* s;   // scores, then probabilities [block, block]
    QLORA__REAL* dp;  // their gradients, then those of the scores
    QLORA__REAL* lse; // [block]
    double* sum;      // [block]
} qlora__attention_room;

// Some queries of some heads of a group.
typedef struct qlora__query_block {
    int64_t head;    // the first head
    int64_t heads;   // number of heads
    int64_t first;   // the first query
    int64_t queries; // queries per head
    int64_t rows;    // heads * queries
} qlora__query_block;

typedef struct qlora__attention_job {
    const qlora__attention* a;
    const qlora__cpu_rows* rows;
    char* rooms;
    int64_t lanes;
    // Computes one block of queries of a sequence, or NULL
    void (*query)(const struct qlora__attention_job* job, const qlora__attention_room* room,
                  const qlora__query_block* b, int64_t begin);
} qlora__attention_job;

static int64_t qlora__block_pad(int64_t n, int64_t multiple) {
    return qlora__ceil_div(n, multiple) * multiple;
}

static size_t qlora__attention_room_bytes(int64_t hd) {
    int64_t width = qlora__block_pad(hd, QLORA__BLOCK_COLS);
    int64_t count = 8 * QLORA__BLOCK * width + 2 * QLORA__BLOCK * QLORA__BLOCK + QLORA__BLOCK;
    return (size_t)count * sizeof(QLORA__REAL) + QLORA__BLOCK * sizeof(double);
}

static qlora__attention_room qlora__attention_room_at(const qlora__attention_job* job,
                                                      int64_t lane) {
    qlora__attention_room room;
    room.width = qlora__block_pad(job->a->hd, QLORA__BLOCK_COLS);
    char* base = job->rooms + (size_t)lane * qlora__attention_room_bytes(job->a->hd);
    room.sum = (double*)(void*)base;
    QLORA__REAL* next = (QLORA__REAL*)(void*)(room.sum + QLORA__BLOCK);
    for (int i = 0; i < 8; i++) {
        room.at[i] = next;
        next += QLORA__BLOCK * room.width;
    }
    room.s = next;
    room.dp = room.s + QLORA__BLOCK * QLORA__BLOCK;
    room.lse = room.dp + QLORA__BLOCK * QLORA__BLOCK;
    return room;
}

// y[r] = factor times row r of a head, for n tokens from `token` on; the padding columns are 0.
static void qlora__block_rows(const qlora__attention_job* job, const qlora_tensor* t, int64_t token,
                              int64_t n, int64_t head, QLORA__REAL factor, int64_t width,
                              QLORA__REAL* y) {
    QLORA__REAL room[QLORA__HEAD_MAX];
    int64_t hd = job->a->hd;
    for (int64_t r = 0; r < n; r++) {
        const QLORA__REAL* x = qlora__row_in(job->rows, t, token + r, head * hd, hd, room);
        if (factor == 1) {
            memcpy(y + r * width, x, (size_t)hd * sizeof *y);
        } else {
            job->rows->point[QLORA__POINT_SCALE](x, NULL, factor, hd, y + r * width);
        }
        if (width > hd) {
            memset(y + r * width + hd, 0, (size_t)(width - hd) * sizeof *y);
        }
    }
}

// A matrix in the memory of a lane, or rows of a tensor.
typedef struct qlora__block_matrix {
    QLORA__REAL* data;
    int64_t ld;
} qlora__block_matrix;

static qlora__block_matrix qlora__block_of(QLORA__REAL* data, int64_t ld) {
    qlora__block_matrix m;
    m.data = data;
    m.ld = ld;
    return m;
}

// One head of n keys or values from `token` on: in place if they need no conversion and no padding.
static qlora__block_matrix qlora__block_keys(const qlora__attention_job* job, const qlora_tensor* t,
                                             int64_t token, int64_t n, int64_t head, int64_t width,
                                             QLORA__REAL* room) {
    if (t->dtype == QLORA_F32 && width == job->a->hd) {
        return qlora__block_of((QLORA__REAL*)t->data + token * t->ld + head * width, t->ld);
    }
    qlora__block_rows(job, t, token, n, head, 1, width, room);
    return qlora__block_of(room, width);
}

// y[d][r] = x[r][d] for n rows; columns up to QLORA__BLOCK are 0.
static void qlora__block_transpose(const qlora__attention_job* job, qlora__block_matrix x,
                                   int64_t n, QLORA__REAL* y) {
    int64_t hd = job->a->hd;
    job->rows->transpose(x.data, x.ld, n, hd, y);
    for (int64_t d = 0; d < hd && n < QLORA__BLOCK; d++) {
        memset(y + d * QLORA__BLOCK + n, 0, (size_t)(QLORA__BLOCK - n) * sizeof *y);
    }
}

static void qlora__block_clear(QLORA__REAL* x, int64_t from, int64_t to) {
    if (to > from) {
        memset(x + from, 0, (size_t)(to - from) * sizeof *x);
    }
}

// The rows of a block of queries from q or the gradient of o; rows up to a multiple of
// QLORA__BLOCK_ROWS are 0.
static void qlora__block_queries(const qlora__attention_job* job, const qlora_tensor* t,
                                 const qlora__query_block* b, QLORA__REAL factor, int64_t width,
                                 QLORA__REAL* y) {
    for (int64_t h = 0; h < b->heads; h++) {
        qlora__block_rows(job, t, b->first, b->queries, b->head + h, factor, width,
                          y + h * b->queries * width);
    }
    qlora__block_clear(y, b->rows * width, qlora__block_pad(b->rows, QLORA__BLOCK_ROWS) * width);
}

// c[m, n] = a[m, k] b[k, n].
typedef struct qlora__block_shape {
    int64_t m;
    int64_t n;
    int64_t k;
} qlora__block_shape;

static qlora__block_shape qlora__block_shape_of(int64_t m, int64_t n, int64_t k) {
    qlora__block_shape shape;
    shape.m = m;
    shape.n = n;
    shape.k = k;
    return shape;
}

// c = a b, or c += a b; m and n are padded. transposed: a is stored [k, m].
static void qlora__block_multiply(const qlora__attention_job* job, qlora__block_shape shape,
                                  qlora__block_matrix a, bool transposed, qlora__block_matrix b,
                                  qlora__block_matrix c, bool add) {
    qlora__block_product p;
    p.m = qlora__block_pad(shape.m, QLORA__BLOCK_ROWS);
    p.n = qlora__block_pad(shape.n, QLORA__BLOCK_COLS);
    p.k = shape.k;
    p.a = a.data;
    p.lda = a.ld;
    p.b = b.data;
    p.ldb = b.ld;
    p.c = c.data;
    p.ldc = c.ld;
    p.add = add;
    p.transposed = transposed;
    p.ahead = 0;
    job->rows->product(&p);
}

// The keys [*from, *to) of the block [j0, j0 + n) that query i sees, counted from j0.
static void qlora__block_seen(const qlora__attention* a, int64_t i, int64_t j0, int64_t n,
                              int64_t* from, int64_t* to) {
    int64_t own = a->before + i;
    int64_t low = a->window > 0 ? own - a->window + 1 - j0 : 0;
    *to = qlora__max(0, qlora__min(n, own + 1 - j0));
    *from = qlora__min(qlora__max(0, low), *to);
}

// A block of queries and the n keys from j on.
typedef struct qlora__block_pair {
    const qlora__query_block* b;
    int64_t j;
    int64_t n;
} qlora__block_pair;

// Whether query number r of the block sees key number k.
static bool qlora__pair_sees(const qlora__attention* a, const qlora__block_pair* p, int64_t r,
                             int64_t k) {
    int64_t from = 0;
    int64_t to = 0;
    qlora__block_seen(a, p->b->first + r % p->b->queries, p->j, p->n, &from, &to);
    return k >= from && k < to;
}

// Whether every query sees every key.
static bool qlora__pair_sees_all(const qlora__attention* a, const qlora__block_pair* p) {
    return qlora__pair_sees(a, p, 0, p->n - 1) && qlora__pair_sees(a, p, p->b->queries - 1, 0);
}

static qlora__block_pair qlora__pair_of(const qlora__query_block* b, int64_t j, int64_t n) {
    qlora__block_pair p;
    p.b = b;
    p.j = j;
    p.n = n;
    return p;
}

// s = x[rows, width] times y, which is the transposed keys or values, of which there are n.
static void qlora__block_dots_of(const qlora__attention_job* job, int64_t rows, int64_t n,
                                 QLORA__REAL* x, QLORA__REAL* y, int64_t width, QLORA__REAL* s) {
    qlora__block_multiply(job, qlora__block_shape_of(rows, n, job->a->hd),
                          qlora__block_of(x, width), false, qlora__block_of(y, QLORA__BLOCK),
                          qlora__block_of(s, QLORA__BLOCK), false);
}

// How weights are multiplied.
typedef enum qlora__weights_way {
    QLORA__WEIGHTS,        // w[queries, keys] x[keys, width]
    QLORA__WEIGHTS_TURNED, // the same, with w stored [keys, queries]
    QLORA__WEIGHTS_OF_KEYS // the transposed w[queries, keys] times x[queries, width]
} qlora__weights_way;

// Adds weights times x to c. The weights of keys that a query does not see are 0, but 0 times a
// value that is not finite would be NaN: then only the others are added.
static void qlora__pair_add(const qlora__attention_job* job, const qlora__block_pair* p,
                            QLORA__REAL* weights, qlora__weights_way way, qlora__block_matrix x,
                            QLORA__REAL* c, int64_t width) {
    bool of_keys = way == QLORA__WEIGHTS_OF_KEYS;
    int64_t m = of_keys ? p->n : p->b->rows;
    int64_t k = of_keys ? p->b->rows : p->n;
    double squares = 0.0;
    bool all = qlora__pair_sees_all(job->a, p);
    if (!all && x.ld == width) {
        squares = job->rows->squares(x.data, k * width, squares);
    }
    for (int64_t i = 0; i < k && !all && x.ld != width; i++) {
        squares = job->rows->squares(x.data + i * x.ld, width, squares);
    }
    // A sum of squares in double precision is finite if all values are; otherwise at most slow.
    if (qlora__finite((float)squares)) {
        qlora__block_multiply(job, qlora__block_shape_of(m, width, k),
                              qlora__block_of(weights, QLORA__BLOCK), way != QLORA__WEIGHTS, x,
                              qlora__block_of(c, width), true);
        return;
    }
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < k; j++) {
            int64_t query = of_keys ? j : i;
            int64_t key = of_keys ? i : j;
            int64_t at = way == QLORA__WEIGHTS_TURNED ? key * QLORA__BLOCK + query
                                                      : query * QLORA__BLOCK + key;
            if (qlora__pair_sees(job->a, p, query, key)) {
                qlora__add_scaled(c + i * width, weights[at], x.data + j * x.ld, width);
            }
        }
    }
}

// The first block of keys that a block of queries sees.
static int64_t qlora__block_first_key(const qlora__attention* a, int64_t query, int64_t begin) {
    int64_t low = a->window > 0 ? a->before + query - a->window + 1 : begin;
    return begin + qlora__max(0, low - begin) / QLORA__BLOCK * QLORA__BLOCK;
}

// The softmax of a block of queries against n keys from j on, and the sums of the queries, whose
// scores are in a column of room->s each.
static void qlora__block_softmax(const qlora__attention_job* job, const qlora__attention_room* room,
                                 const qlora__query_block* b, int64_t j, int64_t n) {
    int32_t from[QLORA__BLOCK];
    int32_t to[QLORA__BLOCK];
    QLORA__REAL shrink[QLORA__BLOCK];
    QLORA__REAL sum[QLORA__BLOCK];
    qlora__soften_block soften;
    soften.s = room->s;
    soften.keys = n;
    soften.queries = qlora__block_pad(b->rows, QLORA__BLOCK_COLS);
    soften.from = from;
    soften.to = to;
    soften.top = room->lse;
    soften.shrink = shrink;
    soften.sum = sum;
    for (int64_t r = 0; r < soften.queries; r++) {
        int64_t first = 0;
        int64_t last = 0;
        // Those that fill a vector see what the last one does.
        int64_t query = qlora__min(r, b->rows - 1) % b->queries;
        qlora__block_seen(job->a, b->first + query, j, n, &first, &last);
        from[r] = (int32_t)first;
        to[r] = (int32_t)last;
    }
    if (job->a->cap > 0.0f) {
        job->rows->point[QLORA__POINT_CAP](room->s, NULL, (QLORA__REAL)job->a->cap,
                                           n * QLORA__BLOCK, room->s);
    }
    job->rows->soften(&soften);
    for (int64_t r = 0; r < b->rows; r++) {
        QLORA__REAL* acc = room->at[3] + r * room->width;
        if (shrink[r] != 1) {
            job->rows->point[QLORA__POINT_SCALE](acc, NULL, shrink[r], room->width, acc);
        }
        room->sum[r] = room->sum[r] * (double)shrink[r] + (double)sum[r];
    }
}

// One head of n keys from `token` on and as many after them as fill a tile: in place if they exist.
static qlora__block_matrix qlora__block_key_rows(const qlora__attention_job* job, int64_t token,
                                                 int64_t n, int64_t head, int64_t width,
                                                 QLORA__REAL* room) {
    const qlora_tensor* k = job->a->k;
    int64_t padded = qlora__block_pad(n, QLORA__BLOCK_ROWS);
    if (token + padded <= k->rows) {
        return qlora__block_keys(job, k, token, padded, head, width, room);
    }
    qlora__block_rows(job, k, token, n, head, 1, width, room);
    qlora__block_clear(room, n * width, padded * width);
    return qlora__block_of(room, width);
}

// room->at: 0 q, 1 q transposed, 2 k, 3 sums of o, 4 v; room->lse has the largest scores so far.
// The scores are transposed, so that each element of a vector belongs to another query.
static void qlora__block_forward(const qlora__attention_job* job, const qlora__attention_room* room,
                                 const qlora__query_block* b, int64_t begin) {
    const qlora__attention* a = job->a;
    int64_t kv_head = b->head / (a->heads / a->kv_heads);
    int64_t width = room->width;
    int64_t end = a->before + b->first + b->queries;
    qlora__block_queries(job, a->q, b, (QLORA__REAL)a->scale, width, room->at[0]);
    qlora__block_transpose(job, qlora__block_of(room->at[0], width), b->rows, room->at[1]);
    qlora__block_clear(room->at[3], 0, QLORA__BLOCK * width);
    for (int64_t r = 0; r < QLORA__BLOCK; r++) {
        room->lse[r] = (QLORA__REAL)-3.0e38; // below every score, and finite for -ffast-math
        room->sum[r] = 0;
    }
    for (int64_t j = qlora__block_first_key(a, b->first, begin); j < end; j += QLORA__BLOCK) {
        int64_t n = qlora__min(QLORA__BLOCK, end - j);
        qlora__block_matrix k = qlora__block_key_rows(job, j, n, kv_head, width, room->at[2]);
        qlora__block_matrix v = qlora__block_keys(job, a->v, j, n, kv_head, width, room->at[4]);
        qlora__block_multiply(job, qlora__block_shape_of(n, b->rows, a->hd), k, false,
                              qlora__block_of(room->at[1], QLORA__BLOCK),
                              qlora__block_of(room->s, QLORA__BLOCK), false);
        qlora__block_softmax(job, room, b, j, n);
        qlora__block_pair pair = qlora__pair_of(b, j, n);
        qlora__pair_add(job, &pair, room->s, QLORA__WEIGHTS_TURNED, v, room->at[3], width);
    }
    for (int64_t r = 0; r < b->rows; r++) {
        int64_t head = b->head + r / b->queries;
        int64_t i = b->first + r % b->queries;
        QLORA__REAL* o = qlora__row_target(a->o, i, head * a->hd, room->at[0]);
        job->rows->point[QLORA__POINT_SCALE](room->at[3] + r * width, NULL,
                                             (QLORA__REAL)(1 / room->sum[r]), a->hd, o);
        qlora__row_done(job->rows, a->o, i, head * a->hd, a->hd, o);
        qlora__put(a->lse, head, i, room->lse[r] + (QLORA__REAL)log(room->sum[r]));
    }
}

// D = do.o of each row, for both passes of the gradient.
static void qlora__block_dots(const qlora__attention_job* job, const qlora__attention_room* room,
                              const qlora__query_block* b, const QLORA__REAL* d_o) {
    const qlora__attention* a = job->a;
    QLORA__REAL o_room[QLORA__HEAD_MAX];
    for (int64_t r = 0; r < b->rows; r++) {
        int64_t head = b->head + r / b->queries;
        int64_t i = b->first + r % b->queries;
        const QLORA__REAL* o = qlora__row_in(job->rows, a->o, i, head * a->hd, a->hd, o_room);
        QLORA__REAL dot = (QLORA__REAL)job->rows->dot(d_o + r * room->width, o, a->hd, 0);
        a->dots[head * a->tokens + i] = dot;
    }
}

// Probabilities and gradients of n scores of a row.
static void qlora__block_scores(const qlora__attention_job* job, QLORA__REAL* s, QLORA__REAL* dp,
                                QLORA__REAL lse, QLORA__REAL dot, int64_t n) {
    qlora__score_row row;
    row.s = s;
    row.dp = dp;
    row.lse = lse;
    row.dot = dot;
    row.cap = (QLORA__REAL)job->a->cap;
    row.n = n;
    row.p = s;
    row.ds = dp;
    if (row.cap > 0) {
        job->rows->point[QLORA__POINT_CAP](s, NULL, row.cap, n, s);
    }
    job->rows->scores(&row);
}

// The probabilities (room->s) and gradients of scores (room->dp) of a block of queries against n
// keys from j on. Those of the keys that fill a tile are 0.
static void qlora__block_score_rows(const qlora__attention_job* job,
                                    const qlora__attention_room* room, const qlora__query_block* b,
                                    int64_t j, int64_t n) {
    const qlora__attention* a = job->a;
    for (int64_t r = 0; r < b->rows; r++) {
        int64_t head = b->head + r / b->queries;
        int64_t i = b->first + r % b->queries;
        QLORA__REAL* s = room->s + r * QLORA__BLOCK;
        QLORA__REAL* dp = room->dp + r * QLORA__BLOCK;
        int64_t from = 0;
        int64_t to = 0;
        int64_t last = qlora__block_pad(n, QLORA__BLOCK_ROWS);
        qlora__block_seen(a, i, j, n, &from, &to);
        if (to > from) {
            qlora__block_scores(job, s + from, dp + from, qlora__at(a->lse, head, i),
                                a->dots[head * a->tokens + i], to - from);
        }
        qlora__block_clear(s, 0, from);
        qlora__block_clear(s, to, last);
        qlora__block_clear(dp, 0, from);
        qlora__block_clear(dp, to, last);
    }
}

// Writes the sums of dq, times a factor.
static void qlora__block_dq_done(const qlora__attention_job* job, const qlora__attention_room* room,
                                 const qlora__query_block* b, QLORA__REAL factor) {
    const qlora__attention* a = job->a;
    QLORA__REAL row[QLORA__HEAD_MAX];
    for (int64_t r = 0; r < b->rows; r++) {
        int64_t col = (b->head + r / b->queries) * a->hd;
        int64_t i = b->first + r % b->queries;
        QLORA__REAL* dq = qlora__row_target(a->dq, i, col, row);
        if (factor == 1) {
            memcpy(dq, room->at[6] + r * room->width, (size_t)a->hd * sizeof *dq);
        } else {
            job->rows->point[QLORA__POINT_SCALE](room->at[6] + r * room->width, NULL, factor, a->hd,
                                                 dq);
        }
        qlora__row_done(job->rows, a->dq, i, col, a->hd, dq);
    }
}

// room->at: 0 q, 1 do, 2 k, 3 k transposed, 4 v, 5 v transposed, 6 sums of dq.
static void qlora__block_dq(const qlora__attention_job* job, const qlora__attention_room* room,
                            const qlora__query_block* b, int64_t begin) {
    const qlora__attention* a = job->a;
    int64_t kv_head = b->head / (a->heads / a->kv_heads);
    int64_t width = room->width;
    int64_t end = b->first + b->queries;
    qlora__block_queries(job, a->q, b, (QLORA__REAL)a->scale, width, room->at[0]);
    qlora__block_queries(job, a->d_o, b, 1, width, room->at[1]);
    qlora__block_dots(job, room, b, room->at[1]);
    qlora__block_clear(room->at[6], 0, QLORA__BLOCK * width);
    for (int64_t j = qlora__block_first_key(a, b->first, begin); j < end; j += QLORA__BLOCK) {
        int64_t n = qlora__min(QLORA__BLOCK, end - j);
        qlora__block_matrix k = qlora__block_keys(job, a->k, j, n, kv_head, width, room->at[2]);
        qlora__block_transpose(job, k, n, room->at[3]);
        qlora__block_transpose(job, qlora__block_keys(job, a->v, j, n, kv_head, width, room->at[4]),
                               n, room->at[5]);
        qlora__block_pair pair = qlora__pair_of(b, j, n);
        qlora__block_dots_of(job, b->rows, n, room->at[0], room->at[3], width, room->s);
        qlora__block_dots_of(job, b->rows, n, room->at[1], room->at[5], width, room->dp);
        qlora__block_score_rows(job, room, b, j, n);
        qlora__pair_add(job, &pair, room->dp, QLORA__WEIGHTS, k, room->at[6], width);
    }
    qlora__block_dq_done(job, room, b, (QLORA__REAL)a->scale);
}

// Adds the share of a block of queries to dk and dv of n keys from j on, and, with `joint`, that of
// the keys to dq. room->at: 0 k, 1 v transposed, 2 sums of dk, 3 sums of dv, 4 q, 5 do, 6 sums of
// dq, 7 k transposed.
static void qlora__block_share(const qlora__attention_job* job, const qlora__attention_room* room,
                               const qlora__query_block* b, int64_t j, int64_t n, bool joint) {
    const qlora__attention* a = job->a;
    int64_t width = room->width;
    n = qlora__min(n, b->first + b->queries - j); // no query sees keys after its own
    qlora__block_pair pair = qlora__pair_of(b, j, n);
    qlora__block_queries(job, a->q, b, (QLORA__REAL)a->scale, width, room->at[4]);
    qlora__block_queries(job, a->d_o, b, 1, width, room->at[5]);
    qlora__block_dots_of(job, b->rows, n, room->at[4], room->at[7], width, room->s);
    qlora__block_dots_of(job, b->rows, n, room->at[5], room->at[1], width, room->dp);
    qlora__block_score_rows(job, room, b, j, n);
    qlora__pair_add(job, &pair, room->dp, QLORA__WEIGHTS_OF_KEYS,
                    qlora__block_of(room->at[4], width), room->at[2], width);
    qlora__pair_add(job, &pair, room->s, QLORA__WEIGHTS_OF_KEYS,
                    qlora__block_of(room->at[5], width), room->at[3], width);
    if (joint) {
        qlora__block_queries(job, a->dq, b, 1, width, room->at[6]);
        qlora__pair_add(job, &pair, room->dp, QLORA__WEIGHTS, qlora__block_of(room->at[0], width),
                        room->at[6], width);
        qlora__block_dq_done(job, room, b, 1);
    }
}

// Queries per head in a block.
static int64_t qlora__block_queries_per_head(const qlora__attention* a) {
    return QLORA__BLOCK / qlora__min(a->heads / a->kv_heads, QLORA__BLOCK_HEADS);
}

// The keys [j, j + n) of a sequence [begin, end).
static void qlora__block_dkv(const qlora__attention_job* job, const qlora__attention_room* room,
                             int64_t kv_head, int64_t j, int64_t n, int64_t begin, int64_t end,
                             bool joint) {
    const qlora__attention* a = job->a;
    int64_t group = a->heads / a->kv_heads;
    int64_t width = room->width;
    int64_t each = qlora__block_queries_per_head(a);
    qlora__block_transpose(job, qlora__block_keys(job, a->v, j, n, kv_head, width, room->at[0]), n,
                           room->at[1]);
    qlora__block_rows(job, a->k, j, n, kv_head, 1, width, room->at[0]);
    qlora__block_transpose(job, qlora__block_of(room->at[0], width), n, room->at[7]);
    qlora__block_clear(room->at[2], 0, QLORA__BLOCK * width);
    qlora__block_clear(room->at[3], 0, QLORA__BLOCK * width);
    int64_t last = a->window > 0 ? qlora__min(end, j + n - 1 + a->window) : end;
    qlora__query_block b;
    for (int64_t h = 0; h < group; h += QLORA__BLOCK_HEADS) {
        b.head = kv_head * group + h;
        b.heads = qlora__min(QLORA__BLOCK_HEADS, group - h);
        // The same blocks of queries for all keys, so that dq can be summed with dk and dv.
        for (b.first = begin + (j - begin) / each * each; b.first < last; b.first += each) {
            b.queries = qlora__min(each, end - b.first);
            b.rows = b.heads * b.queries;
            qlora__block_share(job, room, &b, j, n, joint);
        }
    }
    for (int i = 0; i < 2; i++) {
        const qlora_tensor* t = i == 0 ? a->dk : a->dv;
        for (int64_t r = 0; r < n; r++) {
            QLORA__REAL* to = qlora__row_target(t, j + r, kv_head * a->hd, room->at[4]);
            memcpy(to, room->at[2 + i] + r * width, (size_t)a->hd * sizeof *to);
            qlora__row_done(job->rows, t, j + r, kv_head * a->hd, a->hd, to);
        }
    }
}

// Calls job->query for the blocks of queries of one lane: every lanes-th of all.
static void qlora__attention_query_lanes(void* user, int64_t from, int64_t to) {
    const qlora__attention_job* job = (const qlora__attention_job*)user;
    const qlora__attention* a = job->a;
    const int32_t* offsets = (const int32_t*)a->seqs->data;
    int64_t group = a->heads / a->kv_heads;
    int64_t each = qlora__block_queries_per_head(a);
    for (int64_t lane = from; lane < to; lane++) {
        qlora__attention_room room = qlora__attention_room_at(job, lane);
        qlora__query_block b;
        int64_t number = 0;
        for (b.head = 0; b.head < a->heads; b.head += b.heads) {
            b.heads = qlora__min(QLORA__BLOCK_HEADS, group - b.head % group);
            for (int64_t s = 0; s < a->n_seqs; s++) {
                for (b.first = offsets[s]; b.first < offsets[s + 1]; b.first += each) {
                    b.queries = qlora__min(each, offsets[s + 1] - b.first);
                    b.rows = b.heads * b.queries;
                    if (number++ % job->lanes == lane) {
                        job->query(job, &room, &b, offsets[s]);
                    }
                }
            }
        }
    }
}

static void qlora__attention_key_lanes(void* user, int64_t from, int64_t to) {
    const qlora__attention_job* job = (const qlora__attention_job*)user;
    const qlora__attention* a = job->a;
    const int32_t* offsets = (const int32_t*)a->seqs->data;
    for (int64_t lane = from; lane < to; lane++) {
        qlora__attention_room room = qlora__attention_room_at(job, lane);
        int64_t number = 0;
        for (int64_t head = 0; head < a->kv_heads; head++) {
            for (int64_t s = 0; s < a->n_seqs; s++) {
                for (int64_t j = offsets[s]; j < offsets[s + 1]; j += QLORA__BLOCK) {
                    if (number++ % job->lanes == lane) {
                        qlora__block_dkv(job, &room, head, j,
                                         qlora__min(QLORA__BLOCK, offsets[s + 1] - j), offsets[s],
                                         offsets[s + 1], false);
                    }
                }
            }
        }
    }
}

// All gradients of the heads that share a key head, in one sequence [begin, end). Every sum has the
// same terms in the same order as with separate passes for dq and for dk and dv.
static void qlora__block_joint(const qlora__attention_job* job, const qlora__attention_room* room,
                               int64_t kv_head, int64_t begin, int64_t end) {
    const qlora__attention* a = job->a;
    int64_t group = a->heads / a->kv_heads;
    int64_t col = kv_head * group * a->hd;
    for (int64_t i = begin; i < end; i++) {
        for (int64_t head = kv_head * group; head < kv_head * group + group; head++) {
            const QLORA__REAL* o = (const QLORA__REAL*)a->o->data + i * a->o->ld + head * a->hd;
            const QLORA__REAL* d_o =
                (const QLORA__REAL*)a->d_o->data + i * a->d_o->ld + head * a->hd;
            a->dots[head * a->tokens + i] = (QLORA__REAL)job->rows->dot(d_o, o, a->hd, 0);
        }
        memset((QLORA__REAL*)a->dq->data + i * a->dq->ld + col, 0,
               (size_t)(group * a->hd) * sizeof(QLORA__REAL));
    }
    for (int64_t j = begin; j < end; j += QLORA__BLOCK) {
        qlora__block_dkv(job, room, kv_head, j, qlora__min(QLORA__BLOCK, end - j), begin, end,
                         true);
    }
    for (int64_t i = begin; i < end; i++) {
        QLORA__REAL* dq = (QLORA__REAL*)a->dq->data + i * a->dq->ld + col;
        job->rows->point[QLORA__POINT_SCALE](dq, NULL, (QLORA__REAL)a->scale, group * a->hd, dq);
    }
}

// Task t: key head t % kv_heads of sequence t / kv_heads.
static void qlora__attention_joint_lanes(void* user, int64_t from, int64_t to) {
    const qlora__attention_job* job = (const qlora__attention_job*)user;
    const qlora__attention* a = job->a;
    const int32_t* offsets = (const int32_t*)a->seqs->data;
    for (int64_t lane = from; lane < to; lane++) {
        qlora__attention_room room = qlora__attention_room_at(job, lane);
        for (int64_t task = lane; task < a->n_seqs * a->kv_heads; task += job->lanes) {
            int64_t s = task / a->kv_heads;
            qlora__block_joint(job, &room, task % a->kv_heads, offsets[s], offsets[s + 1]);
        }
    }
}

// In an errand, one of those tasks should not take longer than a millisecond.
#define QLORA__JOINT_ERRAND 256

// Whether the tasks of qlora__attention_joint_lanes keep all threads busy: sequences with tokens.
// They need sums of dq in f32.
static bool qlora__attention_takes_joint(const qlora_ctx* ctx, const qlora__attention* a) {
    const int32_t* offsets = (const int32_t*)a->seqs->data;
    int64_t tasks = 0;
    int64_t longest = 0;
    for (int64_t s = 0; s < a->n_seqs; s++) {
        tasks += offsets[s + 1] > offsets[s] ? a->kv_heads : 0;
        longest = qlora__max(longest, offsets[s + 1] - offsets[s]);
    }
    if (qlora__errand_fine(ctx) && longest > QLORA__JOINT_ERRAND) {
        return false;
    }
    return a->dq->dtype == QLORA_F32 && a->o->dtype == QLORA_F32 && a->d_o->dtype == QLORA_F32 &&
           (qlora__slots(ctx) == 1 || tasks >= 4 * (int64_t)qlora__slots(ctx));
}

// Tokens after the last sequence get 0 in every tensor that is not NULL.
static void qlora__attention_tail(const qlora__attention* a, const qlora_tensor* t, int64_t heads) {
    for (int64_t i = ((const int32_t*)a->seqs->data)[a->n_seqs]; i < a->tokens; i++) {
        for (int64_t head = 0; head < heads; head++) {
            qlora__head_put(t, i, head, a->hd, NULL, 0);
        }
    }
}

// Several lanes for each thread, so that a thread with long blocks does not hold up the others, and
// more in an errand, which can rest between two; as many as the scratch memory has room for.
static qlora_result qlora__attention_lanes(qlora_ctx* ctx, const qlora__attention* a,
                                           qlora__attention_job* job) {
    size_t bytes = qlora__attention_room_bytes(a->hd);
    int64_t fit = (int64_t)(qlora__scratch_free(ctx) / bytes);
    void* rooms = NULL;
    job->a = a;
    job->rows = qlora__rows_of(ctx);
    job->query = NULL;
    int64_t wanted = (qlora__errand_fine(ctx) ? 64 : 4) * (int64_t)ctx->desc.threads;
    job->lanes = qlora__max(1, qlora__min(fit, wanted));
    QLORA__TRY(qlora__scratch(ctx, (size_t)job->lanes * bytes, &rooms));
    job->rooms = (char*)rooms;
    return QLORA_OK;
}

static qlora_result qlora__attention_forward_blocks(qlora_ctx* ctx, const qlora__attention* a) {
    qlora__attention_job job;
    QLORA__TRY(qlora__attention_lanes(ctx, a, &job));
    job.query = qlora__block_forward;
    qlora__parallel(ctx, job.lanes, 1, qlora__attention_query_lanes, &job);
    qlora__attention_tail(a, a->o, a->heads);
    for (int64_t i = ((const int32_t*)a->seqs->data)[a->n_seqs]; i < a->tokens; i++) {
        for (int64_t head = 0; head < a->heads; head++) {
            qlora__put(a->lse, head, i, 0);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__attention_backward_blocks(qlora_ctx* ctx, const qlora__attention* a) {
    qlora__attention_job job;
    QLORA__TRY(qlora__attention_lanes(ctx, a, &job));
    if (qlora__attention_takes_joint(ctx, a)) {
        qlora__parallel(ctx, job.lanes, 1, qlora__attention_joint_lanes, &job);
    } else {
        job.query = qlora__block_dq;
        qlora__parallel(ctx, job.lanes, 1, qlora__attention_query_lanes, &job);
        qlora__parallel(ctx, job.lanes, 1, qlora__attention_key_lanes, &job);
    }
    qlora__attention_tail(a, a->dq, a->heads);
    qlora__attention_tail(a, a->dk, a->kv_heads);
    qlora__attention_tail(a, a->dv, a->kv_heads);
    return QLORA_OK;
}
