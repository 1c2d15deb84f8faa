// packing.h - samples packed into micro-batches.
#ifndef FINETUNE_PACKING_H
#define FINETUNE_PACKING_H

static void packs_free(packs* p) {
    free(p->order);
    free(p->starts);
    memset(p, 0, sizeof *p);
}

typedef struct open_pack {
    uint32_t number;
    int64_t tokens;
    int64_t sequences;
} open_pack;

// Assigns each sample, in the order of `order`, to the first of a few open packs that has room. If
// none has, the fullest pack is closed. pack_of[i] belongs to order[i]. Returns the number of
// packs.
static uint32_t packs_assign(const app* a, const samples* s, const uint32_t* order, size_t count,
                             uint32_t* pack_of) {
    open_pack open[OPEN_PACKS];
    int open_count = 0;
    uint32_t made = 0;
    int64_t texts = (int64_t)sample_texts(a);
    for (size_t i = 0; i < count; i++) {
        int64_t length = s->data[order[i]].length;
        int at = 0;
        int fullest = 0;
        while (at < open_count && (open[at].tokens + length > a->model_desc.tokens ||
                                   open[at].sequences + texts > a->model_desc.max_sequences)) {
            fullest = open[at].tokens > open[fullest].tokens ? at : fullest;
            at++;
        }
        if (at == open_count) {
            at = open_count < OPEN_PACKS ? open_count++ : fullest;
            open[at].number = made++;
            open[at].tokens = 0;
            open[at].sequences = 0;
        }
        open[at].tokens += length;
        open[at].sequences += texts;
        pack_of[i] = open[at].number;
    }
    return made;
}

// Packs the samples of `order`, which is freed.
static bool packs_make(app* a, const samples* s, uint32_t* order, size_t count, packs* out) {
    packs_free(out);
    uint32_t* pack_of = (uint32_t*)take(a, count, sizeof *pack_of);
    out->order = (uint32_t*)take(a, count, sizeof *order);
    out->starts = (size_t*)take(a, count + 2, sizeof *out->starts);
    bool ok = order != NULL && pack_of != NULL && out->order != NULL && out->starts != NULL;
    if (ok) {
        out->count = packs_assign(a, s, order, count, pack_of);
        for (size_t i = 0; i < count; i++) {
            out->starts[pack_of[i] + 2]++;
        }
        for (size_t p = 0; p < out->count; p++) {
            out->starts[p + 2] += out->starts[p + 1];
        }
        for (size_t i = 0; i < count; i++) {
            out->order[out->starts[pack_of[i] + 1]++] = order[i];
        }
    }
    free(order);
    free(pack_of);
    return ok;
}

// Every sample once, in the order of the data.
static uint32_t* order_make(app* a, size_t count) {
    uint32_t* order = (uint32_t*)take(a, count, sizeof *order);
    for (size_t i = 0; i < count && order != NULL; i++) {
        order[i] = (uint32_t)i;
    }
    return order;
}

static bool packs_plain(app* a, const samples* s, packs* out) {
    return packs_make(a, s, order_make(a, s->count), s->count, out);
}

// The samples of a file that an epoch has, with the weight w: those of each record floor(w) times,
// and those of a part of the records once more. The parts of successive epochs are successive
// stretches of one shuffled list, so that over time every record has its turn. `mine` has room for
// the first sample of each record.
static size_t input_order(app* a, size_t number, int64_t epoch, uint32_t* mine, uint32_t* out) {
    const input* one = &a->data.inputs.data[number];
    size_t wanted = input_takes(one);
    size_t records = 0; // of those wanted
    size_t taken = 0;   // samples
    size_t count = 0;
    for (size_t i = 0; i < a->data.train.count; i = record_end(&a->data.train, i)) {
        if (a->data.train.data[i].input == number) {
            mine[count++] = (uint32_t)i;
        }
    }
    size_t whole = count > 0 ? wanted / count * count : 0;
    size_t part = wanted - whole;
    for (; records < wanted; records++) {
        if (records == whole) {
            shuffle(mine, count, mix(mix((uint64_t)a->o.training.seed ^ 0x6d697875u) + number));
        }
        size_t at = records < whole
                        ? records % count
                        : (size_t)((uint64_t)epoch % count * part + records - whole) % count;
        for (size_t i = mine[at]; i < record_end(&a->data.train, mine[at]); i++) {
            out[taken++] = (uint32_t)i;
        }
    }
    return taken;
}

// The samples of an epoch, before they are shuffled.
static uint32_t* epoch_order(app* a, int64_t epoch, size_t* count) {
    *count = a->data.train.count;
    if (!weights_used(a)) {
        return order_make(a, *count);
    }
    size_t total = 0; // at most
    for (size_t i = 0; i < a->data.inputs.count; i++) {
        total += (size_t)ceil(a->data.inputs.data[i].weight) * a->data.inputs.data[i].samples;
    }
    if (total > UINT32_MAX) {
        error_set(a->error, "the weights make an epoch of up to %zu samples; the limit is %llu",
                  total, (unsigned long long)UINT32_MAX);
        return NULL;
    }
    uint32_t* order = (uint32_t*)take(a, total, sizeof *order);
    uint32_t* mine = (uint32_t*)take(a, a->data.train.count, sizeof *mine);
    *count = 0;
    for (size_t i = 0; i < a->data.inputs.count && order != NULL && mine != NULL; i++) {
        *count += input_order(a, i, epoch, mine, order + *count);
    }
    if (mine == NULL) {
        free(order);
        order = NULL;
    }
    free(mine);
    return order;
}

static bool epoch_make(app* a, int64_t epoch, packs* out) {
    uint64_t key = mix(mix((uint64_t)a->o.training.seed) ^ (uint64_t)epoch);
    size_t count = 0;
    uint32_t* order = epoch_order(a, epoch, &count);
    if (order != NULL) {
        shuffle(order, count, key != 0 ? key : 1);
    }
    return packs_make(a, &a->data.train, order, count, out);
}

// The end of the step that starts at a pack. Mismatched texts have the prompt of one text and the
// answer of another one of the step, so that a text is never left alone: it joins its neighbours.
static size_t step_end(const app* a, const packs* p, size_t first) {
    size_t end = first + (size_t)a->o.training.accumulate;
    end = end < p->count ? end : p->count;
    while (method_of(a->o.method.kind)->mismatched && end < p->count &&
           (p->starts[end] - p->starts[first] < 2 || p->starts[p->count] - p->starts[end] < 2)) {
        end++;
    }
    return end;
}

// The pack at which step number `step` of an epoch starts.
static size_t step_start(const app* a, const packs* p, int64_t step) {
    size_t first = 0;
    for (int64_t i = 0; i < step; i++) {
        first = step_end(a, p, first);
    }
    return first;
}

static int64_t epoch_steps(const app* a, const packs* p) {
    int64_t steps = 0;
    for (size_t first = 0; first < p->count; first = step_end(a, p, first)) {
        steps++;
    }
    return steps;
}

// Packing many epochs takes a while: shows that it goes on, and stops after Ctrl-C.
static bool epochs_tell(app* a, int64_t epoch, double total) {
    double now = seconds_now();
    if (epoch == 0) {
        a->progress.counting_since = now;
        a->progress.counting_told = false;
    }
    if (now - a->progress.counting_since > 1.0 && (!a->progress.counting_told || a->screen.live)) {
        char line[80];
        snprintf(line, sizeof line, "counting the steps of %.0f epochs: %.0f%%", total,
                 100.0 * (double)epoch / total);
        if (!a->screen.live || now - a->screen.drawn_at > 0.1) {
            a->screen.drawn_at = now;
            draw(&a->screen, line);
        }
        a->progress.counting_told = true;
    }
    a->stopped = a->stopped || stop_asked != 0;
    return !a->stopped;
}

static bool total_steps_find(app* a) {
    if (a->o.training.steps > 0) {
        a->progress.total_steps = a->o.training.steps;
        return true;
    }
    packs p;
    memset(&p, 0, sizeof p);
    double left = a->o.training.epochs;
    for (int64_t epoch = 0; left > 1e-9; epoch++, left -= 1.0) {
        if (!epoch_make(a, epoch, &p) || !epochs_tell(a, epoch, a->o.training.epochs)) {
            packs_free(&p);
            return false;
        }
        a->progress.total_steps +=
            (int64_t)ceil(fmin(left, 1.0) * (double)epoch_steps(a, &p) - 1e-9);
    }
    packs_free(&p);
    return true;
}

// Moves to the epoch and pack at which a step starts.
static bool position_seek(app* a, int64_t step) {
    int64_t before = 0;
    for (a->progress.epoch = 0;; a->progress.epoch++) {
        if (!epoch_make(a, a->progress.epoch, &a->progress.now) ||
            !epochs_tell(a, a->progress.epoch,
                         fmax(a->o.training.epochs, (double)a->progress.epoch + 1.0))) {
            return false;
        }
        int64_t here = epoch_steps(a, &a->progress.now);
        if (step < before + here) {
            a->progress.next_pack = step_start(a, &a->progress.now, step - before);
            return true;
        }
        before += here;
    }
}

static void batches_free(batches* b) {
    free(b->data);
    free(b->numbers);
    free(b->references);
    memset(b, 0, sizeof *b);
}

// One block of numbers: ids and labels per token, lengths, positions in the data and roles per
// sequence.
static bool batches_room(app* a, batches* b, size_t count, size_t tokens, size_t sequences) {
    if (count <= b->room && tokens <= b->tokens && sequences <= b->sequences) {
        return true;
    }
    size_t room = count > b->room ? count : b->room;
    size_t most = tokens > b->tokens ? tokens : b->tokens;
    size_t each = sequences > b->sequences ? sequences : b->sequences;
    batches_free(b);
    b->data = (qlora_batch*)take(a, room, sizeof *b->data);
    b->numbers = (int32_t*)take(a, 2 * most + 3 * each, sizeof *b->numbers);
    b->references = (double*)take(a, each, sizeof *b->references);
    if (b->data == NULL || b->numbers == NULL || b->references == NULL) {
        batches_free(b);
        return false;
    }
    b->room = room;
    b->tokens = most;
    b->sequences = each;
    return true;
}

// Where the next sequence of a block goes.
typedef struct batch_cursor {
    int32_t* ids;
    int32_t* labels;
    int32_t* lengths;
    int32_t* places;
    int32_t* roles;
    double* references;
} batch_cursor;

static batch_cursor batch_start(const batches* b) {
    batch_cursor c;
    c.ids = b->numbers;
    c.labels = c.ids + b->tokens;
    c.lengths = c.labels + b->tokens;
    c.places = c.lengths + b->sequences;
    c.roles = c.places + b->sequences;
    c.references = b->references;
    return c;
}

static void batch_begin(const app* a, const batch_cursor* c, bool references, qlora_batch* out) {
    memset(out, 0, sizeof *out);
    out->ids = c->ids;
    out->labels = c->labels;
    out->lengths = c->lengths;
    out->sequences = c->places;
    out->roles = method_of(a->o.method.kind)->roles ? c->roles : NULL;
    out->references = references ? c->references : NULL;
}

static void batch_end_sequence(batch_cursor* c, int32_t length, int32_t place, int32_t role,
                               qlora_batch* out) {
    c->ids += length;
    c->labels += length;
    *c->lengths++ = length;
    *c->places++ = place;
    *c->roles++ = role;
    c->references++;
    out->count++;
}

// Adds the texts of a sample, with their log-probabilities by the base unless these are NULL.
static bool batch_add(app* a, const input_list* list, const sample* one, const double* references,
                      batch_cursor* c, qlora_batch* batch) {
    for (size_t k = 0; k < sample_texts(a); k++) {
        qlora_text_sample read;
        int32_t length = sample_texts(a) == 1 ? one->length
                         : k == 0             ? one->first
                                              : one->length - one->first;
        if (qlora_text_sample_read(list->data[one->input].data, one->index + k, &read) !=
            QLORA_OK) {
            return text_fail(a, "");
        }
        memcpy(c->ids, read.ids, (size_t)length * sizeof(int32_t));
        memcpy(c->labels, read.labels, (size_t)length * sizeof(int32_t));
        *c->references = references != NULL ? references[k] : 0.0;
        batch_end_sequence(c, length, one->number,
                           one->desirable ? QLORA_ROLE_DESIRABLE : QLORA_ROLE_UNDESIRABLE, batch);
    }
    return true;
}

// Assembles the packs from `first` to `end` - 1 as a->batches.data[0], [1], ... `references` has
// those of every text of `s`, or is NULL.
static bool batches_fill(app* a, const samples* s, const packs* p, size_t first, size_t end,
                         const double* references) {
    const input_list* list = inputs_of(a, s);
    size_t tokens = 0;
    size_t texts = sample_texts(a);
    size_t sequences = (p->starts[end] - p->starts[first]) * texts;
    for (size_t i = p->starts[first]; i < p->starts[end]; i++) {
        tokens += (size_t)s->data[p->order[i]].length;
    }
    if (!batches_room(a, &a->batches, end - first, tokens, sequences)) {
        return false;
    }
    batch_cursor c = batch_start(&a->batches);
    for (size_t pack = first; pack < end; pack++) {
        qlora_batch* batch = &a->batches.data[pack - first];
        batch_begin(a, &c, references != NULL, batch);
        for (size_t i = p->starts[pack]; i < p->starts[pack + 1]; i++) {
            uint32_t number = p->order[i];
            if (!batch_add(a, list, &s->data[number],
                           references != NULL ? references + number * texts : NULL, &c, batch)) {
                return false;
            }
        }
    }
    return true;
}

static int64_t pack_labels(const samples* s, const packs* p, size_t pack) {
    int64_t labels = 0;
    for (size_t i = p->starts[pack]; i < p->starts[pack + 1]; i++) {
        labels += s->data[p->order[i]].trained;
    }
    return labels;
}

#endif
