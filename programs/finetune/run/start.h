// start.h - from the options to the run.
#ifndef FINETUNE_START_H
#define FINETUNE_START_H

// The GPU of this process: the only one that it can see, or that of its number on this machine.
static int32_t local_device(const app* a) {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    return visible != NULL && visible[0] != '\0' && strchr(visible, ',') == NULL ? 0
                                                                                 : a->ranks.local;
}

// The numbers among the options of the run in --out that this one resumes; false if there is none.
static bool run_options(app* a, options* then) {
    char path[PATH_SIZE];
    option_set set = a->set;
    blob text;
    memset(&text, 0, sizeof text);
    options_clear(then);
    set.values = then;
    if (a->o.output.folder == NULL || a->o.output.resume == RESUME_NEVER) {
        return false;
    }
    out_path(a, "checkpoint/latest", path);
    bool found = path_exists(path);
    if (found) {
        out_path(a, "settings.txt", path);
        found = blob_read_path(&text, path) == 0 && config_read(&set, path, &text, a->error);
    }
    a->error[0] = '\0'; // what is wrong with the file is told when it is compared
    blob_free(&text);
    return found;
}

// --mode auto of a run that is resumed is the mode that it has.
static void mode_keep(app* a) {
    options then;
    if (a->o.model.mode == QLORA_MODE_AUTO && !a->o.eval.only && run_options(a, &then)) {
        a->o.model.mode = then.model.mode;
        a->parts.mode_kept = true;
    }
}

// What --mode auto is on this machine, which settings.txt notes. On a CPU, several processes, which
// may run on different ones, an evaluation and the demo compute in f32, as the library chooses.
static void mode_choose(app* a) {
    char capability[64];
    char text[4096];
    if (a->o.model.mode != QLORA_MODE_AUTO || a->parts.mode_kept || a->o.eval.only) {
        return;
    }
    if (qlora_ctx_backend(a->ctx) == QLORA_BACKEND_CPU) {
        bool fast = cpu_has_bf16(a->ctx) && !a->o.demo && a->ranks.world <= 1;
        a->o.model.mode = fast ? QLORA_MODE_BF16 : QLORA_MODE_F32;
        return;
    }
    qlora_describe(a->ctx, text, sizeof text);
    described(text, "compute capability ", capability);
    a->o.model.mode = atof(capability) >= 8.0 ? QLORA_MODE_BF16 : QLORA_MODE_F32;
}

static bool context_open(app* a) {
    char why[512] = "";
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    mode_keep(a);
    // A device that was asked for is required.
    desc.require_backend =
        a->o.machine.device >= 0 ? QLORA_BACKEND_CUDA : (qlora_backend)a->o.machine.backend;
    desc.device = a->o.machine.device >= 0 ? (int32_t)a->o.machine.device : 0;
    bool own =
        a->ranks.world > 1 && a->o.machine.device < 0 && a->o.machine.backend != QLORA_BACKEND_CPU;
    if (own) { // one GPU per process
        desc.device = local_device(a);
        desc.require_backend = QLORA_BACKEND_CUDA;
    }
    desc.threads = (int32_t)a->o.machine.threads;
#ifndef _WIN32
    if (desc.threads == 0 &&
        a->ranks.local_world > 1) { // the processes of a machine share its cores
        long cores = sysconf(_SC_NPROCESSORS_ONLN) / a->ranks.local_world;
        desc.threads = (int32_t)(cores < 1 ? 1 : cores > 64 ? 64 : cores);
    }
#endif
    desc.math = a->o.model.mode == MODE_TF32 ? QLORA_MATH_TF32 : QLORA_MATH_F32;
    desc.log = a->o.verbose ? qlora_log_stderr : NULL;
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    qlora_result made = qlora_ctx_create(&desc, &a->ctx);
    if (made != QLORA_OK && own && a->o.machine.backend == QLORA_BACKEND_ANY) {
        const char* count = strstr(why, "the driver reports"); // fewer devices than processes
        snprintf(a->ranks.no_gpu, sizeof a->ranks.no_gpu, "device %d: %.230s", (int)desc.device,
                 count != NULL ? count : message_text(why));
        desc.device = 0;
        desc.require_backend = QLORA_BACKEND_CPU;
        made = qlora_ctx_create(&desc, &a->ctx);
    }
    if (made != QLORA_OK) {
        return a->o.machine.device >= 0
                   ? error_set(a->error, "--device %lld: %s", (long long)a->o.machine.device,
                               message_text(why))
                   : error_set(a->error, "%s", message_text(why));
    }
    // The CPU computes FP8 products one by one, as a reference: only on request.
    if (a->o.model.mode == QLORA_MODE_FP8 && qlora_ctx_backend(a->ctx) == QLORA_BACKEND_CPU &&
        a->o.machine.backend != QLORA_BACKEND_CPU && !a->o.plan && !a->o.doctor) {
        return error_set(a->error,
                         "--mode fp8 needs a GPU of compute capability 9.0 (%s); use --mode f32 or "
                         "auto",
                         qlora_ctx_reason(a->ctx));
    }
    qlora_ctx_info info;
    if (qlora_ctx_query(a->ctx, &info) != QLORA_OK) {
        return error_set(a->error, "%s", qlora_last_error(a->ctx));
    }
    a->files = info.desc->files;
    mode_choose(a);
    return true;
}

// The library refuses this when the weights have been loaded.
static bool balance_check(app* a) {
    double factor = a->o.training.router_aux_loss;
    if (a->o.eval.only) {
        return true;
    }
    if (factor > 0.0 && (a->config.experts == 0 || a->config.family == QLORA_FAMILY_GLM4_MOE)) {
        return error_set(a->error, "--router-aux-loss is %g, but %s", factor,
                         a->config.experts == 0 ? "the model has no experts"
                                                : "the routers of this family have sigmoids, for "
                                                  "which there is no load-balancing loss");
    }
    if (a->config.router_loss && a->config.family != QLORA_FAMILY_GLM4_MOE &&
        !(factor > 0.0 || factor < 0.0)) {
        return error_set(a->error,
                         "config.json has output_router_logits, with which transformers adds a "
                         "load-balancing loss; give its router_aux_loss_coef with "
                         "--router-aux-loss, or --router-aux-loss -1 for none");
    }
    return true;
}

static bool model_describe(app* a) {
    const options* o = &a->o;
    qlora_model_desc* d = &a->model_desc;
    if (o->demo) {
        demo_config(&a->config);
        d->config = &a->config;
        d->weight_std = (float)DEMO_STD;
    } else {
        d->dir = o->model.path;
        d->rope_scale = o->model.rope_scale;
        if (!lib(a, qlora_config_read(a->ctx, o->model.path, &a->config), "--model") ||
            (o->model.rope_scale != NULL &&
             !lib(a, qlora_config_scale(a->ctx, o->model.rope_scale, &a->config), "--model"))) {
            return false;
        }
        a->o.adapter.experts = a->config.experts > 0;
    }
    if (!balance_check(a)) {
        return false;
    }
    d->seed = (uint64_t)o->training.seed;
    d->base = (qlora_base_format)o->model.base;
    d->head = (qlora_head_format)o->model.head;
    d->mode = o->model.mode == MODE_TF32 ? QLORA_MODE_F32 : (qlora_mode)o->model.mode;
    d->adapter = o->adapter.from;
    d->expert_layout = (qlora_expert_layout)o->adapter.expert_layout;
    d->rank = (int32_t)o->adapter.rank;
    d->alpha = (float)o->adapter.alpha;
    d->rslora = o->adapter.rslora;
    d->dropout = (float)o->adapter.dropout;
    d->targets = (uint32_t)o->adapter.targets;
    d->train_norms = o->adapter.train_norms;
    d->dora = o->adapter.dora;
    d->save_modules =
        (uint32_t)o->adapter.save_modules; // none, embed, head, both: the bits of qlora_save
    d->token_rows = a->token_rows;
    d->token_row_count = token_rows_read(o->adapter.train_tokens, a->token_rows, MAX_TOKEN_ROWS);
    if (!new_tokens_open(a)) {
        return false;
    }
    if (o->eval.only) {
        d->purpose = QLORA_PURPOSE_EVALUATE;
        d->rank = o->adapter.from != NULL ? d->rank : -1;
    }
    d->progress = load_progress;
    d->progress_user = a;
    return true;
}

static void train_describe(app* a) {
    const options* o = &a->o;
    qlora_model_desc* m = &a->model_desc;
    m->tokens = o->training.tokens;
    m->max_length = o->data.length;
    int64_t least = (int64_t)sample_texts(a); // of one micro-batch
    m->max_sequences = o->training.tokens / 8 > least ? o->training.tokens / 8 : least;
    m->optimizer = (qlora_optimizer)o->optimizer.kind;
    m->recompute = (qlora_choice)o->machine.recompute;
    m->cache = (qlora_choice)o->machine.cache;
    m->offload = (qlora_choice)o->machine.offload;
    m->tile = o->machine.tile;
    m->accumulate = o->training.accumulate;
    m->keep_quantised = o->model.keep_quantised && a->ranks.rank == 0;
    m->quantised_dir = o->model.quantised_dir;
    m->generate_tokens =
        o->sampling.prompt != NULL ? (o->data.length < 160 ? o->data.length : 160) : 0;
    qlora_train_desc* d = &a->train_desc;
    d->lr = o->optimizer.lr > 0.0 ? o->optimizer.lr : -1.0;
    d->beta2 = o->optimizer.beta2 > 0.0 ? o->optimizer.beta2
                                        : 1e-300; // 0 stands for the default; this computes as 0
    d->weight_decay = o->optimizer.weight_decay;
    d->max_norm = o->optimizer.max_norm > 0.0 ? o->optimizer.max_norm : -1.0;
    d->schedule = (qlora_schedule)o->optimizer.schedule;
    d->seed = (uint64_t)o->training.seed;
    d->method = method_of(o->method.kind)->method;
    d->beta = o->method.beta;
    d->label_smoothing = o->method.label_smoothing;
    d->sft_alpha = o->method.sft_alpha;
    d->desirable_weight = o->method.desirable_weight;
    d->undesirable_weight = o->method.undesirable_weight;
    d->loraplus_ratio = o->optimizer.loraplus_ratio;
    memset(d->lr_factors, 0, sizeof d->lr_factors);
    (void)lr_factors_read(o->optimizer.lr_factors, d->lr_factors); // it was checked
    d->neftune = o->training.neftune;
    d->router_aux_loss = o->training.router_aux_loss;
}

// The length that --length max has chosen for the run in --out; false if there is no such run.
static bool length_of_run(app* a) {
    options then;
    bool found = run_options(a, &then) && then.data.length > 1 && then.training.tokens > 1;
    if (found) {
        a->o.data.length = then.data.length;
        a->o.training.tokens = then.training.tokens;
    }
    return found;
}

// The limit of pinned host memory; 0 = the library's. Processes on one machine plan before any of
// them has taken its memory, so each of them may have its share.
static uint64_t host_budget(const app* a) {
    qlora_ctx_info info;
    uint64_t budget = (uint64_t)a->o.machine.host_budget;
    bool shared = a->ranks.world > 1 && a->ranks.local_world > 1;
    if (budget > 0 || !shared || qlora_ctx_backend(a->ctx) == QLORA_BACKEND_CPU ||
        qlora_ctx_query(a->ctx, &info) != QLORA_OK || info.memory.host_free == 0) {
        return budget;
    }
    budget = (info.memory.host_free - info.memory.host_free / 4) / (uint64_t)a->ranks.local_world;
    return budget > 0 ? budget : 1;
}

// --length max: the longest sample that fits, found by planning. A micro-batch has one sample, or
// what --tokens says. The answers to sample prompts need the room of one more.
static qlora_result length_try(app* a, int64_t length, int64_t tokens) {
    options* o = &a->o;
    qlora_plan_desc budget;
    qlora_plan plan;
    memset(&budget, 0, sizeof budget);
    budget.bytes = (uint64_t)o->machine.memory;
    budget.host_bytes = host_budget(a);
    o->data.length = length;
    o->training.tokens = tokens;
    train_describe(a);
    if (samples_wanted(o) && a->model_desc.generate_tokens < length) {
        a->model_desc.generate_tokens = length;
    }
    return qlora_plan_make(a->ctx, &a->model_desc, &budget, &plan);
}

static bool length_longest(app* a, int64_t most) {
    options* o = &a->o;
    if (length_of_run(a)) {
        return true;
    }
    if (a->ranks.world > 1 && o->machine.memory <= 0) {
        return error_set(a->error, "--length max needs --memory with several processes, so that "
                                   "all of them choose the same length");
    }
    bool offloads =
        o->machine.offload != QLORA_CHOICE_OFF && qlora_ctx_backend(a->ctx) != QLORA_BACKEND_CPU;
    if (a->ranks.world > 1 && offloads && o->machine.host_budget <= 0) {
        return error_set(a->error, "--length max needs --host-budget or --offload off with several "
                                   "processes, so that all of them choose the same length");
    }
    int64_t texts = (int64_t)sample_texts(a);
    int64_t given = o->training.tokens;
    int64_t room = (given != 0 ? given : (int64_t)1 << 24) / texts;
    int64_t low = 1; // fits, or is not tried
    int64_t high = most < room ? most : room;
    while (low < high) {
        int64_t length = low + (high - low + 1) / 2;
        qlora_result result = length_try(a, length, given != 0 ? given : texts * length);
        if (result == QLORA_OK) {
            low = length;
        } else if (result == QLORA_ERR_DEVICE_MEMORY || result == QLORA_ERR_MEMORY) {
            high = length - 1;
        } else {
            return lib(a, result, "planning the memory");
        }
    }
    low = low > 2 ? low : 2;
    return lib(a, length_try(a, low, given != 0 ? given : texts * low), "planning the memory");
}

static bool lengths_choose(app* a) {
    options* o = &a->o;
    int64_t most = a->config.max_positions > 0 ? a->config.max_positions : INT64_MAX;
    if (o->data.length == OPTION_MAX) {
        return length_longest(a, most);
    }
    if (o->data.length == 0) {
        o->data.length =
            o->training.tokens != 0 && o->training.tokens < 1024 ? o->training.tokens : 1024;
        o->data.length = o->data.length < most ? o->data.length : most;
    }
    if (o->data.length > most) {
        return error_set(a->error,
                         "--length (%lld) must not exceed the model's limit of %lld tokens%s",
                         (long long)o->data.length, (long long)most,
                         o->model.rope_scale == NULL && a->config.rope.type == QLORA_ROPE_DEFAULT
                             ? "; --rope-scale extends it"
                             : "");
    }
    if (o->training.tokens == 0) {
        int64_t least = (int64_t)sample_texts(a) * o->data.length;
        o->training.tokens = least > 4096 ? least : 4096;
    }
    return true;
}

// Names a limit below 0.1 GiB, and what is needed, in MiB: the library's GiB would be 0.00.
static void memory_small(app* a) {
    qlora_plan_desc any;
    qlora_plan plan;
    char need[32];
    char have[32];
    qlora_model_desc desc = a->model_desc;
    memset(&any, 0, sizeof any);
    any.bytes = UINT64_MAX / 2;
    desc.recompute = desc.recompute == QLORA_CHOICE_AUTO ? QLORA_CHOICE_ON : desc.recompute;
    desc.cache = desc.cache == QLORA_CHOICE_AUTO ? QLORA_CHOICE_OFF : desc.cache;
    if (a->o.machine.memory > 0 && a->o.machine.memory < 107374182 &&
        qlora_plan_make(a->ctx, &desc, &any, &plan) == QLORA_OK) {
        error_set(a->error, "not enough memory: the model needs %s, but --memory is %s",
                  short_bytes(plan.total + plan.context, need),
                  short_bytes((uint64_t)a->o.machine.memory, have));
    }
}

// Looks for settings that fit by planning them: only what was tried is advised.
static void memory_advise(app* a, const qlora_plan_desc* budget) {
    char why[1024];
    qlora_model_desc desc = a->model_desc;
    qlora_plan plan;
    snprintf(why, sizeof why, "%.700s", a->error);
    char* remedy = strstr(why, "; lower "); // the library's, in its own words and not tried
    if (remedy != NULL) {
        *remedy = '\0';
    }
    for (int64_t tokens = a->o.training.tokens; tokens >= 16; tokens /= 2) {
        desc.tokens = tokens;
        desc.max_length = a->o.data.length < tokens ? a->o.data.length : tokens;
        desc.max_sequences = tokens / 8;
        desc.recompute = QLORA_CHOICE_ON;
        desc.cache = QLORA_CHOICE_OFF;
        desc.generate_tokens = a->model_desc.generate_tokens < desc.max_length
                                   ? a->model_desc.generate_tokens
                                   : desc.max_length;
        if (qlora_plan_make(a->ctx, &desc, budget, &plan) == QLORA_OK) {
            error_set(
                a->error,
                "%s; it would fit with --tokens %lld --length %lld --recompute on --cache off", why,
                (long long)tokens, (long long)desc.max_length);
            return;
        }
    }
    error_set(a->error, "%s; it would not fit with --tokens 16 --recompute on --cache off either",
              why);
}

static bool plan_make(app* a) {
    qlora_plan_desc budget;
    memset(&budget, 0, sizeof budget);
    budget.bytes = (uint64_t)a->o.machine.memory;
    budget.host_bytes = host_budget(a);
    a->train_desc.total_steps = a->progress.total_steps;
    a->train_desc.warmup_steps = a->o.optimizer.warmup >= 0
                                     ? a->o.optimizer.warmup
                                     : (a->progress.total_steps * 3 + 99) / 100;
    qlora_result result = qlora_plan_make(a->ctx, &a->model_desc, &budget, &a->plan);
    bool memory = result == QLORA_ERR_DEVICE_MEMORY;
    if (!lib(a, result, memory ? "not enough memory" : "planning the memory")) {
        if (memory) {
            memory_small(a);
            memory_advise(a, &budget);
        }
        return false;
    }
    return true;
}

// The prompt and at least one new token must fit into the memory planned for generating.
static bool prompt_check(app* a) {
    qlora_text_ids ids;
    memset(&ids, 0, sizeof ids);
    if (a->o.sampling.prompt == NULL || a->tok == NULL) {
        return true;
    }
    bool ok = qlora_text_encode(a->tok, a->o.sampling.prompt, strlen(a->o.sampling.prompt),
                                QLORA_TEXT_BOS, &ids) == QLORA_OK ||
              text_fail(a, "--prompt: ");
    long long limit = (long long)a->model_desc.generate_tokens - 1;
    ok =
        ok && ((long long)ids.count <= limit ||
               error_set(a->error, "--prompt has %zu tokens; the limit is %lld", ids.count, limit));
    qlora_text_ids_free(a->text, &ids);
    return ok;
}

// An adapter of --adapter that was trained on other weights has another loss here.
static void base_note(app* a) {
    qlora_model_info info;
    if (a->o.adapter.from == NULL || qlora_model_query(a->model, &info) != QLORA_OK ||
        info.trained_base[0] == '\0') {
        return;
    }
    say(a,
        "note: %s was trained on a base in %s and is used on one in %s, where its losses are "
        "others; --base %s has those of the training\n",
        a->o.adapter.from, info.trained_base, info.base, info.trained_base);
}

// What the options do that may not be expected is said once.
static void notes_print(app* a) {
    const options* o = &a->o;
    if (o->adapter.from != NULL && a->norms_found) {
        say(a, "note: %s contains trained norms; they are loaded%s\n", o->adapter.from,
            o->eval.only ? "" : " and trained further");
    }
    if (o->doctor && o->plan) {
        say(a, "note: --plan is ignored beside --doctor\n");
    }
    if (o->doctor || o->plan || o->eval.only) {
        return;
    }
    if (a->steps_and_epochs) {
        say(a, "note: --steps %lld overrides --epochs %g\n", (long long)o->training.steps,
            o->training.epochs);
    }
    if (a->parts.replaced != NULL) {
        say(a,
            "note: the options of the run in --config changed on the way; --%s is used from the "
            "first step\n",
            a->parts.replaced);
    }
    if (o->optimizer.max_norm == 0.0) {
        say(a, "note: --max-norm 0: gradients are not clipped\n");
    }
    if (o->optimizer.warmup >= a->progress.total_steps && o->optimizer.lr > 0.0) {
        say(a,
            "note: the warm-up of %lld steps is at least as long as the training; the learning "
            "rate does not reach %g\n",
            (long long)o->optimizer.warmup, o->optimizer.lr);
    }
}

// Data for --eval-only: everything is evaluated.
static bool samples_evaluate(app* a) {
    const option_texts* texts =
        a->o.data.eval_files.count > 0 ? &a->o.data.eval_files : &a->o.data.files;
    return files_take(a, texts, false, &a->data.inputs, &a->data.eval, &a->data.eval_counted);
}

static bool data_prepare(app* a) {
    if (a->o.demo && !demo_tokenizer(a)) {
        return false;
    }
    if (a->o.data.files.count == 0 && a->o.data.eval_files.count == 0 && !a->o.demo) {
        return true;
    }
    if (!tokenizer_open(a) || (a->o.demo && !demo_data(a))) {
        return false;
    }
    if (a->o.eval.only) {
        return samples_evaluate(a);
    }
    if (!samples_open(a)) {
        return false;
    }
    if (a->data.eval.count == 0 && (a->o.eval.keep_best || a->o.eval.patience > 0)) {
        return error_set(a->error, "--%s needs held-out samples; see --eval",
                         a->o.eval.keep_best ? "keep-best" : "patience");
    }
    if (method_of(a->o.method.kind)->mismatched &&
        (a->data.train.count == 1 || a->data.eval.count == 1)) {
        return error_set(a->error,
                         "there is 1 sample to %s; --method kto needs at least 2, because it "
                         "mismatches their prompts and answers",
                         a->data.train.count == 1 ? "train on" : "evaluate");
    }
    return a->data.train.count == 0 || total_steps_find(a);
}

// Does everything that can fail before the model's weights are loaded. The output folder comes
// first: a run that cannot be resumed is refused before its data is read.
static bool prepare(app* a) {
    bool look = a->o.doctor || a->o.plan || a->o.eval.only;
    if (!context_open(a)) {
        return false;
    }
    bool ok = model_describe(a) && lengths_choose(a);
    if (ok) {
        train_describe(a);
    }
    if (!together(a, ok && (look || settings_check(a))) || !ranks_connect(a) || !ranks_join(a)) {
        return false;
    }
    ok = data_prepare(a) && prompt_check(a) && prompts_open(a) && (a->o.doctor || plan_make(a));
    return together(a, ok) && ranks_plan(a);
}

static void resumed_print(app* a) {
    if (a->progress.step > 0) {
        say(a, "resumed after step %lld of %lld%s\n", (long long)a->progress.step,
            (long long)a->progress.total_steps,
            a->progress.step < a->progress.total_steps
                ? ""
                : "; this run is finished, and a higher --steps or --epochs extends it");
    }
}

static void backend_print(app* a) {
    char why[512];
    say(a, "%s, %s\n", backend_reason(a, why), mode_name(&a->o, &a->plan));
    counts_print(a);
    notes_print(a);
}

static bool model_start(app* a) {
    char memory[32];
    char trained[256];
    if (a->o.demo && (!demo_model_write(a) || !plan_make(a))) {
        return false;
    }
    a->model_desc.plan = &a->plan;
    a->train_desc.comm = a->ranks.world <= 1              ? NULL
                         : a->ranks.gpus.exchange != NULL ? &a->ranks.gpus
                                                          : &a->ranks.comm;
    bool opened = lib(a, qlora_model_open(a->ctx, &a->model_desc, &a->model), "loading the model");
    first_rank_busy(a, a->o.model.keep_quantised);
    opened = together(a, opened);
    first_rank_busy(a, false);
    if (!opened ||
        !lib(a, qlora_trainer_create(a->model, &a->train_desc, &a->trainer),
             "preparing the training") ||
        !together(a, checkpoint_load(a)) || !ranks_place(a) ||
        !together(a, packs_plain(a, &a->data.eval, &a->progress.eval_packs) && out_begin(a)) ||
        !together(a, references_make(a))) {
        return false;
    }
    peak_find(a);
    say(a, "model: %lld layers, hidden size %lld, %s, %s\n", (long long)a->config.layers,
        (long long)a->config.hidden, trained_text(&a->plan, trained),
        short_bytes(a->plan.total + a->plan.context, memory));
    base_note(a);
    resumed_print(a);
    return a->progress.step == a->progress.total_steps || position_seek(a, a->progress.step);
}

// Evaluates an adapter, or the model itself, without training.
static bool evaluate_only(app* a) {
    qlora_eval_info all;
    memset(&all, 0, sizeof all);
    backend_print(a);
    a->model_desc.plan = &a->plan;
    if (!lib(a, qlora_model_open(a->ctx, &a->model_desc, &a->model), "loading the model") ||
        !packs_plain(a, &a->data.eval, &a->progress.eval_packs)) {
        return false;
    }
    base_note(a);
    eval_place place = {"evaluating", 0, a->progress.eval_packs.count};
    (void)load_progress(a, place.what, 0, place.count);
    for (; place.at < place.count; place.at++) {
        qlora_eval_info info;
        if (!batches_fill(a, &a->data.eval, &a->progress.eval_packs, place.at, place.at + 1,
                          NULL) ||
            !eval_batch(a, &place, a->batches.data, &info, NULL, &a->stopped) || a->stopped) {
            return false;
        }
        all.loss += info.loss;
        all.labels += info.labels;
        all.tokens += info.tokens;
    }
    double loss = all.loss / all.labels;
    screen_clear(&a->screen);
    printf(a->o.json ? "{\"loss\": %.9g, \"perplexity\": %.9g, \"samples\": %zu, \"labels\": "
                       "%.0f, \"tokens\": %lld}\n"
                     : "loss %.4f, perplexity %.4g over %zu samples, %.0f labels, %lld tokens\n",
           loss, exp(loss), a->data.eval.count, all.labels, (long long)all.tokens);
    return true;
}

static bool train(app* a) {
    double start = seconds_now();
    backend_print(a);
    if (!model_start(a)) {
        return false;
    }
    char text[32];
    say(a, "ready in %s\n", short_time(seconds_now() - start, text));
    estimate_tell(a);
    bool fresh = a->progress.step == 0;
    bool ok = (!fresh || a->ranks.rank > 0 || prompt_show(a, "before")) && train_loop(a);
    if (a->progress.step == 0) {
        if (ok) {
            say(a, "stopped before the first step was complete; there is nothing to save\n");
        }
        return ok;
    }
    if (!ok) {
        return false;
    }
    if (part_done(a)) {
        say(a, "\nafter step %lld, the options change as those of the run in --config did\n\n",
            (long long)a->progress.step);
        return true;
    }
    if (a->progress.step < a->progress.total_steps && !a->eval_cut && patience_over(a)) {
        say(a, "\nstopped early: the held-out loss has not fallen for %lld evaluations\n",
            (long long)a->o.eval.patience);
    } else if (a->progress.step < a->progress.total_steps || a->eval_cut) {
        say(a,
            "\nstopped after step %lld of %lld and saved to %s; run the same command to resume\n",
            (long long)a->progress.step, (long long)a->progress.total_steps, a->o.output.folder);
        return true;
    }
    if (a->ranks.rank == 0) {
        ok = prompt_show(a, "after");
        answers_print(a);
    }
    summary_print(a);
    return ok;
}

#endif
