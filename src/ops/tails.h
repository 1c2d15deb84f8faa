// ---- a gated activation with what adapters make of it -------------------------------------------
//
// z = s A^T of the adapter after act(gate) up, and u = dgate Bgate + dup Bup, side by side, of the
// ones before it: computed apart, they read the largest matrices of a layer once more. The kernels
// of the activation compute them as well (kernels/adapter/tails.cu), in bf16 on a GPU. The
// activation and its gradients are those of qlora_swiglu_forward and _backward to the bit; the
// order of the sums depends on the shapes alone.

#define QLORA__TAILS_RANK 16       // at most, of an adapter; higher ones need more registers
#define QLORA__TAILS_ROWS 16       // of a block
#define QLORA__TAILS_FORWARD 32768 // bytes of shared memory
#define QLORA__TAILS_BACKWARD 90112

// How many percent of the blocks that a large GPU runs at the same time there must be for them to
// pay, in the last round too: a block has all columns of its rows. On an H200, a step of
// Qwen2.5-0.5B with 2048 tokens takes 1.7 % less time with u, and 0.6 % less with z. The tests set
// it to 0.
#ifndef QLORA__TAILS_FULL
#define QLORA__TAILS_FULL 80
#endif
#define QLORA__TAILS_BLOCKS 132

static bool qlora__tails_full(int64_t rows, int64_t percent) {
    int64_t blocks = qlora__ceil_div(rows, QLORA__TAILS_ROWS);
    int64_t room = qlora__ceil_div(blocks, QLORA__TAILS_BLOCKS) * QLORA__TAILS_BLOCKS;
    return 100 * blocks >= percent * room;
}

static bool qlora__tails_aligned(const qlora_tensor* t) {
    return t->dtype == QLORA_BF16 && (uintptr_t)t->data % 16 == 0 && t->ld % 8 == 0 &&
           t->cols % 8 == 0 && t->ld < (1 << 26);
}

// Whether there is a kernel for the adapters of a linear layer.
static bool qlora__tails_takes(const qlora_linear_desc* l) {
    int64_t most = 0;
    bool fits = l->count <= 2;
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        most = qlora__max(most, p->rank);
        fits = fits && p->rank % 8 == 0 &&
               (p->rank == 0 || (qlora__tails_aligned(p->a) && qlora__tails_aligned(p->sb)));
    }
    return fits && most > 0 && most <= QLORA__TAILS_RANK;
}

// s = act(gate) up and z = s A^T. Without gate and up, s is there; z has the same bits.
static qlora_result qlora__tails_forward(qlora_ctx* ctx, bool gelu, const qlora_tensor* gate,
                                         const qlora_tensor* up, const qlora_tensor* s,
                                         const qlora_tensor* a, const qlora_tensor* z) {
    void* data[] = {gate != NULL ? gate->data : NULL, s->data, a->data, z->data};
    int32_t ld = gate != NULL ? (int32_t)gate->ld : 0;
    int32_t lds = (int32_t)s->ld;
    int32_t lda = (int32_t)a->ld;
    int64_t ldz = z->ld;
    int64_t rows = s->rows;
    int32_t cols = (int32_t)s->cols;
    int32_t rank = (int32_t)a->rows;
    int32_t kind = gelu;
    int32_t after = gate != NULL ? (int32_t)(((char*)up->data - (char*)gate->data) / 2) : 0;
    QLORA_ASSERT(qlora__tails_aligned(s) && qlora__tails_aligned(a) && rank % 8 == 0);
    QLORA_ASSERT(gate == NULL || (qlora__tails_aligned(gate) && qlora__tails_aligned(up) &&
                                  gate->ld == up->ld));
    void* args[] = {&data[0], &ld,  &after, &data[1], &lds,  &data[2], &lda,
                    &data[3], &ldz, &rows,  &cols,    &rank, &kind};
    return qlora__launch(ctx, QLORA__K_tails_gated, qlora__ceil_div(rows, QLORA__TAILS_ROWS), 1, 1,
                         512, QLORA__TAILS_FORWARD, args);
}

// The gradients of gate and up, in their place, s in that of ds or elsewhere, and u of the linear
// layer whose output gate and up are.
static qlora_result qlora__tails_backward(qlora_ctx* ctx, bool gelu, const qlora_linear_desc* l,
                                          const qlora_tensor* ds, const qlora_tensor* gate,
                                          const qlora_tensor* up, const qlora_tensor* s,
                                          const qlora_tensor* u) {
    void* data[] = {ds->data, gate->data, s->data, u->data};
    void* b[2] = {NULL, NULL};
    int32_t ldb[2] = {0, 0};
    int32_t rank[2] = {0, 0};
    int32_t ldd = (int32_t)ds->ld;
    int32_t ld = (int32_t)gate->ld;
    int32_t lds = (int32_t)s->ld;
    int64_t ldu = u->ld;
    int64_t rows = ds->rows;
    int32_t cols = (int32_t)ds->cols;
    int32_t joined = l->count == 1; // gate and up are one projection
    int32_t kind = gelu;
    int32_t after = (int32_t)(((char*)up->data - (char*)gate->data) / 2);
    for (int i = 0; i < 2; i++) {
        const qlora_linear_part* part = &l->parts[joined ? 0 : i];
        if (part->rank > 0) {
            QLORA_ASSERT(qlora__tails_aligned(part->sb));
            rank[i] = (int32_t)part->rank;
            ldb[i] = (int32_t)part->sb->ld;
            b[i] = (uint16_t*)part->sb->data + (joined ? i * cols * part->sb->ld : 0);
        }
    }
    QLORA_ASSERT(qlora__tails_aligned(ds) && qlora__tails_aligned(gate) && gate->ld == up->ld &&
                 qlora__tails_aligned(up) && qlora__tails_aligned(s));
    void* args[] = {&data[0], &ldd,     &data[1], &ld,     &after,   &data[2], &lds,
                    &b[0],    &ldb[0],  &rank[0], &b[1],   &ldb[1],  &rank[1], &data[3],
                    &ldu,     &rows,    &cols,    &joined, &kind};
    return qlora__launch(ctx, QLORA__K_tails_gated_bwd, qlora__ceil_div(rows, QLORA__TAILS_ROWS), 1,
                         1, 512, QLORA__TAILS_BACKWARD, args);
}
