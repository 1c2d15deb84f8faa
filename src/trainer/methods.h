// ---- methods ------------------------------------------------------------------------------------
//
// One row per method of training that says what it needs and does. The trainer, its steps, slices
// and checkpoints ask the row; none of them contains the name of a method, which the gate `words`
// checks.
//
// Every method multiplies the gradient of each labelled row by a factor. SFT's is the weight of the
// label, over the sum of all weights of the step. A preference has one factor for a sequence, the
// same for all of its labelled rows, which follows from the log-probabilities of whole sequences.

// What a step counts, and what no micro-batch may divide.
typedef enum qlora__unit {
    QLORA__UNIT_ROW, // a labelled row; such a step is a plain sum, which may be divided anywhere
    QLORA__UNIT_SEQUENCE,
    QLORA__UNIT_PAIR // two sequences, of which one is preferred
} qlora__unit;

// The settings of qlora_train_desc that not every method reads.
enum {
    QLORA__SETTING_ALL = 0, // that is, one that every method reads
    QLORA__SETTING_BETA = 1,
    QLORA__SETTING_SMOOTHING = 2,  // label_smoothing
    QLORA__SETTING_LIKELIHOOD = 4, // sft_alpha
    QLORA__SETTING_WEIGHTS = 8     // desirable_weight and undesirable_weight
};

typedef struct qlora__method {
    qlora_method method;
    const char* name; // in messages
    qlora__unit unit;
    unsigned settings;  // bits of those it reads
    qlora__needs needs; // kernels that only its trainers have
    bool reference;     // needs log-probabilities of the reference: the caller's, or the base's
    bool mismatched;    // its first batches have mismatched sequences, which have no gradient
    bool head_norms;    // the head and the norms may be trained with it
    // Whether a batch has whole units, which are added to the counts, and whether a step has enough
    // of them. NULL: nothing beyond what every batch must have.
    qlora_result (*check)(qlora_ctx* ctx, const qlora_batch* b, qlora__step_counts* counts);
    qlora_result (*check_step)(qlora_ctx* ctx, const qlora__step_counts* counts);
    // The factors of a micro-batch, from the log-probabilities of its sequences, and the sums of
    // the step. NULL: the head applies the weights of the labels.
    qlora_result (*factors)(qlora_ctx* ctx, const qlora__preference* p);
    // The numbers of a step, from these sums, which checkpoints keep. NULL: only the mean loss.
    void (*report)(const qlora__report* report, const double* sums, qlora_train_info* out);
} qlora__method;

// ---- units of a batch and of a step

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
    counts->units += (double)(b->count / 2);
    return qlora__sequences_count(ctx, b, &counts->chosen_labels);
}

static qlora_result qlora__pairs_check_step(qlora_ctx* ctx, const qlora__step_counts* counts) {
    return counts->units > 0.0 ? QLORA_OK
                               : qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the step has no pairs");
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
    if (mismatched > 0 && counts->units > 0.0) {
        return qlora__fail(
            ctx, QLORA_ERR_ARGUMENT,
            "a batch of mismatched sequences follows one of others; kl must be known "
            "before the first gradient");
    }
    counts->mismatched += (double)mismatched;
    counts->units += (double)(b->count - mismatched);
    return qlora__sequences_count(ctx, b, &ignored);
}

static qlora_result qlora__roles_check_step(qlora_ctx* ctx, const qlora__step_counts* counts) {
    if (!(counts->units > 0.0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the step has no sequences other than mismatched ones");
    }
    if (counts->units < 2.0) { // its mismatched sequence would be the sequence itself
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the step has 1 sequence other than mismatched ones; KTO needs at least "
                           "2, so that prompts and answers can be mismatched");
    }
    if (counts->mismatched < counts->units || counts->mismatched > counts->units) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the step has %g mismatched sequences and %g others; KTO needs as many "
                           "of both",
                           counts->mismatched, counts->units);
    }
    return QLORA_OK;
}

// ---- the numbers of a step

static double qlora__mean(double sum, double count) {
    return count > 0.0 ? sum / count : 0.0;
}

// What all preferences report.
static void qlora__preference_report(const qlora__report* report, const double* sums,
                                     qlora_train_info* out) {
    double pairs = sums[QLORA__SUM_CHOSEN_COUNT];
    out->preference_loss = qlora__mean(sums[QLORA__SUM_LOSS], report->total);
    out->chosen_nll = qlora__mean(sums[QLORA__SUM_NLL], report->chosen_labels);
    out->loss = out->preference_loss + report->sft_alpha * out->chosen_nll;
    double rejected = sums[QLORA__SUM_REJECTED_COUNT];
    double none = report->total > 0.0 ? (double)NAN : 0.0; // 0 before the first step
    out->rewards_chosen = pairs > 0.0 ? sums[QLORA__SUM_CHOSEN] / pairs : none;
    out->rewards_rejected = rejected > 0.0 ? sums[QLORA__SUM_REJECTED] / rejected : none;
    out->accuracy = qlora__mean(sums[QLORA__SUM_CORRECT], report->total);
    out->kl_raw = qlora__mean(sums[QLORA__SUM_KL], sums[QLORA__SUM_KL_COUNT]);
    out->kl = out->kl_raw > 0.0 ? out->kl_raw : 0.0;
}

static void qlora__pairs_report(const qlora__report* report, const double* sums,
                                qlora_train_info* out) {
    qlora__preference_report(report, sums, out);
    out->margins = qlora__mean(sums[QLORA__SUM_MARGIN], sums[QLORA__SUM_CHOSEN_COUNT]);
}

// Without pairs, the means are compared.
static void qlora__roles_report(const qlora__report* report, const double* sums,
                                qlora_train_info* out) {
    qlora__preference_report(report, sums, out);
    out->margins = out->rewards_chosen - out->rewards_rejected;
}

// ---- the rows

// clang-format off
static const qlora__method qlora__methods[] = {
    {QLORA_METHOD_SFT, "SFT", QLORA__UNIT_ROW, 0,
     0, false, false, true,
     NULL, NULL, NULL, NULL},
    {QLORA_METHOD_DPO, "DPO", QLORA__UNIT_PAIR,
     QLORA__SETTING_BETA | QLORA__SETTING_SMOOTHING | QLORA__SETTING_LIKELIHOOD,
     QLORA__NEED_PAIRS, true, false, false,
     qlora__pairs_check, qlora__pairs_check_step, qlora__preference_factors,
     qlora__pairs_report},
    {QLORA_METHOD_KTO, "KTO", QLORA__UNIT_SEQUENCE,
     QLORA__SETTING_BETA | QLORA__SETTING_WEIGHTS,
     QLORA__NEED_PAIRS, true, true, false,
     qlora__roles_check, qlora__roles_check_step, qlora__preference_factors,
     qlora__roles_report}};
// clang-format on

#define QLORA__METHODS ((int)(sizeof qlora__methods / sizeof qlora__methods[0]))

// The row of a method; NULL if there is none.
static const qlora__method* qlora__method_of(qlora_method method) {
    for (int i = 0; i < QLORA__METHODS; i++) {
        if (qlora__methods[i].method == method) {
            return &qlora__methods[i];
        }
    }
    return NULL;
}

// Whether it reads the setting of this bit.
static bool qlora__method_reads(const qlora__method* row, unsigned setting) {
    return setting == QLORA__SETTING_ALL || (row->settings & setting) != 0;
}
