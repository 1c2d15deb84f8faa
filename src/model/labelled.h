// ---- labelled rows of the last layer ------------------------------------------------------------
//
// After the attention of the last layer, rows do not see each other any more, and only those with a
// label are read again: the others would be computed for nothing. So the labelled rows of the
// attention's output and of the residual stream are gathered, without gaps and in their order, and
// o_proj, MLP, final norm and head have only these rows, forward and backward. Before the backward
// pass of attention, their gradients go back to their tokens; those of other tokens are zero. Where
// attention and MLP stand side by side, all rows are computed.
//
// On the GPU, their number is rounded up to whole chunks of the head, so that it follows from the
// number of chunks, and they add no graphs. The rows that fill it up are copies of row 0 whose
// gradients are zero. On the CPU, there are no other rows, so that those of an adapter are the same
// next to others as alone. None of this needs memory of its own:
//
//   labelled rows                in the memory of   which is otherwise used by
//   output of attention, with z  dqkv               the backward pass of attention, later
//   the same, without training   s                  the activation, later
//   residual stream              gate and up        their product, later
//   gradient of the former       dqkv               the same as above; only on the way back
//   gradient of the latter       delta              gradients of x, earlier; only on the way back

// There are at most this many sizes: the products of each of them are run once before the first
// step.
#define QLORA__LABELLED_SIZES 8

// Chunks of the head by which the sizes differ.
static int64_t qlora__labelled_step(const qlora_model* m) {
    int64_t chunks = qlora__ceil_div(m->plan.tokens, m->plan.head_chunk);
    return qlora__ceil_div(chunks, QLORA__LABELLED_SIZES);
}

// Where the output of attention is gathered.
static const qlora_tensor* qlora__labelled_memory(const qlora_model* m) {
    return qlora__trains(m) ? &m->work.dqkv : &m->work.s;
}

// And the stream: memory of the last layer that is not in use then.
static const qlora_tensor* qlora__labelled_stream(const qlora_model* m, const qlora__layer* last) {
    return m->work.gathered.cols > 0 ? &m->work.gathered : &last->kept.gu;
}

// Whether the memory that gathered rows borrow is large enough.
static bool qlora__labelled_fits(const qlora_model* m, int64_t rows) {
    const qlora_model_config* c = &m->plan.config;
    const qlora__kept* kept = &m->layers[c->layers - 1].kept;
    const struct {
        const qlora_tensor* memory;
        int64_t cols;
    } uses[] = {{qlora__labelled_memory(m), kept->o.cols},
                {qlora__labelled_stream(m, &m->layers[c->layers - 1]), c->hidden}};
    bool fits = true;
    for (size_t i = 0; i < sizeof uses / sizeof uses[0]; i++) {
        size_t size = qlora_dtype_bytes(uses[i].memory->dtype);
        fits = fits && (size_t)rows * (size_t)uses[i].cols * size <= uses[i].memory->bytes;
    }
    return fits;
}

// The rows that the last layer has after attention, if `count` of the `rows` rows of a pass have a
// label; 0 = all of them.
static int64_t qlora__labelled_rows(const qlora_model* m, int64_t count, int64_t rows) {
    int64_t size = qlora__labelled_step(m) * m->plan.head_chunk;
    bool cpu = qlora__on_cpu(m->ctx);
    int64_t labelled = cpu ? count : qlora__ceil_div(count, size) * size;
    bool can = m->plan.tile == 0 && (cpu || !qlora__has_several(m)) && !m->every_row &&
               !qlora__stands_beside(m);
    int64_t room = cpu && qlora__trains(m) ? rows : labelled; // as for another number of labels
    return can && labelled < rows && qlora__labelled_fits(m, room) ? labelled : 0;
}

// The output of attention of such rows, with room for z of o_proj.
static qlora_tensor qlora__labelled_o(const qlora_model* m, int64_t rows) {
    qlora_tensor o;
    int64_t cols = m->layers[m->plan.config.layers - 1].kept.o.cols;
    qlora__arena_window(qlora__labelled_memory(m), 0, rows, cols, &o);
    return o;
}

// Gathers the rows of a tensor with one row per token. to: the labelled rows.
static qlora_result qlora__labelled_gather(qlora_ctx* ctx, const qlora_model* m,
                                           const qlora_tensor* from, const qlora_tensor* to) {
    qlora_tensor rows;
    qlora__arena_window(&m->batch.rows, 0, 1, to->rows, &rows);
    qlora_tensor table = *from;
    table.cols = to->cols;
    return qlora_embed(ctx, &table, &rows, to, &m->flag);
}

// The way back: the first `labelled` rows of x go to their tokens, and the others become zero.
// memory: for a copy, and for the row of tokens without a label.
static qlora_result qlora__labelled_spread(qlora_ctx* ctx, const qlora_model* m, int64_t labelled,
                                           const qlora_tensor* memory, const qlora_tensor* x) {
    qlora_tensor inverse;
    qlora_tensor table;
    qlora_tensor copy;
    qlora_tensor zero;
    qlora_tensor first = *x;
    first.rows = labelled;
    qlora__arena_window(&m->batch.inverse, 0, 1, x->rows, &inverse);
    qlora__arena_window(memory, 0, labelled + 1, x->cols, &table);
    qlora__arena_window(memory, 0, labelled, x->cols, &copy);
    qlora__arena_window(memory, labelled * x->cols, 1, x->cols, &zero);
    QLORA__TRY(qlora_scale(ctx, 1.0f, &first, &copy));
    QLORA__TRY(qlora__tensor_zero(ctx, &zero));
    return qlora_embed(ctx, &table, &inverse, x, &m->flag);
}
