// golden_figures.h - the part of golden.c for the figures of DPO and KTO.
#ifndef GOLDEN_FIGURES_H
#define GOLDEN_FIGURES_H

static double relative(double got, double want) {
    return fabs(got - want) / (fabs(want) > 1.0 ? fabs(want) : 1.0);
}

static void worse(double* worst, double error) {
    *worst = error <= *worst ? *worst : error; // a NaN stays
}

// The log-probabilities of the base, for every step; those of the adapter for the first one.
static void check_logps(fixture* f, golden_session* s) {
    double worst = 0.0;
    double got[64];
    for (int64_t step = 0; step < f->steps; step++) {
        qlora_batch batches[2];
        int64_t half = f->batch;
        for (int64_t i = 0; i < 2; i++) {
            batches[i] = sequences_batch(f, step, i * half, half, 1, i * half, false);
            if (qlora_eval_sequences(s->model, &batches[i], got) != QLORA_OK) {
                trouble(f, "log-probabilities");
                return;
            }
            for (int64_t k = 0; k < half; k++) {
                worse(&worst, relative(got[k], f->references[step * f->sequences + i * half + k]));
            }
        }
    }
    report(f, "log-probabilities of the base", worst, limit_of(f, "ref_logps"));
}

// names: of the lists in golden.json for sequences 0, 2, ... and 1, 3, ... of a DPO step, or for the
// two halves of a KTO step.
static void check_first_logps(fixture* f, golden_session* s, const char* what,
                              const char* const names[2]) {
    double worst = 0.0;
    double got[64];
    for (int64_t i = 0; i < 2; i++) {
        bool dpo = f->method == METHOD_DPO;
        qlora_batch b =
            sequences_batch(f, 0, dpo ? i : i * f->batch, f->batch, dpo ? 2 : 1, 0, false);
        if (qlora_eval_sequences(s->model, &b, got) != QLORA_OK) {
            trouble(f, what);
            return;
        }
        for (int64_t k = 0; k < f->batch; k++) {
            worse(&worst, relative(got[k], list_number(f, names[i], (uint32_t)k)));
        }
    }
    report(f, what, worst, limit_of(f, "ref_logps"));
}

static void check_sequence_logits(fixture* f, golden_session* s, const char* what,
                                  const char* tensor, int64_t first, int64_t stride) {
    qlora_batch b = sequences_batch(f, 0, first, f->batch, stride, 0, false);
    const qlora__st_tensor* t = qlora__st_find(&f->tensors, tensor);
    size_t room = (size_t)(f->batch * f->seq * f->vocab);
    float* got = (float*)malloc(room * 4);
    float* want = (float*)malloc(room * 4);
    if (t == NULL || qlora__st_elements(t) != room ||
        qlora_eval_logits(s->model, &b, got) != QLORA_OK) {
        trouble(f, what);
    } else {
        int64_t at = 0; // padding is left out
        for (int64_t i = 0; i < f->batch; i++) {
            int64_t n = b.lengths[i] * f->vocab;
            qlora__st_read_f32(t, (uint64_t)(i * f->seq * f->vocab), (uint64_t)n, want + at);
            at += n;
        }
        report(f, what, logits_error(got, want, at), limit_of(f, "logits"));
    }
    free(got);
    free(want);
}

static void check_all_sequence_logits(fixture* f, golden_session* s, const char* kind) {
    static const char* const sides[2] = {"_chosen", "_rejected"};
    int count = f->method == METHOD_DPO ? 2 : 1;
    for (int i = 0; i < count; i++) {
        const char* side = count == 2 ? sides[i] : "";
        char what[80];
        char tensor[64];
        snprintf(tensor, sizeof tensor, "%s_logits%s", kind, side);
        snprintf(what, sizeof what, "logits, %s", tensor);
        check_sequence_logits(f, s, what, tensor, count == 2 ? i : f->batch, count);
    }
}

// The figures of golden.json for a step, each with the limit that it is judged by.
static const struct {
    const char* list;
    const char* limit;
    size_t offset;
    int methods; // a bit per method
} step_figures[] = {
    {"losses", "loss_any", offsetof(qlora_train_info, loss), 7},
    {"preference_losses", "loss_any", offsetof(qlora_train_info, preference_loss), 2},
    {"chosen_nll", "loss_any", offsetof(qlora_train_info, chosen_nll), 2},
    {"rewards_chosen", "rewards", offsetof(qlora_train_info, rewards_chosen), 6},
    {"rewards_rejected", "rewards", offsetof(qlora_train_info, rewards_rejected), 6},
    {"margins", "rewards", offsetof(qlora_train_info, margins), 6},
    {"accuracies", NULL, offsetof(qlora_train_info, accuracy), 6},
    {"kl", "kl", offsetof(qlora_train_info, kl), 4},
    {"kl_raw", "kl", offsetof(qlora_train_info, kl_raw), 4},
};
#define STEP_FIGURES (sizeof step_figures / sizeof step_figures[0])

// Runs all steps, each split or not, with references from the file or computed in the step.
static void check_preference_steps(fixture* f, golden_session* s, bool split, bool references) {
    double worst[STEP_FIGURES];
    double worst_norm = 0.0;
    double first = NAN;
    memset(worst, 0, sizeof worst);
    for (int64_t step = 0; step < f->steps; step++) {
        qlora_batch batches[64];
        qlora_train_info info;
        int64_t count = step_batches(f, step, split, references, batches);
        if (qlora_train_gradients(s->trainer, batches, count) != QLORA_OK) {
            trouble(f, "step");
            return;
        }
        if (step == 0) {
            check_tensors(f, s, "gradients of step 0", &f->tensors, "grad.", true,
                          limit_of(f, "grads"));
        }
        if (qlora_train_update(s->trainer) != QLORA_OK ||
            qlora_train_query(s->trainer, &info) != QLORA_OK) {
            trouble(f, "step");
            return;
        }
        for (size_t i = 0; i < STEP_FIGURES; i++) {
            double got = 0.0;
            memcpy(&got, (const char*)&info + step_figures[i].offset, sizeof got);
            double want = list_number(f, step_figures[i].list, (uint32_t)step);
            if ((step_figures[i].methods >> f->method & 1) != 0) {
                worse(&worst[i], relative(got, want));
            }
            first = step == 0 && i == 0 ? relative(got, want) : first;
        }
        worse(&worst_norm,
              relative((double)info.grad_norm, list_number(f, "grad_norms", (uint32_t)step)));
    }
    report(f, "loss of step 0", first, limit_of(f, "loss0"));
    for (size_t i = 0; i < STEP_FIGURES; i++) {
        char what[64];
        snprintf(what, sizeof what, "worst of %s", step_figures[i].list);
        bool judged = (step_figures[i].methods >> f->method & 1) != 0 &&
                      (step_figures[i].limit != NULL || f->opt->mode != QLORA_MODE_BF16);
        if (judged) { // accuracies are shares that were written in f32
            report(f, what, worst[i],
                   step_figures[i].limit != NULL ? limit_of(f, step_figures[i].limit) : 1e-6);
        }
    }
    report(f, "worst gradient norm", worst_norm, limit_of(f, "grad_norm"));
}

// Everything of a DPO or KTO folder that one base shows; `other` runs the steps split, with the
// references computed in the step.
static void check_preferences(fixture* f, golden_session* s, bool other) {
    static const char* const policy[2][2] = {{"policy_logps0/chosen", "policy_logps0/rejected"},
                                             {"policy_kl_logps0", "policy_logps0"}};
    static const char* const base[2][2] = {{"reference_logps0/chosen", "reference_logps0/rejected"},
                                           {"reference_kl_logps0", "reference_logps0"}};
    int kto = f->method == METHOD_KTO ? 1 : 0;
    qlora_adapter_use(s->model, false);
    check_all_sequence_logits(f, s, "nf4");
    check_logps(f, s);
    check_first_logps(f, s, "reference_logps0", base[kto]);
    qlora_adapter_use(s->model, true);
    check_all_sequence_logits(f, s, "lora");
    check_first_logps(f, s, "policy_logps0", policy[kto]);
    check_preference_steps(f, s, other, !other);
}

#endif
