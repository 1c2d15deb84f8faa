// ---- open, close and parameters -----------------------------------------------------------------

// The update of a step: the gradient norm, then AdamW, which applies the scale of the clip, zeroes
// the gradients and writes the copies. With several groups, the clip scales the gradients itself;
// if one of them is not finite, nothing is updated.
static qlora_result qlora__update(qlora_ctx* ctx, qlora_model* m) {
    if (m->range_count == 0) {
        return QLORA_OK;
    }
    if (qlora__balances(m)) {
        QLORA__TRY(qlora__balance_report(ctx, &m->work.experts.balance));
    }
    bool one = m->clip.groups == 1;
    QLORA__TRY(one ? qlora__clip_measure(ctx, &m->clip) : qlora__clip_apply(ctx, &m->clip));
    qlora_tensor scale;
    qlora_tensor flag;
    qlora__clip_device(&m->clip, one ? 0 : -1, one ? &scale : NULL, &flag);
    qlora_adamw_desc args = qlora__adamw_desc_of(m);
    args.clip_scale = one ? &scale : NULL;
    args.not_finite = &flag;
    QLORA__TRY(args.m != NULL ? qlora_adamw_step(ctx, &args)
                              : qlora__adamw8_step(ctx, &args, &m->moments));
    return qlora__dora_refresh(ctx, m, false);
}

// Runs what the last layer does with labelled rows, for each number of them.
static qlora_result qlora__dry_run_labelled(const qlora__pass* all) {
    qlora_model* m = all->m;
    int64_t last = m->plan.config.layers - 1;
    int64_t step = qlora__labelled_step(m);
    qlora__pass pass = *all;
    for (int64_t n = 1; n < QLORA__LABELLED_SIZES; n++) {
        pass.chunks = n * step;
        pass.labelled = qlora__labelled_rows(m, pass.chunks * m->plan.head_chunk, pass.rows);
        if (pass.labelled == 0) {
            continue;
        }
        QLORA__TRY(qlora__forward_mlp(&pass, last));
        if (QLORA__TRAINS && pass.training) {
            QLORA__TRY(qlora__backward_begin(&pass));
            QLORA__TRY(qlora__backward_mlp(&pass, last));
            QLORA__TRY(qlora__backward_labelled(&pass, last));
            QLORA__TRY(qlora__beside_wait(pass.ctx, ~0u));
            QLORA__TRY(qlora__away_wait(pass.ctx, ~0u));
        }
    }
    return QLORA_OK;
}

static bool qlora__projections_alike(const qlora__projection* a, const qlora__projection* b) {
    return a->in == b->in && a->out == b->out && a->is_nf4 == b->is_nf4 && a->is_fp8 == b->is_fp8 &&
           a->has_bias == b->has_bias && a->rank == b->rank && a->dense.dtype == b->dense.dtype &&
           a->nf4_desc.block == b->nf4_desc.block && a->nf4_desc.block2 == b->nf4_desc.block2 &&
           a->nf4_desc.plain_scales == b->nf4_desc.plain_scales &&
           a->magnitude.cols == b->magnitude.cols;
}

// Whether two layers run the same kernels and products.
static bool qlora__layers_alike(const qlora__layer* a, const qlora__layer* b) {
    bool alike = a->cached == b->cached && a->recompute == b->recompute &&
                 a->keeps_attention == b->keeps_attention && a->keeps_heads == b->keeps_heads &&
                 a->sliding == b->sliding && a->no_rope == b->no_rope &&
                 (a->qkv_bias.data == NULL) == (b->qkv_bias.data == NULL);
    alike = alike && a->count == b->count;
    for (int i = 0; i < a->count && alike; i++) {
        alike = qlora__projections_alike(&a->projections[i], &b->projections[i]);
    }
    for (int i = 0; i < QLORA__NORMS && alike; i++) {
        alike = (a->norms[i].data == NULL) == (b->norms[i].data == NULL) &&
                (a->d_norms[i].data == NULL) == (b->d_norms[i].data == NULL);
    }
    for (int i = 0; i < QLORA__GROUPS && alike; i++) {
        alike = a->pads[i] == b->pads[i] && a->kept.z[i].cols == b->kept.z[i].cols;
    }
    return alike;
}

// Finds the layers that a dry run can leave out. With several adapters or memory of the host, all
// of them run.
static void qlora__layers_compare(qlora_model* m) {
    int64_t last = m->plan.config.layers - 1;
    for (int64_t l = 2; l < last && !qlora__has_several(m) && m->plan.host == 0; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int64_t k = 1; k < l && !layer->like_another; k++) {
            const qlora__layer* other = &m->layers[k];
            layer->like_another = qlora__layers_alike(other, layer) &&
                                  qlora__layers_alike(other - 1, layer - 1) &&
                                  qlora__layers_alike(other + 1, layer + 1);
        }
    }
}

// Runs every operation of a step once, on zeroed memory, before the weights are loaded: afterwards
// all kernels are loaded that a step may need, and cuBLAS has run every shape.
static qlora_result qlora__model_dry_run(qlora_ctx* ctx, qlora_model* m) {
    if (qlora__on_cpu(ctx)) {
        return QLORA_OK; // nothing is compiled on the CPU
    }
    qlora__layers_compare(m);
    qlora__pass pass = qlora__pass_of(m, m->plan.tokens, qlora__trains(m));
    pass.dry = true;
    if (qlora__has_several(m) && m->wide == NULL) { // all rows belong to the first adapter
        memset(m->work.runs, 0, sizeof *m->work.runs);
        m->work.runs[0].end = m->plan.tokens;
        m->work.runs[0].label_end = m->plan.tokens;
        m->work.run_count = 1;
    }
    int64_t chunks = qlora__ceil_div(m->plan.tokens, m->plan.head_chunk);
    QLORA__TRY(qlora__forward(&pass));
    qlora_tensor totals = qlora__window(&m->totals, 1, 0, 3);
    QLORA__TRY(qlora__head(&pass, chunks, &totals, qlora__trains(m)));
    if (QLORA__TRAINS && qlora__trains(m)) {
        QLORA__TRY(qlora__backward(&pass));
        QLORA__TRY(qlora__dry_run_labelled(&pass));
        QLORA__TRY(qlora__update(ctx, m));
    }
    // Evaluation has other products: without dropout, the adapters are part of the large product,
    // and without adapters, that product is smaller.
    pass.training = false;
    if (m->desc.dropout > 0.0f) {
        QLORA__TRY(qlora__forward(&pass));
    }
    if (m->desc.dropout > 0.0f || !qlora__trains(m)) {
        QLORA__TRY(qlora__dry_run_labelled(&pass));
    }
    m->use_adapters = false;
    qlora_result r = m->range_count > 0 ? qlora__forward(&pass) : QLORA_OK;
    r = r == QLORA_OK && m->range_count > 0 ? qlora__dry_run_labelled(&pass) : r;
    m->use_adapters = true;
    QLORA__TRY(r);
    if (QLORA__GENERATES && m->desc.generate_tokens > 0) {
        qlora__pass one = qlora__pass_of(m, 1, false);
        one.decoding = true;
        QLORA__TRY(qlora__forward(&one));
        QLORA__TRY(qlora__head_logits(&one, 0, 1));
        if (m->decode.planned) {
            QLORA__TRY(qlora__decode_enqueue(ctx, m));
        }
    }
    return qlora__sync(ctx);
}

// What does not change after the weights have been loaded: the cached copies of a stack, and its
// scale in FP8.
static qlora_result qlora__model_place(qlora_ctx* ctx, const qlora_model* m,
                                       const qlora__layer* layer, int group) {
    const qlora_linear_desc all =
        qlora__linear_of(m, layer, group, m->wide != NULL ? QLORA__ALL_ADAPTERS : m->adapter);
    const qlora_linear_desc* linear = &all;
    if (linear->fp8 != NULL) {
        QLORA__TRY(qlora__fp8_measure(ctx, linear));
        if (layer->cached) {
            QLORA__TRY(qlora__fp8_place(ctx, linear, false));
        }
        if (QLORA__TRAINS && layer->cached && qlora__trains(m)) {
            QLORA__TRY(qlora__fp8_place(ctx, linear, true));
        }
        return layer->cached ? qlora__linear_place_fp8(ctx, linear) : QLORA_OK;
    }
    if (!layer->cached || linear->operand == NULL) {
        return QLORA_OK;
    }
    // With several adapters, the operand has room for any of them.
    qlora_linear_desc one = *linear;
    int64_t pad = qlora_linear_pad(linear);
    qlora_tensor operand =
        qlora__window(linear->operand, qlora_linear_out(linear) + pad, 0, linear->in + pad);
    one.operand = &operand;
    return qlora__linear_place(ctx, &one, QLORA_LINEAR_WEIGHTS | QLORA_LINEAR_ADAPTERS);
}

// Everything that only a model with weights has.
static qlora_result qlora__model_fill_base(qlora_ctx* ctx, qlora_model* m) {
    QLORA__TRY(qlora__model_dry_run(ctx, m));
    QLORA__TRY(m->dir != NULL ? qlora__load_files(ctx, m) : qlora__load_random(ctx, m));
    QLORA__TRY(qlora__model_ready(ctx, m));
    if (QLORA__GENERATES) {
        QLORA__TRY(qlora__decode_check(ctx, m));
        QLORA__TRY(qlora__decode_start(ctx, m));
    }
    if (m->texts.paging.size > 0) {
        size_t bytes = (size_t)(m->texts.paging.pages + 1) * sizeof *m->texts.paging.users;
        m->texts.paging.users = (int32_t*)qlora__alloc_zero(ctx, bytes);
        if (m->texts.paging.users == NULL) {
            QLORA__TRY(QLORA_ERR_MEMORY);
        }
    }
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int g = 0; g < QLORA__GROUPS; g++) {
            QLORA__TRY(qlora__model_place(ctx, m, &m->layers[l], g));
        }
    }
    QLORA__TRY(qlora__model_use_copies(ctx, m));
    for (int32_t k = m->adapters - 1; k >= 0; k--) {
        qlora__adapter_focus(m, k);
        QLORA__TRY(qlora__tensor_zero(ctx, &m->totals));
    }
    return qlora__tensor_zero(ctx, &m->flag);
}

// Gives every adapter its first values.
static qlora_result qlora__model_fill_adapters(qlora_ctx* ctx, qlora_model* m,
                                               const qlora_model_desc* desc) {
    const qlora__adamw_numbers numbers = {0.0, 0.9, 0.999, 1e-8, 0.0};
    for (int32_t k = m->adapters - 1; k >= 0; k--) {
        qlora__adapter_focus(m, k);
        QLORA__TRY(qlora__optimizer_start(ctx, m, false, 1.0, &numbers));
        QLORA__TRY(qlora__adapters_start(ctx, m));
        QLORA__TRY(desc->adapter != NULL
                       ? qlora__adapter_read(ctx, m, desc->adapter, desc->expert_layout)
                       : qlora__parameters_changed(ctx, m));
    }
    return QLORA_OK;
}

static qlora_result qlora__model_fill(qlora_ctx* ctx, qlora_model* m,
                                      const qlora_model_desc* desc) {
    const qlora__adamw_numbers numbers = {0.0, 0.9, 0.999, 1e-8, 0.0};
    QLORA__TRY(qlora__wide_upload(ctx, m));
    for (int32_t k = m->adapters - 1; k >= 0; k--) {
        qlora__adapter_focus(m, k);
        QLORA__TRY(qlora__ranges_upload(ctx, m, 1.0, NULL));
        QLORA__TRY(qlora__optimizer_start(ctx, m, false, 1.0, &numbers));
    }
    if (qlora__computes(m)) {
        QLORA__TRY(qlora__model_fill_base(ctx, m));
    }
    QLORA__TRY(qlora__model_fill_adapters(ctx, m, desc));
    return qlora__sync(ctx);
}

static qlora_result qlora__model_start(qlora_ctx* ctx, qlora_model* m,
                                       const qlora_model_desc* desc) {
    double start = qlora__clock_ms();
    if (!qlora__computes(m) && desc->adapter == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.purpose is QLORA_PURPOSE_ADAPTER, but desc.adapter is NULL");
    }
    if (qlora__computes(m) && m->dir != NULL) {
        QLORA__TRY(qlora__load_check(ctx, m));
    }
    QLORA__TRY(qlora__model_warm_kernels(ctx, m));
    QLORA__TRY(qlora__model_open_fp8(ctx, m));
    QLORA__TRY(qlora__buffer_create(ctx, (size_t)m->plan.total, &m->arena));
    if (m->plan.host > 0) {
        QLORA__TRY(qlora__away_open(ctx));
        QLORA__TRY(qlora__away_alloc(ctx, (size_t)m->plan.host, &m->host));
    }
    qlora__model_layout(m, (char*)m->arena->data);
    qlora__model_operands(m);
    QLORA__TRY(qlora__zero(ctx, m->arena->data, m->arena->bytes, m->arena->bytes, 1));
    if (qlora__computes(m)) {
        QLORA__TRY(qlora__model_wrap(ctx, m));
        QLORA__TRY(qlora__model_rope(ctx, m));
        if (qlora__is_fp8(m)) {
            QLORA__TRY(qlora_fill(ctx, 1.0f, &m->work.fp8_ones));
        }
    }
    QLORA__TRY(qlora__ring_create(ctx, QLORA__RING_SLOTS,
                                  m->batch.all.bytes + sizeof(qlora__adamw_numbers), &m->ring));
    QLORA__TRY(qlora__model_fill(ctx, m, desc));
    qlora__source_settle(m);
    m->desc.quantised_dir = NULL; // the caller's
    m->desc.new_tokens = NULL;
    m->desc.new_token_count = 0;
    QLORA__LOG(ctx, INFO, MODEL, "%lld layers, %.2f GiB, ready after %.1f s",
               (long long)m->plan.config.layers, (double)m->plan.total / 1073741824.0,
               (qlora__clock_ms() - start) * 1e-3);
    return QLORA_OK;
}

// The choices of a plan that is given, which may come from a file.
static const struct {
    const char* name;
    size_t at;
    int64_t least;
    int64_t most; // 0 = the number of layers
} qlora__plan_numbers[] = {
    {"desc.plan.recompute_layers", offsetof(qlora_plan, recompute_layers), 0, 0},
    {"desc.plan.attention_layers", offsetof(qlora_plan, attention_layers), 0, 0},
    {"desc.plan.heads_layers", offsetof(qlora_plan, heads_layers), 0, 0},
    {"desc.plan.cached_layers", offsetof(qlora_plan, cached_layers), 0, 0},
    {"desc.plan.offloaded_layers", offsetof(qlora_plan, offloaded_layers), 0, 0},
    {"desc.plan.offload_every", offsetof(qlora_plan, offload_every), 0, 0},
    {"desc.plan.offloaded_attention", offsetof(qlora_plan, offloaded_attention), 0, 0},
    {"desc.plan.tile", offsetof(qlora_plan, tile), 0, 1 << 24},
    {"desc.plan.head_chunk", offsetof(qlora_plan, head_chunk), 1, 1 << 24}};

#define QLORA__PLAN_NUMBERS ((int)(sizeof qlora__plan_numbers / sizeof qlora__plan_numbers[0]))

static int64_t qlora__plan_number(const qlora_plan* plan, int i) {
    int64_t value;
    memcpy(&value, (const char*)plan + qlora__plan_numbers[i].at, sizeof value);
    return value;
}

// Takes the choices of an earlier plan, which must be for the same model and capacity.
static qlora_result qlora__model_adopt_plan(qlora_ctx* ctx, qlora_model* m,
                                            const qlora_plan* plan) {
    qlora__choices choices;
    for (int i = 0; i < QLORA__PLAN_NUMBERS; i++) {
        int64_t most = qlora__plan_numbers[i].most;
        QLORA__TRY(qlora__need_whole(ctx, qlora__plan_numbers[i].name, qlora__plan_number(plan, i),
                                     qlora__plan_numbers[i].least,
                                     most != 0 ? most : m->plan.config.layers));
    }
    memset(&choices, 0, sizeof choices);
    choices.recompute = plan->recompute_layers;
    choices.attention = plan->attention_layers;
    choices.heads = plan->heads_layers;
    choices.away = plan->offloaded_attention;
    choices.here = plan->offloaded_attention == 0;
    choices.cached = plan->cached_layers;
    choices.offload = plan->offloaded_layers > 0 || plan->offloaded_embedding;
    choices.every = plan->offload_every;
    choices.tile = plan->tile;
    choices.head_chunk = plan->head_chunk;
    QLORA__TRY(qlora__choices_check(ctx, m, &choices));
    qlora__plan_apply(m, &choices);
    m->plan.context = plan->context;
    if (m->plan.total != plan->total || m->plan.tokens != plan->tokens ||
        m->plan.parameters != plan->parameters) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.plan was made for another model or other settings: it plans %llu "
                           "bytes, but this model needs %llu",
                           (unsigned long long)plan->total, (unsigned long long)m->plan.total);
    }
    for (int i = 0; i < QLORA__PLAN_NUMBERS; i++) {
        if (qlora__plan_number(plan, i) != qlora__plan_number(&m->plan, i)) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "%s is %lld, which does not go with the rest of the plan, by which "
                               "it is %lld; make a new plan",
                               qlora__plan_numbers[i].name, (long long)qlora__plan_number(plan, i),
                               (long long)qlora__plan_number(&m->plan, i));
        }
    }
    return QLORA_OK;
}

// host: how much memory of the host the plan may use, if desc has none; 0 = what is free.
static qlora_result qlora__model_build(qlora_ctx* ctx, const qlora_model_desc* desc, uint64_t host,
                                       qlora_model** out) {
    if (desc == NULL || desc->plan == NULL) {
        qlora_plan_desc limit;
        memset(&limit, 0, sizeof limit);
        limit.host_bytes = host;
        return qlora__plan_build(ctx, desc, host > 0 ? &limit : NULL, out);
    }
    qlora_plan_desc machine = qlora__machine_resolve(ctx, NULL);
    QLORA__TRY(qlora__skeleton(ctx, desc, &machine, out));
    QLORA__TRY(qlora__model_adopt_plan(ctx, *out, desc->plan));
    // A GPU refuses memory that it does not have; a CPU may promise it and kill the program later.
    bool fits = !qlora__on_cpu(ctx) || qlora__plan_fits(*out, machine.bytes);
    return fits ? QLORA_OK : qlora__plan_too_large(ctx, *out, machine.bytes);
}

static qlora_result qlora__model_open(qlora_ctx* ctx, const qlora_model_desc* desc,
                                      qlora_model** out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "opening a model"));
    qlora_model* m = NULL;
    qlora_result r = QLORA_OK;
    bool again = true;
    for (uint64_t host = 0; again;) {
        r = qlora__model_build(ctx, desc, host, &m);
        if (r == QLORA_OK) {
            bool was_sealed = qlora__cache_set_sealed(ctx, false);
            r = qlora__model_start(ctx, m, desc);
            qlora__cache_set_sealed(ctx, r == QLORA_OK || was_sealed);
        }
        // Pinned memory may be limited: attention needs none of it.
        again = r == QLORA_ERR_MEMORY && m != NULL && desc->plan == NULL &&
                m->plan.offloaded_attention > 0 && m->host.data == NULL;
        if (again) {
            host = m->plan.host / 2;
            qlora__model_free(m);
            m = NULL;
        }
    }
    if (r != QLORA_OK) {
        if (m != NULL) {
            qlora__model_free(m);
        }
        return r;
    }
    ctx->living[QLORA__MODELS]++;
    *out = m;
    return QLORA_OK;
}

qlora_result qlora_model_open(qlora_ctx* ctx, const qlora_model_desc* desc, qlora_model** out) {
    QLORA__ENTER(ctx, "qlora_model_open");
    return qlora__leave(ctx, qlora__model_open(ctx, desc, out));
}

static qlora_result qlora__model_close(qlora_ctx* ctx, qlora_model* m) {
    QLORA__TRY(qlora__not_in_capture(ctx, "closing a model"));
    if (m->trainers > 0 || m->generations > 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "cannot close the model: it still has %s",
                           m->generations == 0 ? "a trainer"
                           : m->trainers == 0  ? "a generation"
                                               : "a trainer and a generation");
    }
    qlora__evaluation_end(m);
    qlora__model_free(m);
    ctx->living[QLORA__MODELS]--;
    return QLORA_OK;
}

qlora_result qlora_model_close(qlora_model* model) {
    if (model == NULL) {
        return QLORA_OK;
    }
    qlora_ctx* ctx = model->ctx;
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_model_close"));
    return qlora__leave(ctx, qlora__model_close(ctx, model));
}

static qlora_ctx* qlora__model_ctx(const qlora_model* model) {
    return model != NULL ? model->ctx : NULL;
}

// Nothing is read from the device, so this can be called at any time.
qlora_result qlora_model_query(const qlora_model* model, qlora_model_info* out) {
    if (model == NULL || out == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    memset(out, 0, sizeof *out);
    out->ctx = model->ctx;
    out->plan = &model->plan;
    out->purpose = model->desc.purpose;
    out->generate_tokens = model->desc.generate_tokens;
    out->generate_sequences = model->desc.generate_sequences;
    bool pooled = model->texts.paging.size > 0;
    int64_t each = pooled ? model->texts.paging.size : model->desc.generate_tokens;
    int64_t left = model->desc.generate_sequences - model->generations;
    int64_t all = pooled ? model->texts.paging.pages : model->desc.generate_sequences;
    out->generate_positions = each * all;
    out->free_positions = each * (pooled ? model->texts.paging.free : left);
    out->parameters = model->range_count;
    out->use_adapters = model->use_adapters;
    out->trainers = model->trainers;
    out->generations = model->generations;
    out->adapters = model->adapters;
    out->adapter = model->chosen;
    out->base = qlora__base_name(model);
    out->trained_base = qlora__trained_base(model);
    return QLORA_OK;
}

static qlora_result qlora__parameter_need(qlora_ctx* ctx, const qlora_model* m, int64_t index,
                                          const char* name, const void* pointer,
                                          qlora__trained* t) {
    if (pointer == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", name);
    }
    if (index < 0 || !qlora__trained_at(m, index, t)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "index is %lld; the model has %lld trained tensors, numbered from 0",
                           (long long)index, (long long)m->range_count);
    }
    return QLORA_OK;
}

static qlora_result qlora__parameter_query(qlora_ctx* ctx, const qlora_model* m, int64_t index,
                                           qlora_parameter_info* out) {
    qlora__trained t;
    QLORA__TRY(qlora__parameter_need(ctx, m, index, "out", out, &t));
    snprintf(out->name, sizeof out->name, "base_model.model.%.170s", t.name);
    out->rows = t.rows;
    out->cols = t.cols;
    return QLORA_OK;
}

qlora_result qlora_parameter_query(const qlora_model* model, int64_t index,
                                   qlora_parameter_info* out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_parameter_query");
    return qlora__leave(ctx, qlora__parameter_query(ctx, model, index, out));
}

static qlora_result qlora__parameter_read(qlora_ctx* ctx, const qlora_model* m,
                                          const qlora_tensor* arena, int64_t index, float* out) {
    qlora__trained t;
    QLORA__TRY(qlora__parameter_need(ctx, m, index, "out", out, &t));
    qlora_tensor window;
    qlora__arena_window(arena, t.at, t.rows, t.cols, &window);
    QLORA__TRY(qlora__floats_out(ctx, window.data, t.rows * t.cols, out));
    return qlora__trained_mix(ctx, &t, true, out);
}

qlora_result qlora_parameter_read(qlora_model* model, int64_t index, float* out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_parameter_read");
    qlora_result r = qlora__model_settle(model);
    r = r == QLORA_OK ? qlora__parameter_read(ctx, model, &model->parameters, index, out) : r;
    return qlora__leave(ctx, r);
}

static qlora_result qlora__parameter_write(qlora_ctx* ctx, qlora_model* m, int64_t index,
                                           const float* in) {
    QLORA__TRY(qlora__model_idle(ctx, m, "writing a parameter"));
    qlora__trained t;
    QLORA__TRY(qlora__parameter_need(ctx, m, index, "in", in, &t));
    qlora_tensor window;
    qlora__arena_window(&m->parameters, t.at, t.rows, t.cols, &window);
    if (t.experts == 0) {
        QLORA__TRY(qlora__floats_in(ctx, window.data, t.rows * t.cols, in));
        return qlora__parameters_changed(ctx, m);
    }
    size_t bytes = (size_t)(t.rows * t.cols) * sizeof *in;
    float* own = (float*)qlora__alloc(ctx, bytes);
    if (own == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memcpy(own, in, bytes);
    qlora_result r = qlora__trained_mix(ctx, &t, false, own);
    r = r == QLORA_OK ? qlora__floats_in(ctx, window.data, t.rows * t.cols, own) : r;
    qlora__free(ctx, own, bytes);
    return r == QLORA_OK ? qlora__parameters_changed(ctx, m) : r;
}

qlora_result qlora_parameter_write(qlora_model* model, int64_t index, const float* in) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_parameter_write");
    return qlora__leave(ctx, qlora__parameter_write(ctx, model, index, in));
}
