// ---- gradients of adapters in one launch --------------------------------------------------------
//
// dA = u^T x and dB = dy^T z of a linear layer are products over all rows with one dimension as
// small as a rank. One by one they leave most of a GPU idle, so one kernel computes them together
// (kernels/adapter/skinny.cu), in bf16 on a GPU, and a second one adds its parts. The order of
// their sums depends on the shapes alone.

#define QLORA__SKINNY_PRODUCTS 4
#define QLORA__SKINNY_RANK 64  // at most, of dA of all parts together
#define QLORA__SKINNY_STRIP 64 // columns of a block
#define QLORA__SKINNY_SHARED 65536

// Elements of x from which on it pays. The products of smaller ones occupy few multiprocessors and
// leave the others to the main stream: on an H200, a step with 2048 x 896 takes 2 % longer with the
// kernel, with 8192 x 2048 0.8 % less. The tests set it to 1.
#ifndef QLORA__SKINNY_FROM
#define QLORA__SKINNY_FROM ((int64_t)1 << 24)
#endif

// Elements of the largest factor up to which it pays. A library's product of more reads them at the
// speed of the memory as well, and its blocks read the small factor less often.
#define QLORA__SKINNY_MOST ((int64_t)1 << 25)

// P = S^T W [rank, cols], added to d: same layout as skinny_product in kernels/adapter/skinny.cu.
typedef struct qlora__skinny_product {
    const void* s;
    const void* w;
    void* d;
    const void* rstd; // W is the input of a norm instead of its output: its factors of rows,
    const void* norm; // and its weights; or NULL
    int64_t ldd;
    int32_t lds;
    int32_t ldw;
    int32_t rank;
    int32_t cols;
    int32_t transposed; // d is [cols, rank]
    int32_t norm_bf16;
    float scale;
    int32_t room; // to a multiple of 8 bytes
} qlora__skinny_product;

// Same layout as skinny in kernels/adapter/skinny.cu.
typedef struct qlora__skinny {
    qlora__skinny_product products[QLORA__SKINNY_PRODUCTS];
    void* parts; // f32 [splits, numbers]
    int64_t rows;
    int64_t numbers; // of all gradients
    int32_t each;    // rows of a part
    int32_t splits;
    int32_t add; // 0: P replaces d
    int32_t count;
} qlora__skinny;

// Blocks that run at the same time on a large GPU, two on a multiprocessor, and the rows that one
// has at least and at most.
#define QLORA__SKINNY_BLOCKS 264
#define QLORA__SKINNY_LEAST 128
#define QLORA__SKINNY_EACH 1024

// Into how many parts rows are split if there are that many strips: as many blocks as run at the
// same time.
static int64_t qlora__skinny_splits(int64_t rows, int64_t strips) {
    int64_t splits =
        qlora__min(QLORA__SKINNY_BLOCKS / qlora__max(strips, 1), rows / QLORA__SKINNY_LEAST);
    return qlora__max(splits, qlora__max(qlora__ceil_div(rows, QLORA__SKINNY_EACH), 1));
}

static bool qlora__skinny_aligned(const qlora_tensor* t) {
    return t->dtype == QLORA_BF16 && (uintptr_t)t->data % 16 == 0 && t->ld % 8 == 0 &&
           t->cols % 8 == 0 && t->ld < (1 << 30);
}

// Adds a product to the launch. Returns false if the kernel cannot compute it or should not.
static bool qlora__skinny_add(qlora__skinny* k, const qlora_tensor* s, const qlora_tensor* w,
                              const qlora_tensor* d, bool transposed, float scale) {
    if (k->count == QLORA__SKINNY_PRODUCTS || !qlora__skinny_aligned(s) ||
        !qlora__skinny_aligned(w) || s->cols > QLORA__SKINNY_RANK || d->dtype != QLORA_F32 ||
        w->cols >= (1 << 24) || w->rows * w->cols > QLORA__SKINNY_MOST) {
        return false;
    }
    qlora__skinny_product* p = &k->products[k->count];
    p->s = s->data;
    p->w = w->data;
    p->d = d->data;
    p->ldd = d->ld;
    p->lds = (int32_t)s->ld;
    p->ldw = (int32_t)w->ld;
    p->rank = (int32_t)s->cols;
    p->cols = (int32_t)w->cols;
    p->transposed = transposed ? 1 : 0;
    p->scale = scale;
    k->rows = w->rows;
    k->count++;
    return true;
}

// W of the first product is the input of a norm.
static QLORA__UNUSED void qlora__skinny_norm(qlora__skinny* k, const qlora_tensor* rstd,
                                             const qlora_tensor* norm) {
    k->products[0].rstd = rstd->data;
    k->products[0].norm = norm->data;
    k->products[0].norm_bf16 = norm->dtype == QLORA_BF16;
}

static int64_t qlora__skinny_strips(const qlora__skinny* k) {
    int64_t strips = 0;
    for (int32_t i = 0; i < k->count; i++) {
        strips += qlora__ceil_div(k->products[i].cols, QLORA__SKINNY_STRIP);
    }
    return strips;
}

// parts: f32, a row of all gradients for each part of the rows.
static qlora_result qlora__skinny_launch(qlora_ctx* ctx, qlora__skinny* k, void* parts) {
    int64_t strips = qlora__skinny_strips(k);
    if (strips == 0 || k->rows == 0) {
        return QLORA_OK;
    }
    int64_t splits = qlora__skinny_splits(k->rows, strips);
    k->parts = parts;
    k->each = (int32_t)(qlora__ceil_div(k->rows, splits * 64) * 64);
    k->splits = (int32_t)qlora__ceil_div(k->rows, k->each);
    k->numbers = 0;
    for (int32_t i = 0; i < k->count; i++) {
        k->numbers += (int64_t)k->products[i].rank * k->products[i].cols;
    }
    void* args[] = {k};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_skinny_gradients, strips, k->splits, 1, 256,
                             QLORA__SKINNY_SHARED, args));
    return qlora__launch(ctx, QLORA__K_skinny_sum, qlora__ceil_div(k->numbers, 256), 1, 1, 256, 0,
                         args);
}
