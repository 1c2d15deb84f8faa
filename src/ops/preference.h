// ---- preferences --------------------------------------------------------------------------------
//
// The losses of DPO and KTO depend on the log-probability of whole sequences, but their gradient is
// that of the plain loss with one factor per sequence. So the head computes losses and gradients of
// unit weight once, the factors follow from the sums of the losses, and the gradients of the rows
// are multiplied by them. With r = logp - reference and s the logistic function:
//   DPO   x = beta (r(chosen) - r(rejected)),  loss = -(1 - e) log s(x) - e log s(-x)
//         factor: c of the chosen one, -c of the other, c = beta / total ((1 - e) s(-x) - e s(x));
//         the likelihood term adds its weight to the factor of the chosen one
//   KTO   loss = w (1 - u), u = s(beta (r - kl)), or s(beta (kl - r)) if the sequence is not
//         desirable; factor: w beta / total u (1 - u), or minus that
// kl is the mean of r over the mismatched sequences of the whole step, at least 0, and a constant.
// Sums are in double, by ascending sequence, so that they do not depend on how a step is split.

// What a sequence is to the loss. The first three are qlora_role.
enum {
    QLORA__ROLE_NONE = -1,
    QLORA__ROLE_UNDESIRABLE = 0,
    QLORA__ROLE_DESIRABLE = 1,
    QLORA__ROLE_MISMATCHED = 2,
    QLORA__ROLE_CHOSEN = 3, // the next sequence is the rejected one
    QLORA__ROLE_REJECTED = 4
};

// The settings of a step; the same layout as in kernels/train/preference.cu.
typedef struct qlora__preference_numbers {
    double beta;
    double smoothing;
    double likelihood; // weight of the negative log-likelihood of a chosen sequence
    double desirable;
    double undesirable;
    double total; // pairs of the step, or sequences for KTO
} qlora__preference_numbers;

// The sums of a step. The first QLORA__PREFERENCE_VALUES are over values of single sequences.
enum {
    QLORA__SUM_LOSS,
    QLORA__SUM_NLL, // of the chosen sequences
    QLORA__SUM_CHOSEN,
    QLORA__SUM_REJECTED, // rewards
    QLORA__SUM_MARGIN,
    QLORA__SUM_CORRECT,
    QLORA__SUM_CHOSEN_COUNT,
    QLORA__SUM_REJECTED_COUNT,
    QLORA__PREFERENCE_VALUES,
    QLORA__SUM_KL = QLORA__PREFERENCE_VALUES, // of r over the mismatched sequences
    QLORA__SUM_KL_COUNT,
    QLORA__PREFERENCE_SUMS
};

// S sequences, of which those after the batch have no rows and no role. Doubles are in U8 tensors.
typedef struct qlora__preference {
    qlora_tensor starts;     // I32 [1, S + 1]: first labelled row of each sequence
    qlora_tensor roles;      // I32 [1, S]
    qlora_tensor numbers;    // one qlora__preference_numbers
    qlora_tensor references; // double [S]
    qlora_tensor logps;      // double [S]
    qlora_tensor values;     // double [S][QLORA__PREFERENCE_VALUES]
    qlora_tensor sums;       // double [QLORA__PREFERENCE_SUMS]
    qlora_tensor factors;    // f32 [1, S]
} qlora__preference;

// out[s] = -(sum of the losses of sequence s).
static qlora_result qlora__preference_logps(qlora_ctx* ctx, const qlora__preference* p,
                                            const qlora_tensor* losses, const qlora_tensor* out) {
    int64_t count = p->roles.cols;
    if (!qlora__on_cpu(ctx)) {
        void* args[] = {(void*)&losses->data, (void*)&p->starts.data, (void*)&out->data};
        return qlora__launch(ctx, QLORA__K_preference_logps, count, 1, 1, 32, 0, args);
    }
    double* logps = (double*)out->data;
    for (int64_t s = 0; s < count; s++) {
        double sum = 0.0;
        for (int32_t row = qlora__index_at(&p->starts, s); row < qlora__index_at(&p->starts, s + 1);
             row++) {
            sum += (double)qlora__at(losses, 0, row);
        }
        logps[s] = -sum;
    }
    return QLORA_OK;
}

static double qlora__logistic(double x) {
    return 1.0 / (1.0 + exp(-x));
}

static double qlora__log_logistic(double x) {
    return (x < 0.0 ? x : 0.0) - log1p(exp(-fabs(x)));
}

// The pair whose chosen sequence is s: values of both sequences, and their factors.
static void qlora__preference_pair(const qlora__preference_numbers* n, const double* logps,
                                   const double* references, int64_t s, double* values,
                                   double factors[2]) {
    double chosen = n->beta * (logps[s] - references[s]);
    double rejected = n->beta * (logps[s + 1] - references[s + 1]);
    double x = chosen - rejected;
    double* other = values + QLORA__PREFERENCE_VALUES;
    values[QLORA__SUM_LOSS] =
        -(1.0 - n->smoothing) * qlora__log_logistic(x) - n->smoothing * qlora__log_logistic(-x);
    values[QLORA__SUM_NLL] = -logps[s];
    values[QLORA__SUM_CHOSEN] = chosen;
    values[QLORA__SUM_MARGIN] = x;
    values[QLORA__SUM_CORRECT] = x > 0.0 ? 1.0 : 0.0;
    values[QLORA__SUM_CHOSEN_COUNT] = 1.0;
    other[QLORA__SUM_REJECTED] = rejected;
    other[QLORA__SUM_REJECTED_COUNT] = 1.0;
    double c = n->beta / n->total *
               ((1.0 - n->smoothing) * qlora__logistic(-x) - n->smoothing * qlora__logistic(x));
    factors[0] = c + n->likelihood;
    factors[1] = -c;
}

// A sequence of KTO; returns its factor.
static double qlora__preference_single(const qlora__preference_numbers* n, double r, bool desirable,
                                       double kl, double* values) {
    double sign = desirable ? 1.0 : -1.0;
    double weight = desirable ? n->desirable : n->undesirable;
    double u = qlora__logistic(n->beta * sign * (r - kl));
    values[QLORA__SUM_LOSS] = weight * (1.0 - u);
    values[desirable ? QLORA__SUM_CHOSEN : QLORA__SUM_REJECTED] = n->beta * r;
    values[QLORA__SUM_CORRECT] = (r > 0.0) == desirable ? 1.0 : 0.0;
    values[desirable ? QLORA__SUM_CHOSEN_COUNT : QLORA__SUM_REJECTED_COUNT] = 1.0;
    return sign * weight * n->beta / n->total * u * (1.0 - u);
}

static void qlora__preference_cpu(const qlora__preference* p) {
    const qlora__preference_numbers* n = (const qlora__preference_numbers*)p->numbers.data;
    const double* logps = (const double*)p->logps.data;
    const double* references = (const double*)p->references.data;
    double* values = (double*)p->values.data;
    double* sums = (double*)p->sums.data;
    double kl = sums[QLORA__SUM_KL] > 0.0 ? sums[QLORA__SUM_KL] / n->total : 0.0;
    int64_t count = p->roles.cols;
    memset(values, 0, (size_t)count * QLORA__PREFERENCE_VALUES * sizeof(double));
    for (int64_t s = 0; s < count; s++) {
        int32_t role = qlora__index_at(&p->roles, s);
        double factors[2] = {0.0, 0.0};
        double* v = values + s * QLORA__PREFERENCE_VALUES;
        if (role == QLORA__ROLE_REJECTED) {
            continue; // done with the chosen one
        }
        if (role == QLORA__ROLE_CHOSEN) {
            qlora__preference_pair(n, logps, references, s, v, factors);
            qlora__put(&p->factors, 0, s + 1, (QLORA__REAL)factors[1]);
        } else if (role == QLORA__ROLE_DESIRABLE || role == QLORA__ROLE_UNDESIRABLE) {
            factors[0] = qlora__preference_single(n, logps[s] - references[s],
                                                  role == QLORA__ROLE_DESIRABLE, kl, v);
        } else if (role == QLORA__ROLE_MISMATCHED) {
            sums[QLORA__SUM_KL] += logps[s] - references[s];
            sums[QLORA__SUM_KL_COUNT] += 1.0;
        }
        qlora__put(&p->factors, 0, s, (QLORA__REAL)factors[0]);
    }
    for (int64_t i = 0; i < count * QLORA__PREFERENCE_VALUES; i++) {
        sums[i % QLORA__PREFERENCE_VALUES] += values[i];
    }
}

// The factors of all sequences, and the sums of the step.
static QLORA__UNUSED qlora_result qlora__preference_factors(qlora_ctx* ctx,
                                                            const qlora__preference* p) {
    if (qlora__on_cpu(ctx)) {
        qlora__preference_cpu(p);
        return QLORA_OK;
    }
    void* args[] = {(void*)&p->logps.data,   (void*)&p->references.data, (void*)&p->roles.data,
                    (void*)&p->numbers.data, (void*)&p->values.data,     (void*)&p->sums.data,
                    (void*)&p->factors.data, (void*)&p->roles.cols};
    return qlora__launch(ctx, QLORA__K_preference_factors, 1, 1, 1, 256, 0, args);
}

// Multiplies every labelled row of x by the factor of its sequence.
static QLORA__UNUSED qlora_result qlora__preference_scale(qlora_ctx* ctx,
                                                          const qlora__preference* p,
                                                          const qlora_tensor* x) {
    int64_t count = p->roles.cols;
    if (!qlora__on_cpu(ctx)) {
        void* args[] = {(void*)&x->data,        (void*)&x->ld,           (void*)&x->cols,
                        (void*)&p->starts.data, (void*)&p->factors.data, &count};
        return qlora__launch(ctx,
                             x->dtype == QLORA_F32 ? QLORA__K_preference_scale_f32
                                                   : QLORA__K_preference_scale_bf16,
                             x->rows, 1, 1, 256, 0, args);
    }
    const qlora__cpu_rows* rows = qlora__rows_of(ctx);
    QLORA__REAL room[QLORA__ROW_CHUNK];
    for (int64_t s = 0; s < count; s++) {
        QLORA__REAL factor = qlora__at(&p->factors, 0, s);
        for (int32_t row = qlora__index_at(&p->starts, s); row < qlora__index_at(&p->starts, s + 1);
             row++) {
            for (int64_t c = 0; c < x->cols; c += QLORA__ROW_CHUNK) {
                int64_t n = qlora__min(QLORA__ROW_CHUNK, x->cols - c);
                const QLORA__REAL* from = qlora__row_in(rows, x, row, c, n, room);
                QLORA__REAL* to = qlora__row_target(x, row, c, room);
                rows->point[QLORA__POINT_SCALE](from, NULL, factor, n, to);
                qlora__row_done(rows, x, row, c, n, to);
            }
        }
    }
    return QLORA_OK;
}
