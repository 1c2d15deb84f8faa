// ---- the batches of DPO and KTO -----------------------------------------------------------------

static const char* qlora__method_name(qlora_method method) {
    return method == QLORA_METHOD_DPO ? "DPO" : method == QLORA_METHOD_KTO ? "KTO" : "SFT";
}

// Counts the labels of every sequence, of which each must have at least one. `chosen` receives
// those of the even sequences.
static qlora_result qlora__sequences_count(qlora_ctx* ctx, const qlora_batch* b, double* chosen) {
    int64_t at = 0;
    for (int64_t s = 0; s < b->count; s++) {
        int64_t labels = 0;
        for (int64_t i = 1; i < b->lengths[s]; i++) {
            labels += b->labels[at + i] != -100 ? 1 : 0;
        }
        if (labels == 0) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "sequence %lld has no label; its log-probability would be that of "
                               "nothing",
                               (long long)s);
        }
        *chosen += s % 2 == 0 ? (double)labels : 0.0;
        at += b->lengths[s];
    }
    return QLORA_OK;
}

static qlora_result qlora__pairs_check(qlora_ctx* ctx, const qlora_batch* b,
                                       qlora__step_counts* counts) {
    if (b->roles != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "batch->roles is set; the sequences of DPO are pairs, the chosen one "
                           "first");
    }
    if (b->count % 2 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the batch has %lld sequences; DPO needs pairs, both in one batch",
                           (long long)b->count);
    }
    counts->pairs += (double)(b->count / 2);
    return qlora__sequences_count(ctx, b, &counts->chosen_labels);
}

static qlora_result qlora__roles_check(qlora_ctx* ctx, const qlora_batch* b,
                                       qlora__step_counts* counts) {
    int64_t mismatched = 0;
    double ignored = 0.0;
    if (b->roles == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "batch->roles is NULL; KTO needs the role of every sequence");
    }
    for (int64_t s = 0; s < b->count; s++) {
        if (b->roles[s] < 0 || b->roles[s] > QLORA_ROLE_MISMATCHED) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "sequence %lld has role %d; it must be 0, 1 or 2", (long long)s,
                               (int)b->roles[s]);
        }
        mismatched += b->roles[s] == QLORA_ROLE_MISMATCHED ? 1 : 0;
    }
    if (mismatched > 0 && mismatched < b->count) {
        return qlora__fail(
            ctx, QLORA_ERR_ARGUMENT,
            "%lld of the %lld sequences of a batch are mismatched; they need batches "
            "of their own",
            (long long)mismatched, (long long)b->count);
    }
    if (mismatched > 0 && counts->singles > 0.0) {
        return qlora__fail(
            ctx, QLORA_ERR_ARGUMENT,
            "a batch of mismatched sequences follows one of others; kl must be known "
            "before the first gradient");
    }
    counts->mismatched += (double)mismatched;
    counts->singles += (double)(b->count - mismatched);
    return qlora__sequences_count(ctx, b, &ignored);
}

// Checks a batch that belongs to a step of DPO or KTO, and counts it.
static qlora_result qlora__preference_check(const qlora_trainer* t, const qlora_batch* b,
                                            qlora__step_counts* counts) {
    qlora_ctx* ctx = t->ctx;
    if (b->weights != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "batch->weights is set; %s has no weights of labels",
                           qlora__method_name(t->desc.method));
    }
    for (int64_t s = 0; b->references != NULL && s < b->count; s++) {
        if (!(b->references[s] <= 0.0 && b->references[s] > -1e300)) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "reference %lld is %g; a log-probability is finite and at most 0",
                               (long long)s, b->references[s]);
        }
    }
    return t->desc.method == QLORA_METHOD_DPO ? qlora__pairs_check(ctx, b, counts)
                                              : qlora__roles_check(ctx, b, counts);
}

// What must hold for all batches of a step together.
static qlora_result qlora__preference_check_step(const qlora_trainer* t,
                                                 const qlora__step_counts* counts) {
    bool dpo = t->desc.method == QLORA_METHOD_DPO;
    if (!((dpo ? counts->pairs : counts->singles) > 0.0)) {
        return qlora__fail(t->ctx, QLORA_ERR_ARGUMENT, "the step has no %s",
                           dpo ? "pairs" : "sequences other than mismatched ones");
    }
    if (!dpo && counts->singles < 2.0) { // its mismatched sequence would be the sequence itself
        return qlora__fail(t->ctx, QLORA_ERR_ARGUMENT,
                           "the step has 1 sequence other than mismatched ones; KTO needs at least "
                           "2, so that prompts and answers can be mismatched");
    }
    if (!dpo && (counts->mismatched < counts->singles || counts->mismatched > counts->singles)) {
        return qlora__fail(t->ctx, QLORA_ERR_ARGUMENT,
                           "the step has %g mismatched sequences and %g others; KTO needs as many "
                           "of both",
                           counts->mismatched, counts->singles);
    }
    return QLORA_OK;
}

static qlora__preference_numbers qlora__preference_numbers_of(const qlora_trainer* t) {
    const qlora_train_desc* d = &t->desc;
    bool dpo = d->method == QLORA_METHOD_DPO;
    qlora__preference_numbers n;
    n.beta = d->beta;
    n.smoothing = d->label_smoothing;
    n.likelihood = dpo ? d->sft_alpha / t->counts.chosen_labels : 0.0;
    n.desirable = d->desirable_weight;
    n.undesirable = d->undesirable_weight;
    n.total = dpo ? t->counts.pairs : t->counts.singles;
    return n;
}

static double qlora__mean(double sum, double count) {
    return count > 0.0 ? sum / count : 0.0;
}

// Reports the sums of a step.
static void qlora__preference_report(const qlora__report* report, const double* sums,
                                     qlora_train_info* out) {
    double pairs = sums[QLORA__SUM_CHOSEN_COUNT];
    bool kto = sums[QLORA__SUM_KL_COUNT] > 0.0;
    out->preference_loss = qlora__mean(sums[QLORA__SUM_LOSS], report->total);
    out->chosen_nll = qlora__mean(sums[QLORA__SUM_NLL], report->chosen_labels);
    out->loss = out->preference_loss + report->sft_alpha * out->chosen_nll;
    double rejected = sums[QLORA__SUM_REJECTED_COUNT];
    double none = report->total > 0.0 ? (double)NAN : 0.0; // 0 before the first step
    out->rewards_chosen = pairs > 0.0 ? sums[QLORA__SUM_CHOSEN] / pairs : none;
    out->rewards_rejected = rejected > 0.0 ? sums[QLORA__SUM_REJECTED] / rejected : none;
    out->margins = kto ? out->rewards_chosen - out->rewards_rejected
                       : qlora__mean(sums[QLORA__SUM_MARGIN], pairs);
    out->accuracy = qlora__mean(sums[QLORA__SUM_CORRECT], report->total);
    out->kl_raw = qlora__mean(sums[QLORA__SUM_KL], sums[QLORA__SUM_KL_COUNT]);
    out->kl = out->kl_raw > 0.0 ? out->kl_raw : 0.0;
}
