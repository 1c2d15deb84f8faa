// ---- stacks of projections ----------------------------------------------------------------------
//
// Forward and backward of a stack of projections that share an input, with their adapters. The work
// of stack g on the second stream uses slot g.

// Takes the shared operand for these weights, next to the matrices of the adapter. Returns whether
// they are there already; if not, they are about to be.
static bool qlora__stack_claim(const qlora__pass* pass, int64_t layer, int group,
                               bool transposed) {
    const qlora_model* m = pass->m;
    int64_t key = 1 + 2 * (layer * m->adapters + pass->adapter) + (transposed ? 1 : 0);
    qlora__flow* flow = pass->flow;
    bool placed = m->work.places_layers ? flow->placed_layer == key
                                        : m->plan.tile > 0 && flow->placed[group] == key;
    flow->placed[group] = key;
    flow->placed_layer = key;
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
    unsigned readers = pass->flow->readers;
    pass->flow->readers = 0;
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
    qlora__flow* flow = pass->flow;
    out->coded = flow->coded == &layer->fp8[group] && flow->coded_transposed == backward;
    flow->coded = NULL; // the next product overwrites the codes
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
        if (qlora__stack_claim(pass, out->linear.layer, group, backward)) {
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
    if (layer->cached || qlora__stack_claim(pass, out->linear.layer, group, false)) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__operand_wait(pass));
    return m->work.places_layers
               ? qlora__layer_place(pass, layer)
               : qlora__linear_place(pass->ctx, &out->linear,
                                     QLORA_LINEAR_WEIGHTS | QLORA_LINEAR_ADAPTERS);
}

// Whether the activation computes z of down, and its backward pass u of gate and up: see
// ops/tails.h. With dropout, DoRA or several adapters there are other ways.
static bool qlora__tails_come(const qlora__pass* pass, const qlora__layer* layer, int group) {
    const qlora_model* m = pass->m;
    return qlora__ffn_plan_of(layer)->joins && m->on_gpu && m->compute == QLORA_BF16 &&
           m->use_adapters && !pass->decoding && !(m->desc.dropout > 0.0f) && !m->dora &&
           !qlora__has_several(m) && m->plan.config.intermediate % 8 == 0 &&
           qlora__tails_full(qlora__tile_rows(m), QLORA__TAILS_FULL) &&
           qlora__tails_takes(&layer->linears[group]);
}

static bool qlora__z_comes(const qlora__pass* pass, const qlora__layer* layer) {
    return qlora__tails_come(pass, layer, QLORA__DOWN);
}

// Not if it computes other gradients from its tiles (ops/gated.h).
static bool qlora__u_comes(const qlora__pass* pass, const qlora__layer* layer) {
    return qlora__tails_come(pass, layer, QLORA__GATE_UP) &&
           !qlora__ffn_sums(pass->m, layer);
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

// Computes z again, into the last columns of x, for the gradient of B, unless it was kept.
static qlora_result qlora__stack_z(const qlora__pass* pass, const qlora__stack* stack, int group,
                                   const qlora_tensor* x) {
    if (stack->pad == 0 || stack->z.cols > 0) {
        return QLORA_OK;
    }
    const qlora__layer* layer = &pass->m->layers[stack->linear.layer];
    qlora_tensor inner = qlora__window(x, pass->rows, 0, stack->linear.in);
    if (group == QLORA__DOWN && qlora__z_comes(pass, layer)) {
        return qlora__layer_tail(pass, layer, NULL, NULL, &inner);
    }
    pass->flow->readers |= 1u << group;
    return qlora__linear_z(pass->ctx, pass->math, &stack->linear, x, &inner);
}

// Which gradients of a stack are left if the activation comes with the others.
static unsigned qlora__gradients_left(const qlora__pass* pass, const qlora__layer* layer,
                                      int group) {
    bool gated = (group == QLORA__GATE_UP || group == QLORA__DOWN) &&
                 qlora__ffn_sums(pass->m, layer);
    return !gated                   ? QLORA__GRADIENT_A | QLORA__GRADIENT_B
           : group == QLORA__GATE_UP ? QLORA__GRADIENT_A
                                     : QLORA__GRADIENT_B;
}

// Computes dA and dB of a stack from u, and first z if wants_z. None of this needs scratch.
static qlora_result qlora__stack_gradients(const qlora__pass* pass, const qlora__stack* stack,
                                           int group, const qlora_tensor* x, const qlora_tensor* dy,
                                           bool wants_z) {
    qlora_ctx* ctx = pass->ctx;
    if (stack->pad == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__beside_begin(ctx));
    const qlora__layer* layer = &pass->m->layers[stack->linear.layer];
    qlora_result r = wants_z ? qlora__stack_z(pass, stack, group, x) : QLORA_OK;
    if (r == QLORA_OK) {
        qlora__linear_factors factors = qlora__linear_factors_of(
            x, stack->z.cols > 0 ? &stack->z : NULL, dy, stack->linear.owners != NULL ? 0.0f : 1.0f,
            qlora__gradients_left(pass, layer, group));
        r = qlora__linear_gradients(ctx, pass->math, &stack->linear, &factors, NULL,
                                    &pass->m->work.skinny_parts);
    }
    if (r == QLORA_OK && stack->linear.owners != NULL) { // to each adapter its own
        const qlora__wide_layer* wide = &pass->m->wide[stack->linear.layer];
        r = qlora__collect(ctx, &wide->shares[group], wide->share_count[group], wide->most[group],
                           &pass->m->batch.states);
    }
    return qlora__beside_end(ctx, group, r);
}

// Computes all gradients of a stack with dropout, whose masks need scratch.
static qlora_result qlora__stack_backward_masked(const qlora__pass* pass, const qlora__stack* stack,
                                                 const qlora_tensor* x, const qlora_tensor* dy,
                                                 const qlora_tensor* dx) {
    QLORA__ENTER(pass->ctx, "qlora_linear_backward");
    return qlora__leave(
        pass->ctx, qlora__linear_backward(pass->ctx, pass->math, &stack->linear, x, dy, dx, 0));
}

// Whether u of gate and up comes with the codes of their gradients for FP8 products, whose largest
// magnitudes the activation found: see ops/fp8_tails.h. The sums of the pieces are in the memory of
// ds, which the activation has read.
static bool qlora__u_is_coded(const qlora_model* m, const qlora__layer* layer) {
    const qlora_linear_desc* l = &layer->linears[QLORA__GATE_UP];
    int64_t part = qlora_linear_out(l) / l->count;
    int64_t room = qlora__fp8_u_room(qlora__tile_rows(m), part, l->count);
    return qlora__is_fp8(m) && qlora__ffn_sums(m, layer) &&
           layer->pads[QLORA__GATE_UP] > 0 && (uint64_t)room * sizeof(float) <= m->work.ds.bytes;
}

// Computes u of a stack in the last columns of dy, unless it came with the activation. *coded:
// whether the codes of dy are there then.
static qlora_result qlora__stack_u(const qlora__pass* pass, const qlora__stack* stack, int group,
                                   const qlora_tensor* dy, const qlora_tensor* inner, bool* coded) {
    const qlora_model* m = pass->m;
    const qlora__layer* layer = &m->layers[stack->linear.layer];
    const qlora_linear_desc* l = &stack->linear;
    qlora_tensor a;
    qlora_tensor sb;
    *coded = stack->coded;
    if (group == QLORA__GATE_UP && qlora__u_is_coded(m, layer) &&
        qlora__linear_joined(l, stack->pad, &a, &sb)) {
        *coded = true;
        int64_t ranks[2] = {l->parts[0].rank, l->parts[l->count - 1].rank};
        qlora_tensor u = qlora__window(dy, pass->rows, stack->out, stack->pad);
        return qlora__fp8_u(pass->ctx, l->fp8, inner, &sb, ranks, l->count, &u, m->work.ds.data);
    }
    bool there = group == QLORA__GATE_UP && qlora__u_comes(pass, layer);
    return stack->pad > 0 && !there ? qlora__linear_u(pass->ctx, pass->math, l, dy, inner)
                                    : QLORA_OK;
}

// dy (with space for u) and x (with z) -> dx (may be NULL), dA and dB. With dropout, the adapters
// are added to dx one by one, which needs scratch.
static qlora_result qlora__stack_backward(const qlora__pass* pass, const qlora__stack* stack,
                                          int group, const qlora_tensor* x, const qlora_tensor* dy,
                                          const qlora_tensor* dx) {
    qlora_ctx* ctx = pass->ctx;
    if (stack->linear.dropout > 0.0f) {
        return qlora__stack_backward_masked(pass, stack, x, dy, dx);
    }
    qlora_tensor inner = qlora__window(dy, pass->rows, 0, stack->out);
    if (qlora__on_cpu(ctx)) { // both at once
        QLORA__TRY(qlora__linear_u_dx(ctx, pass->math, &stack->linear, dy, &inner, false, dx));
        return qlora__stack_gradients(pass, stack, group, x, dy, false);
    }
    bool coded = false;
    QLORA__TRY(qlora__stack_u(pass, stack, group, dy, &inner, &coded));
    QLORA__TRY(qlora__stack_gradients(pass, stack, group, x, dy, false));
    return dx != NULL ? qlora__linear_dx(ctx, pass->math, &stack->linear, dy, &inner, coded, dx)
                      : QLORA_OK;
}

// The part of a stack's backward pass that belongs to DoRA: the gradients of the magnitudes, which
// need the output before the gains once more, and then the gains on dy. Writes z into the last
// columns of x.
static qlora_result qlora__stack_gains_backward(const qlora__pass* pass, qlora__layer* layer,
                                                int group, const qlora__stack* stack,
                                                const qlora_tensor* x, const qlora_tensor* dy) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    qlora_tensor raw = qlora__window(&m->work.raw, pass->rows, 0, stack->out);
    qlora_tensor inner = qlora__window(dy, pass->rows, 0, stack->out);
    QLORA__ENTER(ctx, "qlora_linear_forward"); // frees the scratch on return
    QLORA__TRY(qlora__leave(
        ctx, qlora__linear_forward(ctx, pass->math, &stack->linear, 0u, x, &raw)));
    int64_t at = 0;
    for (int i = 0; i < layer->layout->groups[group].count; i++) {
        qlora__projection* p = &layer->projections[layer->layout->groups[group].first + i];
        qlora_tensor a = qlora__window(&inner, pass->rows, at, p->out);
        qlora_tensor b = qlora__window(&raw, pass->rows, at, p->out);
        qlora_tensor inverse;
        qlora__arena_window(&layer->inverses[group], at, 1, p->out, &inverse);
        if (qlora__is_dora(m, p)) {
            QLORA__TRY(qlora__dot_columns(ctx, &a, &b, &inverse, &p->dm));
        }
        at += p->out;
    }
    return qlora__scale_columns(ctx, &layer->gains[group], &inner);
}
