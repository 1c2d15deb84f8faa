// ---- steps --------------------------------------------------------------------------------------

static qlora_result qlora__micro_run(qlora_ctx* ctx, void* user) {
    qlora_trainer* t = (qlora_trainer*)user;
    (void)ctx;
    qlora__pass pass = qlora__pass_of(t->m, t->rows, true);
    QLORA__TRY(qlora__forward(&pass));
    qlora_tensor totals = qlora__window(&t->m->totals, 1, 0, 3);
    QLORA__TRY(qlora__head(&pass, t->chunks, &totals, true));
    return qlora__backward(&pass);
}

static qlora_result qlora__update_run(qlora_ctx* ctx, void* user) {
    return qlora__update(ctx, ((qlora_trainer*)user)->m);
}

// Replays, captures at first sight, or runs eagerly; a capture that fails is given up for good,
// once and visibly.
static qlora_result qlora__run(qlora_trainer* t, uint64_t key, qlora_graph_fn fn,
                               qlora_graph** graph) {
    qlora_ctx* ctx = t->ctx;
    if (!t->use_graphs) {
        return fn(ctx, t);
    }
    if (*graph != NULL && !qlora__graph_is_valid(*graph)) {
        QLORA__TRY(qlora__graph_destroy(ctx, *graph));
        *graph = NULL;
    }
    if (*graph != NULL) {
        return qlora__graph_replay(ctx, *graph, key);
    }
    qlora_result r = qlora__graph_capture(ctx, key, fn, t, graph);
    if (r == QLORA_OK || r == QLORA_ERR_DEVICE_LOST || t->m->train.require_graph) {
        return r;
    }
    QLORA__LOG(ctx, WARN, GRAPH, "steps run without graphs from here on: %.400s", ctx->error);
    t->use_graphs = false;
    ctx->error[0] = '\0';
    return fn(ctx, t);
}

static qlora_result qlora__trainer_need(qlora_ctx* ctx, const qlora_trainer* t, bool training) {
    if (training && t->m->train.no_training) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "the model was opened for evaluation only");
    }
    if (training && !t->m->use_adapters) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "the adapters are switched off");
    }
    return qlora__not_in_capture(ctx, "a training call");
}

static qlora_ctx* qlora__trainer_ctx(const qlora_trainer* t) {
    return t != NULL ? t->ctx : NULL;
}

static qlora_result qlora__train_micro(qlora_trainer* t, const qlora_batch* batch,
                                       double total_labels) {
    qlora_ctx* ctx = t->ctx;
    QLORA__TRY(qlora__trainer_need(ctx, t, true));
    if (!(total_labels > 0.0) || total_labels > 1e15) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "total_labels is %g; a step needs at least one label to train on",
                           total_labels);
    }
    QLORA__TRY(qlora__batch_send(t, batch, total_labels));
    return qlora__run(t, (uint64_t)t->chunks, qlora__micro_run, &t->graphs[t->chunks]);
}

qlora_result qlora_train_micro(qlora_trainer* trainer, const qlora_batch* batch,
                               double total_labels) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_train_micro");
    return qlora__leave(trainer->ctx, qlora__train_micro(trainer, batch, total_labels));
}

static double qlora__schedule_lr(const qlora_train_desc* d, int64_t step) {
    if (step < d->warmup_steps) {
        return d->lr * (double)(step + 1) / (double)d->warmup_steps;
    }
    if (d->schedule == QLORA_SCHEDULE_CONSTANT || d->total_steps <= d->warmup_steps) {
        return d->lr;
    }
    double done = (double)(step - d->warmup_steps) / (double)(d->total_steps - d->warmup_steps);
    done = done < 1.0 ? done : 1.0;
    return d->schedule == QLORA_SCHEDULE_LINEAR
               ? d->lr * (1.0 - done)
               : d->lr * 0.5 * (1.0 + cos(3.14159265358979323846 * done));
}

// Sends the numbers of a finished step to the host, without waiting for them.
static qlora_result qlora__record_send(qlora_trainer* t) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    const struct {
        void* to;
        const void* from;
        size_t bytes;
    } copies[] = {{t->record->totals, m->totals.data, 3 * sizeof(float)},
                  {t->record->results, qlora__clip_results(&m->clip), 2 * sizeof(float)},
                  {&t->record->adamw, m->adamw.data, sizeof(qlora_adamw_state)}};
    for (size_t i = 0; i < sizeof copies / sizeof copies[0]; i++) {
#ifndef QLORA_NO_CUDA
        if (!qlora__on_cpu(ctx)) {
            qlora__CUdeviceptr from = (qlora__CUdeviceptr)(uintptr_t)copies[i].from;
            int code = ctx->gpu->cu.MemcpyDtoHAsync(copies[i].to, from, copies[i].bytes,
                                                    ctx->gpu->stream);
            QLORA__TRY(qlora__cu(ctx, code, "cuMemcpyDtoHAsync"));
            continue;
        }
#endif
        memcpy(copies[i].to, copies[i].from, copies[i].bytes);
    }
    if (qlora__on_cpu(ctx) &&
        sizeof(QLORA__REAL) != sizeof(float)) { // the CPU in double, for tests
        for (int i = 0; i < 3; i++) {
            t->record->totals[i] = (float)qlora__load(m->totals.data, QLORA_F32, i);
        }
        for (int i = 0; i < 2; i++) {
            t->record->results[i] = (float)qlora__clip_results(&m->clip)[i];
        }
    }
    qlora_tensor totals = qlora__window(&m->totals, 1, 0, 3);
    return qlora__tensor_zero(ctx, &totals);
}

static qlora_result qlora__train_update(qlora_trainer* t) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    QLORA__TRY(qlora__trainer_need(ctx, t, true));
    qlora__slot* slot = NULL;
    QLORA__TRY(qlora__slot_take(t, &slot));
    double* numbers = (double*)(void*)(slot->memory + m->batch.all.bytes);
    t->last_lr = qlora__schedule_lr(&m->train, t->step);
    numbers[0] = t->last_lr; // as the first five of qlora_adamw_state
    numbers[1] = m->train.beta1;
    numbers[2] = m->train.beta2;
    numbers[3] = m->train.eps;
    numbers[4] = m->train.weight_decay;
    QLORA__TRY(qlora__slot_send(t, slot, m->adamw.data, numbers, 5 * sizeof(double)));
    QLORA__TRY(qlora__run(t, (uint64_t)t->graph_room, qlora__update_run, &t->update_graph));
    QLORA__TRY(qlora__record_send(t));
    t->step++;
    t->last_tokens = t->tokens;
    t->tokens = 0;
    return QLORA_OK;
}

qlora_result qlora_train_update(qlora_trainer* trainer) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_train_update");
    return qlora__leave(trainer->ctx, qlora__train_update(trainer));
}

// The device cannot return an error; it sets a flag that is looked at where we wait anyway.
static qlora_result qlora__flag_check(qlora_ctx* ctx, const qlora_model* m) {
    int32_t flag = 0;
    QLORA__TRY(qlora__copy_out(ctx, &flag, m->flag.data, sizeof flag));
    if (flag != 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "an id, a position or a label was out of range");
    }
    return QLORA_OK;
}

static qlora_result qlora__train_info_read(qlora_trainer* t, qlora_train_info* out) {
    qlora_ctx* ctx = t->ctx;
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__trainer_need(ctx, t, true));
    QLORA__TRY(qlora__sync(ctx));
    QLORA__TRY(qlora__flag_check(ctx, t->m));
    const qlora__record* r = t->record;
    memset(out, 0, sizeof *out);
    out->step = t->step;
    out->skipped = r->adamw.skipped;
    out->last_skipped = r->adamw.skip != 0;
    out->labels = (double)r->totals[2];
    out->loss = r->totals[2] > 0.0f
                    ? ((double)r->totals[0] + (double)r->totals[1]) / (double)r->totals[2]
                    : 0.0;
    out->tokens = t->last_tokens;
    out->grad_norm = r->results[0];
    out->lr = t->last_lr;
    out->graphs = t->use_graphs && t->update_graph != NULL && !qlora__on_cpu(ctx);
    out->waits = t->waits;
    return QLORA_OK;
}

qlora_result qlora_train_info_read(qlora_trainer* trainer, qlora_train_info* out) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_train_info_read");
    return qlora__leave(trainer->ctx, qlora__train_info_read(trainer, out));
}

static qlora_result qlora__train_gradient_read(qlora_trainer* t, int64_t index, float* out) {
    QLORA__TRY(qlora__trainer_need(t->ctx, t, true));
    return qlora__parameter_read(t->ctx, t->m, &t->m->gradients, index, out);
}

qlora_result qlora_train_gradient_read(qlora_trainer* trainer, int64_t index, float* out) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_train_gradient_read");
    return qlora__leave(trainer->ctx, qlora__train_gradient_read(trainer, index, out));
}
