// ---- forward ------------------------------------------------------------------------------------
//
// The forward pass in pieces: begin; then, for each layer, its attention and its MLP. Whole passes,
// steps in slices and decoding all run these pieces in this order.

// NEFTune adds its noise to what the embedding returns: in transformers, some embeddings scale
// their rows themselves, and others are scaled afterwards.
static qlora_result qlora__forward_noise(const qlora__pass* pass, const qlora_tensor* h) {
    const qlora_model* m = pass->m;
    bool scaled = (m->arch->has & QLORA__HAS_ROOT_SCALE) != 0;
    double factor = scaled ? 1.0 : m->plan.config.embedding_scale;
    const qlora__batch_rows rows = {&m->batch.positions, &m->batch.sequences, &m->batch.seqs,
                                    &m->batch.dropout};
    return qlora__noise(pass->ctx, h, &rows, m->neftune * (float)factor);
}

// Token ids -> the input of layer 0 in m->work.x. With tiles, the input of a stack is computed by
// the loop over tiles that uses it, everywhere.
static qlora_result qlora__forward_begin(const qlora__pass* pass) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    qlora_tensor ids = qlora__window(&m->batch.ids, 1, 0, pass->rows);
    qlora_tensor h = qlora__window(qlora__stream_before(m, 0), pass->rows, 0, c->hidden);
    pass->flow->placed_layer = 0; // adapters may have changed
    pass->flow->placed_experts = 0;
    pass->flow->coded = NULL;
    QLORA__TRY(qlora__away_wait(pass->ctx, ~0u)); // copies of a step that was given up
    QLORA__TRY(qlora__tokens_place(pass->ctx, m));
    QLORA__TRY(qlora_embed(pass->ctx, qlora__embed_table(m), &ids, &h, &m->flag));
    if (c->embedding_scale != 1.0) {
        QLORA__TRY(qlora_scale(pass->ctx, (float)c->embedding_scale, &h, &h));
    }
    if (QLORA__TRAINS && pass->training && m->neftune > 0.0f) {
        QLORA__TRY(qlora__forward_noise(pass, &h));
    }
    return m->plan.tile > 0 ? QLORA_OK : qlora__layer_input(pass, &h, qlora__norm_before(m, 0));
}

// Whether the input of a layer is copied to the host in this pass. If not all of them fit there,
// the first layer of a group keeps its input from the forward pass on, and the others have theirs
// only while the backward pass is in their group. The last group is the first one there.
static bool qlora__input_leaves(const qlora__pass* pass, int64_t index) {
    const qlora_model* m = pass->m;
    int64_t every = qlora__max(m->plan.offload_every, 1);
    bool head = index % every == 0;
    bool last = index / every == (m->plan.config.layers - 1) / every;
    return m->layers[index].away != NULL && (pass->group ? !head : head || last);
}

// If the input of a layer is offloaded, its copy to the host starts here; nothing waits for it
// before the memory is needed for the input of the layer after the next.
static qlora_result qlora__input_away(const qlora__pass* pass, int64_t index) {
    qlora__layer* layer = &pass->m->layers[index];
    return pass->training && qlora__input_leaves(pass, index)
               ? qlora__away_copy(pass->ctx, (int)(index % 2), false, &layer->kept.h, layer->away)
               : QLORA_OK;
}

// Gathers the output of attention and the residual stream of the labelled rows.
static qlora_result qlora__layer_gather(const qlora__pass* pass, const qlora__layer* layer,
                                        qlora_tensor* o, qlora_tensor* h) {
    const qlora_model* m = pass->m;
    *o = qlora__labelled_o(m, pass->labelled);
    qlora__arena_window(qlora__labelled_stream(m, layer), 0, pass->rows, m->plan.config.hidden, h);
    qlora_tensor heads = qlora__window(o, pass->rows, 0, layer->linears[QLORA__O].in);
    QLORA__TRY(qlora__labelled_gather(pass->ctx, m, &layer->kept.o, &heads));
    return qlora__labelled_gather(pass->ctx, m, &layer->kept.h, h);
}

// Output of attention in kept.o and the residual stream -> h2, the input of the MLP in m->work.x,
// gate and up.
static qlora_result qlora__layer_middle(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    qlora_tensor o = qlora__slice(pass, &layer->kept.o, 0, layer->kept.o.cols);
    qlora_tensor h = qlora__slice(pass, &layer->kept.h, 0, m->plan.config.hidden);
    qlora_tensor h2 = qlora__layer_h2(pass, layer);
    if (pass->gathered) {
        QLORA__TRY(qlora__layer_gather(pass, layer, &o, &h));
    }
    QLORA__TRY(qlora__mixer_of(layer)->out(pass, layer, &o));
    QLORA__TRY(qlora__beside_wait(pass->ctx, 1u << QLORA__QKV)); // z in x
    QLORA__TRY(qlora__branch_add(pass, layer, QLORA__ATTENTION, &h, &h2,
                                 qlora__branch_norm(m, layer, QLORA__MLP), true));
    return qlora__ffn_of(layer)->in(pass, layer);
}

// When decoding, several rows at the beginning of a text see only each other. Rows that continue a
// text see its state, which they are part of already.
static qlora_result qlora__forward_attention(const qlora__pass* pass, int64_t index) {
    qlora__layer* layer = &pass->m->layers[index];
    const qlora__mixer_kind* kind = qlora__mixer_of(layer);
    QLORA__TRY(qlora__input_away(pass, index));
    if (pass->group && layer->keeps_attention) { // its output is there
        return QLORA_OK;
    }
    QLORA__TRY(qlora__offload_wait(pass, layer));
    QLORA__TRY(kind->in(pass, layer, false));
    QLORA__TRY(qlora__offload_begin(pass, layer, QLORA__OFFLOAD_HEADS));
    bool decoding = QLORA__GENERATES && pass->decoding;
    if (decoding) {
        QLORA__TRY(kind->store(pass, index));
    }
    if (decoding && (pass->first > 0 || pass->rows == 1)) {
        return kind->text(pass, index);
    }
    QLORA__TRY(kind->mix(pass, layer));
    return qlora__offload_begin(pass, layer, QLORA__OFFLOAD_ATTENTION);
}

// Leaves the input of the next layer, or of the head, in m->work.x, unless there are tiles.
static qlora_result qlora__forward_mlp(const qlora__pass* pass, int64_t index) {
    qlora_model* m = pass->m;
    qlora__layer* layer = &m->layers[index];
    const qlora__ffn_kind* kind = qlora__ffn_of(layer);
    int64_t width = m->plan.config.hidden;
    qlora__pass after = qlora__pass_after(pass, index);
    qlora__tiles_begin(pass);
    for (int64_t at = 0; at < after.rows; at += qlora__tile_rows(m)) {
        qlora__pass tile = qlora__tile_at(&after, at);
        qlora_tensor h2 = qlora__layer_h2(&tile, layer);
        qlora_tensor next = qlora__slice(&tile, qlora__stream_before(m, index + 1), 0, width);
        QLORA__TRY(qlora__layer_middle(&tile, layer));
        if (QLORA__TRAINS && kind->note != NULL && pass->training && !pass->group) {
            QLORA__TRY(kind->note(&tile, layer));
        }
        QLORA__TRY(kind->out(&tile, layer));
        // The copy of the input before that of this layer, which was in the same memory.
        QLORA__TRY(qlora__away_wait(pass->ctx, 1u << (index + 1) % 2));
        QLORA__TRY(qlora__beside_wait(pass->ctx, 1u << QLORA__GATE_UP)); // z in x
        QLORA__TRY(qlora__branch_add(&tile, layer, QLORA__MLP, &h2, &next,
                                     qlora__norm_before(m, index + 1), m->plan.tile == 0));
    }
    return QLORA_OK;
}

// Token ids -> the output of the final norm in m->work.x.
static qlora_result qlora__forward(const qlora__pass* pass) {
    qlora_ctx* ctx = pass->ctx;
    size_t scratch = qlora__scratch_mark(ctx);
    QLORA__TRY(qlora__forward_begin(pass));
    for (int64_t l = 0; l < pass->m->plan.config.layers; l++) {
        if (pass->dry && pass->m->layers[l].like_another) {
            continue;
        }
        QLORA__TRY(qlora__forward_attention(pass, l));
        QLORA__TRY(qlora__forward_mlp(pass, l));
        qlora__scratch_release(ctx, scratch);
        pass->flow->passed = l + 1;
    }
    return QLORA_OK;
}
