// ---- operands of FP8 products with what adapters make of them -----------------------------------
//
// The activation of an MLP in e4m3, with z of the adapter after it, and the gradients of gate and
// up, with u of the adapters before them (kernels/fp8/fp8_tails.cu): computed apart, each reads the
// largest matrices of a layer once more. Codes and scales are those of qlora__fp8_quantise_gpu to
// the bit, z that of qlora__tails_forward; u has an order of sums of its own, which depends on the
// shapes alone.

// Columns of an activation, at most: a block keeps its rows. The tests set it to 0, too.
#ifndef QLORA__FP8_GATED_WIDTH
#define QLORA__FP8_GATED_WIDTH 9216
#endif
#define QLORA__FP8_GATED_SHARED 229376 // bytes of shared memory

#define QLORA__FP8_U_ROWS 128   // of a block
#define QLORA__FP8_U_WIDTH 1024 // columns of a piece
#define QLORA__FP8_U_RANK 16    // of the sums of a piece

// Pieces of a part of the columns.
static int64_t qlora__fp8_u_pieces(int64_t part) {
    return qlora__ceil_div(part, QLORA__FP8_U_WIDTH);
}

// f32 elements of the sums of all pieces.
static int64_t qlora__fp8_u_room(int64_t rows, int64_t part, int64_t parts) {
    return parts * qlora__fp8_u_pieces(part) * rows * QLORA__FP8_U_RANK;
}

// The codes and scales of d, whose largest magnitudes f->most has, for the products of f, and
// u = d sB. d has as many parts side by side as there are ranks, one or two of the same width, and
// sB [columns of d, all ranks] has theirs along the diagonal. sums: qlora__fp8_u_room elements.
static QLORA__UNUSED qlora_result qlora__fp8_u(qlora_ctx* ctx, const qlora__fp8* f,
                                               const qlora_tensor* d, const qlora_tensor* sb,
                                               const int64_t* ranks, int64_t parts,
                                               const qlora_tensor* u, void* sums) {
    void* data[] = {d->data,         f->most.data, f->factors.data, f->codes.data,
                    f->scales.data, sb->data,     u->data,         sums};
    int32_t ldd = (int32_t)d->ld;
    int32_t ldb = (int32_t)sb->ld;
    int64_t ldu = u->ld;
    int64_t rows = d->rows;
    int32_t cols = (int32_t)d->cols;
    int32_t part = (int32_t)(d->cols / parts);
    int32_t pieces = (int32_t)qlora__fp8_u_pieces(part);
    int64_t pitch = qlora__fp8_pitch(cols);
    int32_t rank[2] = {(int32_t)ranks[0], parts > 1 ? (int32_t)ranks[1] : 0};
    QLORA_ASSERT(qlora__tails_aligned(d) && qlora__tails_aligned(sb) && part % 8 == 0 &&
                 rank[0] % 8 == 0 && rank[1] % 8 == 0 && rank[0] <= QLORA__FP8_U_RANK &&
                 rank[1] <= QLORA__FP8_U_RANK);
    void* args[] = {&data[0], &ldd,     &rows, &cols,    &part,    &pieces,
                    &data[1], &data[2], &data[3], &pitch, &data[4], &data[5],
                    &ldb,     &rank[0], &rank[1], &data[7]};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_fp8_quantise_u, qlora__ceil_div(rows, QLORA__FP8_U_ROWS),
                             (uint32_t)(parts * pieces), 1, 256, 0, args));
    void* more[] = {&data[7], &rows, &pieces, &rank[0], &rank[1], &data[6], &ldu};
    return qlora__launch(ctx, QLORA__K_fp8_u_sum,
                         qlora__ceil_div(rows * (rank[0] + rank[1]), 256), 1, 1, 256, 0, more);
}

// The codes and scales of act(gate) up for the products of f, and z = act(gate) up A^T. The
// activation itself is not stored.
static QLORA__UNUSED qlora_result qlora__fp8_gated(qlora_ctx* ctx, const qlora__fp8* f, bool gelu,
                                                   const qlora_tensor* gate,
                                                   const qlora_tensor* up, const qlora_tensor* a,
                                                   const qlora_tensor* z) {
    void* data[] = {gate->data,      a->data,       z->data,
                    f->factors.data, f->codes.data, f->scales.data};
    int32_t ld = (int32_t)gate->ld;
    int32_t lda = (int32_t)a->ld;
    int64_t ldz = z->ld;
    int64_t rows = gate->rows;
    int32_t cols = (int32_t)gate->cols;
    int32_t rank = (int32_t)a->rows;
    int32_t kind = gelu;
    int32_t after = (int32_t)(((char*)up->data - (char*)gate->data) / 2);
    int32_t pitch = (int32_t)qlora__fp8_pitch(cols);
    QLORA_ASSERT(qlora__tails_aligned(gate) && qlora__tails_aligned(up) && gate->ld == up->ld &&
                 qlora__tails_aligned(a) && rank % 8 == 0 && rank <= QLORA__TAILS_RANK &&
                 cols <= QLORA__FP8_GATED_WIDTH);
    void* args[] = {&data[0], &ld,   &after, &data[1], &lda,     &data[2], &ldz,    &rows,
                    &cols,    &rank, &kind,  &data[3], &data[4], &pitch,   &data[5]};
    return qlora__launch(ctx, QLORA__K_fp8_gated, qlora__ceil_div(rows, QLORA__TAILS_ROWS), 1, 1,
                         512, QLORA__FP8_GATED_SHARED, args);
}
