// ---- passes through the model -------------------------------------------------------------------

// The settings of a pass through the model.
typedef struct qlora__pass {
    qlora_ctx* ctx;
    qlora_model* m;
    qlora__flow* flow; // what the pass has placed so far
    int64_t rows;      // number of tokens
    int64_t row;       // the first of them, if they are a tile of a larger pass
    int64_t sequences; // that there is room for
    bool training;     // dropout is on
    bool group;        // layers are computed once more, to have their inputs: qlora__group_again
    qlora_math math;   // of products with weights
    bool decoding;     // keys and values are stored in the cache
    int64_t first;     // position of the first row when decoding
    int64_t cache;     // row of the cache that position 0 has when decoding
    int64_t at;        // first row in buffers of a tile, if the rows are a run of one
    int64_t labelled;  // rows of the last layer after attention, 0 = all: see model/labelled.h
    int64_t chunks;    // of the head, if labelled is set
    bool gathered;     // the rows are those
    int32_t adapter;
    bool dry; // nothing but the kernels counts: layers like others are left out
} qlora__pass;

static qlora__pass qlora__pass_of(qlora_model* m, int64_t rows, bool training) {
    qlora__pass pass;
    memset(&pass, 0, sizeof pass);
    pass.ctx = m->ctx;
    pass.m = m;
    pass.flow = &m->flow;
    pass.rows = rows;
    pass.sequences = m->plan.max_sequences;
    pass.training = training;
    pass.math = qlora__model_math(m);
    pass.adapter = m->adapter;
    return pass;
}

// The pass of a micro-batch.
static qlora__pass qlora__pass_of_micro(qlora_model* m, const qlora__micro* micro, bool training) {
    qlora__pass pass = qlora__pass_of(m, micro->rows, training);
    pass.sequences = qlora__size_class_sequences(m, micro->size_class);
    pass.labelled = micro->labelled;
    pass.chunks = micro->chunks;
    return pass;
}

// What a pass is after the attention of layer number `index`.
static qlora__pass qlora__pass_after(const qlora__pass* pass, int64_t index) {
    qlora__pass after = *pass;
    if (pass->labelled > 0 && index == pass->m->plan.config.layers - 1) {
        after.rows = pass->labelled;
        after.gathered = true;
    }
    return after;
}

// A view of the first rows of a tensor and some of its columns.
static qlora_tensor qlora__window(const qlora_tensor* t, int64_t rows, int64_t col, int64_t cols) {
    qlora_tensor v = *t;
    size_t offset = (size_t)col * qlora_dtype_bytes(t->dtype);
    v.data = (char*)t->data + offset;
    v.bytes = t->bytes > offset ? t->bytes - offset : 0;
    v.rows = rows;
    v.cols = cols;
    return v;
}

// The rows of a pass, and some of the columns, of a tensor with one row per token.
static qlora_tensor qlora__slice(const qlora__pass* pass, const qlora_tensor* t, int64_t col,
                                 int64_t cols) {
    return qlora__window(t, pass->rows, pass->row * t->ld + col, cols);
}

// The same for a tensor that has only the rows of a tile.
static qlora_tensor qlora__local(const qlora__pass* pass, const qlora_tensor* t, int64_t col,
                                 int64_t cols) {
    return qlora__window(t, pass->rows, pass->at * t->ld + col, cols);
}

// Whether the rows of a pass can belong to several adapters. Decoding uses the current one.
static bool qlora__pass_is_shared(const qlora__pass* pass) {
    const qlora_model* m = pass->m;
    return qlora__has_several(m) && m->use_adapters && !pass->decoding;
}

// Whether they are computed together, or else run by run; see model/wide.h.
static bool qlora__pass_is_wide(const qlora__pass* pass) {
    return qlora__pass_is_shared(pass) && pass->m->wide != NULL;
}

static bool qlora__pass_has_runs(const qlora__pass* pass) {
    return qlora__pass_is_shared(pass) && pass->m->wide == NULL;
}

// Sets the part of a pass that belongs to run number `index` of the micro-batch, or, without runs,
// the pass itself; false past the last one. A run may have no rows in a tile.
static bool qlora__run_at(const qlora__pass* pass, int64_t index, qlora__pass* out) {
    const qlora_model* m = pass->m;
    *out = *pass;
    if (!qlora__pass_has_runs(pass)) {
        return index == 0;
    }
    if (index >= m->work.run_count) {
        return false;
    }
    const qlora__owned_rows* run = &m->work.runs[index];
    int64_t first = qlora__max(pass->gathered ? run->label : run->row, pass->row);
    int64_t end = qlora__min(pass->gathered ? run->label_end : run->end, pass->row + pass->rows);
    out->row = first;
    out->rows = qlora__max(end - first, 0);
    out->at = pass->at + first - pass->row;
    out->adapter = run->adapter;
    return true;
}

// Tile of a pass that begins at row `at`: all of its rows unless the plan has tiles.
static qlora__pass qlora__tile_at(const qlora__pass* pass, int64_t at) {
    int64_t size = pass->m->plan.tile > 0 ? pass->m->plan.tile : pass->rows;
    qlora__pass tile = *pass;
    tile.row = at;
    tile.rows = qlora__min(size, pass->rows - at);
    return tile;
}

// A loop over tiles begins: no weights are in the shared operand. Within the loop, those of each
// stack are placed once.
static void qlora__tiles_begin(const qlora__pass* pass) {
    memset(pass->flow->placed, 0, sizeof pass->flow->placed);
}

// The bounds of the sequences.
static qlora_tensor qlora__pass_seqs(const qlora__pass* pass) {
    return qlora__window(&pass->m->batch.seqs, 1, 0, pass->sequences + 1);
}
