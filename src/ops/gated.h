// ---- a gated activation with the gradients that read its tiles ----------------------------------
//
// The backward pass of act(gate) up, and with it dB of gate and up and dA of down: computed apart,
// those read the gradients of gate and up and the activation once more, which are the largest
// matrices of a layer. One kernel keeps its tiles for them (kernels/adapter/gated.cu), in bf16 on a
// GPU. dgate and dup are those of qlora_swiglu_backward and qlora_geglu_backward to the bit; the
// sums have an order of their own, which the shapes alone decide. The kernel leaves parts of them,
// which a second one adds; nothing but the optimizer waits for that.

// One of the three gradients: d += scale (tile)^T z, or for down d += z^T (tile).
typedef struct qlora__gated_factor {
    qlora_tensor z;        // [rows, rank]: z of gate or up, u of down
    const qlora_tensor* d; // dB [cols, rank], or dA [rank, cols]
    float scale;
} qlora__gated_factor;

typedef struct qlora__gated {
    const qlora_tensor* dh;
    const qlora_tensor* gate;       // overwritten with its gradient
    const qlora_tensor* up;         // the same; in the same rows as gate, after it
    qlora__gated_factor factors[3]; // gate, up, down; without columns if there is no adapter
    const qlora_tensor* parts;      // f32, qlora__gated_room elements
    const qlora_tensor* most;       // f32 [1, rows], or NULL: raised to the largest magnitudes of
                                    // the rows of both gradients
    const qlora_tensor* a; // [rank of down, cols] bf16, or NULL: dh lacks u of down times it
    bool gelu;
} qlora__gated;

#define QLORA__GATED_RANK 16      // at most; higher ranks need more registers than a block has
#define QLORA__GATED_STRIP 128    // columns of a block
#define QLORA__GATED_RING 82944   // bytes of shared memory; 8.0 has room for two blocks
#define QLORA__GATED_SHARED 87296 // with a

// Elements of the activation from which on it pays. With fewer, its matrices are still in the L2
// cache when they are read once more: on an H200, a step with 2048 x 4864 takes 0.5 % longer with
// the kernel, with 8192 x 8192 1.5 % less. The tests set it to 1.
#ifndef QLORA__GATED_FROM
#define QLORA__GATED_FROM ((int64_t)1 << 24)
#endif

// Whether the kernel adds what the adapter of down adds to dh, if that is a product of its own. The
// tests compare both.
#ifndef QLORA__GATED_SHARE
#define QLORA__GATED_SHARE true
#endif

// Whether there is a kernel for ranks of gate, up and down.
static bool qlora__gated_takes(const int64_t ranks[3]) {
    int64_t most = 0;
    bool eights = true;
    for (int i = 0; i < 3; i++) {
        most = qlora__max(most, ranks[i]);
        eights = eights && ranks[i] % 8 == 0;
    }
    return eights && most > 0 && most <= QLORA__GATED_RANK;
}

// Blocks that run at the same time on a large GPU, two on a multiprocessor.
#define QLORA__GATED_BLOCKS 264

// Into how many parts the rows are split: as many as run at the same time, but none with less than
// 256 rows.
static int64_t qlora__gated_splits(int64_t rows, int64_t cols) {
    int64_t splits = QLORA__GATED_BLOCKS / qlora__ceil_div(cols, QLORA__GATED_STRIP);
    return qlora__max(qlora__min(splits, rows / 256), 1);
}

// f32 elements of the parts of the sums.
static int64_t qlora__gated_room(int64_t rows, int64_t cols) {
    return qlora__gated_splits(rows, cols) * 3 * QLORA__GATED_RANK * cols;
}

// Rows of a part.
static int32_t qlora__gated_each(int64_t rows, int64_t cols) {
    return (int32_t)(qlora__ceil_div(rows, qlora__gated_splits(rows, cols) * 32) * 32);
}

// Everything is aligned to 16 bytes, which the caller knows from its shapes.
static bool qlora__gated_aligned(const qlora_tensor* t) {
    return (uintptr_t)t->data % 16 == 0 && t->ld % 8 == 0 && t->ld < (1 << 24);
}

// The gradients of gate and up, and the parts of the sums.
static qlora_result qlora__gated_tiles(qlora_ctx* ctx, const qlora__gated* g) {
    int64_t ranks[3];
    int32_t rank[3];
    int32_t ldz[3];
    void* z[3];
    bool aligned =
        qlora__gated_aligned(g->dh) && qlora__gated_aligned(g->gate) && qlora__gated_aligned(g->up);
    for (int i = 0; i < 3; i++) {
        const qlora_tensor* t = &g->factors[i].z;
        aligned = aligned && (t->cols == 0 || qlora__gated_aligned(t));
        ranks[i] = t->cols;
        rank[i] = (int32_t)t->cols;
        ldz[i] = t->cols > 0 ? (int32_t)t->ld : 0;
        z[i] = t->cols > 0 ? t->data : NULL;
    }
    QLORA_ASSERT(qlora__gated_takes(ranks) && aligned);
    QLORA_ASSERT(g->gate->ld == g->up->ld && g->gate->cols % 8 == 0);
    QLORA_ASSERT(g->a == NULL || qlora__gated_aligned(g->a));
    int64_t rows = g->dh->rows;
    int64_t cols = g->dh->cols;
    int32_t each = qlora__gated_each(rows, cols);
    int32_t gelu = g->gelu;
    void* parts = g->parts->data;
    void* most = g->most != NULL ? g->most->data : NULL;
    void* a = g->a != NULL ? g->a->data : NULL;
    int32_t lda = g->a != NULL ? (int32_t)g->a->ld : 0;
    void* dh = g->dh->data;
    void* gate = g->gate->data;
    int32_t ldd = (int32_t)g->dh->ld;
    int32_t ld = (int32_t)g->gate->ld;
    int32_t up = (int32_t)(((char*)g->up->data - (char*)gate) / 2);
    void* args[] = {&dh,      &ldd,    &gate,    &ld,   &up,     &rows,    &cols, &each,
                    &z[0],    &ldz[0], &rank[0], &z[1], &ldz[1], &rank[1], &z[2], &ldz[2],
                    &rank[2], &parts,  &gelu,    &most, &a,      &lda};
    return qlora__launch(ctx, QLORA__K_gated_backward, qlora__ceil_div(cols, QLORA__GATED_STRIP),
                         qlora__ceil_div(rows, each), 1, 256,
                         g->a != NULL ? QLORA__GATED_SHARED : QLORA__GATED_RING, args);
}

// Adds the parts to the gradients.
static qlora_result qlora__gated_sum(qlora_ctx* ctx, const qlora__gated* g) {
    int64_t cols = g->dh->cols;
    int32_t each = qlora__gated_each(g->dh->rows, cols);
    int32_t count = (int32_t)qlora__ceil_div(g->dh->rows, each);
    int32_t most = QLORA__GATED_RANK;
    void* parts = g->parts->data;
    int32_t rank[3];
    int64_t ld[3];
    void* d[3];
    float scale[3];
    for (int i = 0; i < 3; i++) {
        const qlora__gated_factor* f = &g->factors[i];
        rank[i] = (int32_t)f->z.cols;
        ld[i] = rank[i] > 0 ? f->d->ld : 0;
        d[i] = rank[i] > 0 ? f->d->data : NULL;
        scale[i] = f->scale;
    }
    void* args[] = {&parts, &count, &most,    &cols,     &d[0], &ld[0], &rank[0], &scale[0],
                    &d[1],  &ld[1], &rank[1], &scale[1], &d[2], &ld[2], &rank[2]};
    return qlora__launch(ctx, QLORA__K_linear_gated_sum, qlora__ceil_div(cols, 128), most / 8, 3,
                         128, 0, args);
}
