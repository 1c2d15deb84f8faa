// golden_methods.h - the part of golden.c for folders of training methods: what golden.json may
// contain, and the sequences and figures of DPO and KTO.
#ifndef GOLDEN_METHODS_H
#define GOLDEN_METHODS_H

enum { METHOD_SFT, METHOD_DPO, METHOD_KTO };

// Every field is understood, or the folder is refused: a setting that is ignored would be tested
// without anybody knowing.
static bool keys_known(fixture* f, const char* object, const char* const* known, size_t count) {
    uint32_t at = object[0] != '\0' ? find(f, object) : 0;
    const qlora__json_token* tokens = f->json.tokens;
    if ((object[0] != '\0' && at == 0) || tokens[at].kind != QLORA__JSON_OBJECT) {
        printf("  golden.json: %s is missing or is not an object\n", object);
        return false;
    }
    for (uint32_t k = at + 1; k < tokens[at].next; k = tokens[k + 1].next) {
        bool found = false;
        for (size_t i = 0; i < count && !found; i++) {
            found = qlora__json_is(&f->json, k, known[i]);
        }
        if (!found) {
            char name[64];
            qlora__json_string(&f->json, k, name, sizeof name);
            printf("  golden.json: %s%s%s is not known\n", object, object[0] != '\0' ? "/" : "",
                   name);
            return false;
        }
    }
    return true;
}

#define KEYS_KNOWN(f, object, list) keys_known(f, object, list, sizeof(list) / sizeof(list)[0])

static bool method_keys_known(fixture* f) {
    static const char* const top[] = {"name",
                                      "method",
                                      "base",
                                      "transformers",
                                      "peft",
                                      "bitsandbytes",
                                      "torch",
                                      "steps",
                                      "batch",
                                      "seq",
                                      "pad_id",
                                      "ignored_label",
                                      "lora",
                                      "optimizer",
                                      "preference",
                                      "formulas",
                                      "spread_of_6_perturbed_runs",
                                      "error_of_6_bf16_runs",
                                      "limits",
                                      "losses",
                                      "grad_norms",
                                      "rewards_chosen",
                                      "rewards_rejected",
                                      "margins",
                                      "accuracies",
                                      "kl",
                                      "kl_raw",
                                      "smallest_margin",
                                      "policy_logps0",
                                      "reference_logps0",
                                      "policy_kl_logps0",
                                      "reference_kl_logps0",
                                      "greedy_smallest_margin",
                                      "greedy_prompt",
                                      "greedy_ids_after_20_steps",
                                      "preference_losses",
                                      "chosen_nll",
                                      "base_loss",
                                      "nf4_loss"};
    static const char* const optimizer[] = {
        "name", "lr", "betas", "eps", "weight_decay", "clip", "loraplus_lr_ratio"};
    static const char* const dpo[] = {"beta", "label_smoothing", "sft_alpha"};
    static const char* const kto[] = {"beta", "desirable_weight", "undesirable_weight", "kl_shift"};
    bool known = KEYS_KNOWN(f, "", top) && KEYS_KNOWN(f, "optimizer", optimizer);
    if (known && !qlora__json_is(&f->json, find(f, "optimizer/name"), "adamw")) {
        printf("  golden.json: optimizer/name is not adamw\n");
        return false;
    }
    if (known && number(f, "ignored_label") != -100.0) {
        printf("  golden.json: ignored_label is not -100\n");
        return false;
    }
    return known && (f->method == METHOD_SFT   ? find(f, "preference") == 0
                     : f->method == METHOD_DPO ? KEYS_KNOWN(f, "preference", dpo)
                                               : KEYS_KNOWN(f, "preference", kto));
}

// A method that this program does not know is left out only if the library has none after the last
// one here either; the library's words say so.
static bool method_is_refused(fixture* f, uint32_t method) {
    char name[64];
    char what[96];
    qlora_train_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.method = (qlora_method)f->method;
    qlora__json_string(&f->json, method, name, sizeof name);
    snprintf(what, sizeof what, "method %s", name);
    return qlora__method_desc_check(f->ctx, &desc) != QLORA_OK && !trouble_known(f, what, true) &&
           f->refused;
}

// The method and the folder of the base; fixtures have neither.
static bool method_open(fixture* f) {
    static const char* const names[] = {"sft", "dpo", "kto"};
    uint32_t method = find(f, "method");
    uint32_t base = find(f, "base");
    char relative[256] = "";
    snprintf(f->base, sizeof f->base, "%s", f->dir);
    if (method == 0 && base == 0) {
        return true;
    }
    f->method = 0;
    while (f->method < 3 && !qlora__json_is(&f->json, method, names[f->method])) {
        f->method++;
    }
    if (f->method == 3 && method != 0 && f->opt->known && method_is_refused(f, method)) {
        return false;
    }
    if (f->method == 3 || base == 0 ||
        qlora__json_string(&f->json, base, relative, sizeof relative) >= sizeof relative) {
        printf("  golden.json: method must be sft, dpo or kto, and base a folder\n");
        return false;
    }
    f->has_pad = true;
    snprintf(f->base, sizeof f->base, "%s/%s", f->dir, relative);
    return method_keys_known(f);
}

static double preference_number(const fixture* f, const char* name) {
    char path[64];
    snprintf(path, sizeof path, "preference/%s", name);
    return number(f, path);
}

static void method_settings(const fixture* f, qlora_train_desc* train) {
    if (find(f, "optimizer/loraplus_lr_ratio") != 0) {
        train->loraplus_ratio = number(f, "optimizer/loraplus_lr_ratio");
    }
    train->method = (qlora_method)f->method;
    if (f->method != METHOD_SFT) {
        train->beta = preference_number(f, "beta");
    }
    if (f->method == METHOD_DPO) {
        train->label_smoothing = preference_number(f, "label_smoothing");
        train->sft_alpha = preference_number(f, "sft_alpha");
    } else if (f->method == METHOD_KTO) {
        train->desirable_weight = preference_number(f, "desirable_weight");
        train->undesirable_weight = preference_number(f, "undesirable_weight");
    }
}

// ---- sequences ----------------------------------------------------------------------------------

// Copies [steps][n][width] of a tensor to sequences first, first + step, ... of every step.
static bool take_ints(fixture* f, const char* name, int64_t n, int64_t width, int64_t first,
                      int64_t stride, int32_t* out) {
    const qlora__st_tensor* t = qlora__st_find(&f->tensors, name);
    if (t == NULL || t->dtype != QLORA__ST_I32 ||
        qlora__st_elements(t) != (uint64_t)(f->steps * n * width)) {
        printf("  golden.safetensors: %s is missing or has another shape\n", name);
        return false;
    }
    for (int64_t i = 0; i < f->steps * n; i++) {
        int64_t to = i / n * f->sequences + first + i % n * stride;
        memcpy(out + to * width, t->data + i * width * 4, (size_t)width * 4);
    }
    return true;
}

static bool take_references(fixture* f, const char* name, int64_t n, int64_t first,
                            int64_t stride) {
    const qlora__st_tensor* t = qlora__st_find(&f->tensors, name);
    if (t == NULL || qlora__st_elements(t) != (uint64_t)(f->steps * n)) {
        printf("  golden.safetensors: %s is missing or has another shape\n", name);
        return false;
    }
    for (int64_t i = 0; i < f->steps * n; i++) {
        float x = 0.0f;
        qlora__st_read_f32(t, (uint64_t)i, 1, &x);
        f->references[i / n * f->sequences + first + i % n * stride] = (double)x;
    }
    return true;
}

// One kind of sequence: its ids, labels, lengths and references.
static bool take_sequences(fixture* f, const char* prefix, const char* references, int64_t n,
                           int64_t first, int64_t stride, int32_t role) {
    char ids[32];
    char labels[32];
    char lengths[32];
    snprintf(ids, sizeof ids, "%sids", prefix);
    snprintf(labels, sizeof labels, "%slabels", prefix);
    snprintf(lengths, sizeof lengths, "%slengths", prefix);
    for (int64_t i = 0; i < f->steps * n; i++) {
        f->roles[i / n * f->sequences + first + i % n * stride] = role;
    }
    return take_ints(f, ids, n, f->seq, first, stride, f->ids) &&
           take_ints(f, labels, n, f->seq, first, stride, f->labels) &&
           take_ints(f, lengths, n, 1, first, stride, f->all_lengths) &&
           take_references(f, references, n, first, stride);
}

// KTO: the mismatched sequences must be prompt i with completion i + kl_shift.
static bool mismatched_known(fixture* f) {
    int64_t n = f->batch;
    int64_t shift = (int64_t)preference_number(f, "kl_shift");
    int32_t* prompts = (int32_t*)malloc((size_t)(f->steps * f->sequences) * 4);
    bool good = take_ints(f, "prompt_lengths", n, 1, n, 1, prompts);
    for (int64_t i = 0; good && i < f->steps * n; i++) {
        int64_t step = i / n * f->sequences;
        int64_t own = step + n + i % n;
        int64_t other = step + n + ((i % n + shift) % n + n) % n;
        int64_t at = step + i % n;
        const int32_t* x = f->ids + at * f->seq;
        int32_t completion = f->all_lengths[other] - prompts[other];
        good = f->all_lengths[at] == prompts[own] + completion &&
               memcmp(x, f->ids + own * f->seq, (size_t)prompts[own] * 4) == 0 &&
               memcmp(x + prompts[own], f->ids + other * f->seq + prompts[other],
                      (size_t)completion * 4) == 0;
    }
    free(prompts);
    if (!good) {
        printf("  golden.safetensors: kl_ids are not the completions that kl_shift names\n");
    }
    return good;
}

// Pairs are interleaved; the mismatched sequences of KTO come before the others.
static bool sequences_open(fixture* f) {
    const qlora__st_tensor* ids =
        qlora__st_find(&f->tensors, f->method == METHOD_DPO ? "chosen_ids" : "ids");
    const qlora__st_tensor* logits =
        qlora__st_find(&f->tensors, f->method == METHOD_DPO ? "lora_logits_chosen" : "lora_logits");
    if (ids == NULL || ids->rank != 3 || logits == NULL || logits->rank != 3 ||
        ids->shape[1] > 32) {
        printf("  golden.safetensors lacks ids or logits\n");
        return false;
    }
    f->steps = ids->shape[0];
    f->batch = ids->shape[1];
    f->seq = ids->shape[2];
    f->vocab = logits->shape[2];
    f->sequences = 2 * f->batch;
    size_t all = (size_t)(f->steps * f->sequences);
    f->ids = (int32_t*)calloc(all * (size_t)f->seq, 4);
    f->labels = (int32_t*)calloc(all * (size_t)f->seq, 4);
    f->all_lengths = (int32_t*)calloc(all, 4);
    f->roles = (int32_t*)calloc(all, 4);
    f->references = (double*)calloc(all, sizeof(double));
    f->flat = (int32_t*)calloc((size_t)(2 * f->sequences * f->seq), 4);
    int64_t n = f->batch;
    if (f->method == METHOD_DPO) {
        return take_sequences(f, "chosen_", "ref_chosen_logps", n, 0, 2, 0) &&
               take_sequences(f, "rejected_", "ref_rejected_logps", n, 1, 2, 0);
    }
    if (!take_sequences(f, "kl_", "ref_kl_logps", n, 0, 1, QLORA_ROLE_MISMATCHED) ||
        !take_sequences(f, "", "ref_logps", n, n, 1, 0)) {
        return false;
    }
    int32_t* desirable = (int32_t*)calloc(all, 4);
    bool good = take_ints(f, "desirable", n, 1, n, 1, desirable);
    for (size_t i = 0; i < all; i++) {
        f->roles[i] = f->roles[i] == QLORA_ROLE_MISMATCHED ? f->roles[i] : desirable[i];
    }
    free(desirable);
    return good && mismatched_known(f);
}

// Sequences first, first + stride, ... of a step as one batch, without padding, in f->flat.
static qlora_batch sequences_batch(fixture* f, int64_t step, int64_t first, int64_t count,
                                   int64_t stride, int64_t flat_at, bool references) {
    qlora_batch b;
    int64_t from = step * f->sequences + first;
    int32_t* ids = f->flat + flat_at * f->seq;
    int32_t* labels = ids + f->sequences * f->seq;
    int64_t at = 0;
    memset(&b, 0, sizeof b);
    for (int64_t i = 0; i < count; i++) {
        int64_t s = from + i * stride;
        f->lengths[flat_at + i] = f->all_lengths[s];
        memcpy(ids + at, f->ids + s * f->seq, (size_t)f->all_lengths[s] * 4);
        memcpy(labels + at, f->labels + s * f->seq, (size_t)f->all_lengths[s] * 4);
        at += f->all_lengths[s];
    }
    b.ids = ids;
    b.labels = labels;
    b.lengths = f->lengths + flat_at;
    b.count = count;
    b.roles = f->method == METHOD_KTO ? f->roles + from : NULL;
    b.references = references ? f->references + from : NULL;
    return b;
}

// A step as the fewest batches, or one batch per pair or sequence.
static int64_t step_batches(fixture* f, int64_t step, bool split, bool references,
                            qlora_batch* out) {
    int64_t unit = f->method == METHOD_DPO ? (split ? 2 : f->sequences) : (split ? 1 : f->batch);
    int64_t count = 0;
    for (int64_t s = 0; s < f->sequences; s += unit) {
        out[count++] = sequences_batch(f, step, s, unit, 1, s, references);
    }
    return count;
}

#endif
