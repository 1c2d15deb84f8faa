// ---- backward -----------------------------------------------------------------------------------
//
// The gradient of the residual stream passes through the layers on the main stream. The gradients
// of the adapters (their inputs normalised again, z, dA, dB) do not affect it, so they run in
// parallel, on the second stream; the work of stack g uses slot g. A buffer that the second stream
// reads must not be overwritten before it has been read:
//
//   buffer                    read for               overwritten by
//   d_out and last columns    down and o             the next norm; if it is not dh itself, the
//                                                    gradient of the next output
//   dqkv                      qkv                    the attention of the next layer
//   output of attention       o                      recomputation of a layer; that of labelled
//                                                    rows (qlora__labelled_o), their way back
//   s                         down                   d_o, and ds of the next layer, after that norm
//   x                         written there as well  recomputation; with DoRA, the next stack
//   gradients of gate and up  gate_up                recomputation of a layer
//   parts of sums             dA of down, dB of      the activation of the next layer, after that
//                             gate and up            norm
//   rstd                      dA of qkv, gate_up     the norm of the next layer
//   the shared operand        z that was not kept    placing other weights: qlora__operand_wait
//   last columns of x and s   keeping z, forward     the next norm; z of the next layer; the head
//
// The main stream uses some memory for one thing after another (qlora__layout_x and _overlaid):
//
//   x, while the head begins | gradients of its rows, until dh is there | x
//   rows and logits of the head | operands and rows of experts (ffns/plans.h) | s for the MLP, d_o
//   for attention, operand, delta, dh and others

// Recomputes the activations after attention: everything except down_proj, unless the backward pass
// of a norm needs its output.
static qlora_result qlora__layer_again_mlp(const qlora__pass* pass, qlora__layer* layer) {
    QLORA__TRY(qlora__layer_middle(pass, layer));
    if (!qlora__has_norm(pass->m, QLORA__NORM_MLP_OUT)) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__ffn_of(layer)->out(pass, layer));
    return qlora__beside_wait(pass->ctx, 1u << QLORA__DOWN); // z in s
}

// Recomputes the activations that a layer did not keep; with tiles, only up to attention. The
// attention of a long sequence takes as long as all products of its layer, and its output is as
// small as the layer's input, so that is kept first where there is memory. after: the pass after
// attention.
static qlora_result qlora__layer_again(const qlora__pass* pass, const qlora__pass* after,
                                       qlora__layer* layer) {
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u));
    if (!layer->keeps_heads) {
        QLORA__TRY(qlora__mixer_of(layer)->in(pass, layer, true));
    }
    if (!layer->keeps_attention) {
        QLORA__TRY(qlora__mixer_of(layer)->mix(pass, layer));
    }
    return pass->m->plan.tile > 0 ? QLORA_OK : qlora__layer_again_mlp(after, layer);
}

// Backward pass of o_proj of the last layer if it has only the labelled rows after attention: their
// gradients go back to their tokens, those of the output of attention, in m->work.d_o, and of the
// residual stream, in m->work.dh.
static qlora_result qlora__backward_labelled(const qlora__pass* pass, int64_t index) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    qlora__layer* layer = &m->layers[index];
    qlora__pass after = qlora__pass_after(pass, index);
    QLORA__TRY(qlora__mixer_of(layer)->out_backward(&after, layer));
    // It still reads dh, and the output of attention in dqkv.
    QLORA__TRY(qlora__beside_wait(ctx, 1u << QLORA__O));
    qlora_tensor d_o = qlora__window(&m->work.d_o, pass->rows, 0, layer->linears[QLORA__O].in);
    qlora_tensor dh = qlora__window(&m->work.dh, pass->rows, 0, m->plan.config.hidden);
    QLORA__TRY(qlora__labelled_spread(ctx, m, pass->labelled, &m->work.dqkv, &d_o));
    return qlora__labelled_spread(ctx, m, pass->labelled, &m->work.delta, &dh);
}

// The backward pass in pieces, in the order in which they run: begin; then, from the last layer to
// the first, its MLP and its attention; then end.

// If the last layer has only the labelled rows after attention: gradient of the final norm's output
// in m->work.rows_dx -> gradient of the residual stream in the first rows of m->work.dh. The head
// has not written the rows that fill up the number of chunks.
static qlora_result qlora__backward_begin_labelled(const qlora__pass* pass) {
    qlora_model* m = pass->m;
    int64_t width = m->plan.config.hidden;
    int64_t end = pass->chunks * m->plan.head_chunk;
    qlora_tensor dx;
    qlora__arena_window(&m->work.rows_dx, 0, pass->labelled, width, &dx);
    if (end < pass->labelled) {
        qlora_tensor rest;
        qlora__arena_window(&m->work.rows_dx, end * width, pass->labelled - end, width, &rest);
        QLORA__TRY(qlora__tensor_zero(pass->ctx, &rest));
    }
    qlora_tensor h = qlora__window(&m->work.last_h, pass->labelled, 0, width);
    qlora_tensor dh = qlora__window(&m->work.dh, pass->labelled, 0, width);
    return qlora__final_norm_backward(pass, &dx, &h, &dh);
}

// Gradient of the final norm's output in m->work.delta -> gradient of the residual stream in
// m->work.dh. With tiles, that of the output comes from the labelled rows here, and not from
// qlora__head_end.
static qlora_result qlora__backward_begin(const qlora__pass* pass) {
    qlora_model* m = pass->m;
    int64_t width = m->plan.config.hidden;
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u)); // z of the last layer, in s
    pass->flow->placed_experts = 0; // the head had that memory
    if (qlora__balances(m)) {
        QLORA__TRY(qlora__balance_turn(pass));
    }
    if (pass->labelled > 0) {
        return qlora__backward_begin_labelled(pass);
    }
    if (m->plan.tile > 0) {
        QLORA__TRY(qlora__head_clear(pass));
    }
    for (int64_t at = 0; at < pass->rows; at += qlora__tile_rows(m)) {
        qlora__pass tile = qlora__tile_at(pass, at);
        qlora_tensor dx = qlora__window(&m->work.delta, tile.rows, 0, width);
        qlora_tensor h = qlora__slice(&tile, &m->work.last_h, 0, width);
        qlora_tensor dh = qlora__slice(&tile, &m->work.dh, 0, width);
        if (m->plan.tile > 0) {
            QLORA__TRY(qlora__head_spread(&tile));
        }
        QLORA__TRY(qlora__final_norm_backward(pass, &dx, &h, &dh));
    }
    return QLORA_OK;
}

// Waits for the input of a layer if it is offloaded, and starts the copies of that of the one below
// it, and of what it keeps of attention, in the memory of the one above, which is no longer needed.
static qlora_result qlora__input_back(const qlora__pass* pass, int64_t index) {
    qlora_model* m = pass->m;
    QLORA__TRY(qlora__away_wait(pass->ctx, 1u << index % 2));
    if (index == 0 || m->layers[index - 1].away == NULL) {
        return QLORA_OK;
    }
    qlora__layer* below = &m->layers[index - 1];
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u)); // it may still read that memory
    QLORA__TRY(
        qlora__away_copy(pass->ctx, (int)((index - 1) % 2), true, &below->kept.h, below->away));
    return qlora__offload_back(pass, below);
}

// Whether the backward pass enters a group of layers of which only the first has its input on the
// host: at its last layer, unless it is the last group.
static bool qlora__group_begins(const qlora_model* m, int64_t index) {
    int64_t every = m->plan.offload_every;
    return m->plan.offloaded_layers > 0 && every > 1 && index % every == every - 1 &&
           index / every != (m->plan.config.layers - 1) / every;
}

// Computes the inputs of the layers of a group once more, from that of its first layer up to that
// of its last one, number `top`. The same operations on the same numbers give the same bits. Of the
// layer above, nothing is needed any more but the gradient of the residual stream.
static qlora_result qlora__group_again(const qlora__pass* pass, int64_t top) {
    qlora_model* m = pass->m;
    int64_t first = top - top % m->plan.offload_every;
    qlora__layer* layer = &m->layers[first];
    qlora__pass again = *pass;
    again.group = true;
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u));
    QLORA__TRY(qlora__away_wait(pass->ctx, ~0u));
    QLORA__TRY(
        qlora__away_copy(pass->ctx, (int)(first % 2), true, &layer->kept.h, layer->away));
    QLORA__TRY(qlora__away_wait(pass->ctx, 1u << first % 2));
    if (m->plan.tile == 0) {
        qlora_tensor h = qlora__window(&layer->kept.h, pass->rows, 0, m->plan.config.hidden);
        QLORA__TRY(qlora__layer_input(&again, &h, qlora__norm_before(m, first)));
    }
    size_t scratch = qlora__scratch_mark(pass->ctx);
    for (int64_t l = first; l < top; l++) {
        QLORA__TRY(qlora__forward_attention(&again, l));
        QLORA__TRY(qlora__forward_mlp(&again, l));
        qlora__scratch_release(pass->ctx, scratch);
    }
    return QLORA_OK;
}

// With tiles, everything between attention and the end of the layer is done for one tile before the
// next: first what was not kept, then its gradients down to the output of attention.
static qlora_result qlora__backward_mlp(const qlora__pass* pass, int64_t index) {
    qlora_model* m = pass->m;
    qlora__layer* layer = &m->layers[index];
    bool tiled = m->plan.tile > 0;
    qlora__pass after = qlora__pass_after(pass, index);
    if (qlora__group_begins(m, index)) {
        QLORA__TRY(qlora__group_again(pass, index));
    }
    QLORA__TRY(qlora__input_back(pass, index));
    if (layer->recompute) {
        QLORA__TRY(qlora__offload_wait(pass, layer));
        QLORA__TRY(qlora__layer_again(pass, &after, layer));
    }
    qlora__tiles_begin(pass);
    for (int64_t at = 0; at < after.rows; at += qlora__tile_rows(m)) {
        qlora__pass tile = qlora__tile_at(&after, at);
        if (tiled) {
            QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u)); // it uses the memory of a tile
            QLORA__TRY(qlora__layer_again_mlp(&tile, layer));
        }
        qlora_tensor h = qlora__mlp_stream(&tile, layer);
        QLORA__TRY(qlora__branch_out_backward(&tile, layer, QLORA__MLP));
        QLORA__TRY(qlora__ffn_of(layer)->out_backward(&tile, layer));
        QLORA__TRY(qlora__ffn_of(layer)->in_backward(&tile, layer, &h));
        if (tiled) {
            QLORA__TRY(qlora__mixer_of(layer)->out_backward(&tile, layer));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__backward_attention(const qlora__pass* pass, int64_t index) {
    qlora_model* m = pass->m;
    qlora__layer* layer = &m->layers[index];
    const qlora__mixer_kind* kind = qlora__mixer_of(layer);
    bool tiled = m->plan.tile > 0;
    bool gathered = qlora__pass_after(pass, index).gathered;
    QLORA__TRY(qlora__offload_next(pass, layer));
    if (gathered) {
        QLORA__TRY(qlora__backward_labelled(pass, index));
    } else if (!tiled) {
        QLORA__TRY(kind->out_backward(pass, layer));
    }
    QLORA__TRY(kind->mix_backward(pass, layer));
    // Below layer 0, at most its norm and the embedding are trained.
    bool below = index > 0 || m->desc.train_norms || qlora__trains_embedding(m);
    qlora__tiles_begin(pass);
    for (int64_t at = 0; at < pass->rows; at += qlora__tile_rows(m)) {
        qlora__pass tile = qlora__tile_at(pass, at);
        qlora_tensor h = qlora__slice(&tile, &layer->kept.h, 0, m->plan.config.hidden);
        qlora_tensor dy = qlora__slice(&tile, &m->work.dqkv, 0, m->work.dqkv.cols);
        if (tiled) {
            QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u));
        }
        QLORA__TRY(kind->in_backward(&tile, layer));
        QLORA__TRY(
            qlora__branch_input_backward(&tile, layer, QLORA__ATTENTION, &dy, &h, below));
    }
    return QLORA_OK;
}

static qlora_result qlora__backward_end(const qlora__pass* pass) {
    qlora_model* m = pass->m;
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u));
    QLORA__TRY(qlora__away_wait(pass->ctx, ~0u));
    if (!qlora__trains_embedding(m)) {
        return QLORA_OK;
    }
    qlora_tensor dh = qlora__window(&m->work.dh, pass->rows, 0, m->plan.config.hidden);
    qlora_tensor ids = qlora__window(&m->batch.ids, 1, 0, pass->rows);
    return qlora__embed_gradient(pass->ctx, &dh, &ids,
                                 m->tables.saved_embed ? NULL : &m->tables.token_rows,
                                 (float)m->plan.config.embedding_scale,
                                 m->tables.saved_embed ? &m->tables.d_embed : &m->tables.d_tokens);
}

static qlora_result qlora__backward(const qlora__pass* pass) {
    QLORA__TRY(qlora__backward_begin(pass));
    for (int64_t l = pass->m->plan.config.layers - 1; l >= 0; l--) {
        if (pass->dry && pass->m->layers[l].like_another) {
            continue;
        }
        QLORA__TRY(qlora__backward_mlp(pass, l));
        QLORA__TRY(qlora__backward_attention(pass, l));
    }
    return qlora__backward_end(pass);
}
