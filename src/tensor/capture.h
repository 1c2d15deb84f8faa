// ---- the buffers that a graph uses --------------------------------------------------------------

// The part of a graph that buffers know about: the buffers that it uses, and the reason why it can
// no longer be replayed.
struct qlora__watch {
    qlora__watch* next;
    uint64_t key;      // the graph's key
    uint64_t* buffers; // ids
    size_t buffer_count;
    size_t buffer_capacity;
    bool exchanges;    // with other processes
    char invalid[128]; // "" while it can be replayed
};

// Records that the graph being captured uses this memory, so that freeing its buffer invalidates
// the graph.
static qlora_result qlora__capture_note(qlora_ctx* ctx, const void* data) {
    qlora__capture* capture = ctx->capture;
    if (capture == NULL || data == NULL) {
        return QLORA_OK;
    }
    const qlora__buffer* b = ctx->buffers;
    while (b != NULL && ((const char*)data < (const char*)b->data ||
                         (const char*)data >= (const char*)b->data + b->bytes)) {
        b = b->next;
    }
    if (b == NULL) {
        return QLORA_OK; // memory of the caller
    }
    for (size_t i = 0; i < capture->count; i++) {
        if (capture->ids[i] == b->id) {
            return QLORA_OK;
        }
    }
    if (capture->count == capture->capacity) {
        size_t capacity = capture->capacity > 0 ? capture->capacity * 2 : 64;
        uint64_t* ids = (uint64_t*)qlora__alloc(ctx, capacity * sizeof *ids);
        if (ids == NULL) {
            return QLORA_ERR_MEMORY;
        }
        if (capture->count > 0) {
            memcpy(ids, capture->ids, capture->count * sizeof *ids);
        }
        qlora__free(ctx, capture->ids, capture->capacity * sizeof *ids);
        capture->ids = ids;
        capture->capacity = capacity;
    }
    capture->ids[capture->count++] = b->id;
    return QLORA_OK;
}

// Invalidates the graphs that use a buffer; with buffer_id 0, all graphs.
static void qlora__graphs_invalidate(qlora_ctx* ctx, uint64_t buffer_id, const char* why) {
    for (qlora__watch* g = ctx->watches; g != NULL; g = g->next) {
        bool hit = buffer_id == 0;
        for (size_t i = 0; i < g->buffer_count && !hit; i++) {
            hit = g->buffers[i] == buffer_id;
        }
        if (hit && g->invalid[0] == '\0') {
            snprintf(g->invalid, sizeof g->invalid, "%s", why);
            QLORA__LOG(ctx, INFO, GRAPH, "graph %llu is no longer valid: %s",
                       (unsigned long long)g->key, why);
        }
    }
}
