// train.h - the run: steps, evaluation, checkpoints.
#ifndef FINETUNE_TRAIN_H
#define FINETUNE_TRAIN_H

// Dense 16-bit tensor peak with fp32 accumulation from the vendor's data sheets, in TFLOP/s.
static const struct {
    const char* name;
    double peak;
} peak_table[] = {
    {"H100 PCIe", 756.0}, {"H100 NVL", 835.0}, {"H200", 989.0},    {"GH200", 989.0},
    {"H100", 989.0},      {"H800", 989.0},     {"H20", 148.0},     {"B200", 2250.0},
    {"A100", 312.0},      {"A800", 312.0},     {"A40", 149.7},     {"A10", 125.0},
    {"L40S", 362.0},      {"L40", 181.0},      {"L4", 121.0},      {"RTX A6000", 154.8},
    {"RTX 5090", 209.5},  {"RTX 4090", 165.2}, {"RTX 4080", 97.5}, {"RTX 3090", 71.0},
    {"RTX 3080", 59.5},
};

static void peak_find(app* a) {
    char text[2048];
    qlora_describe(a->ctx, text, sizeof text);
    const char* device = strstr(text, "device:");
    if (device == NULL || a->plan.mode != QLORA_MODE_BF16) {
        return;
    }
    for (size_t i = 0; i < sizeof peak_table / sizeof peak_table[0]; i++) {
        if (strstr(device, peak_table[i].name) != NULL) {
            a->progress.peak_flop = peak_table[i].peak * 1e12;
            return;
        }
    }
}

// Useful work: what a step computes without what it computes once more.
static double pack_flop(const app* a, const samples* s, const packs* p, size_t pack) {
    double flop = 0.0;
    for (size_t i = p->starts[pack]; i < p->starts[pack + 1]; i++) {
        const sample* one = &s->data[p->order[i]];
        int32_t length = (int32_t)one->length;
        qlora_cost cost;
        qlora_plan_cost(&a->plan, &length, 1, (double)one->trained, &cost);
        flop += cost.flops;
    }
    return flop;
}

// All batches of a step, from a->progress.next_pack to `end`: those of mismatched texts come first,
// in an array of their own that the others are added to.
static bool step_batches(app* a, size_t end, const qlora_batch** out, int64_t* count) {
    size_t packed = end - a->progress.next_pack;
    if (!batches_fill(a, &a->data.train, &a->progress.now, a->progress.next_pack, end,
                      a->references.train)) {
        return false;
    }
    *out = a->batches.data;
    *count = (int64_t)packed;
    if (!method_of(a->o.method.kind)->mismatched) {
        return true;
    }
    size_t first = a->progress.now.starts[a->progress.next_pack];
    size_t texts = a->progress.now.starts[end] - first;
    size_t before = 0;
    if (!mismatched_fill(a, &a->data.train, a->progress.now.order + first, texts, &before)) {
        return false;
    }
    qlora_batch* all = (qlora_batch*)realloc(a->step_batches, (before + packed) * sizeof *all);
    if (all == NULL) {
        return error_set(a->error, "out of memory");
    }
    a->step_batches = all;
    memcpy(all, a->mismatched.data, before * sizeof *all);
    memcpy(all + before, a->batches.data, packed * sizeof *all);
    *out = all;
    *count = (int64_t)(before + packed);
    return true;
}

// Runs a step in slices, so that Ctrl-C is answered between two of them; the results are those of
// whole steps, bit for bit. An interrupted step is discarded and *cut set.
static bool step_slices(app* a, size_t end, bool* cut) {
    const qlora_batch* all = NULL;
    int64_t count = 0;
    bool done = false;
    if (!step_batches(a, end, &all, &count) ||
        !lib(a, qlora_train_begin(a->trainer, all, count), "training")) {
        return false;
    }
    while (!done) {
        if (stop_asked != 0 && a->ranks.world <= 1) { // several processes end with a whole step
            *cut = true;
            return lib(a, qlora_train_cancel(a->trainer), "stopping");
        }
        if (!lib(a, qlora_train_slice(a->trainer, SLICE_MS, &done), "training")) {
            return false;
        }
    }
    a->progress.next_pack = end;
    return true;
}

// The loss of a sequence depends on the whole step, or several processes divide it.
static bool step_is_one(const app* a) {
    return method_of(a->o.method.kind)->preferences || a->ranks.world > 1;
}

// Runs a step without waiting for the device between its micro-batches, where Ctrl-C can cut it
// short. `labels` is the sum over the whole step, so that every trained token has the same weight.
static bool step_whole(app* a, size_t end, int64_t labels, bool* cut) {
    if (step_is_one(a)) {
        const qlora_batch* all = NULL;
        int64_t count = 0;
        bool ok = step_batches(a, end, &all, &count) &&
                  lib(a, qlora_train_step(a->trainer, all, count, NULL), "training");
        a->progress.next_pack = end;
        return ok;
    }
    for (size_t pack = a->progress.next_pack; pack < end; pack++) {
        if (stop_asked != 0) {
            *cut = true;
            return lib(a, qlora_train_cancel(a->trainer), "stopping");
        }
        if (!batches_fill(a, &a->data.train, &a->progress.now, pack, pack + 1, NULL) ||
            !lib(a, qlora_train_micro(a->trainer, a->batches.data, (double)labels), "training")) {
            return false;
        }
    }
    a->progress.next_pack = end;
    return lib(a, qlora_train_update(a->trainer), "training");
}

// Seconds. Up to four micro-batches are queued on the device when Ctrl-C is noticed between them.
#define LONG_STEP 1.0
#define LONG_MICRO 0.5

// Whether a step can be interrupted within a micro-batch: on the CPU always. A GPU runs short ones
// whole, as graphs, and those that take long in slices, with the same bits; how long follows from
// the last step. At first it is not known, and several processes end with a whole step. `longest`
// is the work of the longest micro-batch.
static bool step_sliced(const app* a, double longest) {
    if (qlora_ctx_backend(a->ctx) == QLORA_BACKEND_CPU) {
        return true;
    }
    bool known = a->progress.last_flop > 0.0 && a->progress.last_seconds > 0.0;
    double work = step_is_one(a) ? a->progress.step_flop : longest;
    double limit = step_is_one(a) ? LONG_STEP : LONG_MICRO;
    return a->ranks.world <= 1 &&
           (!known || a->progress.last_seconds * (work / a->progress.last_flop) > limit);
}

// The next step, unless Ctrl-C cuts it short.
static bool step_train(app* a, qlora_train_info* info, bool* cut) {
    double start = seconds_now();
    *cut = false;
    if (a->progress.next_pack >= a->progress.now.count) {
        a->progress.epoch++;
        a->progress.next_pack = 0;
        if (!epoch_make(a, a->progress.epoch, &a->progress.now)) {
            return false;
        }
    }
    size_t end = step_end(a, &a->progress.now, a->progress.next_pack);
    int64_t labels = 0;
    double longest = 0.0;
    a->progress.step_flop = 0.0;
    for (size_t p = a->progress.next_pack; p < end; p++) {
        double flop = pack_flop(a, &a->data.train, &a->progress.now, p);
        labels += pack_labels(&a->data.train, &a->progress.now, p);
        a->progress.step_flop += flop;
        longest = fmax(longest, flop);
    }
    if (!(step_sliced(a, longest) ? step_slices(a, end, cut) : step_whole(a, end, labels, cut))) {
        return false;
    }
    if (*cut) {
        return true;
    }
    if (!lib(a, qlora_train_query(a->trainer, info), "training") ||
        !ranks_vote(a, seconds_now() - start, info->exchange_ms)) {
        return false;
    }
    // The first step also loads kernels, so its time says nothing about the next one.
    a->progress.last_seconds = a->progress.last_flop > 0.0 ? seconds_now() - start : 0.0;
    a->progress.last_flop = a->progress.step_flop;
    a->progress.skipped_in_row = info->last_skipped ? a->progress.skipped_in_row + 1 : 0;
    if (a->progress.skipped_in_row == 10) {
        a->ranks.agreed = true; // every process has the same gradients
        return error_set(
            a->error,
            "step %lld: ten consecutive non-finite gradients; try a lower --lr or --mode "
            "f32",
            (long long)info->step);
    }
    return true;
}

// accuracy NAN = there is none.
static void eval_record(app* a, double accuracy) {
    point p = point_none(a->progress.step);
    p.values[TRACE_EVAL_LOSS] = a->progress.last_eval;
    p.values[TRACE_EVAL_ACCURACY] = accuracy;
    log_eval(a, &p);
    events_point(a, &p);
    history_add(&a->history, &p);
}

static bool evaluate_preferences(app* a) {
    double accuracy = 0.0;
    bool ok = preference_evaluate(a, &a->progress.last_eval, &accuracy);
    a->eval_cut = !ok && a->stopped; // in all processes
    if (!ok && !a->eval_cut) {
        return false;
    }
    if (a->eval_cut) {
        a->ranks.agreed = false; // it is no failure
        stop_agree(a);
        return true;
    }
    a->progress.first_eval = a->progress.step == 0 ? a->progress.last_eval : a->progress.first_eval;
    say(a, "step %lld: held out %.4f, accuracy %.3f\n", (long long)a->progress.step,
        a->progress.last_eval, accuracy);
    eval_record(a, accuracy);
    return true;
}

// Computes the packs of this process, and takes those of the others; `all` has room for the packs
// of every process.
static bool evaluate_share(app* a, qlora_eval_info* all) {
    size_t count = a->progress.eval_packs.count;
    qlora_eval_info* mine = all + (size_t)a->ranks.rank * (count + 1);
    eval_place place = {"evaluating", 0, count};
    bool cut = false;
    (void)load_progress(a, place.what, 0, count);
    for (size_t p = (size_t)a->ranks.rank; p < count && !cut; p += (size_t)a->ranks.world) {
        place.at = p;
        if (!batches_fill(a, &a->data.eval, &a->progress.eval_packs, p, p + 1, NULL) ||
            !eval_batch(a, &place, a->batches.data, &mine[p], NULL, &cut)) {
            return false;
        }
    }
    mine[count].labels = cut ? 1.0 : 0.0;
    size_t bytes = (count + 1) * sizeof *mine;
    void* copy = take(a, 1, bytes);
    if (copy == NULL) {
        return false;
    }
    memcpy(copy, mine, bytes);
    bool ok = a->ranks.world <= 1 || gather(a, copy, bytes, all);
    free(copy);
    return ok;
}

// The loss of all held-out samples, divided between the processes and summed in the order of the
// packs. Ctrl-C cuts an evaluation short. It then has no result and is repeated when the run is
// resumed.
static bool evaluate_packs(app* a, double* loss, double* labels) {
    size_t count = a->progress.eval_packs.count;
    qlora_eval_info* all =
        (qlora_eval_info*)take(a, (size_t)a->ranks.world * (count + 1), sizeof *all);
    bool ok = all != NULL && evaluate_share(a, all);
    for (int32_t i = 0; i < a->ranks.world && ok; i++) {
        a->eval_cut = a->eval_cut || all[(size_t)i * (count + 1) + count].labels > 0.0;
    }
    for (size_t p = 0; p < count && ok; p++) {
        const qlora_eval_info* info = &all[p % (size_t)a->ranks.world * (count + 1) + p];
        *loss += info->loss;
        *labels += info->labels;
    }
    free(all);
    return ok;
}

static bool evaluate(app* a) {
    if (a->data.eval.count == 0) {
        return true;
    }
    if (method_of(a->o.method.kind)->preferences) {
        return evaluate_preferences(a);
    }
    double loss = 0.0;
    double labels = 0.0;
    if (!evaluate_packs(a, &loss, &labels)) {
        return false;
    }
    if (a->eval_cut) {
        stop_agree(a);
        return true;
    }
    a->progress.last_eval = labels > 0.0 ? loss / labels : (double)NAN;
    if (a->progress.step == 0) {
        a->progress.first_eval = a->progress.last_eval;
    }
    if (a->screen.live || a->progress.step == 0 || a->progress.step == a->progress.total_steps ||
        a->progress.total_steps <= 1000) {
        say(a, "step %lld: held out %.4f, ppl %.4g\n", (long long)a->progress.step,
            a->progress.last_eval, exp(a->progress.last_eval));
    }
    eval_record(a, (double)NAN);
    return true;
}

static bool checkpoint_save(app* a) {
    char path[PATH_SIZE];
    if (a->ranks.rank > 0) {
        return true;
    }
    position* p = (position*)take(a, 1, sizeof *p);
    if (p == NULL) {
        return false;
    }
    memcpy(p->magic, POSITION_MAGIC, 8);
    p->settings_hash = a->settings_hash;
    p->data_hash = a->data.data_hash;
    p->total_steps = a->progress.total_steps;
    p->seconds = a->progress.seconds;
    p->first_eval = a->progress.first_eval;
    p->first_loss = a->progress.first_loss;
    p->tokens = a->progress.tokens_seen;
    out_path(a, "checkpoint", path);
    bool ok = lib(a, qlora_checkpoint_save(a->trainer, path, p, sizeof *p), "saving a checkpoint");
    free(p);
    return ok;
}

static bool position_check(app* a, const position* p) {
    if (memcmp(p->magic, POSITION_MAGIC, 8) != 0) {
        return error_set(a->error,
                         "%s/checkpoint was saved by another version of finetune; use a different "
                         "--out, or --resume never to start over",
                         a->o.output.folder);
    }
    if (p->settings_hash != a->settings_hash) {
        return error_set(
            a->error,
            "%s/checkpoint was saved with different options; use a different --out, or "
            "--resume never to start over",
            a->o.output.folder);
    }
    if (p->data_hash != a->data.data_hash) {
        return error_set(
            a->error,
            "the data has changed since %s/checkpoint was saved: its samples, the template, the "
            "added tokens or the weight of a file; use a different --out, or --resume never to "
            "start over",
            a->o.output.folder);
    }
    return true;
}

// A run can be made longer. Making it shorter may be a mistake and needs --extend.
static bool steps_judge(app* a, int64_t done, int64_t before) {
    if (a->progress.total_steps < done) {
        return error_set(a->error,
                         "the run in %s has finished step %lld; %lld step%s too few to resume it",
                         a->o.output.folder, (long long)done, (long long)a->progress.total_steps,
                         a->progress.total_steps == 1 ? " is" : "s are");
    }
    if (a->progress.total_steps < before && !a->o.output.extend) {
        return error_set(a->error,
                         "the run in %s was to take %lld steps, this command %lld; use the same "
                         "number, a higher one, or --extend",
                         a->o.output.folder, (long long)before, (long long)a->progress.total_steps);
    }
    if (a->progress.total_steps != before) {
        say(a, "changed: %lld step%s instead of %lld\n", (long long)a->progress.total_steps,
            a->progress.total_steps == 1 ? "" : "s", (long long)before);
    }
    return true;
}

static bool checkpoint_load(app* a) {
    char path[PATH_SIZE];
    out_path(a, "checkpoint", path);
    if (!a->resuming) {
        return true;
    }
    position* p = (position*)take(a, 1, sizeof *p);
    if (p == NULL) {
        return false;
    }
    size_t size = sizeof *p;
    bool ok = lib(a, qlora_checkpoint_load(a->trainer, path, p, &size), "resuming");
    ok = ok && (size == sizeof *p || error_set(a->error, "%s was not saved by finetune", path));
    ok = ok && position_check(a, p);
    qlora_train_info info;
    ok = ok && lib(a, qlora_train_query(a->trainer, &info), "resuming") &&
         steps_judge(a, info.step, p->total_steps);
    if (ok) {
        a->progress.step = info.step;
        a->complete = p->total_steps == info.step;
        a->progress.seconds = p->seconds;
        a->progress.first_eval = p->first_eval;
        a->progress.first_loss = p->first_loss;
        a->progress.tokens_seen = p->tokens;
    }
    free(p);
    return ok;
}

// The adapter comes last: a folder without its config does not load, and one with it has the chat
// format that it was trained with.
static bool adapter_write(app* a, const char* path) {
    qlora_adapter_desc desc;
    char room[PATH_SIZE];
    if (a->ranks.rank > 0) {
        return true;
    }
    memset(&desc, 0, sizeof desc);
    desc.base_name = base_named(a, room);
    return tokenizer_save(a, path) &&
           lib(a, qlora_adapter_save(a->model, path, &desc), "saving the adapter") &&
           card_write(a, path);
}

// Nothing half written stays where there was nothing.
static bool adapter_put(app* a, const char* path) {
    char why[1024];
    bool exists = path_exists(path);
    bool ok = adapter_write(a, path);
    if (!ok && !exists) {
        memcpy(why, a->error, sizeof why);
        (void)files_remove(a, path);
        memcpy(a->error, why, sizeof why);
    }
    return ok;
}

static bool adapter_save(app* a) {
    char path[PATH_SIZE];
    if (a->ranks.rank > 0) {
        return true;
    }
    out_path(a, "adapter", path);
    bool ok = adapter_put(a, path);
    if (!ok) {
        complain(a);
    }
    out_path(a, "adapter.gguf", path);
    qlora_result result = qlora_adapter_save_gguf(a->model, path, NULL);
    if (result == QLORA_ERR_UNSUPPORTED) { // what llama.cpp's adapters cannot contain
        say(a, "note: no adapter.gguf: %s (merge --model %s --adapter %s/adapter --out DIR)\n",
            message_text(qlora_last_error(a->ctx)), a->model_desc.dir, a->o.output.folder);
        a->no_gguf = true;
        remove(path); // that of an earlier run
    } else if (!lib(a, result, "saving the adapter for llama.cpp")) {
        complain(a);
        ok = false;
    }
    return ok;
}

// Saves the adapter as it is now beside the run, where nothing removes it.
static bool snapshot_save(app* a) {
    char path[PATH_SIZE + 64];
    if (a->ranks.rank > 0) {
        return true;
    }
    out_path(a, "snapshots", path);
    int code = a->files.make_dir(path, a->files.user);
    if (code != 0) {
        return error_set(a->error, "cannot create %s: %s", path, strerror(code));
    }
    size_t used = strlen(path);
    snprintf(path + used, sizeof path - used, "/step-%lld", (long long)a->progress.step);
    bool ok = adapter_put(a, path);
    path[used] = '\0';
    (void)folder_remove(path); // only if it is empty
    return ok;
}

static int64_t interval(const app* a, int64_t wished) {
    int64_t tenth = (a->progress.total_steps + 9) / 10;
    return wished > 0 ? wished : tenth > 1 ? tenth : 1;
}

static void step_record(app* a, const qlora_train_info* info, double seconds) {
    point p = point_none(info->step);
    p.values[TRACE_LOSS] = info->loss;
    p.values[TRACE_GRAD_NORM] = (double)info->grad_norm;
    p.values[TRACE_LR] = info->lr;
    p.values[TRACE_SPEED] = seconds > 0.0 ? (double)info->tokens / seconds : 0.0;
    if (a->progress.now.count > 0) {
        a->progress.epochs_done = (double)a->progress.epoch +
                                  (double)a->progress.next_pack / (double)a->progress.now.count;
        p.values[TRACE_EPOCH] = a->progress.epochs_done;
    }
    p.values[TRACE_MEMORY] = (double)memory_used(a);
    if (method_of(a->o.method.kind)->preferences) {
        p.values[TRACE_CHOSEN] = info->rewards_chosen;
        p.values[TRACE_REJECTED] = info->rewards_rejected;
        p.values[TRACE_MARGINS] = info->margins;
        p.values[TRACE_ACCURACY] = info->accuracy;
    }
    if (trace_measured(a, TRACE_ROUTER_AUX_LOSS)) {
        p.values[TRACE_ROUTER_AUX_LOSS] = info->router_aux_loss;
    }
    if (trace_measured(a, TRACE_LOAD_LEAST)) {
        p.values[TRACE_LOAD_LEAST] = info->load_least;
        p.values[TRACE_LOAD_MOST] = info->load_most;
        p.values[TRACE_LOAD_ENTROPY] = info->load_entropy;
    }
    a->progress.pace =
        a->progress.pace > 0.0 ? a->progress.pace + 0.1 * (seconds - a->progress.pace) : seconds;
    a->progress.step = info->step;
    a->progress.seconds += seconds;
    a->progress.last_loss = info->loss;
    a->progress.first_loss = info->step == 1 ? info->loss : a->progress.first_loss;
    a->progress.tokens_seen += (uint64_t)info->tokens;
    if (info->last_skipped) {
        say(a, "step %lld: skipped because of a non-finite gradient\n", (long long)info->step);
    }
    a->screen.done = a->progress.step == a->progress.total_steps;
    progress_draw(a, &p);
    log_step(a, &p, info);
    events_point(a, &p);
    history_add(&a->history, &p);
    picture_write(a, false);
}

// Saves each result independently, the checkpoint first, so that one failure does not lose the
// others.
static bool results_try(app* a) {
    bool saved = checkpoint_save(a);
    if (!saved) {
        complain(a);
    }
    return adapter_save(a) && saved;
}

// Saves the results where it can: they exist only in memory.
static bool results_save(app* a) {
    a->folder.files_made = false; // from here on there may be results to keep
    a->folder.out_made = false;
    bool failed = a->failed;
    bool ok = results_try(a);
    if (!ok && a->watched) {
        ok = rescue_wait(a, results_try);
        a->failed = ok ? failed : a->failed;
        a->watched = ok;
    }
    if (!ok) {
        rescue_save(a, results_try);
    }
    if (a->folder.log.rest.count > 0 && !a->folder.log.torn) {
        bear(a, TOLD_LOG, growing_flush(a, &a->folder.log));
    }
    if (a->folder.events.rest.count > 0 && !a->folder.events.torn) {
        bear(a, TOLD_EVENTS, growing_flush(a, &a->folder.events));
    }
    picture_write(a, true);
    if (a->o.output.csv && !csv_write(a)) {
        complain(a);
        ok = false;
    }
    return ok;
}

static bool evaluation_due(const app* a) {
    return a->progress.step == 0 || a->progress.step == a->progress.total_steps ||
           a->progress.step % interval(a, a->o.eval.every) == 0;
}

// Evaluates the model and answers the prompts, if this step is one for that. What was interrupted,
// or is not in the log, is made up for.
static bool evaluate_due(app* a) {
    if (!evaluation_due(a)) {
        return true;
    }
    bool ok = a->history.eval_step == a->progress.step || evaluate(a);
    bool ask = a->ranks.rank == 0 && a->prompts.count > 0 && a->prompts.step != a->progress.step;
    if (ok && !a->eval_cut && ask) {
        prompts_answer(a);
        if (a->prompts.step == a->progress.step) {
            events_samples(a, a->progress.step);
        }
    }
    // Only rank 0 makes samples. If Ctrl-C cut them short, nobody goes on to the next step, after
    // which they could not be made up for.
    return ok && (a->prompts.count == 0 || (first_rank_wait(a) && ranks_vote(a, 0.0, 0.0)));
}

// Notes whose adapter is in best/, for a session that goes on. It comes after the adapter: a run
// that is killed in between takes these steps again.
static bool best_note(app* a) {
    char loss[32];
    char text[96];
    real_text(a->progress.last_eval, loss);
    snprintf(text, sizeof text, "step %lld\nheld-out loss %s\n", (long long)a->progress.step, loss);
    return file_replace(a, "best/" BEST_NAME, text, strlen(text));
}

// Saves the adapter if the evaluation of this step is better than the one in best/.
static void best_save(app* a) {
    history* h = &a->history;
    bool lower = h->kept_step == 0 || a->progress.last_eval < h->kept_loss;
    if (a->o.eval.keep_best && a->progress.step > 0 && h->eval_step == a->progress.step && lower &&
        h->kept_step != a->progress.step) {
        char path[PATH_SIZE];
        out_path(a, "best", path);
        bool ok = adapter_put(a, path) && best_note(a);
        bear(a, TOLD_SNAPSHOT, ok);
        h->kept_step = ok ? a->progress.step : h->kept_step;
        h->kept_loss = ok ? a->progress.last_eval : h->kept_loss;
        a->folder.best_lost = !ok;
    }
}

static bool train_loop(app* a) {
    int64_t save_every = interval(a, a->o.output.save_every);
    stop_training = 1;
    a->screen.done = a->progress.step == a->progress.total_steps;
    bool ok = first_rank_wait(a) && evaluate_due(a); // it has shown the prompt
    bool cut = false;
    best_save(a); // of an evaluation that was cut short, or made before --keep-best was given
    ok = ok && first_rank_wait(a) && ranks_vote(a, 0.0, 0.0);
    while (ok && !cut && a->progress.step < a->progress.total_steps && !stop_now(a) &&
           !patience_over(a) && !part_over(a)) {
        qlora_train_info info;
        double start = seconds_now();
        ok = step_train(a, &info, &cut);
        if (ok && !cut) {
            step_record(a, &info, seconds_now() - start);
            ok = evaluate_due(a);
            best_save(a);
        }
        bool saves =
            a->progress.step < a->progress.total_steps && a->progress.step % save_every == 0;
        bool keeps =
            a->o.output.snapshot_every > 0 && a->progress.step % a->o.output.snapshot_every == 0;
        if (ok && !cut && saves) {
            bear(a, TOLD_CHECKPOINT, checkpoint_save(a));
        }
        if (ok && !cut && keeps) {
            bear(a, TOLD_SNAPSHOT, snapshot_save(a));
        }
        ok = ok && (cut || !(saves || keeps || evaluation_due(a)) || first_rank_wait(a));
    }
    stop_training = 0;
    if (a->progress.step == 0) {
        a->ranks.agreed = a->ranks.agreed || ok; // all end here
        return ok;
    }
    // After a lost rank, the parameters may not be those of a whole step.
    if (!ok && a->ranks.gpus.exchange != NULL && !a->ranks.agreed) {
        complain(a);
        picture_write(a, true);
        return false;
    }
    if (!ok) { // the steps so far are complete and are saved anyway
        complain(a);
        (void)qlora_train_cancel(a->trainer);
    }
    bool saved = results_save(a);
    bool agreed = a->ranks.agreed;
    first_rank_busy(a, true);
    saved = (ok || agreed) && together(a, saved); // nobody leaves before rank 0 has saved
    first_rank_busy(a, false);
    // All have come to the end, also if a failure that did not stop the training was reported.
    a->ranks.agreed = a->ranks.agreed || agreed || (ok && saved);
    return ok && saved;
}

#endif
