// golden.c - runs a fixture folder created with transformers, PEFT and bitsandbytes, and checks
// every figure.
//
//   build/golden [--backend cpu|cuda] [--mode f32|bf16|fp8] [--graph on|off] [--tile N]
//                [--offload auto|on|off] [--known] DIR...
//
// A folder has model/, model-bnb4/, adapter0/, adapter20/, golden.safetensors and golden.json,
// whose "limits" give the tolerances. Folders of training methods name the folder of their model
// ("base") and their "method". Exit status 0: all figures are within their limits; 1: at
// least one is not; 2: usage.
#ifndef GOLDEN_NO_MAIN // the test suite has already included the implementation
#define QLORA_STATIC
#define QLORA_IMPLEMENTATION
#include "qlora.h"
#endif

#include <stddef.h>

#include "model_info.h"

typedef struct options {
    qlora_backend backend;
    qlora_mode mode;
    bool graph;
    bool quiet; // print failures only
    bool known; // what the library refuses as unsupported is left out
    int64_t tile;
    qlora_choice offload;
} options;

typedef struct fixture {
    qlora_ctx* ctx;
    const options* opt;
    const char* dir;
    qlora__map json_map;
    qlora__json json;
    qlora__st tensors;
    int64_t steps;
    int64_t batch;
    int64_t seq;
    int64_t vocab;
    int32_t* ids; // [steps][batch][seq]
    int32_t* labels;
    int32_t lengths[64];
    char base[512]; // folder of model/ and model-bnb4/
    int method;
    bool has_pad;         // sequences are padded with pad_id on the right
    int64_t sequences;    // per step, DPO and KTO
    int32_t* all_lengths; // [steps][sequences]
    int32_t* roles;
    double* references;
    int32_t* flat; // ids and labels of a step without padding
    int32_t* text; // the prompt and the text that the reference chose greedily
    int32_t prompt_count;
    int32_t text_count;
    int figures;
    int failures;
    bool refused; // something was left out
} fixture;

static bool report(fixture* f, const char* what, double value, double limit) {
    bool ok = value <= limit; // false for NaN
    if (!ok || !f->opt->quiet) {
        printf("  %-34s %12.4g  limit %-10.3g %s\n", what, value, limit, ok ? "ok" : "FAILED");
    }
    f->figures++;
    f->failures += ok ? 0 : 1;
    return ok;
}

// Internal functions do not name a call, so that the name before a message may be that of an
// earlier one.
static const char* last_words(const fixture* f) {
    const char* text = qlora_last_error(f->ctx);
    const char* colon = strncmp(text, "qlora_", 6) == 0 ? strstr(text, ": ") : NULL;
    return colon != NULL ? colon + 2 : text;
}

static bool trouble(fixture* f, const char* what) {
    printf("  %-34s %s\n", what, last_words(f));
    f->failures++;
    return false;
}

// With --known, what the library refuses as unsupported is not a failure. Its own words decide that,
// so that a folder is tested as soon as it is supported.
static bool trouble_known(fixture* f, const char* what, bool unsupported) {
    if (!f->opt->known || !unsupported) {
        return trouble(f, what);
    }
    printf("  %-34s not supported: %s\n", what, last_words(f));
    f->refused = true;
    return false;
}

static uint32_t find(const fixture* f, const char* path) {
    return qlora__json_find_path(&f->json, 0, path);
}

static double number(const fixture* f, const char* path) {
    double value = NAN;
    uint32_t token = find(f, path);
    return token != 0 && qlora__json_double(&f->json, token, &value) ? value : (double)NAN;
}

// FP8 products are approximate: only losses are judged, with 1 % for the mean of the steps.
static double limit_of(const fixture* f, const char* name) {
    char path[64];
    if (f->opt->mode == QLORA_MODE_FP8) {
        return strncmp(name, "loss", 4) == 0 ? 0.025 : (double)INFINITY;
    }
    snprintf(path, sizeof path, "limits/%s/%s", f->opt->mode == QLORA_MODE_BF16 ? "bf16" : "f32",
             name);
    return number(f, path);
}

static double list_number(const fixture* f, const char* path, uint32_t index) {
    double value = NAN;
    uint32_t token = qlora__json_at(&f->json, find(f, path), index);
    return token != 0 && qlora__json_double(&f->json, token, &value) ? value : (double)NAN;
}

static void path_of(const fixture* f, const char* name, char out[512]) {
    snprintf(out, 512, "%s/%s", f->dir, name);
}

#include "golden/golden_methods.h"

// Reads the greedy text, however long it is.
static bool text_open(fixture* f) {
    uint32_t lists[2] = {find(f, "greedy_prompt"), find(f, "greedy_ids_after_20_steps")};
    int32_t counts[2] = {0, 0};
    for (int k = 0; k < 2; k++) {
        while (qlora__json_at(&f->json, lists[k], (uint32_t)counts[k]) != 0) {
            counts[k]++;
        }
    }
    f->prompt_count = counts[0];
    f->text_count = counts[0] + counts[1];
    f->text = (int32_t*)malloc((size_t)f->text_count * 4 + 4);
    for (int32_t i = 0; i < f->text_count; i++) {
        int64_t id = -1;
        int k = i < counts[0] ? 0 : 1;
        uint32_t at = (uint32_t)(i - k * counts[0]);
        qlora__json_int(&f->json, qlora__json_at(&f->json, lists[k], at), &id);
        f->text[i] = (int32_t)id;
    }
    if (counts[0] == 0 || counts[1] == 0) {
        printf("  golden.json lacks greedy_prompt or greedy_ids_after_20_steps\n");
    }
    return counts[0] > 0 && counts[1] > 0;
}

static bool fixture_open(fixture* f) {
    char path[512];
    path_of(f, "golden.json", path);
    if (qlora__map_open(&f->ctx->env, path, &f->json_map) != QLORA_OK ||
        qlora__json_parse(&f->ctx->env, path, f->json_map.data, (size_t)f->json_map.size, 0,
                          &f->json) != QLORA_OK) {
        return trouble(f, "golden.json");
    }
    path_of(f, "golden.safetensors", path);
    if (qlora__st_open(&f->ctx->env, path, &f->tensors) != QLORA_OK) {
        return trouble(f, "golden.safetensors");
    }
    if (!method_open(f) || !text_open(f)) {
        return false;
    }
    if (f->method != 0) {
        return sequences_open(f);
    }
    const qlora__st_tensor* ids = qlora__st_find(&f->tensors, "input_ids");
    const qlora__st_tensor* labels = qlora__st_find(&f->tensors, "labels");
    const qlora__st_tensor* logits = qlora__st_find(&f->tensors, "base_logits");
    if (ids == NULL || labels == NULL || logits == NULL || ids->rank != 3 || logits->rank != 3 ||
        ids->shape[1] > 64) {
        printf("  golden.safetensors lacks input_ids, labels or base_logits\n");
        return false;
    }
    f->steps = ids->shape[0];
    f->batch = ids->shape[1];
    f->seq = ids->shape[2];
    f->vocab = logits->shape[2];
    f->ids = (int32_t*)malloc((size_t)ids->bytes);
    f->labels = (int32_t*)malloc((size_t)labels->bytes);
    memcpy(f->ids, ids->data, (size_t)ids->bytes);
    memcpy(f->labels, labels->data, (size_t)labels->bytes);
    f->flat = (int32_t*)malloc((size_t)(2 * f->batch * f->seq) * 4);
    return true;
}

static void fixture_close(fixture* f) {
    free(f->ids);
    free(f->labels);
    free(f->all_lengths);
    free(f->roles);
    free(f->references);
    free(f->flat);
    free(f->text);
    qlora__st_close(&f->ctx->env, &f->tensors);
    qlora__json_free(&f->ctx->env, &f->json);
    qlora__map_close(&f->ctx->env, &f->json_map);
}

// The sequences of a step without the padding on their right.
static qlora_batch golden_batch(fixture* f, int64_t step) {
    qlora_batch b;
    int32_t* ids = f->flat;
    int32_t* labels = f->flat + f->batch * f->seq;
    int64_t at = 0;
    memset(&b, 0, sizeof b);
    for (int64_t i = 0; i < f->batch; i++) {
        int64_t from = (step * f->batch + i) * f->seq;
        int64_t length = f->seq;
        while (f->has_pad && length > 1 &&
               (double)f->ids[from + length - 1] == number(f, "pad_id")) {
            length--;
        }
        memcpy(ids + at, f->ids + from, (size_t)length * 4);
        memcpy(labels + at, f->labels + from, (size_t)length * 4);
        f->lengths[i] = (int32_t)length;
        at += length;
    }
    b.ids = ids;
    b.labels = labels;
    b.lengths = f->lengths;
    b.count = f->batch;
    return b;
}

typedef struct golden_session {
    qlora_model* model;
    qlora_trainer* trainer;
} golden_session;

// Plans room for what the folder asks: its sequences and its greedy text.
static void golden_room(const fixture* f, qlora_model_desc* desc) {
    int64_t longest = f->seq > f->text_count ? f->seq : f->text_count;
    desc->max_sequences = f->method == METHOD_DPO ? f->sequences : f->batch;
    desc->tokens = desc->max_sequences * f->seq;
    desc->tokens = desc->tokens > longest ? desc->tokens : longest;
    desc->max_length = longest + 8 < desc->tokens ? longest : desc->tokens;
    desc->generate_tokens = f->text_count;
}

// kind: the folder of the model; adapter NULL: none; base 16-bit or NF4.
// The load-balancing loss has the given coefficient.
static bool golden_open_with(fixture* f, const char* kind, const char* adapter,
                             qlora_base_format base, double coefficient, golden_session* s) {
    char dir[512];
    char adapter_dir[512];
    qlora_model_desc desc;
    qlora_train_desc train;
    memset(&desc, 0, sizeof desc);
    memset(&train, 0, sizeof train);
    memset(s, 0, sizeof *s);
    snprintf(dir, sizeof dir, "%.480s/%s", f->base, kind);
    desc.dir = dir;
    desc.base = base;
    desc.mode = f->opt->mode;
    desc.tile = f->opt->tile;
    desc.offload = f->opt->offload;
    desc.rank = -1;
    if (adapter != NULL) {
        path_of(f, adapter, adapter_dir);
        desc.adapter = adapter_dir;
    }
    golden_room(f, &desc);
    desc.purpose = adapter == NULL ? QLORA_PURPOSE_EVALUATE : QLORA_PURPOSE_TRAIN;
    train.eager = !f->opt->graph;
    train.require_graph = f->opt->graph && f->opt->backend == QLORA_BACKEND_CUDA;
    train.schedule = QLORA_SCHEDULE_CONSTANT;
    train.lr = number(f, "optimizer/lr");
    train.beta1 = list_number(f, "optimizer/betas", 0);
    train.beta2 = list_number(f, "optimizer/betas", 1);
    train.eps = number(f, "optimizer/eps");
    train.weight_decay = number(f, "optimizer/weight_decay");
    train.max_norm = number(f, "optimizer/clip");
    train.router_aux_loss = coefficient;
    method_settings(f, &train);
    qlora_result r = qlora_model_open(f->ctx, &desc, &s->model);
    if (r != QLORA_OK) {
        return trouble_known(f, kind, r == QLORA_ERR_UNSUPPORTED);
    }
    if (adapter != NULL && qlora_trainer_create(s->model, &train, &s->trainer) != QLORA_OK) {
        return trouble(f, "trainer");
    }
    return true;
}

static bool golden_open(fixture* f, const char* kind, const char* adapter, qlora_base_format base,
                        golden_session* s) {
    return golden_open_with(f, kind, adapter, base, 0.0, s);
}

static void golden_close(golden_session* s) {
    qlora_trainer_destroy(s->trainer);
    qlora_model_close(s->model);
}

// Largest difference divided by the largest logit; a NaN anywhere gives NaN.
static double logits_error(const float* got, const float* want, int64_t n) {
    double worst = 0.0;
    double most = 0.0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)got[i] - (double)want[i]);
        most = fabs((double)want[i]) > most ? fabs((double)want[i]) : most;
        if (!(d <= worst)) {
            worst = d;
        }
    }
    return worst / most;
}

static void check_logits(fixture* f, golden_session* s, const char* what, const char* tensor) {
    int64_t n = f->batch * f->seq * f->vocab;
    float* got = (float*)malloc((size_t)n * 4);
    float* want = (float*)malloc((size_t)n * 4);
    qlora_batch b = golden_batch(f, 0);
    const qlora__st_tensor* t = qlora__st_find(&f->tensors, tensor);
    if (t == NULL || qlora_eval_logits(s->model, &b, got) != QLORA_OK) {
        trouble(f, what);
    } else {
        int64_t at = 0; // padding is left out
        for (int64_t i = 0; i < f->batch; i++) {
            int64_t part = f->lengths[i] * f->vocab;
            qlora__st_read_f32(t, (uint64_t)(i * f->seq * f->vocab), (uint64_t)part, want + at);
            at += part;
        }
        report(f, what, logits_error(got, want, at), limit_of(f, "logits"));
    }
    free(got);
    free(want);
}

static void check_loss(fixture* f, golden_session* s, const char* what, const char* name) {
    qlora_batch b = golden_batch(f, 0);
    qlora_eval_info info;
    memset(&info, 0, sizeof info);
    if (qlora_eval(s->model, &b, &info) != QLORA_OK) {
        trouble(f, what);
        return;
    }
    double want = number(f, name);
    double got = info.loss / info.labels;
    report(f, what, fabs(got - want) / (fabs(want) > 1.0 ? fabs(want) : 1.0), limit_of(f, "loss0"));
}

// Relative 2-norm of the difference; if the reference is zero, 1e-12 in absolute terms, scaled
// to limit.
static double tensor_error(const float* got, const float* want, size_t n, double limit) {
    double difference = 0.0;
    double norm = 0.0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)got[i] - (double)want[i];
        difference += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    return norm > 0.0 ? sqrt(difference / norm) : sqrt(difference) / 1e-12 * limit;
}

// Compares every trained tensor with the one in a file whose name is prefix + name.
static void check_tensors(fixture* f, golden_session* s, const char* what, const qlora__st* file,
                          const char* prefix, bool gradients, double limit) {
    double worst = 0.0;
    char worst_name[192] = "";
    for (int64_t i = 0; i < model_parameters(s->model); i++) {
        qlora_parameter_info p;
        char name[256];
        if (qlora_parameter_query(s->model, i, &p) != QLORA_OK) {
            trouble(f, what);
            return;
        }
        size_t n = (size_t)(p.rows * p.cols);
        float* got = (float*)malloc(n * 4);
        float* want = (float*)malloc(n * 4);
        snprintf(name, sizeof name, "%s%s", prefix, p.name);
        const qlora__st_tensor* t = qlora__st_find(file, name);
        qlora_result r = gradients ? qlora_gradient_read(s->trainer, i, got)
                                   : qlora_parameter_read(s->model, i, got);
        double error = NAN;
        if (t == NULL || qlora__st_elements(t) != n) {
            printf("  %s is missing from the file or has another size\n", name);
        } else if (r != QLORA_OK) {
            trouble(f, what);
        } else {
            qlora__st_read_f32(t, 0, n, want);
            error = tensor_error(got, want, n, limit);
        }
        if (!(error <= worst)) {
            worst = error;
            snprintf(worst_name, sizeof worst_name, "%s", p.name);
        }
        free(got);
        free(want);
    }
    if (!report(f, what, worst, limit)) {
        printf("    worst: %s\n", worst_name);
    }
}

static void check_steps(fixture* f, golden_session* s) {
    double worst_loss = 0.0;
    double worst_norm = 0.0;
    double first = NAN;
    double drift = 0.0;
    for (int64_t step = 0; step < f->steps; step++) {
        qlora_batch b = golden_batch(f, step);
        qlora_train_info info;
        if (qlora_train_micro(s->trainer, &b, qlora_batch_labels(&b)) != QLORA_OK) {
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
        double loss = list_number(f, "losses", (uint32_t)step);
        double norm = list_number(f, "grad_norms", (uint32_t)step);
        double loss_error = fabs(info.loss - loss) / (fabs(loss) > 1.0 ? fabs(loss) : 1.0);
        double norm_error = fabs((double)info.grad_norm - norm) / (norm > 1.0 ? norm : 1.0);
        first = step == 0 ? loss_error : first;
        drift += (info.loss - loss) / loss / (double)f->steps;
        worst_loss = loss_error <= worst_loss ? worst_loss : loss_error;
        worst_norm = norm_error <= worst_norm ? worst_norm : norm_error;
    }
    report(f, "loss of step 0", first, limit_of(f, "loss0"));
    report(f, "worst loss of the steps", worst_loss, limit_of(f, "loss_any"));
    report(f, "worst gradient norm", worst_norm, limit_of(f, "grad_norm"));
    if (f->opt->mode == QLORA_MODE_FP8) {
        report(f, "mean loss of the steps", fabs(drift), 0.01);
    }
}

// The other trajectory of a folder, whose losses contain the load-balancing loss. It has limits for
// f32 only; the gradients are judged by those of the folder.
static void check_balanced_steps(fixture* f, golden_session* s) {
    double worst[3] = {0.0, 0.0, 0.0};
    static const char* const lists[] = {"with_aux/losses", "with_aux/aux_losses",
                                        "with_aux/grad_norms"};
    static const char* const limits[] = {"with_aux/limits/loss_any", "with_aux/limits/loss_any",
                                         "with_aux/limits/grad_norm"};
    int64_t steps = 0;
    while (steps < f->steps && list_number(f, lists[0], (uint32_t)steps) > 0.0) {
        steps++;
    }
    for (int64_t step = 0; step < steps; step++) {
        qlora_batch b = golden_batch(f, step);
        qlora_train_info info;
        if (qlora_train_gradients(s->trainer, &b, 1) != QLORA_OK) {
            trouble(f, "step with the load-balancing loss");
            return;
        }
        if (step == 0) {
            check_tensors(f, s, "gradients, balanced", &f->tensors, "grad_aux.", true,
                          limit_of(f, "grads"));
        }
        if (qlora_train_update(s->trainer) != QLORA_OK ||
            qlora_train_query(s->trainer, &info) != QLORA_OK) {
            trouble(f, "step with the load-balancing loss");
            return;
        }
        const double got[] = {info.loss, info.router_aux_loss, (double)info.grad_norm};
        for (int i = 0; i < 3; i++) {
            double want = list_number(f, lists[i], (uint32_t)step);
            double error = fabs(got[i] - want) / (want > 1.0 ? want : 1.0);
            worst[i] = error <= worst[i] ? worst[i] : error;
        }
    }
    for (int i = 0; i < 3; i++) {
        static const char* const names[] = {"loss, balanced", "load-balancing loss",
                                            "gradient norm, balanced"};
        report(f, names[i], steps > 0 ? worst[i] : (double)NAN,
               f->opt->mode == QLORA_MODE_F32 ? number(f, limits[i]) : (double)INFINITY);
    }
}

static void check_balance(fixture* f) {
    golden_session s;
    if (find(f, "with_aux") == 0 || f->opt->mode == QLORA_MODE_FP8 || f->refused) {
        return;
    }
    if (golden_open_with(f, "model", "adapter0", QLORA_BASE_NF4,
                         number(f, "with_aux/coefficient"), &s)) {
        check_balanced_steps(f, &s);
    }
    golden_close(&s);
}

// Whether the reference had longrope's long factors from the first token of its text on. Others
// choose by its length, as transformers does while it generates.
static bool always_long(const fixture* f) {
    uint32_t token = find(f, "rope_factors");
    return token != 0 && qlora__json_is(&f->json, token, "long");
}

// How far the tokens that the reference chose after `from` to `to` tokens of its text are below the
// top, relative to the largest logit; judged in one pass over `to` tokens.
static bool greedy_below(const fixture* f, golden_session* s, int32_t from, int32_t to,
                         double* worst) {
    qlora_batch b;
    memset(&b, 0, sizeof b);
    b.ids = f->text;
    b.labels = f->text;
    b.lengths = &to;
    b.count = 1;
    float* logits = (float*)malloc((size_t)(to * f->vocab) * 4);
    bool ok = qlora_eval_logits(s->model, &b, logits) == QLORA_OK;
    for (int32_t i = from - 1; ok && i < to; i++) {
        const float* row = logits + (int64_t)i * f->vocab;
        double top = -INFINITY;
        double most = 0.0;
        for (int64_t v = 0; v < f->vocab; v++) {
            top = (double)row[v] > top ? (double)row[v] : top;
            most = fabs((double)row[v]) > most ? fabs((double)row[v]) : most;
        }
        double below = (top - (double)row[f->text[i + 1]]) / most;
        *worst = below <= *worst ? *worst : below;
    }
    free(logits);
    return ok;
}

// The continuation that the reference chose greedily, token by token: ours must choose the same
// token or (in bf16) rank it within greedy_margin of the top.
static void check_greedy(fixture* f, golden_session* s) {
    int64_t shorts = s->model->short_texts;
    int32_t last = f->text_count - 1;
    int32_t split = always_long(f) || shorts >= last ? f->prompt_count - 1 : (int32_t)shorts;
    double worst = 0.0;
    bool ok = split < f->prompt_count || greedy_below(f, s, f->prompt_count, split, &worst);
    int32_t rest = split < f->prompt_count ? f->prompt_count : split + 1;
    if (!ok || !greedy_below(f, s, rest, last, &worst)) {
        trouble(f, "greedy text");
        return;
    }
    bool bf16 = f->opt->mode != QLORA_MODE_F32;
    bool judged = bf16 || number(f, "greedy_smallest_margin") >= 1e-4;
    double limit = bf16 ? limit_of(f, "greedy_margin") : 0.0;
    if (judged) {
        report(f, "greedy text", worst, limit);
    } else {
        printf("  %-34s %12.4g  not checked: the reference's own margin is too small\n",
               "greedy text", worst);
    }
}

typedef struct continuation {
    int32_t* ids;
    int32_t count;
} continuation;

static bool take_token(void* user, int32_t token) {
    continuation* c = (continuation*)user;
    c->ids[c->count++] = token;
    return true;
}

// The same text by prefill and decoding with the key/value cache: in f32, every token must match
// the reference. If that had the long factors from the first token on, ours is generated from where
// it has them, too.
static void check_generate(fixture* f, golden_session* s) {
    static const int32_t none[1] = {-1};
    continuation ours;
    qlora_generate_desc d;
    int64_t first = always_long(f) ? s->model->short_texts + 1 : 0;
    memset(&ours, 0, sizeof ours);
    memset(&d, 0, sizeof d);
    d.prompt = f->text;
    d.prompt_tokens = first > f->prompt_count ? first : f->prompt_count;
    d.max_tokens = f->text_count - d.prompt_tokens;
    d.stops = none;
    d.stop_count = 1;
    if (d.max_tokens <= 0) {
        printf("  %-34s not checked: it has no text with the long factors\n",
               "greedy text by qlora_generate");
        return;
    }
    ours.ids = (int32_t*)malloc((size_t)d.max_tokens * 4);
    if (qlora_generate(s->model, &d, take_token, &ours) != QLORA_OK) {
        trouble(f, "greedy text by qlora_generate");
        free(ours.ids);
        return;
    }
    int32_t different = ours.count == d.max_tokens ? 0 : (int32_t)d.max_tokens;
    for (int32_t i = 0; i < ours.count; i++) {
        different += ours.ids[i] != f->text[d.prompt_tokens + i] ? 1 : 0;
    }
    free(ours.ids);
    if (f->opt->mode == QLORA_MODE_F32 && number(f, "greedy_smallest_margin") >= 1e-4) {
        report(f, "greedy text by qlora_generate", (double)different, 0.0);
    } else {
        printf("  %-34s %12d  of %d tokens differ; not checked\n", "greedy text by qlora_generate",
               (int)different, (int)d.max_tokens);
    }
}

// Whether the library refuses the folder by its config alone.
static bool family_is_refused(fixture* f) {
    char path[512];
    qlora_model_config config;
    snprintf(path, sizeof path, "%.480s/model", f->base);
    qlora_result r = f->opt->known ? qlora_config_read(f->ctx, path, &config) : QLORA_OK;
    return r == QLORA_ERR_UNSUPPORTED && !trouble_known(f, "model", true);
}

// Not every family has ever been saved by bitsandbytes; model/ is tested in any case.
static bool kind_exists(const fixture* f, const char* kind) {
    char path[560];
    snprintf(path, sizeof path, "%.480s/%s/config.json", f->base, kind);
    FILE* file = fopen(path, "rb");
    if (file != NULL) {
        fclose(file);
    } else if (!f->opt->quiet) {
        printf("  %-34s not in this folder\n", kind);
    }
    return file != NULL || strcmp(kind, "model") == 0;
}

#include "golden/golden_figures.h"

// The logits and losses of the base, with and without the adapter, and the steps.
static void check_sft(fixture* f, golden_session* s, const char* kind) {
    char what[64];
    qlora_adapter_use(s->model, false);
    snprintf(what, sizeof what, "logits, NF4 of %s", kind);
    check_logits(f, s, what, "nf4_logits");
    snprintf(what, sizeof what, "loss, NF4 of %s", kind);
    check_loss(f, s, what, "nf4_loss");
    qlora_adapter_use(s->model, true);
    snprintf(what, sizeof what, "logits, adapter0 on %s", kind);
    check_logits(f, s, what, "lora_logits");
    check_steps(f, s);
}

// The two forms of the base in 4 bits, with the adapter.
static void check_kinds(fixture* f) {
    golden_session s;
    static const char* const kinds[] = {"model", "model-bnb4"};
    for (int k = 0; k < 2; k++) {
        if (!kind_exists(f, kinds[k])) {
            continue;
        }
        if (golden_open(f, kinds[k], "adapter0", QLORA_BASE_NF4, &s)) {
            if (f->method == METHOD_SFT) {
                check_sft(f, &s, kinds[k]);
            } else {
                check_preferences(f, &s, k == 1);
            }
            char path[512];
            qlora__st final_adapter;
            path_of(f, "adapter20/adapter_model.safetensors", path);
            if (qlora__st_open(&f->ctx->env, path, &final_adapter) != QLORA_OK) {
                trouble(f, "adapter20");
            } else if (f->opt->mode == QLORA_MODE_F32) {
                check_tensors(f, &s, "adapter after the steps", &final_adapter, "", false,
                              limit_of(f, "adapter20"));
            }
            qlora__st_close(&f->ctx->env, &final_adapter);
            check_greedy(f, &s);
            check_generate(f, &s);
        }
        golden_close(&s);
    }
}

// Returns the number of failures; *figures is set to the number of comparisons, *refused if the
// library does not support something of the folder.
static int run_fixture(qlora_ctx* ctx, const options* opt, const char* dir, int* figures,
                       bool* refused) {
    fixture f;
    memset(&f, 0, sizeof f);
    f.ctx = ctx;
    f.opt = opt;
    f.dir = dir;
    *figures = 0;
    if (!opt->quiet) {
        printf("%s\n", dir);
    }
    bool opened = fixture_open(&f);
    *refused = f.refused || (opened && family_is_refused(&f));
    if (!opened || *refused) {
        fixture_close(&f);
        return *refused ? 0 : 1;
    }
    golden_session s;
    // Folders of methods do not have these, and FP8 needs a 4-bit base.
    if (f.method == METHOD_SFT && opt->mode != QLORA_MODE_FP8) {
        if (golden_open(&f, "model", NULL, QLORA_BASE_16BIT, &s)) {
            check_logits(&f, &s, "logits, 16-bit base", "base_logits");
            check_loss(&f, &s, "loss, 16-bit base", "base_loss");
        }
        golden_close(&s);
    }
    check_kinds(&f);
    check_balance(&f);
    int failures = f.failures;
    *figures = f.figures;
    *refused = f.refused;
    fixture_close(&f);
    if (!opt->quiet) {
        printf("  %s\n", failures == 0 ? "all figures are within their limits" : "FAILED");
    }
    return failures;
}

#ifndef GOLDEN_NO_MAIN // the test suite has its own

static int usage(int status) {
    printf("usage: golden [--backend cpu|cuda] [--mode f32|bf16|fp8] [--graph on|off] [--tile N] "
           "[--offload auto|on|off] [--known] DIR...\n"
           "runs fixture folders (model/, model-bnb4/, adapter0/, adapter20/, golden.*) and prints "
           "every\n"
           "figure with its limit; status 0 if all are within it. --known leaves out what the\n"
           "library refuses as unsupported, and prints its message.\n");
    return status;
}

int main(int argc, char** argv) {
    options opt = {QLORA_BACKEND_CPU, QLORA_MODE_F32, true, false, false, 0, QLORA_CHOICE_AUTO};
    int i = 1;
    for (; i < argc && strncmp(argv[i], "--", 2) == 0; i++) {
        const char* value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--help") == 0) {
            return usage(0);
        }
        if (strcmp(argv[i], "--known") == 0) {
            opt.known = true;
            continue;
        }
        if (strcmp(argv[i], "--backend") == 0 &&
            (strcmp(value, "cpu") == 0 || strcmp(value, "cuda") == 0)) {
            opt.backend = strcmp(value, "cpu") == 0 ? QLORA_BACKEND_CPU : QLORA_BACKEND_CUDA;
        } else if (strcmp(argv[i], "--mode") == 0 &&
                   (strcmp(value, "f32") == 0 || strcmp(value, "bf16") == 0 ||
                    strcmp(value, "fp8") == 0)) {
            opt.mode = strcmp(value, "f32") == 0    ? QLORA_MODE_F32
                       : strcmp(value, "bf16") == 0 ? QLORA_MODE_BF16
                                                    : QLORA_MODE_FP8;
        } else if (strcmp(argv[i], "--graph") == 0 &&
                   (strcmp(value, "on") == 0 || strcmp(value, "off") == 0)) {
            opt.graph = strcmp(value, "on") == 0;
        } else if (strcmp(argv[i], "--tile") == 0 && atoi(value) > 0) {
            opt.tile = atoi(value);
        } else if (strcmp(argv[i], "--offload") == 0 &&
                   (strcmp(value, "auto") == 0 || strcmp(value, "on") == 0 ||
                    strcmp(value, "off") == 0)) {
            opt.offload = strcmp(value, "auto") == 0 ? QLORA_CHOICE_AUTO
                          : strcmp(value, "on") == 0 ? QLORA_CHOICE_ON
                                                     : QLORA_CHOICE_OFF;
        } else {
            fprintf(stderr, "golden: invalid option or value: %s %s\n", argv[i], value);
            return usage(2);
        }
        i++;
    }
    if (i == argc) {
        return usage(2);
    }
    char why[512] = "";
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = opt.backend;
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    qlora_ctx* ctx = NULL;
    if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) {
        fprintf(stderr, "golden: %s\n", why);
        return 1;
    }
    int failures = 0;
    int left_out = 0;
    for (; i < argc; i++) {
        int figures = 0;
        bool refused = false;
        failures += run_fixture(ctx, &opt, argv[i], &figures, &refused);
        left_out += refused ? 1 : 0;
    }
    if (qlora_ctx_destroy(ctx) != QLORA_OK) {
        fprintf(stderr, "golden: %s\n", qlora_last_error(ctx));
        failures++;
    }
    if (left_out > 0) {
        printf("not supported, in whole or in part: %d of the folders\n", left_out);
    }
    printf("%s\n", failures == 0 ? "all folders passed" : "FAILED");
    return failures == 0 ? 0 : 1;
}

#endif
