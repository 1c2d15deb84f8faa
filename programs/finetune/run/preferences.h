// preferences.h - DPO and KTO: mismatched texts, log-probabilities by the base, evaluation.
#ifndef FINETUNE_PREFERENCES_H
#define FINETUNE_PREFERENCES_H

// ---- mismatched texts ----

// The length of the text that has the prompt of one sample and the answer of another; an answer
// that is too long is cut, but never to nothing.
static int32_t mismatched_length(const app* a, const sample* prompt, const sample* answer) {
    int64_t length = (int64_t)prompt->prompt + answer->length - answer->prompt;
    return (int32_t)(length < a->o.data.length ? length : a->o.data.length);
}

static bool mismatched_add(app* a, const input_list* list, const sample* prompt,
                           const sample* answer, batch_cursor* c, qlora_batch* batch) {
    qlora_text_sample read;
    int32_t length = mismatched_length(a, prompt, answer);
    size_t rest = (size_t)(length - prompt->prompt) * sizeof(int32_t);
    if (qlora_text_sample_read(list->data[prompt->input].data, prompt->index, &read) != QLORA_OK) {
        return text_fail(a, "");
    }
    memcpy(c->ids, read.ids, (size_t)prompt->prompt * sizeof(int32_t));
    for (int32_t i = 0; i < prompt->prompt; i++) {
        c->labels[i] = -100;
    }
    if (qlora_text_sample_read(list->data[answer->input].data, answer->index, &read) != QLORA_OK) {
        return text_fail(a, "");
    }
    memcpy(c->ids + prompt->prompt, read.ids + answer->prompt, rest);
    memcpy(c->labels + prompt->prompt, read.labels + answer->prompt, rest);
    *c->references = 0.0;
    batch_end_sequence(c, length, prompt->number, QLORA_ROLE_MISMATCHED, batch);
    return true;
}

// Assembles the mismatched texts of some samples, in their order, as a->mismatched.data[0], [1],
// ...: the prompt of each with the answer of the one before it. Returns their number in *count.
static bool mismatched_fill(app* a, const samples* s, const uint32_t* order, size_t texts,
                            size_t* count) {
    size_t tokens = 0;
    *count = 0;
    for (size_t i = 0; i < texts; i++) {
        tokens += (size_t)mismatched_length(a, &s->data[order[i]],
                                            &s->data[order[(i + texts - 1) % texts]]);
    }
    if (!batches_room(a, &a->mismatched, texts, tokens, texts)) {
        return false;
    }
    batch_cursor c = batch_start(&a->mismatched);
    int64_t used = 0;
    for (size_t i = 0; i < texts; i++) {
        const sample* prompt = &s->data[order[i]];
        const sample* answer = &s->data[order[(i + texts - 1) % texts]];
        int32_t length = mismatched_length(a, prompt, answer);
        qlora_batch* batch = *count > 0 ? &a->mismatched.data[*count - 1] : NULL;
        if (batch == NULL || used + length > a->model_desc.tokens ||
            batch->count == a->model_desc.max_sequences) {
            batch = &a->mismatched.data[(*count)++];
            batch_begin(a, &c, false, batch);
            used = 0;
        }
        used += length;
        if (!mismatched_add(a, inputs_of(a, s), prompt, answer, &c, batch)) {
            return false;
        }
    }
    return true;
}

// ---- the base ----

// Numbers that processes exchange at a time: the memory of a GPU may be full.
enum { LOGPS_PIECE = 4096 };

// Fills in the numbers that other processes have computed; NaN stands for those that this one has
// not. Each number comes from one process, so all have the same bits.
static bool logps_share(app* a, double* out, size_t count) {
    if (a->ranks.world <= 1) {
        return true;
    }
    double* all = (double*)take(a, (size_t)a->ranks.world * LOGPS_PIECE, sizeof *all);
    bool ok = all != NULL;
    for (size_t at = 0; at < count && ok; at += LOGPS_PIECE) {
        size_t n = count - at < LOGPS_PIECE ? count - at : LOGPS_PIECE;
        ok = gather(a, out + at, n * sizeof *out, all);
        for (size_t i = 0; i < n * (size_t)a->ranks.world && ok; i++) {
            out[at + i % n] = all[i] == all[i] ? all[i] : out[at + i % n];
        }
    }
    free(all);
    return ok;
}

static void logps_clear(double* out, size_t count) {
    for (size_t i = 0; i < count; i++) {
        out[i] = (double)NAN;
    }
}

// The log-probabilities of the texts of a batch. Ctrl-C makes it fail.
static bool logps_batch(app* a, const eval_place* place, const qlora_batch* batch, double* out) {
    qlora_eval_info info;
    bool cut = false;
    bool ok = eval_batch(a, place, batch, &info, out, &cut);
    a->stopped = a->stopped || cut;
    return ok && (!cut || error_set(a->error, "stopped"));
}

// The log-probabilities of all texts of `s`, by the model as it is. The packs are divided between
// the processes.
static bool logps_find(app* a, const samples* s, const packs* p, const char* what, double* out) {
    size_t texts = sample_texts(a);
    double* got = (double*)take(a, (size_t)a->model_desc.max_sequences, sizeof *got);
    bool ok = got != NULL;
    logps_clear(out, s->count * texts);
    eval_place place = {what, 0, p->count};
    (void)load_progress(a, what, 0, p->count);
    for (size_t pack = (size_t)a->ranks.rank; pack < p->count && ok;
         pack += (size_t)a->ranks.world) {
        place.at = pack;
        ok = batches_fill(a, s, p, pack, pack + 1, NULL) &&
             logps_batch(a, &place, a->batches.data, got);
        for (size_t i = p->starts[pack]; ok && i < p->starts[pack + 1]; i++) {
            memcpy(out + p->order[i] * texts, got + (i - p->starts[pack]) * texts,
                   texts * sizeof *got);
        }
    }
    free(got);
    return together(a, ok) && logps_share(a, out, s->count * texts);
}

// The same for the mismatched texts of the samples for evaluation.
static bool logps_mismatched(app* a, double* out) {
    size_t count = 0;
    size_t at = 0;
    uint32_t* order = order_make(a, a->data.eval.count);
    bool ok = order != NULL && mismatched_fill(a, &a->data.eval, order, a->data.eval.count, &count);
    logps_clear(out, a->data.eval.count);
    for (size_t i = 0; i < count && ok; i++) {
        const qlora_batch* batch = &a->mismatched.data[i];
        const eval_place place = {"evaluating", i, count};
        ok = i % (size_t)a->ranks.world != (size_t)a->ranks.rank ||
             logps_batch(a, &place, batch, out + at);
        at += (size_t)batch->count;
    }
    free(order);
    return together(a, ok) && logps_share(a, out, a->data.eval.count);
}

#define REFERENCES_FILE "references.bin"

typedef struct references_head { // of the file, before one double per text
    char magic[8];
    uint64_t settings_hash;
    uint64_t data_hash;
    uint64_t model;
    uint64_t count;
} references_head;

static references_head references_expect(const app* a) {
    references_head head;
    memset(&head, 0, sizeof head);
    memcpy(head.magic, "ftref 1", 8);
    head.settings_hash = a->settings_hash;
    head.data_hash = a->data.data_hash;
    head.model = a->identity.model;
    head.count = a->data.train.count * sample_texts(a);
    return head;
}

// Takes the file of an earlier session; *found is false if it is missing or of something else.
static bool references_load(app* a, bool* found) {
    char path[PATH_SIZE];
    blob text;
    references_head want = references_expect(a);
    size_t bytes = (size_t)want.count * sizeof(double);
    memset(&text, 0, sizeof text);
    out_path(a, REFERENCES_FILE, path);
    bool ok = file_read(a, path, &text);
    *found = ok && text.count == sizeof want + bytes && memcmp(text.data, &want, sizeof want) == 0;
    if (*found) {
        memcpy(a->references.train, text.data + sizeof want, bytes);
    }
    blob_free(&text);
    return ok;
}

static bool references_save(app* a) {
    references_head head = references_expect(a);
    blob text;
    memset(&text, 0, sizeof text);
    bool ok =
        (blob_add(&text, (const char*)&head, sizeof head) &&
         blob_add(&text, (const char*)a->references.train, (size_t)head.count * sizeof(double))) ||
        error_set(a->error, "out of memory");
    ok = ok && file_replace(a, REFERENCES_FILE, text.data, text.count);
    blob_free(&text);
    return ok;
}

// What one process does not find is computed by all.
static bool found_by_all(app* a, bool* found) {
    char mine = *found ? 1 : 0;
    char* all = (char*)take(a, (size_t)a->ranks.world, 1);
    bool ok = all != NULL && (a->ranks.world <= 1 || gather(a, &mine, 1, all));
    for (int32_t i = 0; i < a->ranks.world && a->ranks.world > 1 && ok; i++) {
        *found = *found && all[i] != 0;
    }
    free(all);
    return ok;
}

static bool references_train(app* a) {
    static const char what[] = "computing log-probabilities by the base";
    bool found = false;
    packs all;
    memset(&all, 0, sizeof all);
    a->references.train =
        (double*)take(a, a->data.train.count * sample_texts(a), sizeof *a->references.train);
    bool ok = together(a, a->references.train != NULL && references_load(a, &found)) &&
              found_by_all(a, &found);
    if (ok && !found) {
        ok = together(a, packs_plain(a, &a->data.train, &all)) &&
             logps_find(a, &a->data.train, &all, what, a->references.train) && references_save(a);
    }
    packs_free(&all);
    return ok;
}

// What preferences need of the base before the first step: with --reference precompute, the
// log-probabilities of the training data; those of the held-out samples in any case.
static bool references_make(app* a) {
    const method_row* method = method_of(a->o.method.kind);
    if (!method->preferences) {
        return true;
    }
    base_logps* r = &a->references;
    r->eval = (double*)take(a, a->data.eval.count * sample_texts(a), sizeof *r->eval);
    r->eval_mismatched = (double*)take(a, a->data.eval.count, sizeof *r->eval_mismatched);
    bool ok = r->eval != NULL && r->eval_mismatched != NULL &&
              lib(a, qlora_adapter_use(a->model, false), "switching the adapter off");
    ok = together(a, ok) &&
         logps_find(a, &a->data.eval, &a->progress.eval_packs, "evaluating", r->eval) &&
         (!method->mismatched || logps_mismatched(a, r->eval_mismatched)) &&
         (a->o.method.reference != REFERENCE_PRECOMPUTE || references_train(a));
    return lib(a, qlora_adapter_use(a->model, true), "switching the adapter on") && ok;
}

static void references_free(base_logps* r) {
    free(r->train);
    free(r->eval);
    free(r->eval_mismatched);
    memset(r, 0, sizeof *r);
}

// ---- evaluation ----

static double log_logistic(double x) {
    return (x < 0.0 ? x : 0.0) - log1p(exp(-fabs(x)));
}

// The loss of a pair, without the likelihood term. r: of its two texts.
static double pair_loss(const app* a, const double* r) {
    double x = a->o.method.beta * (r[0] - r[1]);
    return -(1.0 - a->o.method.label_smoothing) * log_logistic(x) -
           a->o.method.label_smoothing * log_logistic(-x);
}

static double judged_loss(const app* a, const sample* s, double r, double kl) {
    double x = a->o.method.beta * (s->desirable ? r - kl : kl - r);
    return (s->desirable ? a->o.method.desirable_weight : a->o.method.undesirable_weight) /
           (1.0 + exp(x));
}

// The share of samples that the model orders as it should.
static double preference_right(const app* a, const sample* s, const double* r) {
    bool right = sample_texts(a) == 2 ? r[0] > r[1] : (r[0] > 0.0) == s->desirable;
    return right ? 1.0 : 0.0;
}

// The labels of the chosen texts.
static bool chosen_labels(app* a, double* out) {
    *out = 0.0;
    for (size_t i = 0; i < a->data.eval.count; i++) {
        const sample* s = &a->data.eval.data[i];
        qlora_text_sample read;
        if (qlora_text_sample_read(inputs_of(a, &a->data.eval)->data[s->input].data, s->index,
                                   &read) != QLORA_OK) {
            return text_fail(a, "");
        }
        *out += (double)trained_count(read.labels, (size_t)s->first);
    }
    return true;
}

// The mean loss of the samples for evaluation and the share that is ordered as it should be.
static bool preference_evaluate(app* a, double* loss, double* accuracy) {
    size_t texts = sample_texts(a);
    double kl = 0.0;
    double nll = 0.0;
    double labels = 0.0;
    double* r = (double*)take(a, a->data.eval.count * texts, sizeof *r);
    bool ok = together(a, r != NULL);
    if (ok && method_of(a->o.method.kind)->mismatched) {
        ok = logps_mismatched(a, r);
        for (size_t i = 0; ok && i < a->data.eval.count; i++) {
            kl += (r[i] - a->references.eval_mismatched[i]) / (double)a->data.eval.count;
        }
    }
    ok = ok && logps_find(a, &a->data.eval, &a->progress.eval_packs, "evaluating", r) &&
         (a->o.method.sft_alpha == 0.0 || chosen_labels(a, &labels));
    *loss = 0.0;
    *accuracy = 0.0;
    for (size_t i = 0; ok && i < a->data.eval.count; i++) {
        nll -= r[i * texts];
        for (size_t k = i * texts; k < (i + 1) * texts; k++) {
            r[k] -= a->references.eval[k];
        }
        *loss += texts == 2 ? pair_loss(a, r + i * texts)
                            : judged_loss(a, &a->data.eval.data[i], r[i], kl > 0.0 ? kl : 0.0);
        *accuracy += preference_right(a, &a->data.eval.data[i], r + i * texts);
    }
    *loss /= (double)a->data.eval.count;
    *loss += labels > 0.0 ? a->o.method.sft_alpha * nll / labels : 0.0;
    *accuracy /= (double)a->data.eval.count;
    free(r);
    return ok;
}

#endif
