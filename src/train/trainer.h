// ---- creating a trainer -------------------------------------------------------------------------

// The settings of the method and of learning rates.
static qlora_result qlora__method_desc_check(qlora_ctx* ctx, const qlora_train_desc* d) {
    const struct {
        const char* name;
        double value;
        double below;
        unsigned setting;
    } numbers[] = {{"beta", d->beta, 1e6, QLORA__SETTING_BETA},
                   {"label_smoothing", d->label_smoothing, 1.0, QLORA__SETTING_SMOOTHING},
                   {"sft_alpha", d->sft_alpha, 1e6, QLORA__SETTING_LIKELIHOOD},
                   {"desirable_weight", d->desirable_weight, 1e6, QLORA__SETTING_WEIGHTS},
                   {"undesirable_weight", d->undesirable_weight, 1e6, QLORA__SETTING_WEIGHTS},
                   {"loraplus_ratio", d->loraplus_ratio, 1e6, QLORA__SETTING_ALL},
                   {"neftune", d->neftune, 1e6, QLORA__SETTING_ALL}};
    const qlora__method* row = qlora__method_of(d->method);
    if (row == NULL) {
        return qlora__need_whole(ctx, "desc.method", (int64_t)d->method, 0, QLORA__METHODS - 1);
    }
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        char name[40];
        snprintf(name, sizeof name, "desc.%s", numbers[i].name);
        QLORA__TRY(qlora__need_real(ctx, name, numbers[i].value, 0.0, numbers[i].below));
        if (numbers[i].value > 0.0 && !qlora__method_reads(row, numbers[i].setting)) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "%s is %g, but desc.method is %d, which does not use it", name,
                               numbers[i].value, (int)d->method);
        }
    }
    for (int i = 0; i < QLORA_LR_FACTORS; i++) {
        char name[40];
        snprintf(name, sizeof name, "desc.lr_factors[%d]", i);
        QLORA__TRY(qlora__need_real(ctx, name, d->lr_factors[i], 0.0, 1e6));
    }
    return QLORA_OK;
}

static qlora_result qlora__train_desc_check(qlora_ctx* ctx, const qlora_train_desc* d) {
    if (d->reserved_must_be_zero0 != 0 || d->reserved_must_be_zero1 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the train desc was not zeroed before its fields were set");
    }
    const struct {
        const char* name;
        double value;
        double least;
        double below;
    } numbers[] = {{"desc.lr", d->lr, -1e300, 1e300},
                   {"desc.beta1", d->beta1, 0.0, 1.0},
                   {"desc.beta2", d->beta2, 0.0, 1.0},
                   {"desc.eps", d->eps, 0.0, 1e300},
                   {"desc.weight_decay", d->weight_decay, 0.0, 1e300},
                   {"desc.router_aux_loss", d->router_aux_loss, -1e300, 1e6},
                   {"desc.max_norm", d->max_norm, -1e300, 1e300}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        QLORA__TRY(qlora__need_real(ctx, numbers[i].name, numbers[i].value, numbers[i].least,
                                    numbers[i].below));
    }
    QLORA__TRY(qlora__method_desc_check(ctx, d));
    QLORA__TRY(qlora__need_whole(ctx, "desc.clip", (int64_t)d->clip, 0, QLORA_CLIP_LAYERS));
    QLORA__TRY(
        qlora__need_whole(ctx, "desc.schedule", (int64_t)d->schedule, 0, QLORA_SCHEDULE_CONSTANT));
    QLORA__TRY(qlora__need_whole(ctx, "desc.warmup_steps", d->warmup_steps, 0, INT64_MAX));
    QLORA__TRY(qlora__need_whole(ctx, "desc.total_steps", d->total_steps, 0, INT64_MAX));
    return qlora__need_whole(ctx, "desc.keep_checkpoints", d->keep_checkpoints, 0, 64);
}

static qlora_result qlora__train_desc_resolve(qlora_ctx* ctx, const qlora_train_desc* given,
                                              qlora_train_desc* d) {
    memset(d, 0, sizeof *d);
    if (given != NULL) {
        QLORA__TRY(qlora__train_desc_check(ctx, given));
        *d = *given;
    }
    d->lr = d->lr < 0.0 ? 0.0 : d->lr > 0.0 ? d->lr : 2e-4;
    d->beta1 = d->beta1 > 0.0 ? d->beta1 : 0.9;
    d->beta2 = d->beta2 > 0.0 ? d->beta2 : 0.999;
    d->eps = d->eps > 0.0 ? d->eps : 1e-8;
    d->max_norm = d->max_norm < 0.0 ? -1.0 : d->max_norm > 0.0 ? d->max_norm : 1.0;
    d->keep_checkpoints = d->keep_checkpoints > 0 ? d->keep_checkpoints : 2;
    if (qlora__method_reads(qlora__method_of(d->method), QLORA__SETTING_BETA)) {
        d->beta = d->beta > 0.0 ? d->beta : 0.1;
    }
    if (qlora__method_reads(qlora__method_of(d->method), QLORA__SETTING_WEIGHTS)) {
        d->desirable_weight = d->desirable_weight > 0.0 ? d->desirable_weight : 1.0;
        d->undesirable_weight = d->undesirable_weight > 0.0 ? d->undesirable_weight : 1.0;
    }
    d->router_aux_loss = d->router_aux_loss > 0.0 ? d->router_aux_loss : 0.0;
    d->loraplus_ratio = d->loraplus_ratio > 0.0 ? d->loraplus_ratio : 1.0;
    for (int i = 0; i < QLORA_LR_FACTORS; i++) {
        d->lr_factors[i] = d->lr_factors[i] > 0.0 ? d->lr_factors[i] : 1.0;
    }
    return QLORA_OK;
}

static void qlora__trainer_drop(qlora_ctx* ctx, qlora_graph* graph) {
    if (graph != NULL) {
        qlora_result ignored = qlora__graph_destroy(ctx, graph);
        (void)ignored;
    }
}

static void qlora__trainer_free(qlora_trainer* t) {
    qlora_ctx* ctx = t->ctx;
    for (int64_t i = 0; i < t->graph_room && t->graphs != NULL; i++) {
        qlora__trainer_drop(ctx, t->graphs[i]);
    }
    qlora__trainer_drop(ctx, t->update_graph);
    qlora__free(ctx, t->graphs, (size_t)t->graph_room * sizeof *t->graphs);
    for (int i = 0; i < QLORA__RECORDS; i++) {
        qlora__event_destroy(ctx, t->reports[i].event);
    }
    qlora__pinned_free(ctx, t->records, QLORA__RECORDS * sizeof *t->records);
    for (int i = 0; i < QLORA__TREE_LEVELS; i++) {
        qlora__buffer_destroy(ctx, t->more[i]);
    }
    qlora__comm_stop(t);
    qlora__ring_destroy(ctx, &t->ring);
    qlora__free(ctx, t, sizeof *t);
}

// Compiles the kernels that only some trainers need.
static qlora_result qlora__trainer_warm(qlora_ctx* ctx, const qlora_model* m,
                                        const qlora_trainer* t) {
#ifndef QLORA_NO_CUDA
    qlora__needs need = (t->desc.neftune > 0.0 ? QLORA__NEED_NOISE : 0) | t->method->needs;
    if (need != 0 && !qlora__on_cpu(ctx)) {
        need |= QLORA__NEED_TRAIN | (m->compute == QLORA_BF16 ? QLORA__NEED_BF16 : QLORA__NEED_F32);
        bool was_sealed = qlora__cache_set_sealed(ctx, false);
        qlora_result r = qlora__cache_warm(ctx, need, false);
        qlora__cache_set_sealed(ctx, was_sealed);
        return r;
    }
#endif
    (void)ctx;
    (void)m;
    (void)t;
    return QLORA_OK;
}

static qlora_result qlora__trainer_build(qlora_ctx* ctx, qlora_model* m, qlora_trainer* t) {
    t->ctx = ctx;
    t->m = m;
    t->use_graphs = !t->desc.eager && !qlora__on_cpu(ctx);
    int64_t room = qlora__ceil_div(m->plan.tokens, m->plan.head_chunk) + 1;
    t->chunk_room = room;
    room *= QLORA__SIZE_CLASSES * (t->method->reference ? QLORA__MICRO_KINDS : 1);
    t->graphs = (qlora_graph**)qlora__alloc_zero(ctx, (size_t)room * sizeof *t->graphs);
    if (t->graphs == NULL) {
        return QLORA_ERR_MEMORY;
    }
    t->graph_room = room;
    size_t bytes = QLORA__RECORDS * sizeof *t->records;
    t->records = (qlora__record*)qlora__pinned_alloc(ctx, bytes);
    if (t->records == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memset(t->records, 0, bytes);
    for (int i = 0; i < QLORA__RECORDS; i++) {
        QLORA__TRY(qlora__event_create(ctx, &t->reports[i].event));
    }
    const qlora__adamw_numbers numbers = {t->desc.lr, t->desc.beta1, t->desc.beta2, t->desc.eps,
                                          t->desc.weight_decay};
    if (qlora__has_several(m)) { // the updates of a step must not wait for each other
        QLORA__TRY(qlora__ring_create(ctx, QLORA__RING_SLOTS, sizeof numbers, &t->ring));
    }
    QLORA__TRY(qlora__optimizer_start(ctx, m, t->desc.clip == QLORA_CLIP_LAYERS, t->desc.max_norm,
                                      &numbers));
    QLORA__TRY(qlora__ranges_upload(ctx, m, t->desc.loraplus_ratio, t->desc.lr_factors));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->flag));
    QLORA__TRY(qlora__sums_clear(ctx, m));
    return qlora__tensor_zero(ctx, &m->totals);
}

// The adapter of a new trainer, and what is not supported with several.
static qlora_result qlora__trainer_adapter(qlora_ctx* ctx, qlora_model* m,
                                           const qlora_train_desc* desc) {
    int32_t adapter = desc != NULL ? desc->adapter : 0;
    // Of a desc that has not been checked yet.
    const qlora__method* row = desc != NULL ? qlora__method_of(desc->method) : NULL;
    QLORA__TRY(qlora__need_whole(ctx, "desc.adapter", adapter, 0, m->adapters - 1));
    if (qlora__has_several(m) ? m->owns[adapter].trainers > 0 : m->trainers > 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "the %s already has a trainer",
                           qlora__has_several(m) ? "adapter" : "model");
    }
    const char* what = desc == NULL || !qlora__has_several(m)        ? NULL
                       : row == NULL || row->unit != QLORA__UNIT_ROW ? "desc.method is not SFT"
                       : desc->comm != NULL                          ? "desc.comm is set"
                       : desc->neftune > 0.0                         ? "desc.neftune is set"
                       : desc->router_aux_loss > 0.0                 ? "desc.router_aux_loss is set"
                                                                     : NULL;
    if (what != NULL) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "%s, which is not supported for a model with %d adapters", what,
                           (int)m->adapters);
    }
    if (desc != NULL && desc->require_graph && qlora__has_several(m) && m->wide == NULL) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "desc.require_graph is set, but the %d adapters of this model run one "
                           "after another, without graphs: that needs a GPU and ranks whose sum is "
                           "at most 128 or an eighth of the hidden size",
                           (int)m->adapters);
    }
    qlora__adapter_focus(m, adapter);
    return QLORA_OK;
}

// The load-balancing loss needs routers that have it; a config that asks for it needs an answer.
static qlora_result qlora__trainer_router(qlora_ctx* ctx, const qlora_model* m,
                                          const qlora_train_desc* desc) {
    double factor = desc != NULL ? desc->router_aux_loss : 0.0;
    bool experts = qlora__balances(m);
    bool sigmoid = experts && m->arch->experts->experts->score == QLORA__ROUTER_SIGMOID;
    if (factor > 0.0 && (!experts || sigmoid)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "desc.router_aux_loss is %g, but %s", factor,
                           sigmoid ? "the scores of this family's routers are sigmoids, for which "
                                     "transformers has no load-balancing loss; set it to 0"
                                   : "the model has no experts; set it to 0");
    }
    if (experts && !sigmoid && m->plan.config.router_loss && !(factor > 0.0) && !(factor < 0.0)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "the config has output_router_logits, with which transformers adds a "
                           "load-balancing loss; set desc.router_aux_loss to its "
                           "router_aux_loss_coef, or to -1 to train without it");
    }
    return QLORA_OK;
}

static qlora_result qlora__trainer_create(qlora_ctx* ctx, qlora_model* m,
                                          const qlora_train_desc* desc, qlora_trainer** out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    if (!qlora__trains(m)) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the model was opened for evaluation; open it with "
                           "QLORA_PURPOSE_TRAIN");
    }
    QLORA__TRY(qlora__trainer_adapter(ctx, m, desc));
    QLORA__TRY(qlora__trainer_router(ctx, m, desc));
    QLORA__TRY(qlora__not_in_capture(ctx, "creating a trainer"));
    qlora_trainer* t = (qlora_trainer*)qlora__alloc_zero(ctx, sizeof *t);
    if (t == NULL) {
        return QLORA_ERR_MEMORY;
    }
    t->ctx = ctx;
    qlora_result r = qlora__train_desc_resolve(ctx, desc, &t->desc);
    t->method = qlora__method_of(t->desc.method);
    r = r == QLORA_OK ? qlora__trainer_warm(ctx, m, t) : r;
    r = r == QLORA_OK ? qlora__trainer_build(ctx, m, t) : r;
    r = r == QLORA_OK ? qlora__comm_start(t) : r;
    if (r != QLORA_OK) {
        qlora__trainer_free(t);
        return r;
    }
    if (!t->method->head_norms && (qlora__trains_head(m) || m->desc.train_norms)) {
        qlora__trainer_free(t);
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "the %s trained, which DPO and KTO do not support",
                           m->desc.train_norms ? "norms are" : "head is");
    }
    if (t->desc.clip == QLORA_CLIP_LAYERS &&
        (qlora__trains_embedding(m) || qlora__trains_head(m))) {
        qlora__trainer_free(t);
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "desc.clip is QLORA_CLIP_LAYERS, but the embedding or the head, which "
                           "belong to no layer, are trained");
    }
    m->neftune = (float)t->desc.neftune;
    m->work.experts.balance.coefficient = t->desc.router_aux_loss;
    m->trainers++;
    if (qlora__has_several(m)) {
        m->owns[m->adapter].trainers++;
    }
    ctx->living[QLORA__TRAINERS]++;
    *out = t;
    return QLORA_OK;
}

qlora_result qlora_trainer_create(qlora_model* model, const qlora_train_desc* desc,
                                  qlora_trainer** out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_trainer_create");
    qlora_result r = qlora__trainer_create(ctx, model, desc, out);
    return qlora__leave(ctx, qlora__adapter_leave(model, r));
}

// Ends what a step in slices has under way. An update that has begun is finished, because some
// parameters have their new values already; its result is returned.
static qlora_result qlora__sliced_stop(qlora_trainer* t) {
    qlora__errand* e = t->sliced.errand;
    qlora_result r = QLORA_OK;
    if (e != NULL) {
        bool updating = t->m->updating == e;
        qlora__model_errand_end(t->m, e, !updating);
        r = updating ? e->result : QLORA_OK;
    }
    t->sliced.errand = NULL;
    if (t->m->stepping == t) {
        t->m->stepping = NULL;
    }
    return r;
}

qlora_result qlora_trainer_destroy(qlora_trainer* trainer) {
    if (trainer == NULL) {
        return QLORA_OK;
    }
    qlora_ctx* ctx = trainer->ctx;
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_trainer_destroy"));
    qlora_result r = qlora__not_in_capture(ctx, "destroying a trainer");
    if (r == QLORA_OK) {
        (void)qlora__sliced_stop(trainer); // it is destroyed all the same
        trainer->m->trainers--;
        if (qlora__has_several(trainer->m)) {
            trainer->m->owns[trainer->desc.adapter].trainers--;
        }
        trainer->m->neftune = 0.0f;
        trainer->m->work.experts.balance.coefficient = 0.0;
        ctx->living[QLORA__TRAINERS]--;
        qlora__trainer_free(trainer);
    }
    return qlora__leave(ctx, r);
}

// ---- settings that change -----------------------------------------------------------------------

static qlora_result qlora__train_set(qlora_trainer* t, const qlora_train_desc* desc) {
    qlora_ctx* ctx = t->ctx;
    qlora_train_desc d;
    if (desc == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc is NULL");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "changing the settings of a trainer"));
    if (t->tokens > 0 || t->sliced.begun) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "a step is in progress; finish it or drop it with qlora_train_cancel "
                           "before changing settings");
    }
    QLORA__TRY(qlora__train_desc_resolve(ctx, desc, &d));
    const char* fixed =
        d.clip != t->desc.clip                     ? "clip"
        : d.seed != t->desc.seed                   ? "seed"
        : d.eager != t->desc.eager                 ? "eager"
        : d.require_graph != t->desc.require_graph ? "require_graph"
        : d.method != t->desc.method               ? "method"
        : d.comm != t->desc.comm                   ? "comm"
        : d.adapter != t->desc.adapter             ? "adapter"
        : memcmp(&d.loraplus_ratio, &t->desc.loraplus_ratio, sizeof d.loraplus_ratio) != 0
            ? "loraplus_ratio"
        : memcmp(&d.neftune, &t->desc.neftune, sizeof d.neftune) != 0        ? "neftune"
        : memcmp(&d.router_aux_loss, &t->desc.router_aux_loss, sizeof d.router_aux_loss) != 0
            ? "router_aux_loss"
        : memcmp(d.lr_factors, t->desc.lr_factors, sizeof d.lr_factors) != 0 ? "lr_factors"
                                                                             : NULL;
    if (fixed != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.%s differs from that of the trainer and cannot be changed", fixed);
    }
    QLORA__TRY(qlora__clip_set(ctx, &t->m->clip, (float)d.max_norm));
    t->desc = d;
    return QLORA_OK;
}

qlora_result qlora_train_set(qlora_trainer* trainer, const qlora_train_desc* desc) {
    QLORA__TRY(qlora__trainer_enter(trainer, "qlora_train_set"));
    return qlora__trainer_leave(trainer, qlora__train_set(trainer, desc));
}
