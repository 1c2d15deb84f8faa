// tensorboard.h - --tensorboard: the log as a file of events that TensorBoard reads.
#ifndef FINETUNE_TENSORBOARD_H
#define FINETUNE_TENSORBOARD_H

#define EVENTS_NAME "events.out.tfevents.finetune" // TensorBoard looks for "tfevents"
#define EVENTS_OWNER "tensorboard.txt"             // in OUT: the folder of its events

static double wall_time(void) {
    return (double)time(NULL);
}

// Cuts the file of an earlier session to the steps that are not taken again.
static bool events_trim(app* a) {
    FILE* file = fopen(a->folder.events.path, "rb");
    if (file == NULL) {
        return errno == ENOENT || error_set(a->error, "--tensorboard: cannot read %.800s: %s",
                                            a->folder.events.path, strerror(errno));
    }
    long kept = events_kept(file, a->progress.step);
    fclose(file);
    return file_cut(a->folder.events.path, kept) == 0 ||
           error_set(a->error, "--tensorboard: cannot write %.800s: %s", a->folder.events.path,
                     strerror(errno));
}

// Whether the events in --tensorboard are those of the run in --out, which has its name.
static bool events_ours(app* a) {
    char path[PATH_SIZE];
    blob text;
    memset(&text, 0, sizeof text);
    out_path(a, EVENTS_OWNER, path);
    bool ours = blob_read_path(&text, path) == 0 && text.count == strlen(a->o.output.tensorboard) &&
                memcmp(text.data, a->o.output.tensorboard, text.count) == 0;
    blob_free(&text);
    return ours;
}

// The options as in settings.txt, for the plugin `hparams`.
static bool events_settings(app* a, blob* out) {
    blob text;
    blob info;
    blob summary;
    memset(&text, 0, sizeof text);
    memset(&info, 0, sizeof info);
    memset(&summary, 0, sizeof summary);
    bool ok = settings_write(&a->set, SETTINGS_ALL, &text) && blob_add(&text, "", 1);
    for (char* line = text.data; ok && *line != '\0';) {
        char* end = strchr(line, '\n');
        *end = '\0';
        size_t name = strcspn(line, " ");
        const char* value = line[name] != '\0' ? line + name + 1 : "yes";
        line[name > 0 && line[name - 1] == ':' ? name - 1 : name] = '\0';
        ok = event_hparam(&info, line, value);
        line = end + 1;
    }
    ok = ok && event_hparams(&summary, &info) && event_summary(out, wall_time(), 0, &summary);
    blob_free(&text);
    blob_free(&info);
    blob_free(&summary);
    return ok;
}

// Opens the file of events. Another run's is not overwritten: --out was empty, so a file that
// exists cannot belong to this run.
static bool events_open(app* a) {
    growing* g = &a->folder.events;
    if (a->o.output.tensorboard == NULL) {
        return true;
    }
    if (strlen(a->o.output.tensorboard) + 64 > PATH_SIZE) {
        return error_set(a->error, "--tensorboard: the path is longer than %d characters",
                         PATH_SIZE - 64);
    }
    snprintf(g->path, sizeof g->path, "%s/" EVENTS_NAME, a->o.output.tensorboard);
    a->folder.events_parents = folder_parents(a->o.output.tensorboard);
    a->folder.events_folder_made = !path_exists(a->o.output.tensorboard);
    int code = a->files.make_dir(a->o.output.tensorboard, a->files.user);
    if (code != 0) {
        return error_set(a->error, "--tensorboard: cannot create %s: %s", a->o.output.tensorboard,
                         strerror(code));
    }
    bool exists = path_exists(g->path);
    if (exists && !events_ours(a) && a->o.output.resume != RESUME_NEVER) {
        return error_set(a->error,
                         "--tensorboard %s has the events of another run; use a different folder, "
                         "or --resume never to replace them",
                         a->o.output.tensorboard);
    }
    a->folder.events_made = !exists;
    if (!a->resuming && exists && remove(g->path) != 0) {
        return error_set(a->error, "--tensorboard: cannot replace %.800s: %s", g->path,
                         strerror(errno));
    }
    if (!file_replace(a, EVENTS_OWNER, a->o.output.tensorboard, strlen(a->o.output.tensorboard)) ||
        !events_trim(a) || !growing_flush(a, g)) {
        return false;
    }
    if (ftell(g->file) > 0) {
        return true;
    }
    return ((event_version(&g->rest, wall_time()) && events_settings(a, &g->rest)) ||
            error_set(a->error, "out of memory")) &&
           growing_flush(a, g);
}

static void events_put(app* a, int64_t step, const blob* summary, bool whole) {
    blob record;
    memset(&record, 0, sizeof record);
    if (!whole || !event_summary(&record, wall_time(), step, summary)) {
        bear(a, TOLD_EVENTS, error_set(a->error, "cannot write events: out of memory"));
    } else if (summary->count > 0) {
        growing_add(a, &a->folder.events, TOLD_EVENTS, &record);
    }
    blob_free(&record);
}

static void events_point(app* a, const point* p) {
    blob summary;
    bool ok = true;
    memset(&summary, 0, sizeof summary);
    if (a->o.output.tensorboard == NULL) {
        return;
    }
    for (int i = 0; ok && i < TRACES; i++) {
        if (known(p->values[i])) {
            ok = event_scalar(&summary, trace_names[i].tag, (float)p->values[i]);
        }
    }
    events_put(a, p->step, &summary, ok);
    blob_free(&summary);
}

static void events_samples(app* a, int64_t step) {
    blob summary;
    bool ok = true;
    memset(&summary, 0, sizeof summary);
    if (a->o.output.tensorboard == NULL) {
        return;
    }
    for (size_t i = 0; ok && i < a->prompts.count; i++) {
        const sample_prompt* p = &a->prompts.data[i];
        const sample_answer* last = &p->answers[p->answer_count - 1];
        char tag[32];
        snprintf(tag, sizeof tag, "samples/%zu", i + 1);
        ok = event_text(&summary, tag, last->text.data, last->text.count);
    }
    events_put(a, step, &summary, ok);
    blob_free(&summary);
}

#endif
