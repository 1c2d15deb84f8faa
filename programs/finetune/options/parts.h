// parts.h - the parts of a run whose options changed when it was resumed.
//
// At the end of settings.txt, each part but the last has a line "until N" with its last step, and
// after it the options that it had instead of those above, of those that may change. --config of
// such a file repeats one part after the other, as the sessions of the run did.
#ifndef FINETUNE_PARTS_H
#define FINETUNE_PARTS_H

typedef struct run_part {
    int64_t until;
    const char* body; // its options
    size_t size;
    const char* next; // part; NULL = this is the last one
} run_part;

// The line that begins a part, or NULL.
static const char* part_find(const char* text) {
    while (text != NULL && !line_parts(text)) {
        text = strchr(text, '\n');
        text = text != NULL ? text + 1 : NULL;
    }
    return text;
}

// Reads the part that begins at `text`. False if its line is wrong.
static bool part_read(const char* text, run_part* out) {
    char* end = NULL;
    long long until = strtoll(text + strlen("until "), &end, 10);
    const char* line = end + strspn(end, " \t\r");
    out->until = until;
    out->body = *line == '\n' ? line + 1 : line;
    out->next = part_find(out->body);
    out->size = out->next != NULL ? (size_t)(out->next - out->body) : strlen(out->body);
    return until > 0 && (*line == '\n' || *line == '\0');
}

static size_t option_bytes(option_kind kind) {
    return kind == OPT_FLAG    ? sizeof(bool)
           : kind == OPT_REAL  ? sizeof(double)
           : kind == OPT_TEXTS ? sizeof(option_texts)
           : kind == OPT_TEXT  ? sizeof(const char*)
                               : sizeof(int64_t);
}

// Whether an option differs from what options_clear left.
static bool option_given(const options* cleared, const options* o, const option* row) {
    return memcmp((const char*)o + row->offset, (const char*)cleared + row->offset,
                  option_bytes(row->kind)) != 0;
}

static void option_copy(options* to, const options* from, const option* row) {
    memcpy((char*)to + row->offset, (const char*)from + row->offset, option_bytes(row->kind));
}

// The options of a part, instead of the last ones; those of the command line, in `given`, win.
static bool part_apply(app* a, const run_part* p, const options* given) {
    char name[PATH_SIZE];
    options cleared;
    options_clear(&cleared);
    for (size_t i = 0; i < a->set.count; i++) {
        const option* row = &a->set.rows[i];
        if (row->kind != OPT_HEADING && (setting_soft(row) || setting_kept(row))) {
            option_copy(&a->o, &cleared, row);
        }
    }
    a->parts.part_text.count = 0;
    snprintf(name, sizeof name, "%.800s, until %lld", a->o.config, (long long)p->until);
    if (!blob_add(&a->parts.part_text, p->body, p->size) || !blob_add(&a->parts.part_text, "", 1)) {
        return error_set(a->error, "out of memory");
    }
    a->parts.part_text.count--;
    if (!config_read(&a->set, name, &a->parts.part_text, a->error)) {
        return false;
    }
    for (size_t i = 0; i < a->set.count; i++) {
        const option* row = &a->set.rows[i];
        if (row->kind != OPT_HEADING && setting_kept(row) && option_given(&cleared, given, row)) {
            option_copy(&a->o, given, row);
        }
    }
    return true;
}

// The step that the run in the output folder has taken; 0 = there is none.
static int64_t steps_done(const app* a) {
    char path[PATH_SIZE];
    blob list;
    memset(&list, 0, sizeof list);
    snprintf(path, sizeof path, "%s/checkpoint/latest",
             a->o.output.folder != NULL ? a->o.output.folder : "demo-out");
    bool read = blob_read_path(&list, path) == 0 && strncmp(list.data, "step-", 5) == 0;
    int64_t done = read ? strtoll(list.data + 5, NULL, 10) : 0;
    blob_free(&list);
    return done;
}

// The first option of the command line that the parts would set, or NULL.
static const char* parts_replaced(const app* a, const options* given) {
    options cleared;
    options_clear(&cleared);
    for (size_t i = 0; i < a->set.count; i++) {
        const option* row = &a->set.rows[i];
        if (row->kind != OPT_HEADING && setting_soft(row) && option_given(&cleared, given, row)) {
            return row->name;
        }
    }
    return NULL;
}

// Finds the part that this session repeats: the first one whose steps the run has not taken.
static bool part_search(app* a, const options* given) {
    bool anew = a->o.output.resume == RESUME_NEVER && !a->parts.next_part;
    int64_t done = anew ? 0 : steps_done(a);
    int64_t before = 0;
    run_part p;
    for (const char* at = a->o.parts; at != NULL; at = p.next, before = p.until) {
        if (!part_read(at, &p) || p.until <= before) {
            size_t length = strcspn(at, "\r\n");
            return error_set(a->error,
                             "--config %.400s: '%.*s' is not the step at which a part of a run "
                             "ends, above %lld",
                             a->o.config, (int)(length < 100 ? length : 100), at,
                             (long long)before);
        }
        a->o.output.extend = a->o.output.extend || (p.until == done && !anew);
        if (p.until <= done) {
            continue;
        }
        if (a->ranks.world > 1 || a->o.machine.ranks > 1) {
            return error_set(a->error,
                             "--config %s: the options of that run changed after step %lld, which "
                             "several processes cannot repeat; give the options of each part by "
                             "hand, the later ones with --extend",
                             a->o.config, (long long)p.until);
        }
        a->parts.until = p.until;
        return part_apply(a, &p, given);
    }
    return true;
}

// After the options are read: those of the part to repeat take the place of the last ones.
static bool parts_choose(app* a, int argc, char** argv) {
    options* o = &a->o;
    options given;
    option_set set = a->set;
    set.values = &given;
    if (o->parts == NULL || o->plan || o->doctor || o->eval.only) {
        return true;
    }
    options_clear(&given);
    if (!options_read(&set, 1, argc, argv, a->error)) {
        return false;
    }
    a->parts.replaced = parts_replaced(a, &given);
    if (a->parts.replaced == NULL && !part_search(a, &given)) {
        return false;
    }
    o->output.resume = a->parts.next_part ? RESUME_MUST : o->output.resume;
    return true;
}

static bool part_over(const app* a) {
    return a->parts.until > 0 && a->progress.step >= a->parts.until;
}

// Whether the next part follows in this process.
static bool part_done(const app* a) {
    return part_over(a) && !a->failed && stop_asked == 0;
}

// ---- what is written ----

// Takes over the parts of the run that is resumed, and its options if those of this session are
// others. `then` has what is in its settings.txt.
static bool parts_take(app* a, const option_set* then) {
    const char* past = ((const options*)then->values)->parts;
    blob now;
    memset(&now, 0, sizeof now);
    bool ok = (past == NULL || blob_add(&a->parts.past, past, strlen(past))) &&
              blob_add(&a->parts.past, "", 1) &&
              settings_write(then, SETTINGS_PART, &a->parts.before) &&
              settings_write(&a->set, SETTINGS_PART, &now);
    if (ok && now.count == a->parts.before.count &&
        (now.count == 0 || memcmp(now.data, a->parts.before.data, now.count) == 0)) {
        a->parts.before.count = 0;
    }
    blob_free(&now);
    return ok || error_set(a->error, "out of memory");
}

static bool part_write(int64_t until, const char* body, size_t size, blob* out) {
    char line[80];
    snprintf(line, sizeof line, "until %lld\n", (long long)until);
    return blob_add(out, line, strlen(line)) && blob_add(out, body, size);
}

// The parts before this session. Steps that will be taken again belong to it.
static bool parts_write(const app* a, blob* out) {
    int64_t before = 0;
    bool ok = true;
    run_part p;
    for (const char* at = a->parts.past.count > 1 ? a->parts.past.data : NULL; at != NULL && ok;
         at = p.next) {
        if (!part_read(at, &p)) {
            break;
        }
        p.until = p.until < a->progress.step ? p.until : a->progress.step;
        ok = p.until <= before || part_write(p.until, p.body, p.size, out);
        before = p.until > before ? p.until : before;
    }
    return ok && (a->parts.before.count == 0 || a->progress.step <= before ||
                  part_write(a->progress.step, a->parts.before.data, a->parts.before.count, out));
}

#endif
