// ---- plan ---------------------------------------------------------------------------------------

// Counts a trained tensor and returns the place after it; each starts at a multiple of 8 elements.
static int64_t qlora__number_range(qlora_model* m, int64_t count, int64_t at) {
    if (count > 0) {
        m->range_count++;
        m->longest_range = qlora__max(m->longest_range, count);
        m->plan.parameters += count;
        m->moment_bytes += qlora__moments_place(0, count).end;
    }
    return at + (int64_t)qlora__align_up((size_t)count, 8);
}

// What was counted since the last call is of this place.
static void qlora__number_place(qlora_model* m, qlora_place place) {
    int64_t known = 0;
    for (int i = 0; i < QLORA_PLACES; i++) {
        known += m->plan.trained[i];
    }
    m->plan.trained[place] += m->plan.parameters - known;
}

// The A matrices of a stack are contiguous, so that one product computes their gradients; the B
// matrices follow.
static int64_t qlora__number_group(qlora_model* m, qlora__layer* layer, int group, int64_t at) {
    int count = layer->layout->groups[group].count;
    qlora__projection* first = &layer->projections[layer->layout->groups[group].first];
    for (int i = 0; i < count; i++) {
        qlora__projection* p = &first[i];
        p->a_at = at;
        at = qlora__number_range(m, p->rank * p->in, at);
    }
    for (int i = 0; i < count; i++) {
        qlora__projection* p = &first[i];
        p->b_at = at;
        at = qlora__number_range(m, p->out * p->rank, at);
    }
    for (int i = 0; i < count && m->dora; i++) {
        qlora__projection* p = &first[i];
        if (p->rank > 0) {
            p->m_at = at;
            at = qlora__number_range(m, p->out, at);
        }
    }
    return at;
}

// The same for what experts have. A and B of all of them are one tensor each, expert after expert;
// gate and up of an expert have the same A, and their B follow each other.
static int64_t qlora__number_experts(qlora_model* m, qlora__layer* layer, int64_t at) {
    const qlora__expert_rows* rows = layer->layout->experts;
    for (int unit = layer->layout->count; unit < qlora__unit_count(layer); unit++) {
        int first = qlora__unit_at(layer, unit);
        int stack = qlora__is_stack(layer, first);
        int64_t experts = stack != 0 ? m->plan.config.experts : 1;
        int parts = stack == 1 ? rows->count - 1 : 1;
        const qlora__projection* p = &layer->projections[first];
        int64_t out = qlora__unit_out(layer, first);
        int64_t a_at = at;
        int64_t b_at = qlora__number_range(m, experts * p->rank * p->in, at);
        at = qlora__number_range(m, experts * out * p->rank, b_at);
        qlora__number_place(m, stack != 0 ? QLORA_PLACE_EXPERTS : QLORA_PLACE_ROUTER);
        for (int64_t e = 0; e < experts; e++) {
            for (int k = 0; k < parts; k++) {
                qlora__projection* own = &layer->projections[first + (int)e * rows->count + k];
                own->a_at = a_at + e * p->rank * p->in;
                own->b_at = b_at + (e * out + k * p->out) * p->rank;
            }
        }
    }
    return at;
}

// Assigns a place to a trained matrix of `rows` rows; none without rows.
static int64_t qlora__number_saved(qlora_model* m, int64_t rows, int64_t at, int64_t* place) {
    *place = at;
    return qlora__number_range(m, rows * m->plan.config.hidden, at);
}

// Assigns a place to every trained tensor.
static void qlora__number_parameters(qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    int64_t at = 0;
    m->range_count = 0;
    m->longest_range = 0;
    m->moment_bytes = 0;
    m->plan.parameters = 0;
    memset(m->plan.trained, 0, sizeof m->plan.trained);
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int g = 0; g < QLORA__GROUPS; g++) {
            at = qlora__number_group(m, layer, g, at);
            qlora__number_place(m, g <= QLORA__O ? QLORA_PLACE_ATTENTION : QLORA_PLACE_MLP);
        }
        if (layer->experts != NULL) {
            at = qlora__number_experts(m, layer, at);
        }
        for (int i = 0; i < QLORA__NORMS && m->desc.train_norms; i++) {
            if (qlora__has_norm(m, i)) {
                int64_t width = qlora__arch_norm_width(m->arch, c, i);
                layer->norms_at[i] = at;
                at = qlora__number_range(m, width, at);
            }
        }
        qlora__number_place(m, QLORA_PLACE_NORMS);
    }
    if (m->desc.train_norms) {
        m->tables.final_norm_at = at;
        at = qlora__number_range(m, c->hidden, at);
    }
    qlora__number_place(m, QLORA_PLACE_NORMS);
    at = qlora__number_saved(m, m->tables.saved_embed ? c->vocab : 0, at, &m->tables.embed_at);
    at = qlora__number_saved(m, m->tables.saved_head ? c->vocab : 0, at, &m->tables.head_at);
    at = qlora__number_saved(m, m->tables.token_count, at, &m->tables.tokens_at);
    at = qlora__number_saved(m, m->tables.head_rows ? m->tables.token_count : 0, at,
                             &m->tables.head_tokens_at);
    qlora__number_place(m, QLORA_PLACE_TABLES);
    m->elements = at;
}

// Sizes of a layer's projections and stacks.
static void qlora__shape_layer(qlora_model* m, qlora__layer* layer) {
    const qlora_model_config* c = &m->plan.config;
    for (int i = 0; i < layer->count; i++) {
        qlora__projection* p = &layer->projections[i];
        const qlora__projection_row* row = qlora__row_of(layer, i);
        p->in = qlora__arch_width(c, row->in);
        p->out = qlora__arch_width(c, row->out);
        // The rope kernel adds the bias of q, k and v, unless a norm comes between.
        bool later = row->bias == QLORA__BIAS_QKV && !c->qk_norm;
        p->has_bias = qlora__arch_bias(c, row->bias) && !later;
    }
}

static void qlora__connect_part(const qlora__layer* layer, int number, qlora_linear_part* part) {
    qlora__projection* p = &layer->projections[number];
    part->out = p->out;
    part->rank = p->rank;
    part->scale = p->scale;
    part->projection = qlora__row_of(layer, number)->bit;
    part->nf4 = p->is_nf4 ? &p->nf4 : NULL;
    part->fp8 = p->is_fp8 ? &p->fp8 : NULL;
    part->dense = qlora__is_coded(p) ? NULL : &p->dense;
    part->bias = p->has_bias ? &p->bias : NULL;
    part->a = &p->a;
    part->sb = &p->sb;
    part->da = &p->da;
    part->db = &p->db;
}

// A linear of experts: `count` projections, which read the same rows.
static void qlora__connect_expert(qlora__layer* layer, int64_t index, int number, int count,
                                  qlora_linear_desc* linear) {
    memset(linear, 0, sizeof *linear);
    linear->count = count;
    linear->in = layer->projections[number].in;
    linear->layer = (int32_t)index;
    for (int i = 0; i < count; i++) {
        qlora__connect_part(layer, number + i, &linear->parts[i]);
    }
    layer->experts->pad = qlora__max(layer->experts->pad, qlora_linear_pad(linear));
}

static void qlora__connect_experts(qlora_model* m, int64_t index) {
    qlora__layer* layer = &m->layers[index];
    const qlora__expert_rows* rows = layer->layout->experts;
    int first = qlora__first_expert(layer->layout);
    qlora__connect_expert(layer, index, layer->layout->count, 1, &layer->experts->router);
    if (first > layer->layout->count + 1) {
        qlora__connect_expert(layer, index, first - 1, 1, &layer->experts->shared_gate);
    }
    for (int64_t e = 0; e < m->plan.config.experts; e++) {
        int at = first + (int)e * rows->count;
        qlora_linear_desc* linears = layer->experts->linears + 2 * e;
        qlora__connect_expert(layer, index, at, rows->count - 1, &linears[0]);
        qlora__connect_expert(layer, index, at + rows->count - 1, 1, &linears[1]);
    }
}

// Points the linears of a layer at the tensors of its projections.
static void qlora__connect_layer(qlora_model* m, int64_t index) {
    qlora__layer* layer = &m->layers[index];
    if (layer->experts != NULL) {
        qlora__connect_experts(m, index);
    }
    for (int g = 0; g < QLORA__GROUPS; g++) {
        qlora_linear_desc* linear = &layer->linears[g];
        memset(linear, 0, sizeof *linear);
        linear->count = layer->layout->groups[g].count;
        for (int i = 0; i < linear->count; i++) {
            int number = layer->layout->groups[g].first + i;
            linear->in = layer->projections[number].in;
            qlora__connect_part(layer, number, &linear->parts[i]);
        }
        linear->operand = &layer->operands[g];
        linear->dropout = qlora__trains(m) ? m->desc.dropout : 0.0f;
        linear->layer = (int32_t)index;
        linear->positions = &m->batch.positions;
        linear->sequences = &m->batch.sequences;
        linear->state = &m->batch.dropout;
        layer->pads[g] = qlora_linear_pad(linear);
    }
}

// What describes a rotation besides its factors, which of them are used being a matter of the plan.
#define QLORA__ROPE_NUMBERS 12
static void qlora__rope_numbers(const qlora_rope_desc* r, double out[QLORA__ROPE_NUMBERS]) {
    const double numbers[QLORA__ROPE_NUMBERS] = {(double)r->type,     r->theta,
                                                 r->factor,           r->low_freq_factor,
                                                 r->high_freq_factor, r->original_max_position,
                                                 r->beta_fast,        r->beta_slow,
                                                 r->attention_factor, r->mscale,
                                                 r->mscale_all_dim,   r->no_truncate ? 1.0 : 0.0};
    memcpy(out, numbers, sizeof numbers);
}

static bool qlora__rope_same(const qlora_rope_desc* a, const qlora_rope_desc* b) {
    double x[QLORA__ROPE_NUMBERS];
    double y[QLORA__ROPE_NUMBERS];
    qlora__rope_numbers(a, x);
    qlora__rope_numbers(b, y);
    return memcmp(x, y, sizeof x) == 0 &&
           memcmp(a->short_factor, b->short_factor, sizeof a->short_factor) == 0 &&
           memcmp(a->long_factor, b->long_factor, sizeof a->long_factor) == 0;
}

// Checks what a family adds to Llama's block.
static qlora_result qlora__config_check_family(qlora_ctx* ctx, const qlora_model_config* c) {
    const qlora__arch* arch = qlora__arch_of(c->family);
    const struct {
        const char* name;
        double value;
    } factors[] = {{"config.embedding_scale", c->embedding_scale},
                   {"config.residual_scale", c->residual_scale},
                   {"config.attention_scale", c->attention_scale},
                   {"config.logits_divisor", c->logits_divisor},
                   {"config.attention_cap", c->attention_cap},
                   {"config.logits_cap", c->logits_cap},
                   {"config.query_beta", c->query_beta},
                   {"config.query_period", c->query_period},
                   {"config.norm_offset", c->norm_offset}};
    for (size_t i = 0; i < sizeof factors / sizeof factors[0]; i++) {
        QLORA__TRY(qlora__need_real(ctx, factors[i].name, factors[i].value, 0.0, 1e30));
    }
    QLORA__TRY(qlora__need_whole(ctx, "config.rope_dims", c->rope_dims, 0, c->head_dim));
    if (c->rope_dims % 2 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "config.rope_dims is %lld; it must be even",
                           (long long)c->rope_dims);
    }
    if (c->query_beta > 0.0 && !(c->query_period > 0.0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "config.query_period is %g; with query_beta it must be positive",
                           c->query_period);
    }
    if (c->query_beta > 0.0 && c->window > 0 && !qlora__rope_same(&c->rope, &c->rope_sliding)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "config.query_beta is %g; with windows it needs a rope_sliding that is "
                           "equal to rope",
                           c->query_beta);
    }
    bool scaled = c->residual_scale < 1.0 || c->residual_scale > 1.0;
    if (c->residual_scale > 0.0 && scaled && arch->norms->module[QLORA__NORM_MLP_OUT] != NULL) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "config.residual_scale is %g; with norms after attention and MLP it "
                           "must be 1",
                           c->residual_scale);
    }
    return QLORA_OK;
}

// Checks what a config says of experts.
static qlora_result qlora__config_check_experts(qlora_ctx* ctx, qlora_model_config* c) {
    const qlora__arch* arch = qlora__arch_of(c->family);
    bool may = arch->experts != NULL;
    QLORA__TRY(qlora__need_whole(ctx, "config.experts", c->experts, arch->layout == NULL ? 1 : 0,
                                 may ? QLORA__MAX_EXPERTS : 0));
    if (c->experts == 0) {
        return QLORA_OK;
    }
    c->expert_groups = qlora__max(c->expert_groups, 1);
    c->expert_groups_used = qlora__max(c->expert_groups_used, 1);
    bool shared = arch->experts->groups[QLORA__DOWN].count > 0;
    bool sigmoid = arch->experts->experts->score == QLORA__ROUTER_SIGMOID;
    const struct {
        const char* name;
        int64_t value;
        int64_t least;
        int64_t most;
    } sizes[] = {{"config.experts_per_token", c->experts_per_token, 1, c->experts},
                 {"config.expert_intermediate", c->expert_intermediate, 1, 1 << 24},
                 {"config.shared_intermediate", c->shared_intermediate, shared ? 1 : 0,
                  shared ? 1 << 24 : 0},
                 {"config.expert_groups", c->expert_groups, 1, sigmoid ? c->experts : 1},
                 {"config.expert_groups_used", c->expert_groups_used, 1, c->expert_groups}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        QLORA__TRY(
            qlora__need_whole(ctx, sizes[i].name, sizes[i].value, sizes[i].least, sizes[i].most));
    }
    int64_t each = c->experts / c->expert_groups;
    if (each * c->expert_groups != c->experts || (c->expert_groups > 1 && each < 2) ||
        c->experts_per_token > each * c->expert_groups_used) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "config.expert_groups is %lld and config.expert_groups_used %lld; with "
                           "%lld experts, %lld of which are chosen, that is not possible",
                           (long long)c->expert_groups, (long long)c->expert_groups_used,
                           (long long)c->experts, (long long)c->experts_per_token);
    }
    double weights = 3.0 * (double)(c->experts * c->expert_intermediate) * (double)c->hidden;
    if (weights * (double)c->layers > 1e14) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "config.experts is %lld; the experts of the model would have more than "
                           "1e14 weights",
                           (long long)c->experts);
    }
    return qlora__need_real(ctx, "config.routed_scale", c->routed_scale, 0.0, 1e30);
}

// Fills in the defaults of a config that comes from the caller, and checks it.
static qlora_result qlora__config_check(qlora_ctx* ctx, qlora_model_config* c) {
    if (c->kv_heads == 0) {
        c->kv_heads = c->heads;
    }
    if (c->head_dim == 0 && c->heads > 0) {
        c->head_dim = c->hidden / c->heads;
    }
    if (c->rope_sliding.theta == 0.0) {
        c->rope_sliding = c->rope;
    }
    const struct {
        const char* name;
        int64_t value;
        int64_t most;
    } sizes[] = {{"config.vocab", c->vocab, QLORA__MAX_VOCAB},
                 {"config.hidden", c->hidden, 1 << 24},
                 {"config.intermediate", c->intermediate, 1 << 24},
                 {"config.layers", c->layers, QLORA_MAX_LAYERS},
                 {"config.heads", c->heads, 1 << 24},
                 {"config.kv_heads", c->kv_heads, 1 << 24},
                 {"config.head_dim", c->head_dim, 256}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        QLORA__TRY(qlora__need_whole(ctx, sizes[i].name, sizes[i].value, 1, sizes[i].most));
    }
    if (c->head_dim % 2 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "config.head_dim is %lld; it must be even",
                           (long long)c->head_dim);
    }
    if (c->heads % c->kv_heads != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "config.heads is %lld; it must be a multiple of config.kv_heads, %lld",
                           (long long)c->heads, (long long)c->kv_heads);
    }
    if (!(c->rms_eps > 0.0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "config.rms_eps is %g; it must be positive",
                           c->rms_eps);
    }
    QLORA__TRY(qlora__need_whole(ctx, "config.window", c->window, 0, INT64_MAX));
    QLORA__TRY(qlora__need_whole(ctx, "config.max_positions", c->max_positions, 0, INT64_MAX));
    QLORA__TRY(qlora__config_check_family(ctx, c));
    QLORA__TRY(qlora__config_check_experts(ctx, c));
    return qlora__need_whole(ctx, "config.stop_count", c->stop_count, 0, QLORA_MAX_STOP_IDS);
}

// ---- the slots of several adapters --------------------------------------------------------------

static size_t qlora__loras_bytes(const qlora_model* m) {
    return (size_t)(m->adapters * m->plan.config.layers * QLORA__PROJECTIONS) * sizeof *m->loras;
}

static void qlora__slots_free(qlora_model* m) {
    qlora_ctx* ctx = m->ctx;
    qlora__free(ctx, m->owns, (size_t)m->adapters * sizeof *m->owns);
    qlora__free(ctx, m->loras, qlora__loras_bytes(m));
    qlora__free(ctx, m->work.runs, (size_t)m->plan.max_sequences * sizeof *m->work.runs);
    qlora__free(ctx, m->wide, (size_t)m->plan.config.layers * sizeof *m->wide);
}

static qlora_result qlora__slots_check(qlora_ctx* ctx, const qlora_model_desc* d) {
    QLORA__TRY(qlora__need_whole(ctx, "desc.slot_count", d->slot_count, 0, QLORA__MOST_ADAPTERS));
    if (d->slot_count > 0 && d->slots == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.slots is NULL, but desc.slot_count is %lld",
                           (long long)d->slot_count);
    }
    for (int64_t i = 0; i < d->slot_count; i++) {
        char name[40];
        snprintf(name, sizeof name, "desc.slots[%lld].rank", (long long)i);
        QLORA__TRY(qlora__need_whole(ctx, name, d->slots[i].rank, 0, 1024));
        snprintf(name, sizeof name, "desc.slots[%lld].alpha", (long long)i);
        QLORA__TRY(qlora__need_real(ctx, name, (double)d->slots[i].alpha, -1e300, 1e300));
    }
    const char* both = d->slot_count == 0          ? NULL
                       : d->adapter != NULL        ? "desc.adapter is set"
                       : d->rank < 0               ? "desc.rank is negative"
                       : d->slot_count == 1        ? NULL
                       : d->dropout > 0.0f         ? "desc.dropout is set"
                       : d->dora                   ? "desc.dora is set"
                       : d->train_norms            ? "desc.train_norms is set"
                       : d->save_modules != 0      ? "desc.save_modules is set"
                       : d->token_row_count > 0    ? "desc.token_rows is set"
                       : d->new_token_count > 0    ? "desc.new_tokens is set"
                       : d->mode == QLORA_MODE_FP8 ? "desc.mode is FP8"
                                                   : NULL;
    return both == NULL ? QLORA_OK
                        : qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                                      "%s, which is not supported with the %lld adapters of "
                                      "desc.slots",
                                      both, (long long)d->slot_count);
}

// Takes rank, scale and seed of a slot for the current adapter.
static void qlora__slot_take(qlora_model* m, const qlora_model_desc* desc, int64_t index) {
    if (desc->slot_count == 0) {
        return;
    }
    const qlora_adapter_slot* slot = &desc->slots[index];
    int32_t rank = slot->rank > 0 ? slot->rank : desc->rank > 0 ? desc->rank : 16;
    m->desc.rank = rank;
    m->desc.alpha = slot->alpha != 0.0f   ? slot->alpha
                    : desc->alpha != 0.0f ? desc->alpha
                                          : 2.0f * (float)rank;
    m->adapter_seed = slot->seed;
}

// Creates the entries of several adapters; the current one is number 0.
static qlora_result qlora__slots_create(qlora_ctx* ctx, qlora_model* m) {
    m->adapters = m->desc.slot_count > 1 ? (int32_t)m->desc.slot_count : 1;
    if (!qlora__has_several(m)) {
        return QLORA_OK;
    }
    m->owns = (qlora__own*)qlora__alloc_zero(ctx, (size_t)m->adapters * sizeof *m->owns);
    m->loras = (qlora__lora*)qlora__alloc_zero(ctx, qlora__loras_bytes(m));
    m->work.runs = (qlora__owned_rows*)qlora__alloc_zero(ctx, (size_t)m->plan.max_sequences *
                                                                  sizeof *m->work.runs);
    return m->owns != NULL && m->loras != NULL && m->work.runs != NULL ? QLORA_OK
                                                                       : QLORA_ERR_MEMORY;
}

// Refuses what the build has no code for.
static qlora_result qlora__parts_check(qlora_ctx* ctx, const qlora_model_desc* d) {
    if (!QLORA__TRAINS && d->purpose == QLORA_PURPOSE_TRAIN) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "desc.purpose is QLORA_PURPOSE_TRAIN; training is not in this build: "
                           "it was left out by QLORA_NO_TRAIN");
    }
    if (!QLORA__GENERATES && d->generate_tokens > 0) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "desc.generate_tokens is %lld, but generating is not in this build: it "
                           "was left out by QLORA_NO_GENERATE",
                           (long long)d->generate_tokens);
    }
    return QLORA_OK;
}

static qlora_result qlora__model_desc_check(qlora_ctx* ctx, const qlora_model_desc* d) {
    if (d == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the model desc is NULL");
    }
    if (d->reserved_must_be_zero0 != 0 || d->reserved_must_be_zero1 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the model desc was not zeroed before its fields were set");
    }
    if (d->dir == NULL && d->config == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.dir and desc.config are both NULL; set either dir (a folder) or "
                           "config (random weights)");
    }
    if (d->dir != NULL && d->config != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.dir and desc.config are both set; set either dir (a folder) or "
                           "config (random weights)");
    }
    const struct {
        const char* name;
        int64_t value;
        int64_t least;
        int64_t most;
    } fields[] = {{"desc.rank", d->rank, INT32_MIN, 1024},
                  {"desc.targets", d->targets, 0, INT32_MAX},
                  {"desc.save_modules", d->save_modules, 0, QLORA_SAVE_EMBED | QLORA_SAVE_HEAD},
                  {"desc.token_row_count", d->token_row_count, 0, 1 << 24},
                  {"desc.new_token_count", d->new_token_count, 0, 1 << 24},
                  {"desc.base", (int64_t)d->base, 0, QLORA_BASE_FP8},
                  {"desc.head", (int64_t)d->head, 0, QLORA_HEAD_NF4},
                  {"desc.mode", (int64_t)d->mode, 0, QLORA_MODE_FP8},
                  {"desc.purpose", (int64_t)d->purpose, 0, QLORA_PURPOSE_ADAPTER},
                  {"desc.optimizer", (int64_t)d->optimizer, 0, QLORA_OPTIMIZER_ADAMW_8BIT},
                  {"desc.recompute", (int64_t)d->recompute, 0, QLORA_CHOICE_OFF},
                  {"desc.cache", (int64_t)d->cache, 0, QLORA_CHOICE_OFF},
                  {"desc.offload", (int64_t)d->offload, 0, QLORA_CHOICE_OFF},
                  {"desc.tile", d->tile, INT64_MIN, 1 << 24},
                  {"desc.tokens", d->tokens, 0, 1 << 24},
                  {"desc.max_sequences", d->max_sequences, 0, 1 << 24},
                  {"desc.max_length", d->max_length, 0, 1 << 24},
                  {"desc.head_chunk", d->head_chunk, 0, 1 << 24},
                  {"desc.generate_tokens", d->generate_tokens, 0, 1 << 24},
                  {"desc.accumulate", d->accumulate, 0, 1 << 24},
                  {"desc.generate_sequences", d->generate_sequences, 0, QLORA__MOST_TEXTS},
                  {"desc.generate_positions", d->generate_positions, 0, 1 << 30}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        QLORA__TRY(qlora__need_whole(ctx, fields[i].name, fields[i].value, fields[i].least,
                                     fields[i].most));
    }
    if (d->mode > QLORA_MODE_F32 && d->mode < QLORA_MODE_BF16) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.mode is %d, which is unused; for TF32, set math of the context",
                           (int)d->mode);
    }
    QLORA__TRY(qlora__saved_desc_check(ctx, d));
    QLORA__TRY(qlora__slots_check(ctx, d));
    QLORA__TRY(qlora__need_real(ctx, "desc.dropout", (double)d->dropout, -1e30, 1.0));
    QLORA__TRY(qlora__need_real(ctx, "desc.alpha", (double)d->alpha, -1e300, 1e300));
    return qlora__need_real(ctx, "desc.weight_std", (double)d->weight_std, 0.0, 1e300);
}

// Checks that a model has seen texts of this length.
static qlora_result qlora__positions_check(qlora_ctx* ctx, const char* name, int64_t value,
                                           int64_t positions) {
    return value <= positions ? QLORA_OK
                              : qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                                            "%s is %lld, but the model has %lld positions "
                                            "(max_position_embeddings); longer texts need "
                                            "desc.rope_scale",
                                            name, (long long)value, (long long)positions);
}

// Fills in the defaults of the capacity settings. A config without max_positions has no limit.
static qlora_result qlora__capacity_resolve(qlora_ctx* ctx, const qlora_model_config* c,
                                            qlora_model_desc* d) {
    int64_t positions = c->max_positions > 0 ? c->max_positions : INT64_MAX;
    d->tokens = d->tokens != 0 ? d->tokens : 2048;
    d->max_sequences = d->max_sequences != 0 ? d->max_sequences : qlora__max(d->tokens / 8, 1);
    d->max_length = d->max_length != 0 ? d->max_length : qlora__min(d->tokens, positions);
    d->generate_sequences = d->generate_sequences != 0 ? d->generate_sequences : 1;
    if (d->generate_positions >= d->generate_sequences * d->generate_tokens) {
        d->generate_positions = 0; // all texts have room at full length
    }
    d->head_chunk = qlora__min(d->head_chunk != 0 ? d->head_chunk : 1024, d->tokens);
    QLORA__TRY(qlora__need_whole(ctx, "desc.max_sequences", d->max_sequences, 1, d->tokens));
    QLORA__TRY(qlora__need_whole(ctx, "desc.max_length", d->max_length, 1, d->tokens));
    QLORA__TRY(qlora__positions_check(ctx, "desc.max_length", d->max_length, positions));
    return qlora__positions_check(ctx, "desc.generate_tokens", d->generate_tokens, positions);
}

static size_t qlora__decode_results_bytes(const qlora__decode* d) {
    return 2 * (size_t)d->texts * sizeof *d->results;
}

// Bytes of the projections of all layers, of which the first layer has the pointer, and of what
// layers have of their experts.
static size_t qlora__projections_bytes(const qlora_model* m) {
    size_t count = 0;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        count += (size_t)m->layers[l].count;
    }
    return count * sizeof(qlora__projection);
}

static size_t qlora__mixture_bytes(const qlora_model* m) {
    return sizeof(qlora__experts) +
           (size_t)(2 * m->plan.config.experts) * sizeof(qlora_linear_desc);
}

static void qlora__projections_free(qlora_model* m) {
    for (int64_t l = 0; m->layers != NULL && l < m->plan.config.layers; l++) {
        qlora__free(m->ctx, m->layers[l].experts,
                    m->layers[l].experts != NULL ? qlora__mixture_bytes(m) : 0);
    }
    if (m->layers != NULL && m->layers[0].projections != NULL) {
        qlora__free(m->ctx, m->layers[0].projections, qlora__projections_bytes(m));
    }
}

static void qlora__model_free(qlora_model* m) {
    qlora_ctx* ctx = m->ctx;
    if (m->arena != NULL) {
        // An allocator of the caller's may reuse the memory at once, so nothing may still run in
        // it. The text of the error that brought us here stays.
        char error[QLORA__ERROR_SIZE];
        memcpy(error, ctx->env.error, sizeof error);
        qlora_result ignored = qlora__away_wait(ctx, ~0u);
        ignored = qlora__sync(ctx);
        (void)ignored;
        memcpy(ctx->env.error, error, sizeof error);
    }
    for (int i = 0; i < 2; i++) {
        qlora_result ignored = qlora__graph_destroy(ctx, m->decode.graphs[i]);
        (void)ignored;
    }
    qlora__source_close(m);
    qlora__ring_destroy(ctx, &m->ring);
    qlora__buffer_destroy(ctx, m->arena);
    qlora__away_free(ctx, &m->host);
    qlora__free(ctx, m->texts.paging.users,
                (size_t)(m->texts.paging.pages + 1) * sizeof *m->texts.paging.users);
    qlora__free(ctx, m->decode.host, (size_t)m->decode.texts * sizeof *m->decode.host);
    qlora__pinned_free(ctx, m->decode.results, qlora__decode_results_bytes(&m->decode));
    qlora__free(ctx, m->decode.sent, (size_t)m->decode.params.cols);
    qlora__projections_free(m);
    qlora__free(ctx, m->layers, (size_t)m->plan.config.layers * sizeof *m->layers);
    qlora__free(ctx, m->dir, m->dir != NULL ? strlen(m->dir) + 1 : 0);
    qlora__free(ctx, m->tables.token_ids,
                (size_t)m->tables.token_count * sizeof *m->tables.token_ids);
    qlora__slots_free(m);
    qlora__free(ctx, m, sizeof *m);
}

// A hash of the paths of the model folder and the adapter, and of the scaling, if there is one.
static uint64_t qlora__source_name(const qlora_model_desc* desc) {
    uint64_t hash = 0;
    const char* const names[] = {desc->dir, desc->adapter, desc->rope_scale};
    for (size_t i = 0; i < (desc->rope_scale != NULL ? 3u : 2u); i++) {
        qlora__hash h;
        qlora__hash_begin(&h);
        qlora__hash_add(&h, &hash, sizeof hash);
        qlora__hash_add(&h, names[i] != NULL ? names[i] : "", names[i] ? strlen(names[i]) : 0);
        hash = qlora__hash_end(&h);
    }
    return hash;
}

// The bits of what the experts of a layer have.
static uint32_t qlora__expert_targets(const qlora__layout* layout) {
    const qlora__expert_rows* experts = layout->experts;
    uint32_t has = experts != NULL ? 1u << experts->router.bit : 0;
    if (experts != NULL && experts->shared_gate.module != NULL) {
        has |= 1u << experts->shared_gate.bit;
    }
    for (int i = 0; experts != NULL && i < experts->count; i++) {
        has |= 1u << experts->rows[i].bit;
    }
    return has;
}

// Replaces "all" by the projections that the model has, and refuses others.
static qlora_result qlora__targets_resolve(qlora_ctx* ctx, qlora_model* m) {
    static const char* const names[] = {"q", "k", "v", "o", "gate", "up", "down", "qkv", "gate_up"};
    uint32_t has = 0;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        const qlora__layout* layout = qlora__arch_layout(m->arch, &m->plan.config, l);
        for (int i = 0; i < layout->count; i++) {
            has |= 1u << layout->rows[i].bit;
        }
        has |= qlora__expert_targets(layout);
    }
    const uint32_t attention =
        QLORA_TARGET_Q | QLORA_TARGET_K | QLORA_TARGET_V | QLORA_TARGET_O | QLORA_TARGET_QKV;
    if (m->desc.targets == 0 || m->desc.targets == (uint32_t)QLORA_TARGET_ALL) {
        m->desc.targets = has & (uint32_t)QLORA_TARGET_ALL;
    }
    if ((m->desc.targets & (uint32_t)QLORA_TARGET_ATTENTION) != 0) {
        m->desc.targets &= ~(uint32_t)QLORA_TARGET_ATTENTION;
        m->desc.targets |= has & attention;
    }
    const uint32_t known =
        (uint32_t)QLORA_TARGET_ALL | QLORA_TARGET_ROUTER | QLORA_TARGET_SHARED_GATE;
    if ((m->desc.targets & ~known) != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.targets is %u, which has bits that qlora_target does not",
                           (unsigned)m->desc.targets);
    }
    for (int bit = 11; bit < 15; bit++) {
        if ((m->desc.targets & ~has & 1u << bit) != 0) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "desc.targets contains %s, which this model does not have",
                               bit == 13   ? "the router"
                               : bit == 14 ? "the gate of the shared expert"
                                           : "experts");
        }
    }
    for (int bit = 0; bit < 9; bit++) {
        if ((m->desc.targets & ~has & 1u << bit) != 0) {
            bool early = bit < 3 || bit == 7;
            return qlora__fail(
                ctx, QLORA_ERR_ARGUMENT,
                "desc.targets contains %s, which this model does not have; it has "
                "%s",
                names[bit],
                early ? ((has & QLORA_TARGET_QKV) != 0 ? "qkv" : "q, k and v")
                : (has & (QLORA_TARGET_GATE | QLORA_TARGET_GATE_UP)) == 0
                    ? "experts"
                    : ((has & QLORA_TARGET_GATE_UP) != 0 ? "gate_up" : "gate and up"));
        }
    }
    return QLORA_OK;
}

// capability 0: the CPU.
static qlora_result qlora__mode_check(qlora_ctx* ctx, qlora_mode mode, int32_t capability) {
    if (mode == QLORA_MODE_BF16 && capability != 0 && capability < 80) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "desc.mode is BF16, which needs compute capability 8.0 or later; this "
                           "is %d.%d; use F32 or AUTO",
                           (int)capability / 10, (int)capability % 10);
    }
    if (mode == QLORA_MODE_FP8 && capability != 0 && capability != 90) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "desc.mode is FP8, which needs compute capability 9.0; this is %d.%d; "
                           "use BF16 or AUTO",
                           (int)capability / 10, (int)capability % 10);
    }
    return QLORA_OK;
}

// FP8 products need 4-bit or FP8 weights, and rows of results that are aligned to 16 bytes.
static qlora_result qlora__fp8_check(qlora_ctx* ctx, const qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    const struct {
        const char* name;
        int64_t value;
        int64_t of;
    } widths[] = {{"hidden", c->hidden, 8},
                  {"intermediate", c->intermediate,
                   qlora__ffn_plans[qlora__arch_first(m->arch)->ffn].fp8_multiple},
                  {"heads * head_dim", qlora__q_width(c), 8},
                  {"kv_heads * head_dim", qlora__kv_width(c), 4}}; // k and v are next to each other
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        if (widths[i].value % widths[i].of != 0) {
            return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                               "desc.mode is FP8, but config.%s is %lld; it must be a multiple of "
                               "%lld",
                               widths[i].name, (long long)widths[i].value, (long long)widths[i].of);
        }
    }
    if (m->dora) { // its backward pass needs both forms of the weights at once
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "desc.mode is FP8, which DoRA does not support; use BF16 or AUTO");
    }
    for (int64_t l = 0; l < c->layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            if (!qlora__is_coded(&m->layers[l].projections[i])) {
                char module[160];
                qlora__module_of(m, l, i, module, sizeof module);
                return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                                   "desc.mode is FP8, which needs 4-bit or FP8 weights, but %s is "
                                   "in 16 or 32 bits",
                                   module);
            }
        }
    }
    return QLORA_OK;
}

// The tokens of the longest text that is rotated by the short factors, if that is not the longest
// one of all.
static int64_t qlora__rope_short(const qlora_rope_desc* rope, int64_t longest) {
    bool two = rope->type == QLORA_ROPE_LONGROPE &&
               (double)longest > rope->original_max_position &&
               memcmp(rope->short_factor, rope->long_factor, sizeof rope->long_factor) != 0;
    return !two                               ? longest
           : rope->original_max_position > 0.0 ? (int64_t)rope->original_max_position
                                               : 0; // an error, which is found later
}

// What the planned lengths mean for the rotary tables.
static qlora_result qlora__skeleton_angles(qlora_ctx* ctx, qlora_model* m) {
    qlora_model_config* c = &m->plan.config;
    m->positions = qlora__max(m->desc.max_length, m->desc.generate_tokens);
    int64_t full = qlora__rope_short(&c->rope, m->positions);
    int64_t sliding = qlora__rope_short(&c->rope_sliding, m->positions);
    if (full != sliding && full < m->positions && sliding < m->positions) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "config.rope has its short factors in texts of up to %lld tokens, "
                           "config.rope_sliding in texts of up to %lld; only one number is "
                           "supported",
                           (long long)full, (long long)sliding);
    }
    c->rope.use_long = false; // every text has its own
    c->rope_sliding.use_long = false;
    m->short_texts = qlora__min(full, sliding);
    m->angle_rows = m->positions + (qlora__has_two_rotations(m) ? m->short_texts : 0);
    return QLORA_OK;
}

// A plan is the caller's memory.
static qlora_result qlora__plan_vocab_check(qlora_ctx* ctx, const qlora_plan* plan) {
    return plan->base_vocab > 0 && plan->base_vocab <= plan->config.vocab
               ? QLORA_OK
               : qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                             "desc.plan.base_vocab is %lld; it must be 1 to desc.plan.config.vocab "
                             "(%lld)",
                             (long long)plan->base_vocab, (long long)plan->config.vocab);
}

// A config can promise layers that the files do not have. Their descriptions would take memory by
// that number, so the last one is looked for first. A folder with nothing but a config can be
// planned, so the files need not exist.
static qlora_result qlora__skeleton_last_layer(qlora_ctx* ctx, const qlora_model_desc* desc,
                                               qlora_model* m) {
    bool exists = false;
    const qlora__folder* folder = NULL;
    char name[160];
    if (desc->dir == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__source_exists(ctx, desc->dir, &exists));
    if (!exists) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__source_folder(ctx, m, desc->dir, &folder));
    int64_t last = m->plan.config.layers - 1;
    snprintf(name, sizeof name, "model.layers.%lld.%s.weight", (long long)last,
             qlora__arch_layout(m->arch, &m->plan.config, last)->rows[0].module);
    if (qlora__folder_find(folder, name) == NULL) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT,
                           "%s: tensor %s is missing; the config has %lld layers", folder->dir,
                           name, (long long)m->plan.config.layers);
    }
    return QLORA_OK;
}

// The config of the model: from its folder, from a plan or as given, scaled if that is asked for.
static qlora_result qlora__skeleton_config(qlora_ctx* ctx, const qlora_model_desc* desc,
                                           qlora_model* m) {
    qlora_model_config* c = &m->plan.config;
    bool planned = desc->dir != NULL && desc->plan != NULL; // then it is scaled already
    if (desc->dir != NULL && desc->plan == NULL) {
        QLORA__TRY(qlora__config_read(&ctx->env, desc->dir, c));
    } else {
        // A plan is the caller's memory too, so that its config is checked as well.
        qlora_model_config given = planned ? desc->plan->config : *desc->config;
        QLORA__TRY(qlora__config_check(ctx, &given));
        *c = given;
        if (planned) { // before new tokens
            QLORA__TRY(qlora__plan_vocab_check(ctx, desc->plan));
            c->vocab = desc->plan->base_vocab;
        }
    }
    if (desc->rope_scale != NULL) {
        if (!planned) {
            QLORA__TRY(qlora__config_scale(&ctx->env, desc->rope_scale, c));
        }
        snprintf(m->rope_scale, sizeof m->rope_scale, "%s", desc->rope_scale);
    }
    m->desc.rope_scale = NULL; // the caller's
    m->plan.base_vocab = c->vocab;
    return QLORA_OK;
}

// Sets the rank and scale of every module of every adapter.
static qlora_result qlora__slots_shape(qlora_ctx* ctx, qlora_model* m,
                                       const qlora_model_desc* desc) {
    qlora_result r = qlora__adapter_shapes(ctx, m, desc);
    for (int32_t k = 1; k < m->adapters && r == QLORA_OK; k++) {
        qlora__adapter_focus(m, k);
        qlora__slot_take(m, desc, k);
        r = qlora__adapter_shapes(ctx, m, desc);
    }
    qlora__adapter_focus(m, 0);
    return r == QLORA_OK ? qlora__wide_choose(ctx, m) : r;
}

// Assigns a place to every trained tensor of every adapter.
static void qlora__slots_number(qlora_model* m) {
    int64_t parameters = 0;
    int64_t trained[QLORA_PLACES];
    memset(trained, 0, sizeof trained);
    for (int32_t k = m->adapters - 1; k >= 0; k--) {
        qlora__adapter_focus(m, k);
        qlora__number_parameters(m);
        parameters += m->plan.parameters;
        for (int i = 0; i < QLORA_PLACES; i++) {
            trained[i] += m->plan.trained[i];
        }
    }
    m->plan.parameters = parameters;
    memcpy(m->plan.trained, trained, sizeof trained);
}

// The room beside a row of several adapters: that of all of them if they stand side by side, or
// that of the one with the highest ranks if their rows are computed separately.
static void qlora__slots_pads(qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers && m->wide != NULL; l++) {
        for (int g = 0; g < QLORA__GROUPS; g++) {
            m->layers[l].pads[g] = qlora__wide_pad(m, l, g);
        }
    }
    for (int32_t k = m->adapters - 1; k >= 0 && qlora__has_several(m) && m->wide == NULL; k--) {
        qlora__adapter_focus(m, k);
        for (int64_t l = 0; l < m->plan.config.layers; l++) {
            for (int g = 0; g < QLORA__GROUPS; g++) {
                int64_t pad = qlora_linear_pad(&m->layers[l].linears[g]);
                m->layers[l].pads[g] = qlora__max(m->layers[l].pads[g], pad);
            }
        }
    }
}

static qlora_result qlora__skeleton_projections(qlora_ctx* ctx, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        layer->layout = qlora__arch_layout(m->arch, c, l);
        const qlora__expert_rows* experts = layer->layout->experts;
        layer->count = layer->layout->count;
        if (experts != NULL) {
            layer->count = qlora__first_expert(layer->layout) + (int)c->experts * experts->count;
            layer->experts = (qlora__experts*)qlora__alloc_zero(ctx, qlora__mixture_bytes(m));
            if (layer->experts == NULL) {
                return QLORA_ERR_MEMORY;
            }
            layer->experts->linears = (qlora_linear_desc*)(void*)(layer->experts + 1);
        }
    }
    qlora__projection* all =
        (qlora__projection*)qlora__alloc_zero(ctx, qlora__projections_bytes(m));
    for (int64_t l = 0; l < c->layers && all != NULL; l++) {
        m->layers[l].projections = all;
        all += m->layers[l].count;
    }
    return all != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
}

// Refuses what kinds of parts do not support.
static qlora_result qlora__parts_refuse(qlora_ctx* ctx, const qlora_model* m) {
    const char* what = NULL;
    for (int64_t l = 0; l < m->plan.config.layers && what == NULL; l++) {
        const qlora__ffn_plan* plan = qlora__ffn_plan_of(&m->layers[l]);
        what = plan->refuse != NULL ? plan->refuse(m) : NULL;
    }
    return what == NULL ? QLORA_OK : qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "this model %s", what);
}

static qlora_result qlora__skeleton_fill(qlora_ctx* ctx, const qlora_model_desc* desc,
                                         const qlora_plan_desc* machine, qlora_model* m) {
    qlora_model_config* c = &m->plan.config;
    m->plan.source = qlora__source_name(desc);
    if (desc->plan != NULL && desc->plan->source != m->plan.source) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.plan was made for another model folder, adapter or rope_scale");
    }
    QLORA__TRY(qlora__skeleton_config(ctx, desc, m));
    m->arch = qlora__arch_of(c->family);
    qlora__config_resolve(c);
    m->on_gpu = machine->capability != 0;
    m->own_chunk = m->desc.head_chunk != 0;
    QLORA__TRY(qlora__capacity_resolve(ctx, c, &m->desc));
    QLORA__TRY(qlora__skeleton_angles(ctx, m));
    m->desc.rank = desc->rank == 0 ? 16 : desc->rank;
    m->desc.dropout = desc->dropout > 0.0f ? desc->dropout : 0.0f;
    m->desc.alpha = desc->alpha != 0.0f ? desc->alpha : 2.0f * (float)m->desc.rank;
    m->adapter_seed = desc->seed;
    qlora__slot_take(m, desc, 0);
    QLORA__TRY(qlora__targets_resolve(ctx, m));
    QLORA__TRY(qlora__mode_check(ctx, desc->mode, machine->capability));
    // On the CPU, only operands of products are 16-bit, while they are packed.
    bool wants_16bit = desc->mode != QLORA_MODE_F32 && machine->capability >= 80;
    m->plan.mode = desc->mode != QLORA_MODE_AUTO ? desc->mode
                   : wants_16bit                 ? QLORA_MODE_BF16
                                                 : QLORA_MODE_F32;
    m->math = ctx->desc.math;
    m->compute = wants_16bit ? QLORA_BF16 : QLORA_F32;
    m->plan.tokens = m->desc.tokens;
    m->plan.max_sequences = m->desc.max_sequences;
    m->plan.max_length = m->desc.max_length;
    m->plan.head_chunk = m->desc.head_chunk;
    QLORA__TRY(qlora__skeleton_last_layer(ctx, desc, m));
    size_t bytes = (size_t)c->layers * sizeof *m->layers;
    m->layers = (qlora__layer*)qlora__alloc_zero(ctx, bytes);
    if (m->layers == NULL) {
        return QLORA_ERR_MEMORY;
    }
    QLORA__TRY(qlora__skeleton_projections(ctx, m));
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__shape_layer(m, &m->layers[l]);
        m->layers[l].sliding = c->sliding[l] != 0;
        m->layers[l].no_rope = c->no_rope[l] != 0;
    }
    QLORA__TRY(qlora__slots_create(ctx, m));
    return qlora__slots_shape(ctx, m, desc);
}

// A head in the files counts, whatever the config says; without one, the flag decides. A folder
// with nothing but a config can be planned, so the files need not exist.
static qlora_result qlora__skeleton_head(qlora_ctx* ctx, const qlora_model_desc* desc,
                                         qlora_model* m) {
    if (desc->dir == NULL || desc->plan != NULL || !m->plan.config.tied) {
        return QLORA_OK;
    }
    bool exists = false;
    QLORA__TRY(qlora__source_exists(ctx, desc->dir, &exists));
    if (exists) {
        const qlora__folder* folder = NULL;
        QLORA__TRY(qlora__source_folder(ctx, m, desc->dir, &folder));
        m->plan.config.tied = qlora__folder_find(folder, "lm_head.weight") == NULL;
    }
    return QLORA_OK;
}

// A 4-bit head is a copy that nothing else reads and nothing changes.
static qlora_result qlora__skeleton_head_format(qlora_ctx* ctx, const qlora_model_desc* desc,
                                                qlora_model* m) {
    if (desc->head != QLORA_HEAD_NF4 || !qlora__computes(m)) {
        return QLORA_OK;
    }
    const char* why = qlora__trains_head(m) ? "is trained"
                      : m->plan.config.tied ? "is its embedding (a tied head)"
                                            : NULL;
    if (why != NULL) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "desc.head is NF4, but the head of this model %s; it must be FULL", why);
    }
    m->base.head_is_nf4 = true;
    m->base.head_desc.rows = m->plan.config.vocab;
    m->base.head_desc.cols = m->plan.config.hidden;
    m->base.head_desc.plain_scales = true; // so that it can be quantised in slices
    return QLORA_OK;
}

// Decides which weights are 4-bit or FP8: all of such a base, or those that are so in the files.
static qlora_result qlora__skeleton_formats(qlora_ctx* ctx, const qlora_model_desc* desc,
                                            qlora_model* m) {
    const qlora__folder* folder = NULL;
    if (desc->dir != NULL && m->plan.config.quantized) {
        QLORA__TRY(qlora__source_folder(ctx, m, desc->dir, &folder));
    }
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            qlora__projection* p = &m->layers[l].projections[i];
            bool routes = qlora__is_router(&m->layers[l], i); // as in bitsandbytes, not quantised
            p->is_nf4 = desc->base == QLORA_BASE_NF4 && !routes;
            p->is_fp8 = desc->base == QLORA_BASE_FP8 && !routes;
            p->nf4_desc.rows = p->out;
            p->nf4_desc.cols = p->in;
            p->nf4_desc.plain_scales = desc->single_quant;
            if (folder == NULL) {
                continue;
            }
            qlora__weight_source found;
            QLORA__TRY(qlora__projection_source(ctx, folder, m, l, i, &found));
            const qlora__linear_source source = found.linear;
            // What the folder left in 16 bits when it was quantised stays so, as in transformers.
            p->is_nf4 = source.nf4;
            p->is_fp8 = source.fp8;
            p->stored = source.nf4 || source.fp8;
            if (source.nf4) {
                p->nf4_desc.block = (int32_t)source.block;
                p->nf4_desc.block2 = (int32_t)source.block2;
                p->nf4_desc.plain_scales = !source.nested;
            }
        }
    }
    return QLORA_OK;
}

// Creates a model without its memory, which is enough to plan it.
static qlora_result qlora__skeleton(qlora_ctx* ctx, const qlora_model_desc* desc,
                                    const qlora_plan_desc* machine, qlora_model** out) {
    QLORA__TRY(qlora__model_desc_check(ctx, desc));
    QLORA__TRY(qlora__parts_check(ctx, desc));
    qlora_model* m = (qlora_model*)qlora__alloc_zero(ctx, sizeof *m);
    if (m == NULL) {
        return QLORA_ERR_MEMORY;
    }
    m->ctx = ctx;
    m->desc = *desc;
    m->use_adapters = true;
    m->source = (qlora__source*)qlora__alloc_zero(ctx, sizeof *m->source);
    qlora_result r = m->source != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    r = r == QLORA_OK ? qlora__skeleton_fill(ctx, desc, machine, m) : r;
    r = r == QLORA_OK ? qlora__skeleton_head(ctx, desc, m) : r;
    r = r == QLORA_OK ? qlora__saved_shapes(ctx, m, desc) : r;
    r = r == QLORA_OK ? qlora__skeleton_head_format(ctx, desc, m) : r;
    if (r == QLORA_OK) {
        r = qlora__skeleton_formats(ctx, desc, m);
    }
    r = r == QLORA_OK ? qlora__parts_refuse(ctx, m) : r;
    if (r == QLORA_OK && qlora__maps_weights(ctx, desc, machine)) {
        r = qlora__map_weights(ctx, desc->dir, m);
    }
    if (r == QLORA_OK && qlora__is_fp8(m)) {
        r = qlora__fp8_check(ctx, m);
    }
    if (r == QLORA_OK && desc->dir != NULL) {
        size_t bytes = strlen(desc->dir) + 1;
        m->dir = (char*)qlora__alloc(ctx, bytes);
        r = m->dir != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
        if (r == QLORA_OK) {
            memcpy(m->dir, desc->dir, bytes);
        }
    }
    if (r != QLORA_OK) {
        qlora__model_free(m);
        return r;
    }
    m->desc.dir = m->dir;
    m->desc.config = NULL;
    m->desc.adapter = NULL;
    m->desc.plan = NULL;
    m->desc.slots = NULL;
    qlora__slots_number(m);
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__connect_layer(m, l);
    }
    qlora__slots_pads(m);
    *out = m;
    return QLORA_OK;
}
