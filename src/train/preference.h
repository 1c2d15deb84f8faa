// ---- the batches of preferences -----------------------------------------------------------------

// Checks a batch by the rules of the method, and counts its units.
static qlora_result qlora__method_check(const qlora_trainer* t, const qlora_batch* b,
                                        qlora__step_counts* counts) {
    qlora_ctx* ctx = t->ctx;
    if (t->method->check == NULL) {
        return QLORA_OK;
    }
    if (b->weights != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "batch->weights is set; %s has no weights of labels", t->method->name);
    }
    for (int64_t s = 0; b->references != NULL && s < b->count; s++) {
        if (!(b->references[s] <= 0.0 && b->references[s] > -1e300)) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "reference %lld is %g; a log-probability is finite and at most 0",
                               (long long)s, b->references[s]);
        }
    }
    return t->method->check(ctx, b, counts);
}

// What must hold for all batches of a step together.
static qlora_result qlora__method_check_step(const qlora_trainer* t,
                                             const qlora__step_counts* counts) {
    return t->method->check_step != NULL ? t->method->check_step(t->ctx, counts) : QLORA_OK;
}

static qlora__preference_numbers qlora__preference_numbers_of(const qlora_trainer* t) {
    const qlora_train_desc* d = &t->desc;
    bool likelihood = qlora__method_reads(t->method, QLORA__SETTING_LIKELIHOOD);
    qlora__preference_numbers n;
    n.beta = d->beta;
    n.smoothing = d->label_smoothing;
    n.likelihood = likelihood ? d->sft_alpha / t->counts.chosen_labels : 0.0;
    n.desirable = d->desirable_weight;
    n.undesirable = d->undesirable_weight;
    n.total = t->counts.units;
    return n;
}
