// ---- tensors of a model in a GGUF file ----------------------------------------------------------

// llama.cpp rotates pairs of neighbours in some architectures; their files order the rows of q and
// k accordingly. Row `row` of our matrix is this row of the file's.
static QLORA__UNUSED int64_t qlora__gguf_stored_row(int64_t row, int64_t head_dim) {
    int64_t in_head = row % head_dim;
    int64_t half = head_dim / 2;
    return row - in_head + (in_head < half ? 2 * in_head : 2 * (in_head - half) + 1);
}

// How a matrix of the model is made from those of a file: rows [first, first + rows) of the parts,
// one below the other. Or, if `each` is not 0, so many rows of every part in turn, from row `first`
// of each part on: the halves of the matrices of experts.
typedef struct qlora__gguf_view {
    const qlora__gguf_tensor* parts[3];
    uint32_t count;
    int64_t first;
    int64_t rows;
    int64_t cols;
    int64_t each;     // 0 = the parts are whole
    int64_t head_dim; // > 0: the rows are those of q or k, and are put back in order within heads
    bool minus_one;   // the file holds w + 1
} qlora__gguf_view;

static bool qlora__gguf_view_is_plain(const qlora__gguf_view* v) {
    return v->count == 1 && v->head_dim == 0 && !v->minus_one;
}

// A vector is a matrix of one column, so that its elements can be put in order like rows. The
// matrices of experts follow each other.
static int64_t qlora__gguf_rows(const qlora__gguf_tensor* t) {
    return (int64_t)(t->rank == 1 ? t->shape[0] : t->shape[1] * t->shape[2]);
}

// The tensor and the row in it that hold a row of the view.
static const qlora__gguf_tensor* qlora__gguf_view_row(const qlora__gguf_view* v, int64_t row,
                                                      uint64_t* stored) {
    if (v->each > 0) {
        int64_t turn = row / v->each;
        *stored = (uint64_t)(v->first + turn / v->count * v->each + row % v->each);
        return v->parts[turn % v->count];
    }
    int64_t at = v->first + (v->head_dim > 0 ? qlora__gguf_stored_row(row, v->head_dim) : row);
    uint32_t part = 0;
    while (part + 1 < v->count && at >= qlora__gguf_rows(v->parts[part])) {
        at -= qlora__gguf_rows(v->parts[part]);
        part++;
    }
    *stored = (uint64_t)at;
    return v->parts[part];
}

// The bytes of a row of the view.
static const uint8_t* qlora__gguf_view_bytes(const qlora__gguf_view* v, int64_t row) {
    uint64_t stored = 0;
    const qlora__gguf_tensor* t = qlora__gguf_view_row(v, row, &stored);
    return t->data + stored * ((uint64_t)v->cols / t->type->block * t->type->bytes);
}

// Elements [first, first + count) as floats.
static QLORA__UNUSED void qlora__gguf_view_read(const qlora__gguf_view* v, uint64_t first,
                                                uint64_t count, float* out) {
    uint64_t cols = (uint64_t)v->cols;
    float block[256];
    for (uint64_t done = 0; done < count;) {
        uint64_t col = (first + done) % cols;
        uint64_t stored = 0;
        int64_t number = (int64_t)((first + done) / cols);
        const qlora__gguf_type* type = qlora__gguf_view_row(v, number, &stored)->type;
        const uint8_t* row = qlora__gguf_view_bytes(v, number);
        uint64_t skip = col % type->block;
        uint64_t n = type->block - skip;
        n = n < count - done ? n : count - done;
        type->widen(row + col / type->block * type->bytes, block);
        for (uint64_t i = 0; i < n; i++) {
            out[done + i] = v->minus_one ? block[skip + i] - 1.0f : block[skip + i];
        }
        done += n;
    }
}
