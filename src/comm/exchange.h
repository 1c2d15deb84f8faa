// ---- the sum over all processes -----------------------------------------------------------------
//
// The gradients are summed slice by slice: in a round, every process owns one slice, receives the
// nodes of all the others for it, adds them in the order of the tree and sends the sum to all. Data
// is only copied between processes and added by our own kernel, so the bits are those of a single
// process. No process holds more than QLORA__COMM_ROOM bytes of the others.

#define QLORA__COMM_ROOM (64 << 20)
#define QLORA__COMM_SMALL 256 // bytes for the small numbers of a node

// Everything about one sum.
typedef struct qlora__sum {
    qlora_trainer* t;
    qlora__part* parts; // of all processes
    int64_t part_count;
    int own; // parts of this process
    qlora_message* messages;
    int64_t message_room;
    int64_t count;  // messages so far
    int64_t length; // elements of a slice
    char* received; // slices of other processes, then small numbers
    char* smalls;
} qlora__sum;

static qlora_result qlora__comm_fail(qlora_ctx* ctx, const qlora_comm* comm, const char* why) {
    return qlora__fail(ctx, QLORA_ERR_COMM, "rank %d of %d: %s", (int)comm->rank, (int)comm->world,
                       why[0] != '\0' ? why : "the exchange failed");
}

static void* qlora__comm_stream(const qlora_ctx* ctx) {
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        return ctx->gpu->stream;
    }
#endif
    (void)ctx;
    return NULL;
}

// Copies the messages to or from host memory; `receive` selects those to copy.
static qlora_result qlora__comm_stage(qlora_ctx* ctx, const qlora_message* messages, int64_t count,
                                      bool receive, char* host) {
    size_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        const qlora_message* m = &messages[i];
        if (m->receive && receive) {
            QLORA__TRY(qlora__copy_in(ctx, m->data, host + at, m->bytes));
        } else if (!m->receive && !receive) {
            QLORA__TRY(qlora__copy_out(ctx, host + at, m->data, m->bytes));
        }
        at += qlora__align_up(m->bytes, 16);
    }
    return QLORA_OK;
}

// Exchanges messages in device memory through a provider for host memory.
static qlora_result qlora__comm_through_host(qlora_ctx* ctx, const qlora_comm* comm,
                                             qlora_message* messages, int64_t count) {
    char why[400] = "";
    size_t bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        bytes += qlora__align_up(messages[i].bytes, 16);
    }
    size_t list = (size_t)count * sizeof *messages;
    char* host = (char*)qlora__pinned_alloc(ctx, bytes);
    qlora_message* copies = (qlora_message*)qlora__alloc(ctx, list);
    qlora_result r = host != NULL && copies != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    r = r == QLORA_OK ? qlora__comm_stage(ctx, messages, count, false, host) : r;
    size_t at = 0;
    for (int64_t i = 0; i < count && r == QLORA_OK; i++) {
        copies[i] = messages[i];
        copies[i].data = host + at;
        at += qlora__align_up(messages[i].bytes, 16);
    }
    if (r == QLORA_OK && !comm->exchange(copies, count, NULL, why, sizeof why, comm->user)) {
        r = qlora__comm_fail(ctx, comm, why);
    }
    r = r == QLORA_OK ? qlora__comm_stage(ctx, messages, count, true, host) : r;
    qlora__free(ctx, copies, list);
    qlora__pinned_free(ctx, host, bytes);
    return r;
}

static qlora_result qlora__comm_exchange(qlora_ctx* ctx, const qlora_comm* comm,
                                         qlora_message* messages, int64_t count) {
    char why[400] = "";
    if (count == 0) {
        return QLORA_OK;
    }
    if (!comm->device && !qlora__on_cpu(ctx)) {
        return qlora__comm_through_host(ctx, comm, messages, count);
    }
    return comm->exchange(messages, count, qlora__comm_stream(ctx), why, sizeof why, comm->user)
               ? QLORA_OK
               : qlora__comm_fail(ctx, comm, why);
}

// Before the device reaches an exchange and after it has passed it, it computes. That is no time
// that another process takes, so limits start again. `marks` are recorded before and after it.
static qlora_result qlora__comm_spare(qlora_ctx* ctx, const qlora_comm* comm,
                                      void* const marks[2]) {
    char why[400] = "";
    bool begun = false;
    bool ended = false;
    QLORA__TRY(qlora__event_poll(ctx, marks[0], &begun));
    QLORA__TRY(qlora__event_poll(ctx, marks[1], &ended));
    if (begun && !ended) {
        return QLORA_OK;
    }
    return comm->exchange(NULL, 0, qlora__comm_stream(ctx), why, sizeof why, comm->user)
               ? QLORA_OK
               : qlora__comm_fail(ctx, comm, why);
}

// Waits until the stream has passed an event, as long as the exchange before it can succeed. If
// marks is NULL, the device has reached the exchange.
static qlora_result qlora__comm_wait_event(qlora_ctx* ctx, const qlora_comm* comm,
                                           void* const marks[2], void* event) {
    char why[400] = "";
    bool done = comm->alive == NULL || !comm->device || event == NULL;
    while (!done) {
        QLORA__TRY(qlora__event_poll(ctx, event, &done));
        if (!done && marks != NULL) {
            QLORA__TRY(qlora__comm_spare(ctx, comm, marks));
        }
        if (!done && !comm->alive(why, sizeof why, comm->user)) {
            return qlora__comm_fail(ctx, comm, why);
        }
        if (!done) {
            qlora__sleep_us(50);
        }
    }
    return QLORA_OK;
}

// An exchange that fails on the device is noticed after the update that follows it was queued. Only
// the last one can be under way: the next one is not queued before it has ended.
static qlora_result qlora__comm_wait(qlora_trainer* t, void* event) {
    const qlora__report* last = &t->reports[qlora__record_of(t->step)];
    qlora_result r = t->world > 1
                         ? qlora__comm_wait_event(t->ctx, &t->comm, last->exchange_events, event)
                         : QLORA_OK;
    t->spoilt = t->spoilt || r != QLORA_OK;
    return r;
}

// The same for the next slot of the ring, whose last copy may be behind an exchange.
static qlora_result qlora__comm_slot(qlora_trainer* t) {
    const qlora__slot* slot = &t->m->ring.slots[t->m->ring.next];
    return slot->busy ? qlora__comm_wait(t, slot->event) : QLORA_OK;
}

static void qlora__sum_message(qlora__sum* sum, bool receive, int32_t peer, void* data,
                               size_t bytes) {
    QLORA_ASSERT(sum->count < sum->message_room);
    if (bytes > 0) {
        qlora_message* m = &sum->messages[sum->count++];
        m->data = data;
        m->bytes = bytes;
        m->peer = peer;
        m->receive = receive;
        sum->t->sent += receive ? 0 : (int64_t)bytes;
    }
}

static qlora_result qlora__sum_send(qlora__sum* sum) {
    qlora_result r = qlora__comm_exchange(sum->t->ctx, &sum->t->comm, sum->messages, sum->count);
    sum->count = 0;
    return r;
}

// The first element of an own node: an entry of the stack, or the gradients.
static qlora_result qlora__sum_own(const qlora__sum* sum, int own, QLORA__REAL** out) {
    qlora_trainer* t = sum->t;
    if (own == t->tree.levels) {
        *out = (QLORA__REAL*)t->m->gradients.data;
        return QLORA_OK;
    }
    return qlora__tree_entry(t, own, out);
}

// Adds right = left + right for neighbours that are halves of a node, until one node is left: it is
// where the last part was. `few` selects what is added.
static qlora_result qlora__sum_add(qlora__sum* sum, int64_t count, int64_t elements, bool few) {
    qlora_trainer* t = sum->t;
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    qlora__part stack[QLORA__SHARE_NODES];
    int levels = 0;
    for (int64_t i = 0; i < sum->part_count; i++) {
        qlora__part right = sum->parts[i];
        while (levels > 0 && qlora__node_joins(&stack[levels - 1].node, &right.node, count)) {
            const qlora__part* left = &stack[--levels];
            if (few) { // the totals and sums of the model are the place where they are added
                QLORA__TRY(qlora__tree_run(ctx, QLORA__TREE_TAKE, NULL, NULL, 0, right.few,
                                           &m->totals, &m->work.preference.sums));
                QLORA__TRY(qlora__tree_run(ctx, QLORA__TREE_FOLD, NULL, NULL, 0, left->few,
                                           &m->totals, &m->work.preference.sums));
                QLORA__TRY(qlora__tree_run(ctx, QLORA__TREE_PUSH, NULL, NULL, 0, right.few,
                                           &m->totals, &m->work.preference.sums));
            } else {
                QLORA__TRY(qlora__tree_run(ctx, QLORA__TREE_FOLD, right.values, left->values,
                                           elements, NULL, NULL, NULL));
            }
            right.node.begin = left->node.begin;
        }
        stack[levels++] = right;
    }
    QLORA_ASSERT(levels == 1);
    return QLORA_OK;
}

// One round: slices of sum->length elements, one per process, from element `at` on.
static qlora_result qlora__sum_round(qlora__sum* sum, int64_t count, int64_t at) {
    qlora_trainer* t = sum->t;
    const qlora_comm* comm = &t->comm;
    const size_t size = sizeof(QLORA__REAL);
    int64_t n = t->m->elements;
    QLORA__REAL* gradients = (QLORA__REAL*)t->m->gradients.data;
    qlora__stretch mine = qlora__stretch_at(n, at, sum->length, comm->rank);
    int64_t other = 0;
    for (int64_t i = 0; i < sum->part_count; i++) {
        qlora__part* part = &sum->parts[i];
        if (part->rank == comm->rank) {
            QLORA__REAL* values = NULL;
            QLORA__TRY(qlora__sum_own(sum, part->own, &values));
            part->values = (char*)(values + mine.begin);
            for (int32_t peer = 0; peer < comm->world; peer++) {
                qlora__stretch slice = qlora__stretch_at(n, at, sum->length, peer);
                if (peer != comm->rank) {
                    qlora__sum_message(sum, false, peer, values + slice.begin,
                                       (size_t)slice.count * size);
                }
            }
        } else {
            part->values = sum->received + (size_t)(other++ * sum->length) * size;
            qlora__sum_message(sum, true, part->rank, part->values, (size_t)mine.count * size);
        }
    }
    QLORA__TRY(qlora__sum_send(sum));
    const qlora__part* root = &sum->parts[sum->part_count - 1];
    QLORA__REAL* target = gradients + mine.begin;
    if (mine.count > 0) {
        QLORA__TRY(qlora__sum_add(sum, count, mine.count, false));
        if (root->values != (char*)target) {
            QLORA__TRY(qlora__tree_run(t->ctx, QLORA__TREE_TAKE, target, root->values, mine.count,
                                       NULL, NULL, NULL));
        }
    }
    for (int32_t peer = 0; peer < comm->world; peer++) {
        qlora__stretch slice = qlora__stretch_at(n, at, sum->length, peer);
        if (peer != comm->rank) {
            qlora__sum_message(sum, false, peer, target, (size_t)mine.count * size);
            qlora__sum_message(sum, true, peer, gradients + slice.begin,
                               (size_t)slice.count * size);
        }
    }
    return qlora__sum_send(sum);
}

// The small numbers, which every process adds itself.
static qlora_result qlora__sum_smalls(qlora__sum* sum, int64_t count) {
    qlora_trainer* t = sum->t;
    qlora_model* m = t->m;
    const qlora_comm* comm = &t->comm;
    for (int64_t i = 0; i < sum->part_count; i++) {
        qlora__part* part = &sum->parts[i];
        part->few = sum->smalls + (size_t)i * QLORA__COMM_SMALL;
        if (part->rank != comm->rank) {
            qlora__sum_message(sum, true, part->rank, part->few, sizeof(qlora__tree_small));
            continue;
        }
        if (part->own == t->tree.levels) { // the last one is still in the model
            QLORA__TRY(qlora__tree_run(t->ctx, QLORA__TREE_PUSH, NULL, NULL, 0, part->few,
                                       &m->totals, &m->work.preference.sums));
        } else {
            QLORA__REAL* entry = NULL;
            QLORA__TRY(qlora__tree_entry(t, part->own, &entry));
            part->few = (char*)(entry + qlora__partial_small(m));
        }
        for (int32_t peer = 0; peer < comm->world; peer++) {
            if (peer != comm->rank) {
                qlora__sum_message(sum, false, peer, part->few, sizeof(qlora__tree_small));
            }
        }
    }
    QLORA__TRY(qlora__sum_send(sum));
    QLORA__TRY(qlora__sum_add(sum, count, 0, true));
    return qlora__tree_run(t->ctx, QLORA__TREE_TAKE, NULL, NULL, 0,
                           sum->parts[sum->part_count - 1].few, &m->totals,
                           &m->work.preference.sums);
}

// Chooses the length of slices, and makes room for those of other processes.
static qlora_result qlora__sum_memory(qlora__sum* sum) {
    qlora_trainer* t = sum->t;
    qlora_ctx* ctx = t->ctx;
    const int64_t size = (int64_t)sizeof(QLORA__REAL);
    int64_t others = sum->part_count - sum->own;
    int64_t even = qlora__ceil_div(t->m->elements, t->comm.world);
    int64_t most = QLORA__COMM_ROOM / size / qlora__max(sum->part_count, 1);
    sum->length = (int64_t)qlora__align_up((size_t)qlora__max(qlora__min(even, most), 1), 64);
    size_t slices = qlora__align_up((size_t)(others * sum->length * size), 256);
    size_t bytes = slices + (size_t)sum->part_count * QLORA__COMM_SMALL;
    if (t->received == NULL || t->received->bytes < bytes) {
        qlora__buffer_destroy(ctx, t->received);
        t->received = NULL;
        QLORA__TRY(qlora__buffer_create(ctx, bytes, &t->received));
    }
    sum->received = (char*)t->received->data;
    sum->smalls = sum->received + slices;
    return QLORA_OK;
}

static qlora_result qlora__sum_run(qlora__sum* sum, int64_t count) {
    qlora_trainer* t = sum->t;
    qlora__share_parts(count, t->comm.world, sum->parts);
    for (int64_t i = 0; i < sum->part_count; i++) {
        sum->own += sum->parts[i].rank == t->comm.rank ? 1 : 0;
    }
    QLORA_ASSERT(sum->own == 0 || sum->own == t->tree.levels + 1);
    QLORA__TRY(qlora__sum_memory(sum));
    QLORA__TRY(qlora__sum_smalls(sum, count));
    for (int64_t at = 0; at < t->m->elements; at += sum->length * t->comm.world) {
        QLORA__TRY(qlora__sum_round(sum, count, at));
    }
    return QLORA_OK;
}

// The whole sum of a step.
static qlora_result qlora__sum_all(qlora_trainer* t) {
    qlora_ctx* ctx = t->ctx;
    int64_t count = t->leaves;
    qlora__sum sum;
    t->sent = 0;
    memset(&sum, 0, sizeof sum);
    sum.t = t;
    sum.part_count = qlora__share_parts(count, t->comm.world, NULL);
    sum.message_room = (sum.part_count + 2) * t->comm.world;
    size_t part_bytes = (size_t)sum.part_count * sizeof *sum.parts;
    size_t message_bytes = (size_t)sum.message_room * sizeof *sum.messages;
    sum.parts = (qlora__part*)qlora__alloc(ctx, part_bytes);
    sum.messages = (qlora_message*)qlora__alloc(ctx, message_bytes);
    qlora_result r =
        sum.parts != NULL && sum.messages != NULL ? qlora__sum_run(&sum, count) : QLORA_ERR_MEMORY;
    qlora__free(ctx, sum.messages, message_bytes);
    qlora__free(ctx, sum.parts, part_bytes);
    return r;
}
