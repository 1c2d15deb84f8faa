// ---- a step of decoding on the device -----------------------------------------------------------
//
// One new position of every text in flight: token and position are read from the texts' state, the
// next token is chosen and stored there, so a step needs nothing from the host and one graph serves
// all steps. The kernels (decode*.cu, sample.cu) are those of few rows; which of them run, and the
// order of their sums, depends on the device, the driver, the shapes of the model and its adapters,
// generate_tokens and generate_sequences alone. Each layer is seven of them:
//
//   norm, z of qkv | qkv | attention | o | residual, norm, z of gate and up | gate, up | down
//
// An MLP without a gate has one more for its activation. Where attention and MLP stand side by
// side, x is made once more for the MLP, before the output of attention joins the stream.
//
// For one text, one kernel makes all layers (kernels/decode/decode_layers.cuh) where the weights
// are NF4 as models have them by default, rows are multiples of 256, no norm follows o or down, and
// the device has room for its blocks and can launch them together.
//
// With more than 8 texts, the kernel before o and the one before down compute z of these, where
// there are kernels for it (heads of 64 and 128, ranks that fit the norm); otherwise z is a product
// of its own. The columns of qkv, o and down are split over blocks; attention and the norms add the
// sums of the splits, since they have more blocks for it than a product has tiles. With one text,
// attention and gate and up leave partial sums of z, which are complete with them.

#ifndef QLORA_NO_CUDA

// Chooses the next tokens from the logits.
static qlora_result qlora__decode_pick(const qlora_model* m) {
    const qlora__decode* d = &m->decode;
    void* logits = d->logits.data;
    void* state = d->state.data;
    void* seen = d->seen.data;
    void* found = d->parts.data;
    int64_t ld = d->logits.ld;
    int32_t vocab = (int32_t)m->plan.config.vocab;
    int32_t count = (int32_t)qlora__ceil_div(vocab, QLORA__SAMPLE_PART);
    void* parts[] = {&logits, &ld, &vocab, &state, &seen, &found};
    QLORA__TRY(
        qlora__decode_launch(m, QLORA__K_sample_parts, count, d->texts, 1, 256, 0, parts));
    void* results = d->results;
    void* choose[] = {&logits, &ld, &vocab, &state, &seen, &found, &count, &results};
    return qlora__decode_launch(m, QLORA__K_sample_choose, d->texts, 1, 1, 1024, 0, choose);
}

// Whether the logits of many texts have a kernel of their own.
static bool qlora__decode_head_fits(const qlora_model* m, const qlora__decode_product* p) {
    return qlora__decode_is_many(m) && (m->decode.variants & QLORA__DECODE_WARPGROUP) != 0 &&
           qlora__has_warpgroups(m->ctx) && !m->base.head_is_nf4 && p->K % 64 == 0 &&
           ((p->parts[0].N | p->parts[0].ld | p->ldy) & 7) == 0;
}

// Whether those of a single text have.
static bool qlora__decode_head_is_one(const qlora_model* m, const qlora__decode_product* p) {
    return m->decode.texts == 1 && (m->decode.variants & QLORA__DECODE_ONE) != 0 &&
           !m->base.head_is_nf4 && p->K <= 32768 && p->K % 256 == 0 && p->parts[0].ld % 8 == 0;
}

static qlora_result qlora__decode_head(const qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    const qlora__decode* d = &m->decode;
    qlora_linear_part head;
    qlora__decode_product p;
    memset(&head, 0, sizeof head);
    memset(&p, 0, sizeof p);
    head.nf4 = m->base.head_is_nf4 ? &m->base.head_nf4 : NULL;
    head.dense = qlora__head_table(m);
    p.parts[0] = qlora__decode_part_of(&head, 0, c->vocab, 0);
    p.maps = m->base.head_is_nf4 ? m->base.head_nf4.maps : NULL;
    p.count = 1;
    p.x = d->x.data;
    p.ldx = d->x.ld;
    p.y = d->logits.data;
    p.ldy = d->logits.ld;
    p.y_is_bf16 = 1;
    p.K = (int32_t)c->hidden;
    p.rows = (int32_t)d->texts;
    p.alpha = (float)(1.0 / c->logits_divisor);
    p.cap = (float)c->logits_cap;
    if (qlora__decode_head_fits(m, &p)) {
        int64_t groups = qlora__ceil_div(p.rows, QLORA__DECODE_MANY_ROWS);
        int64_t blocks = qlora__min(qlora__ceil_div(c->vocab, QLORA__DECODE_MANY_TILE),
                                    qlora__max(1, m->ctx->gpu->sm_count / groups));
        void* args[] = {&p};
        return qlora__decode_launch(m, QLORA__K_decode_many_head, blocks, groups, 1, 512,
                                    qlora__kernel_rows[QLORA__K_decode_many_head].shared, args);
    }
    if (qlora__decode_head_is_one(m, &p)) {
        void* args[] = {&p};
        return qlora__decode_launch(m, QLORA__K_decode_head, m->ctx->gpu->sm_count, 1, 1, 256,
                                    (uint32_t)p.K * 2, args);
    }
    return qlora__decode_multiply(m, m->base.head_is_nf4, false, &p);
}

// A branch, from its input in x to its output in y.
static qlora_result qlora__decode_branch(qlora_model* m, int64_t l, int branch) {
    const qlora__decode* d = &m->decode;
    qlora__layer* layer = &m->layers[l];
    if (branch == QLORA__ATTENTION) {
        return qlora__mixer_of(layer)->step(m, l);
    }
    QLORA__TRY(qlora__ffn_of(layer)->step(m, layer));
    return qlora__decode_product_run(m, layer, QLORA__DOWN, &d->s, &d->y);
}

// What the norm after a branch needs.
static void qlora__decode_after(const qlora_model* m, const qlora__layer* layer, int branch,
                                qlora__decode_between* b) {
    b->layer = layer;
    b->before = qlora__branches[branch].out;
    b->after = qlora__layer_norm(m, layer, qlora__branches[branch].after);
    b->flip = 1 - b->flip;
}

// A layer with attention and MLP side by side. x and z are made once more for the MLP, whose
// activation is computed before the output of attention joins the stream.
static qlora_result qlora__decode_beside(qlora_model* m, int64_t l, qlora__decode_between* b) {
    const qlora__decode* d = &m->decode;
    qlora__layer* layer = &m->layers[l];
    b->norm = qlora__branch_norm(m, layer, QLORA__ATTENTION);
    b->next = &layer->linears[QLORA__QKV];
    QLORA__TRY(qlora__decode_norm_run(m, b));
    QLORA__TRY(qlora__decode_branch(m, l, QLORA__ATTENTION));
    qlora__decode_between again = *b;
    again.again = true;
    again.next = &layer->linears[QLORA__GATE_UP];
    QLORA__TRY(qlora__decode_norm_run(m, &again));
    QLORA__TRY(qlora__ffn_of(layer)->step(m, layer));
    qlora__decode_after(m, layer, QLORA__ATTENTION, b);
    b->next = NULL;
    QLORA__TRY(qlora__decode_norm_run(m, b));
    QLORA__TRY(qlora__decode_product_run(m, layer, QLORA__DOWN, &d->s, &d->y));
    qlora__decode_after(m, layer, QLORA__MLP, b);
    return QLORA_OK;
}

// The layers one by one, from the embedding on; *b is then what the norm before the head needs.
static qlora_result qlora__decode_each(qlora_model* m, qlora__decode_between* b) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__layer* layer = &m->layers[l];
        if (qlora__stands_beside(m)) {
            QLORA__TRY(qlora__decode_beside(m, l, b));
            continue;
        }
        for (int i = 0; i < QLORA__BRANCHES; i++) {
            b->norm = qlora__branch_norm(m, layer, i);
            b->next = &layer->linears[qlora__branches[i].in];
            QLORA__TRY(qlora__decode_norm_run(m, b));
            QLORA__TRY(qlora__decode_branch(m, l, i));
            qlora__decode_after(m, layer, i, b);
        }
    }
    return QLORA_OK;
}

// Enqueues the kernels of a step.
static qlora_result qlora__decode_enqueue(qlora_ctx* ctx, void* user) {
    qlora_model* m = (qlora_model*)user;
    const qlora__decode* d = &m->decode;
    int64_t blocks;
    int64_t shared;
    qlora__decode_between b;
    memset(&b, 0, sizeof b);
    QLORA__TRY(qlora__capture_note(ctx, d->state.data)); // all is in one arena
    QLORA__TRY(qlora__tokens_place(ctx, m));
    if (qlora__decode_layers_fit(m, &blocks, &shared)) {
        QLORA__TRY(qlora__decode_norm_run(m, &b)); // the embedding
        qlora_result r = qlora__decode_layers_run(m, 1 - b.flip, blocks, shared);
        m->decode.refused = r == QLORA_ERR_UNSUPPORTED;
        QLORA__TRY(r);
        b.flip = 1 - b.flip;
        b.added = true;
    } else {
        QLORA__TRY(qlora__decode_each(m, &b));
    }
    b.norm = &m->base.final_norm;
    b.next = NULL;
    QLORA__TRY(qlora__decode_norm_run(m, &b));
    QLORA__TRY(qlora__decode_head(m));
    return qlora__decode_pick(m);
}

#else

static qlora_result qlora__decode_enqueue(qlora_ctx* ctx, void* user) {
    (void)user;
    return qlora__no_kernels(ctx);
}

static qlora_result qlora__decode_layers_send(qlora_ctx* ctx, qlora_model* m) {
    (void)m;
    return qlora__no_kernels(ctx);
}

#endif

// Whether steps run on the device.
static QLORA__UNUSED bool qlora__decode_ready(const qlora_model* m) {
    return m->decode.planned && m->decode.works && !qlora__on_cpu(m->ctx);
}

// The parts of a stack share a table of levels, and so do all stacks if one kernel takes them:
// compares those of the weights.
static qlora_result qlora__decode_check(qlora_ctx* ctx, qlora_model* m) {
    bool same = true;
    bool alike = true;
    bool any = false;
    float whole[QLORA__NF4_MAPS];
    for (int64_t l = 0; l < m->plan.config.layers && m->decode.planned; l++) {
        for (int g = 0; g < QLORA__GROUPS; g++) {
            const qlora_linear_desc* linear = &m->layers[l].linears[g];
            float first[QLORA__NF4_MAPS];
            for (int i = 0; i < linear->count; i++) {
                float maps[QLORA__NF4_MAPS];
                const qlora_nf4* w = linear->parts[i].nf4;
                if (w != NULL) {
                    QLORA__TRY(qlora__copy_out(ctx, i == 0 ? first : maps, w->maps, sizeof maps));
                    same = same && (i == 0 || memcmp(first, maps, sizeof maps) == 0);
                }
            }
            if (linear->parts[0].nf4 != NULL) {
                if (!any) {
                    memcpy(whole, first, sizeof whole);
                }
                alike = alike && memcmp(first, whole, sizeof first) == 0;
                any = true;
            }
        }
    }
    m->decode.works = same;
    m->decode.alike = same && alike && any;
    return QLORA_OK;
}

// Prepares the tables of the texts. The pages of a text follow each other; those of a pool are
// given to texts when they begin.
static qlora_result qlora__decode_start(qlora_ctx* ctx, qlora_model* m) {
    qlora__decode* d = &m->decode;
    if (!d->planned) {
        return QLORA_OK;
    }
    size_t room = (size_t)d->texts * sizeof *d->host;
    d->host = (qlora__decode_text*)qlora__alloc_zero(ctx, room);
    if (d->host == NULL) {
        return QLORA_ERR_MEMORY;
    }
    d->credit = 2 * QLORA__AHEAD_COST; // long texts are likely
    d->results = (qlora__decode_result*)qlora__mapped_alloc(ctx, qlora__decode_results_bytes(d));
    if (d->results == NULL) {
        QLORA__TRY(QLORA_ERR_MEMORY);
    }
    if (d->texts == 1) {
        d->sent = (uint8_t*)qlora__alloc_zero(ctx, (size_t)d->params.cols);
        if (d->sent == NULL) {
            QLORA__TRY(QLORA_ERR_MEMORY);
        }
    }
    for (int64_t n = 0; n < d->texts && m->texts.paging.size == 0; n++) {
        int32_t pages[QLORA__MOST_PAGES];
        for (int64_t i = 0; i < d->pages; i++) {
            pages[i] = (int32_t)(n * d->pages + i);
        }
        size_t bytes = (size_t)d->pages * 4;
        QLORA__TRY(qlora__copy_in(ctx, (char*)d->table.data + (size_t)n * bytes, pages, bytes));
    }
    return QLORA_OK;
}

// Enqueues the kernels of a step, as a new graph if there is a place for it, and once more if the
// driver refuses blocks that wait for each other: then there are smaller kernels.
static qlora_result qlora__decode_try(qlora_ctx* ctx, qlora_model* m, uint64_t key,
                                      qlora_graph** graph) {
    bool refused = m->decode.refused;
    for (;;) {
        qlora_result r = graph == NULL
                             ? qlora__decode_enqueue(ctx, m)
                             : qlora__graph_capture(ctx, key, qlora__decode_enqueue, m, graph);
        if (r == QLORA_OK || m->decode.refused == refused) {
            return r;
        }
        refused = true;
        QLORA__LOG(ctx, WARN, GRAPH, "a step is made of smaller kernels from now on: %.400s",
                   ctx->env.error);
    }
}

// Runs a step for the texts on the device. If it cannot be captured as a graph, steps are launched
// kernel by kernel from then on; if the driver refuses a launch whose blocks wait for each other,
// each stack of a layer has a kernel of its own.
static QLORA__UNUSED qlora_result qlora__decode_step(qlora_ctx* ctx, qlora_model* m) {
    int which = m->use_adapters ? 1 : 0;
    uint64_t key = (uint64_t)(uintptr_t)m + (uint64_t)which;
    qlora_graph** graph = &m->decode.graphs[which];
    if (*graph != NULL && !qlora__graph_is_valid(*graph)) { // adapters, stream or workspace changed
        QLORA__TRY(qlora__graph_destroy(ctx, *graph));
        *graph = NULL;
    }
    if (*graph != NULL) {
        return qlora__graph_replay(ctx, *graph, key);
    }
    QLORA__TRY(qlora__decode_layers_send(ctx, m)); // nothing runs without its parameters
    if (!m->decode.eager) {
        qlora_result r = qlora__decode_try(ctx, m, key, graph);
        if (r == QLORA_OK || r == QLORA_ERR_DEVICE_LOST) {
            return r;
        }
        if (r == QLORA_ERR_CAPTURE) { // otherwise the next step tries again
            QLORA__LOG(ctx, WARN, GRAPH, "texts are generated without graphs from now on: %.400s",
                       ctx->env.error);
            m->decode.eager = true;
        }
    }
    return qlora__decode_try(ctx, m, key, NULL);
}
