// ---- one layer, forward -------------------------------------------------------------------------

// The settings of a pass through the model.
typedef struct qlora__pass {
    qlora_ctx* ctx;
    qlora_model* m;
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
    pass.sequences = qlora__room_of(m, micro->room);
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
    if (index >= m->run_count) {
        return false;
    }
    const qlora__owned_rows* run = &m->runs[index];
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
    memset(pass->m->placed, 0, sizeof pass->m->placed);
}

// Whether these weights are already in the shared operand, next to the matrices of the adapter; if
// not, they are about to be.
static bool qlora__stack_is_placed(const qlora__pass* pass, int64_t layer, int group, bool turned) {
    qlora_model* m = pass->m;
    int64_t key = 1 + 2 * (layer * m->adapters + pass->adapter) + (turned ? 1 : 0);
    bool placed = m->places_layers ? m->placed_layer == key
                                   : m->plan.tile > 0 && m->placed[group] == key;
    m->placed[group] = key;
    m->placed_layer = key;
    return placed;
}

// Places the weights of all stacks of a layer, next to the matrices of the adapter, which a pass
// without adapters does not read.
static qlora_result qlora__layer_place(const qlora__pass* pass, const qlora__layer* layer) {
    const qlora_model* m = pass->m;
    qlora_linear_desc stacks[QLORA__GROUPS];
    qlora_tensor operands[QLORA__GROUPS];
    for (int g = 0; g < QLORA__GROUPS; g++) {
        qlora_linear_desc* linear = &stacks[g];
        *linear = qlora__linear_of(m, layer, g, pass->adapter);
        int64_t pad = qlora_linear_pad(linear);
        operands[g] = qlora__window(&layer->operands[g], qlora_linear_out(linear) + pad, 0,
                                    linear->in + pad);
        linear->operand = &operands[g];
    }
    return qlora__linear_place_at_once(pass->ctx, stacks, QLORA__GROUPS);
}

// A stack of a layer, set up for a pass: without adapters, its ranks are zero and its operand is
// only the weights. Weights without a cached copy are placed in the shared operand; in FP8 mode,
// `backward` tells in which form.
typedef struct qlora__stack {
    qlora_linear_desc linear;
    qlora_tensor operand;
    qlora_tensor positions; // of the rows of the pass, for dropout
    qlora_tensor sequences;
    qlora__linear_owners owners;              // of adapters side by side
    qlora_tensor weights[QLORA_LINEAR_PARTS]; // in the operand, if one of those adapters is alone
    qlora_tensor z; // its z, if it was kept; otherwise without columns
    bool coded;     // the codes of its operand are there
    int64_t out;
    int64_t pad;
} qlora__stack;

// One of several adapters that stand side by side, without the others: its own matrices, next to
// the weights of the operand if the layer has a copy of them.
static void qlora__stack_alone(const qlora__layer* layer, int group, qlora__stack* s) {
    int64_t row = 0;
    for (int i = 0; i < s->linear.count && s->linear.operand != NULL && layer->cached; i++) {
        qlora_linear_part* part = &s->linear.parts[i];
        s->weights[i] = qlora__window(&layer->operands[group], part->out,
                                      row * layer->operands[group].ld, s->linear.in);
        part->dense = &s->weights[i];
        part->nf4 = NULL;
        part->fp8 = NULL;
        row += part->out;
    }
    s->linear.operand = NULL;
}

// Which rows a stack has. The mask of a row does not depend on where it is gathered.
static void qlora__stack_rows(const qlora__pass* pass, qlora__stack* s) {
    const qlora__batch_block* b = &pass->m->batch;
    bool gathered = pass->gathered && s->linear.dropout > 0.0f;
    s->positions =
        qlora__window(gathered ? &b->row_positions : &b->positions, 1, pass->row, pass->rows);
    s->sequences =
        qlora__window(gathered ? &b->row_sequences : &b->sequences, 1, pass->row, pass->rows);
    s->linear.positions = &s->positions;
    s->linear.sequences = &s->sequences;
}

// Waits until the second stream no longer reads the shared operand, or the adapters beside it.
static qlora_result qlora__operand_wait(const qlora__pass* pass) {
    unsigned readers = pass->m->readers;
    pass->m->readers = 0;
    return qlora__beside_wait(pass->ctx, readers);
}

// Whether products read the 4-bit codes: for a single row, dequantising the weights does not pay.
// On the CPU this is also less work than reading copies of 32 bits, and for a few rows as well.
// Rows of a pass that are few because of their labels are not computed in another way.
static bool qlora__pass_reads_codes(const qlora__pass* pass, const qlora__layer* layer) {
    bool fp8 = qlora__is_fp8(pass->m);
    bool few = qlora__on_cpu(pass->ctx) && !fp8;
    bool codes = few ? pass->rows <= 8 : pass->rows == 1 && (!layer->cached || fp8);
    return codes && !pass->training && !pass->gathered;
}

static qlora_result qlora__stack_ready(const qlora__pass* pass, qlora__layer* layer, int group,
                                       bool backward, qlora__stack* out) {
    qlora_model* m = pass->m;
    bool wide = qlora__pass_is_wide(pass);
    out->coded = m->coded == &layer->fp8[group] && m->coded_turned == backward;
    m->coded = NULL; // the next product overwrites the codes
    out->linear = qlora__linear_of(m, layer, group, wide ? QLORA__ALL_ADAPTERS : pass->adapter);
    if (wide) {
        out->owners.rows = qlora__window(&m->batch.owners, 1, pass->row, pass->rows);
        out->owners.columns = m->wide[layer - m->layers].columns[group];
        out->owners.state = backward ? &m->batch.states : NULL;
        out->linear.owners = &out->owners;
    }
    out->out = qlora_linear_out(&out->linear);
    out->linear.dropout = pass->training ? m->desc.dropout : 0.0f;
    qlora__stack_rows(pass, out);
    out->pad = m->use_adapters ? qlora_linear_pad(&out->linear) : 0;
    memset(&out->z, 0, sizeof out->z);
    if (backward && out->pad > 0 && layer->kept.z[group].cols > 0) {
        out->z = qlora__slice(pass, &layer->kept.z[group], 0, out->pad);
    }
    for (int i = 0; i < out->linear.count && !m->use_adapters; i++) {
        out->linear.parts[i].rank = 0;
    }
    if (qlora__pass_reads_codes(pass, layer)) {
        out->linear.operand = NULL;
        out->linear.fp8 = NULL;
        out->coded = false;
    }
    if (m->wide != NULL && !wide && out->pad > 0) {
        qlora__stack_alone(layer, group, out);
    }
    if (out->linear.fp8 != NULL && !layer->cached) {
        if (qlora__stack_is_placed(pass, out->linear.layer, group, backward)) {
            return QLORA_OK;
        }
        QLORA__TRY(qlora__operand_wait(pass));
        QLORA__TRY(qlora__fp8_place(pass->ctx, &out->linear, backward));
        return out->pad > 0 ? qlora__linear_place_fp8(pass->ctx, &out->linear) : QLORA_OK;
    }
    if (out->linear.operand == NULL) {
        return QLORA_OK;
    }
    out->operand =
        qlora__window(&layer->operands[group], out->out + out->pad, 0, out->linear.in + out->pad);
    out->linear.operand = &out->operand;
    if (layer->cached && qlora__has_several(m) && m->wide == NULL) { // it has those of the last run
        QLORA__TRY(qlora__operand_wait(pass));
        return qlora__linear_place(pass->ctx, &out->linear, QLORA_LINEAR_ADAPTERS);
    }
    if (layer->cached || qlora__stack_is_placed(pass, out->linear.layer, group, false)) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__operand_wait(pass));
    return m->places_layers ? qlora__layer_place(pass, layer)
                            : qlora__linear_place(pass->ctx, &out->linear,
                                                  QLORA_LINEAR_WEIGHTS | QLORA_LINEAR_ADAPTERS);
}

// Whether the activation computes z of down, and its backward pass u of gate and up: see
// ops/tails.h. With dropout, DoRA or several adapters there are other ways.
static bool qlora__tails_come(const qlora__pass* pass, const qlora__layer* layer, int group) {
    const qlora_model* m = pass->m;
    return m->on_gpu && m->compute == QLORA_BF16 && m->use_adapters && !pass->decoding &&
           !(m->desc.dropout > 0.0f) && !m->dora && !qlora__has_several(m) &&
           m->plan.config.intermediate % 8 == 0 &&
           qlora__tails_full(qlora__tile_rows(m), QLORA__TAILS_FULL) &&
           qlora__tails_takes(&layer->linears[group]);
}

static bool qlora__z_comes(const qlora__pass* pass, const qlora__layer* layer) {
    return qlora__tails_come(pass, layer, QLORA__DOWN);
}

// Not if it computes other gradients from its tiles (ops/gated.h).
static bool qlora__u_comes(const qlora__pass* pass, const qlora__layer* layer) {
    return qlora__tails_come(pass, layer, QLORA__GATE_UP) &&
           !qlora__gated_ranks(pass->m, layer, NULL);
}

// z of down from the activation in s, with the activation if gate and up are not NULL.
static qlora_result qlora__layer_tail(const qlora__pass* pass, const qlora__layer* layer,
                                      const qlora_tensor* gate, const qlora_tensor* up,
                                      const qlora_tensor* s) {
    const qlora_model* m = pass->m;
    qlora_tensor z = *s;
    z.data = (uint16_t*)s->data + s->cols;
    z.cols = layer->pads[QLORA__DOWN];
    return qlora__tails_forward(pass->ctx, (m->arch->has & QLORA__HAS_GELU) != 0, gate, up, s,
                                layer->linears[QLORA__DOWN].parts[0].a, &z);
}

// x and y have the rows of a tile.
static qlora_result qlora__stack_forward_run(const qlora__pass* pass, qlora__layer* layer,
                                             int group, const qlora_tensor* x,
                                             const qlora_tensor* y) {
    qlora__stack stack;
    QLORA__TRY(qlora__stack_ready(pass, layer, group, false, &stack));
    qlora_tensor in = qlora__local(pass, x, 0, stack.linear.in + stack.pad);
    qlora_tensor out = qlora__local(pass, y, 0, stack.out);
    unsigned there = stack.coded ? QLORA__THERE_CODES : 0u;
    there |= group == QLORA__DOWN && qlora__z_comes(pass, layer) ? QLORA__THERE_Z : 0u;
    QLORA__ENTER(pass->ctx, "qlora_linear_forward"); // frees the scratch on return
    QLORA__TRY(qlora__leave(pass->ctx, qlora__linear_forward(pass->ctx, pass->math, &stack.linear,
                                                             there, &in, &out)));
    return pass->m->use_adapters && qlora__stack_is_dora(pass->m, layer, group)
               ? qlora__scale_columns(pass->ctx, &layer->gains[group], &out)
               : QLORA_OK;
}

static qlora_result qlora__stack_forward(const qlora__pass* pass, qlora__layer* layer, int group,
                                         const qlora_tensor* x, const qlora_tensor* y) {
    qlora__pass run;
    for (int64_t i = 0; qlora__run_at(pass, i, &run); i++) {
        if (run.rows > 0) {
            QLORA__TRY(qlora__stack_forward_run(&run, layer, group, x, y));
        }
    }
    return QLORA_OK;
}

// Keeps z of a stack, the last columns of its input x, for the gradients of B. x is not overwritten
// before qlora__beside_wait.
static qlora_result qlora__stack_keep_z(const qlora__pass* pass, const qlora__layer* layer,
                                        int group, const qlora_tensor* x) {
    const qlora_tensor* kept = &layer->kept.z[group];
    int64_t pad = pass->training && pass->m->use_adapters ? layer->pads[group] : 0;
    if (kept->cols == 0 || pad == 0) {
        return QLORA_OK;
    }
    qlora_tensor from = qlora__local(pass, x, layer->linears[group].in, pad);
    qlora_tensor to = qlora__slice(pass, kept, 0, pad);
    QLORA__TRY(qlora__beside_begin(pass->ctx));
    return qlora__beside_end(pass->ctx, group, qlora__copy_narrow(pass->ctx, &from, &to));
}

// The inputs of attention.
typedef struct qlora__heads {
    qlora_attention_desc desc;
    qlora_tensor q;
    qlora_tensor k;
    qlora_tensor v;
} qlora__heads;

static qlora__heads qlora__heads_of(const qlora__pass* pass, const qlora__layer* layer) {
    const qlora_model_config* c = &pass->m->plan.config;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    const qlora_tensor* rotated = c->qk_norm ? &layer->kept.qk : &layer->kept.qkv;
    qlora__heads h;
    memset(&h, 0, sizeof h);
    h.desc.heads = c->heads;
    h.desc.kv_heads = c->kv_heads;
    h.desc.head_dim = c->head_dim;
    h.desc.window = layer->sliding ? c->window : 0;
    h.desc.scale = (float)c->attention_scale;
    h.desc.cap = (float)c->attention_cap;
    h.desc.longest = pass->m->plan.max_length;
    h.q = qlora__window(rotated, pass->rows, 0, q);
    h.k = qlora__window(rotated, pass->rows, q, kv);
    h.v = qlora__window(&layer->kept.qkv, pass->rows, q + kv, kv);
    return h;
}

// Rotates q and k, which are the first columns of x, or, backward, their gradients; before that, a
// bias is added to all columns of x. If q is scaled by its position, its table contains the factor.
static qlora_result qlora__layer_rotate(const qlora__pass* pass, const qlora__layer* layer,
                                        const qlora_tensor* x, const qlora_tensor* bias,
                                        bool backward) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t q = qlora__q_width(c);
    qlora_tensor angles = qlora__window(&m->batch.angles, 1, pass->row, pass->rows);
    const qlora_tensor* table = layer->sliding ? &m->rope_sliding : &m->rope;
    qlora_rotation_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.head_dim = c->head_dim;
    desc.neighbours = (m->arch->has & QLORA__HAS_PAIRED_ROPE) != 0;
    desc.backward = backward;
    desc.heads = layer->no_rope ? 0 : c->heads + c->kv_heads;
    if (desc.heads == 0 && bias == NULL) {
        return QLORA_OK;
    }
    if (desc.heads == 0 || !qlora__scales_queries(m)) {
        return qlora_rope_apply(pass->ctx, &desc, x, &angles, table, bias, &m->flag);
    }
    qlora_tensor x_q = qlora__window(x, pass->rows, 0, q);
    qlora_tensor x_rest = qlora__window(x, pass->rows, q, x->cols - q);
    qlora_tensor bias_q;
    qlora_tensor bias_rest;
    if (bias != NULL) {
        bias_q = qlora__window(bias, 1, 0, q);
        bias_rest = qlora__window(bias, 1, q, x->cols - q);
    }
    desc.heads = c->heads;
    QLORA__TRY(qlora_rope_apply(pass->ctx, &desc, &x_q, &angles, &m->rope_query,
                                bias != NULL ? &bias_q : NULL, &m->flag));
    desc.heads = c->kv_heads;
    return qlora_rope_apply(pass->ctx, &desc, &x_rest, &angles, table,
                            bias != NULL ? &bias_rest : NULL, &m->flag);
}

// Normalised input in m->x -> rotated q, k and v.
static qlora_result qlora__layer_qkv(const qlora__pass* pass, qlora__layer* layer) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    qlora_tensor rotated = qlora__slice(pass, &layer->kept.qkv, 0, q + 2 * kv);
    QLORA__TRY(qlora__stack_forward(pass, layer, QLORA__QKV, &m->x, &rotated));
    const qlora_tensor* bias = c->qkv_bias && !c->qk_norm ? &layer->qkv_bias : NULL;
    if (c->qk_norm) {
        const struct {
            int64_t at;
            int64_t width;
            const qlora_tensor* weight;
        } parts[] = {{0, q, &layer->norms[QLORA__NORM_Q]}, {q, kv, &layer->norms[QLORA__NORM_K]}};
        for (int i = 0; i < 2; i++) {
            qlora_tensor from = qlora__slice(pass, &layer->kept.qkv, parts[i].at, parts[i].width);
            qlora_tensor to = qlora__slice(pass, &layer->kept.qk, parts[i].at, parts[i].width);
            QLORA__TRY(qlora_rmsnorm_forward(ctx, &from, parts[i].weight, (float)c->rms_eps, &to));
        }
        rotated = qlora__slice(pass, &layer->kept.qk, 0, q + kv);
    }
    return qlora__layer_rotate(pass, layer, &rotated, bias, false);
}

// The input of a stack: the normalised residual stream, or the stream itself.
static qlora_result qlora__rows_input(const qlora__pass* pass, const qlora_tensor* h,
                                      const qlora_tensor* norm, const qlora_tensor* x) {
    float eps = (float)pass->m->plan.config.rms_eps;
    return norm != NULL ? qlora_rmsnorm_forward(pass->ctx, h, norm, eps, x)
                        : qlora_scale(pass->ctx, 1.0f, h, x);
}

// The input of a stack in m->x.
static qlora_result qlora__layer_input(const qlora__pass* pass, const qlora_tensor* stream,
                                       const qlora_tensor* norm) {
    int64_t width = pass->m->plan.config.hidden;
    qlora_tensor h = qlora__window(stream, pass->rows, 0, width);
    qlora_tensor x = qlora__window(&pass->m->x, pass->rows, 0, width);
    return qlora__rows_input(pass, &h, norm, &x);
}

// Norm number `norm` of a layer; NULL if it has none.
static const qlora_tensor* qlora__layer_norm(const qlora_model* m, const qlora__layer* layer,
                                             int norm) {
    return qlora__has_norm(m, norm) ? &layer->norms[norm] : NULL;
}

// Where attention (0) and MLP (1) put their output: where the backward pass of the norm that
// follows finds it, if there is one.
static qlora_tensor* qlora__layer_out(qlora_model* m, qlora__layer* layer, int part) {
    bool kept = qlora__has_norm(m, part == 0 ? QLORA__NORM_ATTENTION_OUT : QLORA__NORM_MLP_OUT);
    return kept ? &layer->kept.out[part] : &m->delta;
}

// The rows of a pass of the residual stream between attention and MLP. It is that of a tile, unless
// the stream is updated in place.
static qlora_tensor qlora__layer_h2(const qlora__pass* pass, const qlora__layer* layer) {
    int64_t width = pass->m->plan.config.hidden;
    return qlora__trains(pass->m) ? qlora__window(&layer->kept.h2, pass->rows, 0, width)
                                  : qlora__slice(pass, &layer->kept.h2, 0, width);
}

// Notes that the next kernel writes the codes of an operand of a stack: of its input or, turned, of
// dy.
static const qlora__fp8* qlora__codes_note(const qlora__pass* pass, const qlora__layer* layer,
                                           int group, bool turned) {
    pass->m->coded = &layer->fp8[group];
    pass->m->coded_turned = turned;
    return pass->m->coded;
}

// Where the norm before or after a product of a stack writes such codes; NULL if nowhere.
static const qlora__fp8* qlora__codes_of_norm(const qlora__pass* pass, const qlora__layer* layer,
                                              int group, bool turned) {
    qlora_model* m = pass->m;
    bool writes = m->on_gpu && qlora__is_fp8(m) && m->compute == QLORA_BF16 && !m->dora &&
                  !qlora__pass_has_runs(pass) && m->plan.config.hidden % 8 == 0 &&
                  m->plan.config.hidden <= QLORA__NORM_CODED &&
                  (turned || !qlora__pass_reads_codes(pass, layer));
    m->coded = NULL;
    return writes ? qlora__codes_note(pass, layer, group, turned) : NULL;
}

// The norm of stream + delta in m->x, for the stack that follows: gate and up of the same layer, or
// q, k and v of the next one, if there is one.
static qlora_result qlora__layer_norm_add(const qlora__pass* pass, const qlora__layer* layer,
                                          int part, qlora__norm_job* job) {
    const qlora_model* m = pass->m;
    const qlora__layer* next = part == 0 ? layer : layer + 1;
    int group = part == 0 ? QLORA__GATE_UP : QLORA__QKV;
    bool any = next < m->layers + m->plan.config.layers;
    job->fp8 = any ? qlora__codes_of_norm(pass, next, group, false) : NULL;
    QLORA__ENTER(pass->ctx, "qlora_rmsnorm_residual_forward");
    return qlora__leave(pass->ctx, qlora__norm_forward(pass->ctx, job));
}

// Adds the output of attention (0) or MLP (1), through its own norm and with the factor of the
// family, to `stream`, giving `next`; then, unless that is left to the next loop over tiles,
// prepares the input of the stack that follows, whose norm is `before` (NULL = none), in m->x.
static qlora_result qlora__layer_add(const qlora__pass* pass, qlora__layer* layer, int part,
                                     const qlora_tensor* stream, const qlora_tensor* next,
                                     const qlora_tensor* before, bool wants_x) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    float eps = (float)c->rms_eps;
    const qlora_tensor* after =
        qlora__layer_norm(m, layer, part == 0 ? QLORA__NORM_ATTENTION_OUT : QLORA__NORM_MLP_OUT);
    qlora_tensor h = qlora__window(stream, pass->rows, 0, c->hidden);
    qlora_tensor sum = qlora__window(next, pass->rows, 0, c->hidden);
    qlora_tensor delta = qlora__window(&m->delta, pass->rows, 0, c->hidden);
    qlora_tensor x = qlora__window(&m->x, pass->rows, 0, c->hidden);
    if (after != NULL) {
        qlora_tensor out = qlora__window(&layer->kept.out[part], pass->rows, 0, c->hidden);
        QLORA__TRY(qlora_rmsnorm_forward(pass->ctx, &out, after, eps, &delta));
    }
    if (c->residual_scale != 1.0) {
        QLORA__TRY(qlora_scale(pass->ctx, (float)c->residual_scale, &delta, &delta));
    }
    if (before != NULL && wants_x) {
        qlora__norm_job job;
        memset(&job, 0, sizeof job);
        job.x = &h;
        job.delta = &delta;
        job.sum = &sum;
        job.w = before;
        job.y = &x;
        job.eps = eps;
        return qlora__layer_norm_add(pass, layer, part, &job);
    }
    QLORA__TRY(qlora_add(pass->ctx, &h, &delta, &sum));
    return wants_x ? qlora__layer_input(pass, next, NULL) : QLORA_OK;
}

// Gathers the output of attention and the residual stream of the labelled rows.
static qlora_result qlora__layer_gather(const qlora__pass* pass, const qlora__layer* layer,
                                        qlora_tensor* o, qlora_tensor* h) {
    const qlora_model* m = pass->m;
    *o = qlora__labelled_o(m, pass->labelled);
    qlora__arena_window(&layer->kept.gu, 0, pass->rows, m->plan.config.hidden, h);
    qlora_tensor heads = qlora__window(o, pass->rows, 0, qlora__q_width(&m->plan.config));
    QLORA__TRY(qlora__labelled_gather(pass->ctx, m, &layer->kept.o, &heads));
    return qlora__labelled_gather(pass->ctx, m, &layer->kept.h, h);
}

// A copy of bytes [from, end) of what a layer keeps of attention, to the host or back.
static qlora_result qlora__turn_copy(const qlora__pass* pass, const qlora__layer* layer,
                                     size_t from, size_t end, bool back) {
    if (layer->away_attention == NULL || from == end) {
        return QLORA_OK;
    }
    qlora_tensor some = layer->kept.o;
    some.data = (char*)some.data + from;
    some.dtype = QLORA_U8;
    some.rows = 1;
    some.cols = (int64_t)(end - from);
    some.ld = some.cols;
    return qlora__away_copy(pass->ctx, 2 + (int)(layer->turn % 2), back, &some,
                            (char*)layer->away_attention + from);
}

// The copy back.
static qlora_result qlora__turn_back(const qlora__pass* pass, const qlora__layer* layer) {
    return qlora__turn_copy(pass, layer, 0, qlora__turn_bytes(pass->m, layer), true);
}

// Waits for the copies of the memory of a layer's turn: of what it keeps of attention, or before
// that of the last layer that had this memory.
static qlora_result qlora__turn_wait(const qlora__pass* pass, const qlora__layer* layer) {
    return layer->turn >= 0 ? qlora__away_wait(pass->ctx, 4u << layer->turn % 2) : QLORA_OK;
}

// Begins the copies to the host, each as soon as its part is there. Those of a layer take longer
// than the layer itself if its products are fast. A recomputed layer has one, before o_proj, whose
// z is computed once more before it is needed.
typedef enum qlora__turn_part {
    QLORA__TURN_HEADS,     // q, k and v, rotated
    QLORA__TURN_ATTENTION, // its output
    QLORA__TURN_O          // z of o_proj, in the same rows
} qlora__turn_part;

static qlora_result qlora__turn_away(const qlora__pass* pass, const qlora__layer* layer,
                                     qlora__turn_part part) {
    const qlora_model* m = pass->m;
    if (!pass->training || layer->away_attention == NULL ||
        layer->recompute != (part == QLORA__TURN_ATTENTION)) {
        return QLORA_OK;
    }
    if (part == QLORA__TURN_HEADS) {
        return qlora__turn_copy(pass, layer, m->turn_bytes[1], m->turn_bytes[2], false);
    }
    QLORA__TRY(qlora__beside_wait(pass->ctx, 1u << QLORA__QKV)); // z of q, k and v
    size_t end = layer->recompute ? qlora__turn_bytes(m, layer) : m->turn_bytes[1];
    return qlora__turn_copy(pass, layer, 0, end, false);
}

// Output of attention in kept.o and the residual stream -> h2, the input of the MLP in m->x, gate
// and up.
static qlora_result qlora__layer_middle(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    qlora_tensor o = qlora__slice(pass, &layer->kept.o, 0, layer->kept.o.cols);
    qlora_tensor h = qlora__slice(pass, &layer->kept.h, 0, m->plan.config.hidden);
    qlora_tensor h2 = qlora__layer_h2(pass, layer);
    if (pass->gathered) {
        QLORA__TRY(qlora__layer_gather(pass, layer, &o, &h));
    }
    QLORA__TRY(qlora__stack_forward(pass, layer, QLORA__O, &o, qlora__layer_out(m, layer, 0)));
    QLORA__TRY(qlora__turn_away(pass, layer, QLORA__TURN_O));
    QLORA__TRY(qlora__beside_wait(pass->ctx, 1u << QLORA__QKV)); // z in x
    QLORA__TRY(qlora__layer_add(pass, layer, 0, &h, &h2,
                                qlora__layer_norm(m, layer, QLORA__NORM_MLP), true));
    QLORA__TRY(qlora__stack_forward(pass, layer, QLORA__GATE_UP, &m->x, &layer->kept.gu));
    return qlora__stack_keep_z(pass, layer, QLORA__GATE_UP, &m->x);
}

// The bounds of the sequences.
static qlora_tensor qlora__pass_seqs(const qlora__pass* pass) {
    return qlora__window(&pass->m->batch.seqs, 1, 0, pass->sequences + 1);
}

static qlora_result qlora__layer_attention(const qlora__pass* pass, qlora__layer* layer) {
    const qlora_model_config* c = &pass->m->plan.config;
    qlora__heads heads = qlora__heads_of(pass, layer);
    qlora_tensor o = qlora__window(&layer->kept.o, pass->rows, 0, qlora__q_width(c));
    qlora_tensor lse = layer->kept.lse;
    lse.cols = pass->rows;
    lse.ld = pass->rows;
    qlora_tensor seqs = qlora__pass_seqs(pass);
    return qlora_attention_forward(pass->ctx, &heads.desc, &heads.q, &heads.k, &heads.v, &seqs, &o,
                                   &lse);
}

// s = act(gate) up.
static qlora_result qlora__layer_gated(const qlora__pass* pass, const qlora_tensor* gate,
                                       const qlora_tensor* up, const qlora_tensor* s) {
    return (pass->m->arch->has & QLORA__HAS_GELU) != 0
               ? qlora_geglu_forward(pass->ctx, gate, up, s)
               : qlora_swiglu_forward(pass->ctx, gate, up, s);
}

// Whether the activation's kernel writes its codes for the product of down instead of the
// activation, which the backward pass computes again.
static bool qlora__activation_is_coded(const qlora__pass* pass, const qlora__layer* layer) {
    const qlora_model* m = pass->m;
    return qlora__is_fp8(m) && qlora__z_comes(pass, layer) &&
           !qlora__pass_reads_codes(pass, layer) &&
           m->plan.config.intermediate <= QLORA__FP8_GATED_WIDTH;
}

// The gated activation in m->s, or its codes, and z of down if the activation comes with it.
static qlora_result qlora__layer_activation(const qlora__pass* pass, const qlora__layer* layer) {
    qlora_model* m = pass->m;
    int64_t width = m->plan.config.intermediate;
    qlora_tensor gate = qlora__window(&layer->kept.gu, pass->rows, 0, width);
    qlora_tensor up = qlora__window(&layer->kept.gu, pass->rows, width, width);
    qlora_tensor s = qlora__window(&m->s, pass->rows, 0, width);
    if (qlora__activation_is_coded(pass, layer)) {
        qlora_tensor z = qlora__window(&m->s, pass->rows, width, layer->pads[QLORA__DOWN]);
        return qlora__fp8_gated(pass->ctx, qlora__codes_note(pass, layer, QLORA__DOWN, false),
                                (m->arch->has & QLORA__HAS_GELU) != 0, &gate, &up,
                                layer->linears[QLORA__DOWN].parts[0].a, &z);
    }
    return qlora__z_comes(pass, layer) ? qlora__layer_tail(pass, layer, &gate, &up, &s)
                                       : qlora__layer_gated(pass, &gate, &up, &s);
}

// The gated activation and down_proj.
static qlora_result qlora__layer_down(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    QLORA__TRY(qlora__beside_wait(pass->ctx, 1u << QLORA__DOWN)); // z of the layer before, in s
    QLORA__TRY(qlora__layer_activation(pass, layer));
    QLORA__TRY(
        qlora__stack_forward(pass, layer, QLORA__DOWN, &m->s, qlora__layer_out(m, layer, 1)));
    return qlora__stack_keep_z(pass, layer, QLORA__DOWN, &m->s);
}

// The norm before layer number `index`, or NULL; after the last layer, the final norm.
static const qlora_tensor* qlora__norm_before(const qlora_model* m, int64_t index) {
    return index < m->plan.config.layers
               ? qlora__layer_norm(m, &m->layers[index], QLORA__NORM_ATTENTION)
               : &m->final_norm;
}

// The residual stream before layer number `index`; after the last layer, last_h.
static const qlora_tensor* qlora__stream_before(const qlora_model* m, int64_t index) {
    return index < m->plan.config.layers ? &m->layers[index].kept.h : &m->last_h;
}
