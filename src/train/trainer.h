// ---- life ---------------------------------------------------------------------------------------

static void qlora__trainer_free(qlora_trainer* t) {
    qlora_ctx* ctx = t->ctx;
    for (int64_t i = 0; i < t->graph_room && t->graphs != NULL; i++) {
        qlora_result ignored = qlora__graph_destroy(ctx, t->graphs[i]);
        (void)ignored;
    }
    qlora_result ignored = qlora__graph_destroy(ctx, t->update_graph);
    (void)ignored;
    qlora__free(ctx, t->graphs, (size_t)t->graph_room * sizeof *t->graphs);
    for (int i = 0; i < QLORA__SLOTS; i++) {
#ifndef QLORA_NO_CUDA
        if (t->slots[i].event != NULL) {
            ctx->gpu->cu.EventSynchronize(t->slots[i].event);
            ctx->gpu->cu.EventDestroy(t->slots[i].event);
        }
#endif
        qlora__pinned_free(ctx, t->slots[i].memory, t->slot_bytes);
    }
    qlora__pinned_free(ctx, t->record, sizeof *t->record);
    qlora__free(ctx, t, sizeof *t);
}

static qlora_result qlora__trainer_build(qlora_ctx* ctx, qlora_model* m, qlora_trainer* t) {
    t->ctx = ctx;
    t->m = m;
    t->slot_bytes = m->batch.all.bytes + 64;
    t->use_graphs = !m->train.eager && !qlora__on_cpu(ctx);
    int64_t room = qlora__ceil_div(m->plan.tokens, m->plan.head_chunk) + 1;
    t->graphs = (qlora_graph**)qlora__alloc_zero(ctx, (size_t)room * sizeof *t->graphs);
    if (t->graphs == NULL) {
        return QLORA_ERR_MEMORY;
    }
    t->graph_room = room;
    t->record = (qlora__record*)qlora__pinned_alloc(ctx, sizeof *t->record);
    if (t->record == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memset(t->record, 0, sizeof *t->record);
    for (int i = 0; i < QLORA__SLOTS; i++) {
        t->slots[i].memory = (char*)qlora__pinned_alloc(ctx, t->slot_bytes);
        if (t->slots[i].memory == NULL) {
            return QLORA_ERR_MEMORY;
        }
#ifndef QLORA_NO_CUDA
        if (!qlora__on_cpu(ctx)) {
            int code = ctx->gpu->cu.EventCreate(&t->slots[i].event, 2); // no timing
            QLORA__TRY(qlora__cu(ctx, code, "cuEventCreate"));
        }
#endif
    }
    return QLORA_OK;
}

static qlora_result qlora__trainer_create(qlora_ctx* ctx, qlora_model* m, qlora_trainer** out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    if (m->trainers > 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "the model has a trainer already");
    }
    qlora_trainer* t = (qlora_trainer*)qlora__alloc_zero(ctx, sizeof *t);
    if (t == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__trainer_build(ctx, m, t);
    if (r != QLORA_OK) {
        qlora__trainer_free(t);
        return r;
    }
    m->trainers++;
    ctx->living[QLORA__TRAINERS]++;
    *out = t;
    return QLORA_OK;
}

qlora_result qlora_trainer_create(qlora_model* model, qlora_trainer** out) {
    qlora_ctx* ctx = qlora_model_ctx(model);
    QLORA__ENTER(ctx, "qlora_trainer_create");
    return qlora__leave(ctx, qlora__trainer_create(ctx, model, out));
}

qlora_result qlora_trainer_destroy(qlora_trainer* trainer) {
    if (trainer == NULL) {
        return QLORA_OK;
    }
    qlora_ctx* ctx = trainer->ctx;
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_trainer_destroy"));
    qlora_result r = qlora__not_in_capture(ctx, "destroying a trainer");
    if (r == QLORA_OK) {
        trainer->m->trainers--;
        ctx->living[QLORA__TRAINERS]--;
        qlora__trainer_free(trainer);
    }
    return qlora__leave(ctx, r);
}
