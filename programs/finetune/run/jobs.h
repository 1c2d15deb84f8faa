// jobs.h - several adapters in one run: --jobs FILE.
//
// Every job is a run of its own, with its own options, data, folder, log and checkpoints; they
// share the model, and each micro-batch has the packs of all of them. So the folder of a job is the
// one that it would have alone.
#ifndef FINETUNE_JOBS_H
#define FINETUNE_JOBS_H

#define MAX_JOBS 64
#define JOB_TEXTS 128 // values of a job in the file

typedef struct job {
    app a; // its name is a.job
    char name[48];
    char out[PATH_SIZE];
    char* texts[JOB_TEXTS];
    size_t text_count;
    size_t end; // of the packs of the step that is running
    bool over;  // it diverged; the others go on
} job;

typedef struct job_list {
    job* data[MAX_JOBS];
    size_t count;
    app* base; // the command line
    qlora_model_desc model_desc;
    qlora_adapter_slot slots[MAX_JOBS];
    batches joined; // of a step
    int32_t* adapters;
    size_t adapter_room;
} job_list;

// ---- the file -----------------------------------------------------------------------------------

// What can differ between jobs.
static const char* const job_options[] = {"data",
                                          "eval-data",
                                          "template",
                                          "format",
                                          "columns",
                                          "max-samples",
                                          "rank",
                                          "alpha",
                                          "loraplus-ratio",
                                          "epochs",
                                          "steps",
                                          "lr",
                                          "schedule",
                                          "warmup",
                                          "beta2",
                                          "weight-decay",
                                          "max-norm",
                                          "length",
                                          "tokens",
                                          "accumulate",
                                          "seed",
                                          "truncate",
                                          "train-prompt",
                                          "last-turn",
                                          "eval",
                                          "eval-every",
                                          "keep-best",
                                          "patience",
                                          "csv",
                                          "sample-prompt",
                                          "sample-tokens",
                                          "sample-message",
                                          "save-every",
                                          "snapshot-every",
                                          "sample-temperature"};

// A name becomes a folder.
static bool job_name_fits(const char* name) {
    size_t n = strlen(name);
    return n > 0 && n < 48 && name[0] != '.' && name[n - 1] != '.' &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == n;
}

// Whether names differ at most in case: some file systems have one folder for both.
static bool job_names_alike(const char* a, const char* b) {
    while (*a != '\0' && tolower((unsigned char)*a) == tolower((unsigned char)*b)) {
        a++;
        b++;
    }
    return *a == *b;
}

static bool job_name(job_list* l, job* j, const char* text, char error[1024]) {
    if (!job_name_fits(text)) {
        return error_set(error,
                         "name: '%.60s' cannot name a folder; use up to 47 letters, digits, '.', "
                         "'_' and '-', and no '.' at the beginning or the end",
                         text);
    }
    for (size_t i = 0; i < l->count; i++) {
        const char* other = l->data[i]->name;
        if (l->data[i] == j || !job_names_alike(other, text)) {
            continue;
        }
        return strcmp(other, text) == 0
                   ? error_set(error, "name: '%s' is given twice", text)
                   : error_set(error,
                               "name: '%s' and '%s' differ only in case, and some file systems "
                               "would have one folder for both",
                               other, text);
    }
    snprintf(j->name, sizeof j->name, "%s", text);
    return true;
}

// An option that a job can have, by its name in the file; NULL with an error.
static const option* job_option(job* j, const char* key, char error[1024]) {
    const option* row = option_find(&j->a.set, key, strlen(key));
    if (row == NULL) {
        char hint[256];
        error_set(error, "'%.60s' is not an option%s", key,
                  option_advice(&j->a.set, key, "", hint));
        return NULL;
    }
    if (!name_among(row->name, job_options, sizeof job_options / sizeof job_options[0])) {
        error_set(error, "'%s' is the same for all jobs; give it in the command line", key);
        return NULL;
    }
    return row;
}

// An empty list: none instead of those of the command line.
static bool job_none(job* j, const char* key, char error[1024]) {
    if (strcmp(key, "name") == 0) {
        return error_set(error, "name: a string was expected");
    }
    const option* row = job_option(j, key, error);
    if (row == NULL) {
        return false;
    }
    if (row->kind != OPT_TEXTS) {
        return error_set(error, "%s: one value was expected", key);
    }
    ((option_texts*)option_at(&j->a.set, row))->count = 0;
    return true;
}

// Stores a value of the file. `again`: it is not the first one of a list.
static bool job_value(job_list* l, job* j, const char* key, const char* text, bool word, bool again,
                      char error[1024]) {
    if (strcmp(key, "name") == 0) {
        return word && !again ? job_name(l, j, text, error)
                              : error_set(error, "name: a string was expected");
    }
    const option* row = job_option(j, key, error);
    if (row == NULL) {
        return false;
    }
    bool flag = row->kind == OPT_FLAG;
    bool list = row->kind == OPT_TEXTS;
    bool yes = !word && strcmp(text, "true") == 0;
    bool no = !word && strcmp(text, "false") == 0;
    if (flag != (yes || no)) {
        return error_set(error, "%s: %s was expected", key,
                         flag ? "true or false" : "a number or a string");
    }
    if (flag) {
        *(bool*)option_at(&j->a.set, row) = yes;
        return true;
    }
    if (again && !list) {
        return error_set(error, "%s: one value was expected", key);
    }
    if (list && !again) { // instead of those of the command line
        ((option_texts*)option_at(&j->a.set, row))->count = 0;
    }
    return option_store(&j->a.set, row, text, error);
}

// A copy that lives as long as the job.
static const char* job_text(job* j, const char* text, size_t size, char error[1024]) {
    char* copy = j->text_count < JOB_TEXTS ? (char*)malloc(size + 1) : NULL;
    if (copy == NULL) {
        error_set(error, j->text_count < JOB_TEXTS ? "out of memory" : "too many values");
        return NULL;
    }
    memcpy(copy, text, size);
    copy[size] = '\0';
    j->texts[j->text_count++] = copy;
    return copy;
}

// A string, a number, true or false.
static bool job_scalar(job_list* l, job* j, json_reader* r, const char* key, bool again,
                       char error[1024]) {
    blob text;
    memset(&text, 0, sizeof text);
    json_space(r);
    bool word = r->at < r->end && *r->at == '"';
    const char* start = r->at;
    bool ok = word ? json_string(r, &text)
                   : r->at < r->end && strchr("[{", *r->at) == NULL && json_skip(r);
    if (!ok) {
        blob_free(&text);
        return error_set(error, "%s: %s", key,
                         r->wrong != NULL ? r->wrong : "a value was expected");
    }
    if (!word) {
        ok = blob_add(&text, start, (size_t)(r->at - start));
    }
    if (text.count > 0 && memchr(text.data, 0, text.count) != NULL) {
        blob_free(&text);
        return error_set(error, "%s: a zero byte cannot be in a value", key);
    }
    const char* copy = ok ? job_text(j, text.count > 0 ? text.data : "", text.count, error) : NULL;
    blob_free(&text);
    return copy != NULL && job_value(l, j, key, copy, word, again, error);
}

// Notes the name of a member, which `keys` has behind all names before it. Only one of two values
// would count, and the other one would be lost without a word.
static bool job_key(blob* keys, const char* key, char error[1024]) {
    for (size_t at = 0; at < keys->count; at += strlen(keys->data + at) + 1) {
        if (strcmp(keys->data + at, key) == 0) {
            return error_set(error, "%.60s is given twice", key);
        }
    }
    return blob_add(keys, key, strlen(key) + 1) || error_set(error, "out of memory");
}

static bool job_member(job_list* l, job* j, json_reader* r, blob* keys, char error[1024]) {
    blob key;
    memset(&key, 0, sizeof key);
    json_space(r);
    bool ok = (json_string(r, &key) && (key.count == 0 || memchr(key.data, 0, key.count) == NULL) &&
               blob_add(&key, "", 1)) ||
              error_set(error, "the name of an option was expected");
    ok = ok && (json_take(r, ':') || error_set(error, "%.60s: ':' was expected", key.data));
    ok = ok && job_key(keys, key.data, error);
    json_space(r);
    if (ok && r->at < r->end && *r->at == '[') {
        bool more = true;
        for (size_t i = 0; ok && more; i++) {
            ok = json_next(r, i, &more) || error_set(error, "%.60s: %s", key.data, r->wrong);
            ok = ok && (!more || job_scalar(l, j, r, key.data, i > 0, error));
            ok = ok && (more || i > 0 || job_none(j, key.data, error));
        }
    } else {
        ok = ok && job_scalar(l, j, r, key.data, false, error);
    }
    blob_free(&key);
    return ok;
}

static bool job_object(job_list* l, job* j, json_reader* r, char error[1024]) {
    blob keys;
    memset(&keys, 0, sizeof keys);
    if (!json_take(r, '{')) {
        return error_set(error, "an object was expected");
    }
    bool ok = true;
    bool first = true;
    while (ok && !json_take(r, '}')) {
        ok = first || json_take(r, ',') || error_set(error, "',' or '}' was expected");
        ok = ok && job_member(l, j, r, &keys, error);
        first = false;
    }
    blob_free(&keys);
    if (!ok) {
        return false;
    }
    if (j->a.o.data.length == OPTION_MAX) {
        return error_set(error, "length: a number was expected");
    }
    return j->name[0] != '\0' || error_set(error, "name is missing");
}

// What the jobs of a run cannot have.
static bool job_check(const options* o, char error[1024]) {
    const struct {
        const char* name;
        bool given;
    } rows[] = {{"method dpo and kto", method_of(o->method.kind)->preferences},
                {"adapter", o->adapter.from != NULL},
                {"dora", o->adapter.dora},
                {"save-modules", o->adapter.save_modules != 0},
                {"train-tokens", o->adapter.train_tokens != NULL},
                {"add-tokens", o->adapter.add_tokens != NULL},
                {"train-norms", o->adapter.train_norms},
                {"dropout", o->adapter.dropout > 0.0},
                {"neftune", o->training.neftune > 0.0},
                {"router-aux-loss", o->training.router_aux_loss > 0.0},
                {"mode fp8", o->model.mode == QLORA_MODE_FP8},
                {"ranks", o->machine.ranks > 1},
                {"demo", o->demo},
                {"prompt", o->sampling.prompt != NULL},
                {"tensorboard", o->output.tensorboard != NULL},
                {"eval-only", o->eval.only},
                {"doctor", o->doctor},
                {"json", o->json},
                {"length max", o->data.length == OPTION_MAX}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i].given) {
            return error_set(error, "--%s cannot be used with --jobs", rows[i].name);
        }
    }
    return true;
}

static bool job_open(job_list* l, json_reader* r, char error[1024]) {
    if (l->count == MAX_JOBS) {
        return error_set(error, "there are more than %d jobs", MAX_JOBS);
    }
    job* j = (job*)calloc(1, sizeof *j);
    if (j == NULL) {
        return error_set(error, "out of memory");
    }
    l->data[l->count++] = j;
    j->a.o = l->base->o;
    j->a.set = l->base->set;
    j->a.set.values = &j->a.o;
    j->a.program = l->base->program;
    j->a.ranks.world = 1;
    j->a.ranks.local_world = 1;
    j->a.o.jobs = NULL;
    if (!job_object(l, j, r, error)) {
        return false;
    }
    j->a.job = j->name;
    int n = snprintf(j->out, sizeof j->out, "%s/%s", l->base->o.output.folder, j->name);
    j->a.o.output.folder = j->out;
    j->a.steps_and_epochs = j->a.o.training.steps > 0 && j->a.o.training.epochs > 0.0;
    if (n < 0 || n >= PATH_SIZE - 64) {
        return error_set(error, "--out is too long");
    }
    if (!options_check(&j->a.o, j->a.adapter, error)) {
        return false;
    }
    options_resolve(&j->a.o, 1);
    history_clear(&j->a.history);
    j->a.progress.first_eval = (double)NAN;
    j->a.progress.last_eval = (double)NAN;
    j->a.progress.last_loss = (double)NAN;
    j->a.progress.epochs_done = (double)NAN;
    return true;
}

// Standard input can be read once; options_check has counted within each job.
static bool jobs_inputs_check(const job_list* l, char error[1024]) {
    const job* reader = NULL;
    for (size_t i = 0; i < l->count; i++) {
        const options* o = &l->data[i]->a.o;
        const option_texts* lists[2] = {&o->data.files, &o->data.eval_files};
        for (int64_t k = 0; k < lists[0]->count + lists[1]->count; k++) {
            const char* path =
                k < lists[0]->count ? lists[0]->items[k] : lists[1]->items[k - lists[0]->count];
            if (strcmp(path, "-") != 0) {
                continue;
            }
            if (reader != NULL) {
                return error_set(error,
                                 "jobs %s and %s both read standard input (-), which only one of "
                                 "them can",
                                 reader->name, l->data[i]->name);
            }
            reader = l->data[i];
        }
    }
    return true;
}

static bool jobs_read(job_list* l) {
    app* a = l->base;
    blob text;
    char why[1024] = "";
    memset(&text, 0, sizeof text);
    if (a->o.output.folder == NULL) {
        return error_set(a->error, "--out DIR is required: every job has a folder in it");
    }
    if (!job_check(&a->o, a->error)) {
        return false;
    }
    int code = blob_read_path(&text, a->o.jobs);
    if (code != 0 || text.data == NULL) {
        blob_free(&text);
        return error_set(a->error, "--jobs %s: %s", a->o.jobs,
                         code != 0 ? strerror(code) : "the file is empty");
    }
    json_reader r = json_start(text.data, text.count);
    bool more = true;
    bool ok = true;
    for (size_t i = 0; ok && more; i++) {
        ok = json_next(&r, i, &more) || error_set(why, "%s", r.wrong);
        ok = ok && (!more || job_open(l, &r, why));
    }
    ok = ok && (json_end(&r) || error_set(why, "the file goes on after the list"));
    blob_free(&text);
    if (!ok && l->count > 0) {
        return error_set(a->error, "--jobs %.400s, job %zu: %.500s", a->o.jobs, l->count, why);
    }
    if (ok && l->count == 0) {
        return error_set(a->error, "--jobs %s: the list is empty", a->o.jobs);
    }
    return (ok && jobs_inputs_check(l, why)) ||
           error_set(a->error, "--jobs %.400s: %.500s", a->o.jobs, why);
}

// ---- preparing ----------------------------------------------------------------------------------

// A fault of a job becomes that of the run.
static bool job_fail(job_list* l, job* j) {
    l->base->stopped = l->base->stopped || j->a.stopped;
    return error_set(l->base->error, "job %s: %.900s", j->name, j->a.error);
}

static bool job_prepare(job_list* l, job* j) {
    app* a = &j->a;
    a->ctx = l->base->ctx;
    a->files = l->base->files;
    a->o.model.mode = l->base->o.model.mode; // they share the model
    if (!model_describe(a) || !lengths_choose(a)) {
        return false;
    }
    train_describe(a);
    if (!(a->o.plan || settings_check(a)) || !data_prepare(a) || !prompts_open(a)) {
        return false;
    }
    a->train_desc.total_steps = a->progress.total_steps;
    a->train_desc.warmup_steps = a->o.optimizer.warmup >= 0
                                     ? a->o.optimizer.warmup
                                     : (a->progress.total_steps * 3 + 99) / 100;
    return true;
}

// The model of all jobs: a micro-batch has a pack of each.
static void jobs_describe(job_list* l) {
    qlora_model_desc* d = &l->model_desc;
    *d = l->data[0]->a.model_desc;
    d->tokens = 0;
    d->max_sequences = 0;
    for (size_t i = 0; i < l->count; i++) {
        app* a = &l->data[i]->a;
        const qlora_model_desc* own = &a->model_desc;
        l->slots[i].rank = own->rank;
        l->slots[i].alpha = own->alpha != 0.0f ? own->alpha : 2.0f * (float)own->rank;
        l->slots[i].seed = own->seed;
        d->tokens += own->tokens;
        d->max_sequences += own->max_sequences;
        d->max_length = own->max_length > d->max_length ? own->max_length : d->max_length;
        d->accumulate = own->accumulate > d->accumulate ? own->accumulate : d->accumulate;
        d->generate_tokens =
            own->generate_tokens > d->generate_tokens ? own->generate_tokens : d->generate_tokens;
        a->train_desc.adapter = (int32_t)i;
    }
    d->slots = l->slots;
    d->slot_count = (int64_t)l->count;
    d->progress_user = l->base;
}

static bool jobs_prepare(job_list* l) {
    app* base = l->base;
    base->ranks.world = 1;
    for (size_t i = 0; i < l->count && !base->parts.mode_kept; i++) {
        mode_keep(&l->data[i]->a);
        base->parts.mode_kept = l->data[i]->a.parts.mode_kept;
        base->o.model.mode = l->data[i]->a.o.model.mode;
    }
    if (!context_open(base)) {
        return false;
    }
    for (size_t i = 0; i < l->count; i++) {
        if (!job_prepare(l, l->data[i])) {
            return job_fail(l, l->data[i]);
        }
    }
    jobs_describe(l);
    qlora_plan_desc budget;
    memset(&budget, 0, sizeof budget);
    budget.bytes = (uint64_t)base->o.machine.memory;
    budget.host_bytes = (uint64_t)base->o.machine.host_budget;
    qlora_result result = qlora_plan_make(base->ctx, &l->model_desc, &budget, &base->plan);
    return lib(base, result,
               result == QLORA_ERR_DEVICE_MEMORY ? "not enough memory" : "planning the memory");
}

// What belongs to the model from now on is that of this job.
static bool job_select(job_list* l, size_t i) {
    return lib(&l->data[i]->a, qlora_adapter_select(l->base->model, (int64_t)i),
               "selecting an adapter");
}

// The trainable parameters of a job: adapters differ in nothing but the rank.
static int64_t jobs_share(const job_list* l, size_t i) {
    int64_t ranks = 0;
    for (size_t k = 0; k < l->count; k++) {
        ranks += l->slots[k].rank;
    }
    return l->base->plan.parameters / ranks * l->slots[i].rank;
}

static bool job_begin(job_list* l, size_t i) {
    app* a = &l->data[i]->a;
    a->model = l->base->model;
    a->plan = l->base->plan;
    a->plan.parameters = jobs_share(l, i);
    a->plan.work.adapters *= (double)l->slots[i].rank / (double)l->slots[0].rank;
    if (!job_select(l, i) ||
        !lib(a, qlora_trainer_create(a->model, &a->train_desc, &a->trainer),
             "preparing the training") ||
        !checkpoint_load(a) || !packs_plain(a, &a->data.eval, &a->progress.eval_packs) ||
        !out_begin(a)) {
        return false;
    }
    counts_print(a);
    notes_print(a);
    resumed_print(a);
    return a->progress.step == a->progress.total_steps || position_seek(a, a->progress.step);
}

// Before the first step: how long all jobs take together.
static void jobs_estimate(job_list* l) {
    double rates[2];
    double seconds = 0.0;
    double shorter = 0.0; // in bf16
    int64_t steps = 0;
    int64_t evals = 0;
    char of[48];
    char text[32];
    bool bf16 = estimate_bf16(l->base);
    if (!estimate_rates(&l->data[0]->a, rates)) {
        return;
    }
    for (size_t i = 0; i < l->count; i++) {
        estimate e;
        if (estimate_make(&l->data[i]->a, rates, &e)) {
            seconds += estimate_seconds(&e, bf16, e.steps, e.evals);
            shorter += estimate_seconds(&e, true, e.steps, e.evals);
            steps = e.steps > steps ? e.steps : steps; // taken together
            evals += e.evals;
        }
    }
    snprintf(of, sizeof of, " of %zu job%s", l->count, l->count == 1 ? "" : "s");
    estimate_say(l->base, steps, of, evals, seconds);
    if (seconds > ESTIMATE_LONG && !bf16 && l->base->o.model.mode == QLORA_MODE_F32 &&
        shorter < 0.9 * seconds) {
        say(l->base, "      shorter: --mode bf16 (about %s)\n", short_time(shorter, text));
    }
}

static bool jobs_begin(job_list* l) {
    app* base = l->base;
    char memory[32];
    char trained[256];
    char why[512];
    say(base, "%s, %s\n", backend_reason(base, why), mode_name(&base->o, &base->plan));
    l->model_desc.plan = &base->plan;
    if (!lib(base, qlora_model_open(base->ctx, &l->model_desc, &base->model),
             "loading the model")) {
        return false;
    }
    for (size_t i = 0; i < l->count; i++) {
        if (!job_begin(l, i)) {
            return job_fail(l, l->data[i]);
        }
    }
    say(base, "model: %lld layers, hidden size %lld, %zu adapters, %s, %s\n",
        (long long)base->plan.config.layers, (long long)base->plan.config.hidden, l->count,
        trained_text(&base->plan, trained),
        short_bytes(base->plan.total + base->plan.context, memory));
    jobs_estimate(l);
    return true;
}

// ---- the run ------------------------------------------------------------------------------------

static bool job_goes_on(const job* j) {
    return !j->over && j->a.progress.step < j->a.progress.total_steps && !patience_over(&j->a);
}

// The packs of the next step of a job, as its own batches.
static bool job_packs(job* j) {
    app* a = &j->a;
    if (a->progress.next_pack >= a->progress.now.count) {
        a->progress.epoch++;
        a->progress.next_pack = 0;
        if (!epoch_make(a, a->progress.epoch, &a->progress.now)) {
            return false;
        }
    }
    j->end = step_end(a, &a->progress.now, a->progress.next_pack);
    return batches_fill(a, &a->data.train, &a->progress.now, a->progress.next_pack, j->end, NULL);
}

static bool jobs_room(job_list* l, size_t* most) {
    size_t tokens = 0;
    size_t sequences = 0;
    *most = 0;
    for (size_t i = 0; i < l->count; i++) {
        const job* j = l->data[i];
        size_t own = job_goes_on(j) ? j->end - j->a.progress.next_pack : 0;
        *most = own > *most ? own : *most;
        for (size_t p = 0; p < own; p++) {
            const qlora_batch* b = &j->a.batches.data[p];
            sequences += (size_t)b->count;
            for (int64_t s = 0; s < b->count; s++) {
                tokens += (size_t)b->lengths[s];
            }
        }
    }
    if (sequences > l->adapter_room) {
        free(l->adapters);
        l->adapters = (int32_t*)take(l->base, sequences, sizeof *l->adapters);
        l->adapter_room = l->adapters != NULL ? sequences : 0;
    }
    return l->adapters != NULL && batches_room(l->base, &l->joined, *most, tokens, sequences);
}

// Micro-batch number p has pack number p of every job that has one, job after job.
static bool jobs_join(job_list* l, size_t* count) {
    if (!jobs_room(l, count)) {
        return false;
    }
    batch_cursor c = batch_start(&l->joined);
    int32_t* adapters = l->adapters;
    for (size_t p = 0; p < *count; p++) {
        qlora_batch* to = &l->joined.data[p];
        batch_begin(l->base, &c, false, to);
        to->adapters = adapters;
        for (size_t i = 0; i < l->count; i++) {
            const job* j = l->data[i];
            size_t own = job_goes_on(j) ? j->end - j->a.progress.next_pack : 0;
            const qlora_batch* from = &j->a.batches.data[p];
            int64_t at = 0;
            for (int64_t s = 0; p < own && s < from->count; s++) {
                size_t bytes = (size_t)from->lengths[s] * sizeof(int32_t);
                memcpy(c.ids, from->ids + at, bytes);
                memcpy(c.labels, from->labels + at, bytes);
                at += from->lengths[s];
                *adapters++ = (int32_t)i;
                batch_end_sequence(&c, from->lengths[s], from->sequences[s], 0, to);
            }
        }
    }
    return true;
}

// After a step: the log, evaluation, checkpoint of a job.
static bool job_record(job_list* l, size_t i, const qlora_train_info* info, double seconds) {
    job* j = l->data[i];
    app* a = &j->a;
    a->progress.next_pack = j->end;
    step_record(a, info, seconds);
    a->progress.skipped_in_row = info->last_skipped ? a->progress.skipped_in_row + 1 : 0;
    if (a->progress.skipped_in_row == 10) {
        error_set(a->error, "step %lld: ten consecutive non-finite gradients; try a lower lr",
                  (long long)info->step);
        complain(a);
        j->over = true;
        return true;
    }
    if (!job_select(l, i) || !evaluate_due(a)) {
        return false;
    }
    best_save(a);
    if (job_goes_on(j) && a->progress.step % interval(a, a->o.output.save_every) == 0) {
        bear(a, TOLD_CHECKPOINT, checkpoint_save(a));
    }
    if (a->o.output.snapshot_every > 0 && a->progress.step % a->o.output.snapshot_every == 0) {
        bear(a, TOLD_SNAPSHOT, snapshot_save(a));
    }
    return true;
}

static bool jobs_step(job_list* l) {
    app* base = l->base;
    qlora_trainer* trainers[MAX_JOBS];
    qlora_train_info infos[MAX_JOBS];
    size_t owners[MAX_JOBS];
    size_t active = 0;
    size_t count = 0;
    double start = seconds_now();
    for (size_t i = 0; i < l->count; i++) {
        app* a = &l->data[i]->a;
        if (job_goes_on(l->data[i])) {
            if (!job_packs(l->data[i])) {
                return job_fail(l, l->data[i]);
            }
            owners[active] = i;
            trainers[active++] = a->trainer;
        }
    }
    if (!jobs_join(l, &count) || !lib(base,
                                      qlora_train_step_each(trainers, (int64_t)active,
                                                            l->joined.data, (int64_t)count, infos),
                                      "training")) {
        return false;
    }
    double seconds = seconds_now() - start;
    bool ok = true;
    for (size_t k = 0; k < active; k++) { // each of them has taken the step
        if (!job_record(l, owners[k], &infos[k], seconds) && ok) {
            ok = job_fail(l, l->data[owners[k]]);
        }
    }
    return ok;
}

static bool jobs_run_on(const job_list* l) {
    for (size_t i = 0; i < l->count; i++) {
        if (job_goes_on(l->data[i])) {
            return stop_asked == 0;
        }
    }
    return false;
}

// What became of a job that is saved.
static void job_tell(job* j) {
    app* a = &j->a;
    char tokens[32];
    char epochs[40];
    char held[64] = "";
    if (j->over || job_goes_on(j) || a->eval_cut) {
        say(a, "stopped after step %lld of %lld and saved to %s\n", (long long)a->progress.step,
            (long long)a->progress.total_steps, a->o.output.folder);
        return;
    }
    if (a->progress.step < a->progress.total_steps) {
        say(a, "stopped early: the held-out loss has not fallen for %lld evaluations\n",
            (long long)a->o.eval.patience);
    }
    if (known(a->progress.last_eval)) {
        snprintf(held, sizeof held, "held out %.4f -> %.4f; ", a->progress.first_eval,
                 a->progress.last_eval);
    }
    bool counted = epoch_text(a, epochs)[0] != '\0';
    say(a, "%lld step%s, %s%s%s%s tokens; %ssaved to %s\n", (long long)a->progress.step,
        a->progress.step == 1 ? "" : "s", counted ? "epoch " : "", epochs, counted ? ", " : "",
        short_number((double)a->progress.tokens_seen, tokens), held, a->o.output.folder);
    try_print(a);
}

// Saves a job; what cannot be saved has been said then.
static bool job_save(job_list* l, size_t i) {
    app* a = &l->data[i]->a;
    if (!job_select(l, i)) {
        complain(a);
        return false;
    }
    a->watched = l->base->watched;
    bool ok = results_save(a);
    l->base->watched = a->watched; // Ctrl-C counts for those that follow as well
    return ok;
}

// Saves every job, whatever became of the others.
static bool jobs_save(job_list* l, bool ok) {
    for (size_t i = 0; i < l->count; i++) {
        app* a = &l->data[i]->a;
        if (a->progress.step == 0) {
            continue;
        }
        if (job_save(l, i)) {
            job_tell(l->data[i]);
        } else {
            ok = false;
        }
        l->base->failed = l->base->failed || a->failed;
    }
    return ok;
}

// After Ctrl-C: whether there is something to resume.
static void jobs_tell_stop(job_list* l) {
    bool saved = false;
    bool rest = false;
    for (size_t i = 0; i < l->count; i++) {
        saved = saved || l->data[i]->a.progress.step > 0;
        rest = rest || job_goes_on(l->data[i]) || l->data[i]->a.eval_cut;
    }
    if (rest) {
        say(l->base, saved ? "run the same command to resume\n"
                           : "stopped before the first step was complete; there is nothing to "
                             "save\n");
    }
}

static bool jobs_train(job_list* l) {
    char memory[160];
    bool ok = jobs_begin(l);
    stop_training = STOP_STEP;
    for (size_t i = 0; i < l->count && ok; i++) {
        app* a = &l->data[i]->a;
        ok = (job_select(l, i) && evaluate_due(a)) || job_fail(l, l->data[i]);
        best_save(a);
    }
    while (ok && jobs_run_on(l)) {
        ok = jobs_step(l);
    }
    stop_training = 0;
    if (!ok && l->base->error[0] != '\0' && !l->base->stopped) {
        complain(l->base);
    }
    for (size_t i = 0; i < l->count && !ok; i++) { // a step that failed would forbid saving
        if (l->data[i]->a.trainer != NULL) {
            (void)qlora_train_cancel(l->data[i]->a.trainer);
        }
    }
    ok = jobs_save(l, ok) && ok;
    if (ok && stop_asked == 0) {
        say(l->base, "%s\n", memory_text(l->base, memory));
    } else if (ok) {
        jobs_tell_stop(l);
    }
    return ok;
}

static void jobs_close(job_list* l) {
    for (size_t i = l->count; i-- > 0;) { // the folder above was made with the first one
        job* j = l->data[i];
        if (j->a.progress.step == 0 && j->a.ctx != NULL && !j->a.o.plan) {
            out_unmake(&j->a);
        }
        if (j->a.trainer != NULL) {
            qlora_trainer_destroy(j->a.trainer);
        }
        j->a.trainer = NULL;
        j->a.model = NULL; // these are the run's
        j->a.ctx = NULL;
        app_close(&j->a);
        for (size_t k = 0; k < j->text_count; k++) {
            free(j->texts[k]);
        }
        free(j);
    }
    batches_free(&l->joined);
    free(l->adapters);
}

// --jobs: a is the command line.
static bool jobs_run(app* a) {
    static job_list l; // zeroed, and large
#ifndef _WIN32
    signal(SIGPIPE, SIG_IGN); // writing fails instead, and the training is saved
#endif
    l.base = a;
    bool ok = a->ranks.world <= 1 || error_set(a->error, "--jobs needs a single process");
    ok = ok && jobs_read(&l) && jobs_prepare(&l);
    if (ok && a->o.plan) {
        plan_show(a);
    } else if (ok) {
        ok = jobs_train(&l);
    }
    jobs_close(&l);
    return ok;
}

#endif
