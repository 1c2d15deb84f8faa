// ---- graphs: capture and replay -----------------------------------------------------------------

struct qlora_graph {
    qlora__watch watch; // must be first: the context's list points to it
    qlora_ctx* owner;
    uint64_t replays;
    size_t nodes;
    void* exec; // CUgraphExec
    qlora_graph_fn fn;
    void* user;
};

static void qlora__graph_free(qlora_ctx* ctx, qlora_graph* graph) {
    qlora__free(ctx, graph->watch.buffers,
                graph->watch.buffer_capacity * sizeof *graph->watch.buffers);
    qlora__free(ctx, graph, sizeof *graph);
}

#ifndef QLORA_NO_CUDA

// Runs the callback inside a capture. The capture is ended even if the callback fails, so that the
// stream can be used again.
static qlora_result qlora__graph_record(qlora_ctx* ctx, qlora_graph* graph, void** recorded) {
    qlora__gpu* gpu = ctx->gpu;
    QLORA__TRY(qlora__away_wait(ctx, ~0u));
    QLORA__TRY(qlora__cu(
        ctx,
        gpu->cu.StreamBeginCapture(gpu->stream, QLORA__CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
        "cuStreamBeginCapture"));
    qlora__capture capture;
    memset(&capture, 0, sizeof capture);
    ctx->capture = &capture;
    qlora_result r = graph->fn(ctx, graph->user);
    ctx->capture = NULL;
    qlora__beside_finish(ctx, r != QLORA_OK || capture.broke[0] != '\0');
    char text[QLORA__ERROR_SIZE];
    snprintf(text, sizeof text, "%s", r != QLORA_OK ? ctx->env.error : capture.broke);
    int code = gpu->cu.StreamEndCapture(gpu->stream, recorded);
    graph->watch.buffers = capture.ids;
    graph->watch.buffer_count = capture.count;
    graph->watch.buffer_capacity = capture.capacity;
    graph->watch.exchanges = capture.exchanges;
    if (qlora__cu_is_sticky(code)) {
        return qlora__cu(ctx, code, "cuStreamEndCapture");
    }
    if (r == QLORA_OK && text[0] == '\0' && code == 0) {
        return QLORA_OK;
    }
    if (code == 0 && *recorded != NULL) {
        gpu->cu.GraphDestroy(*recorded);
    }
    *recorded = NULL;
    if (r == QLORA_ERR_DEVICE_LOST) {
        return r;
    }
    const char* name = code != 0 ? qlora__cu_name(gpu, code) : "";
    return qlora__fail(ctx, QLORA_ERR_CAPTURE, "graph %llu was not captured: %.500s%s%s",
                       (unsigned long long)graph->watch.key,
                       text[0] != '\0' ? text
                       : r != QLORA_OK ? "the callback failed without a message"
                                       : "a call inside the callback cannot be captured",
                       code != 0 ? "; cuStreamEndCapture returned " : "", name);
}

// ---- memsets ------------------------------------------------------------------------------------
//
// cuBLAS clears a counter before many of its kernels, and memset nodes cost the host more than any
// other node when a graph is launched: about 3 us, compared with 0.03 us for a kernel (driver 580).
// Small clears are therefore replaced by kernel nodes between the same neighbours. Clears that
// cannot be replaced are left unchanged.

// Same layout as CUDA_MEMSET_NODE_PARAMS.
typedef struct qlora__memset_node {
    qlora__CUdeviceptr address;
    size_t pitch;
    unsigned value;
    unsigned element; // bytes
    size_t width;     // elements
    size_t height;
} qlora__memset_node;

// Same layout as CUDA_KERNEL_NODE_PARAMS.
typedef struct qlora__kernel_node {
    void* function;
    unsigned grid[3];
    unsigned block[3];
    unsigned shared;
    void** args;
    void** extra;
    void* kernel;
    void* context;
} qlora__kernel_node;

#define QLORA__NEIGHBOURS 8
#define QLORA__SMALL_CLEAR 65536 // bytes

typedef struct qlora__clear_node {
    qlora__CUdeviceptr address;
    int64_t floats;
    size_t before_count;
    size_t after_count;
    void* before[QLORA__NEIGHBOURS];
    void* after[QLORA__NEIGHBOURS];
} qlora__clear_node;

// Returns true for a small clear of whole words, and fills in its neighbours.
static bool qlora__graph_clear_at(const qlora__cuda_table* cu, void* node, qlora__clear_node* out) {
    int type = 0;
    qlora__memset_node set;
    memset(out, 0, sizeof *out);
    memset(&set, 0, sizeof set);
    if (cu->GraphNodeGetType(node, &type) != 0 || type != QLORA__CU_GRAPH_NODE_TYPE_MEMSET ||
        cu->GraphMemsetNodeGetParams(node, &set) != 0) {
        return false;
    }
    if (set.value != 0 || set.height > 1 || set.element == 0 || set.element > 4 ||
        set.width > QLORA__SMALL_CLEAR / set.element || set.width * set.element % 4 != 0 ||
        set.address % 4 != 0) {
        return false;
    }
    out->address = set.address;
    out->floats = (int64_t)(set.width * set.element / 4);
    if (cu->GraphNodeGetDependencies(node, NULL, NULL, &out->before_count) != 0 ||
        cu->GraphNodeGetDependentNodes(node, NULL, NULL, &out->after_count) != 0 ||
        out->before_count > QLORA__NEIGHBOURS || out->after_count > QLORA__NEIGHBOURS) {
        return false;
    }
    return cu->GraphNodeGetDependencies(node, out->before, NULL, &out->before_count) == 0 &&
           cu->GraphNodeGetDependentNodes(node, out->after, NULL, &out->after_count) == 0;
}

static qlora_result qlora__graph_clear_swap(qlora_ctx* ctx, void* recorded, void* node,
                                            qlora__clear_node* clear) {
    const qlora__cuda_table* cu = &ctx->gpu->cu;
    int64_t rows = 1;
    float zero = 0.0f;
    void* args[] = {&clear->address, &clear->floats, &rows, &clear->floats, &zero};
    qlora__kernel_node fill;
    memset(&fill, 0, sizeof fill);
    fill.function = qlora__cache_function(ctx, QLORA__K_elementwise_fill_f32);
    fill.block[0] = 256;
    fill.grid[0] = (unsigned)qlora__max(1, qlora__ceil_div(clear->floats, 4 * 256));
    for (int i = 1; i < 3; i++) {
        fill.block[i] = 1;
        fill.grid[i] = 1;
    }
    fill.args = args;
    void* made = NULL;
    QLORA__TRY(qlora__cu(ctx,
                         cu->GraphAddKernelNode(&made, recorded, clear->before,
                                                clear->before_count, &fill),
                         "cuGraphAddKernelNode"));
    void* from[QLORA__NEIGHBOURS];
    for (size_t i = 0; i < clear->after_count; i++) {
        from[i] = made;
    }
    if (clear->after_count > 0) {
        QLORA__TRY(qlora__cu(
            ctx,
            cu->GraphAddDependencies(recorded, from, clear->after, NULL, clear->after_count),
            "cuGraphAddDependencies"));
    }
    return qlora__cu(ctx, cu->GraphDestroyNode(node), "cuGraphDestroyNode");
}

static qlora_result qlora__graph_swap_clears(qlora_ctx* ctx, void* recorded, size_t count) {
    const qlora__cuda_table* cu = &ctx->gpu->cu;
    if (qlora__cache_function(ctx, QLORA__K_elementwise_fill_f32) == NULL ||
        cu->GraphNodeGetType == NULL || cu->GraphMemsetNodeGetParams == NULL ||
        cu->GraphNodeGetDependencies == NULL || cu->GraphNodeGetDependentNodes == NULL ||
        cu->GraphAddKernelNode == NULL || cu->GraphAddDependencies == NULL ||
        cu->GraphDestroyNode == NULL) {
        return QLORA_OK; // an older driver, or pre-warm did not compile the kernel
    }
    void** nodes = (void**)qlora__alloc_zero(ctx, (count + 1) * sizeof *nodes);
    if (nodes == NULL) {
        return QLORA_ERR_MEMORY;
    }
    size_t room = count;
    qlora_result r = qlora__cu(ctx, cu->GraphGetNodes(recorded, nodes, &room), "cuGraphGetNodes");
    for (size_t i = 0; r == QLORA_OK && i < count && nodes[i] != NULL; i++) {
        qlora__clear_node clear;
        if (qlora__graph_clear_at(cu, nodes[i], &clear)) {
            r = qlora__graph_clear_swap(ctx, recorded, nodes[i], &clear);
        }
    }
    qlora__free(ctx, nodes, (count + 1) * sizeof *nodes);
    return r;
}

static qlora_result qlora__graph_instantiate(qlora_ctx* ctx, qlora_graph* graph, void* recorded) {
    qlora__gpu* gpu = ctx->gpu;
    QLORA__TRY(
        qlora__cu(ctx, gpu->cu.GraphGetNodes(recorded, NULL, &graph->nodes), "cuGraphGetNodes"));
    QLORA__TRY(qlora__graph_swap_clears(ctx, recorded, graph->nodes));
    return qlora__cu(ctx, gpu->cu.GraphInstantiate(&graph->exec, recorded, 0),
                     "cuGraphInstantiateWithFlags");
}

static qlora_result qlora__graph_launch(qlora_ctx* ctx, qlora_graph* graph) {
    return qlora__cu(ctx, ctx->gpu->cu.GraphLaunch(graph->exec, ctx->gpu->stream), "cuGraphLaunch");
}

// Captures the graph, and launches it if `now` is set.
static qlora_result qlora__graph_build(qlora_ctx* ctx, qlora_graph* graph, bool now) {
    if (qlora__on_cpu(ctx)) {
        return now ? graph->fn(ctx, graph->user) : QLORA_OK;
    }
    void* recorded = NULL;
    QLORA__TRY(qlora__graph_record(ctx, graph, &recorded));
    qlora_result r = qlora__graph_instantiate(ctx, graph, recorded);
    r = r == QLORA_OK && now ? qlora__graph_launch(ctx, graph) : r;
    ctx->gpu->cu.GraphDestroy(recorded);
    return r;
}

static void qlora__graph_drop_exec(qlora_ctx* ctx, qlora_graph* graph) {
    if (graph->exec != NULL) {
        ctx->gpu->cu.GraphExecDestroy(graph->exec);
        graph->exec = NULL;
    }
}

// Ends the graphs that exchange data with other processes: a communicator must outlive them.
static QLORA__UNUSED void qlora__graphs_part(qlora_ctx* ctx, const char* why) {
    for (qlora__watch* g = ctx->watches; g != NULL; g = g->next) {
        if (g->exchanges) {
            qlora__graph_drop_exec(ctx, (qlora_graph*)g); // the watch is its first member
            snprintf(g->invalid, sizeof g->invalid, "%s", why);
        }
    }
}

#else

static qlora_result qlora__graph_build(qlora_ctx* ctx, qlora_graph* graph, bool now) {
    return now ? graph->fn(ctx, graph->user) : QLORA_OK;
}

static void qlora__graph_drop_exec(qlora_ctx* ctx, qlora_graph* graph) {
    (void)ctx;
    (void)graph;
}

static qlora_result qlora__graph_launch(qlora_ctx* ctx, qlora_graph* graph) {
    return graph->fn(ctx, graph->user);
}

#endif

// With `now`, the graph is also launched.
static qlora_result qlora__graph_make(qlora_ctx* ctx, uint64_t key, qlora_graph_fn fn, void* user,
                                      bool now, qlora_graph** out) {
    if (fn == NULL || out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", fn == NULL ? "fn" : "out");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "capturing another graph"));
    qlora_graph* graph = (qlora_graph*)qlora__alloc_zero(ctx, sizeof *graph);
    if (graph == NULL) {
        return QLORA_ERR_MEMORY;
    }
    graph->owner = ctx;
    graph->watch.key = key;
    graph->fn = fn;
    graph->user = user;
    qlora_result r = qlora__graph_build(ctx, graph, now);
    if (r != QLORA_OK) {
        QLORA__LOG(ctx, WARN, GRAPH, "%s", ctx->env.error);
        qlora__graph_drop_exec(ctx, graph);
        qlora__graph_free(ctx, graph);
        return r;
    }
    graph->watch.next = ctx->watches;
    ctx->watches = &graph->watch;
    ctx->living[QLORA__GRAPHS]++;
    QLORA__LOG(ctx, INFO, GRAPH, "graph %llu captured, %llu nodes", (unsigned long long)key,
               (unsigned long long)graph->nodes);
    *out = graph;
    return QLORA_OK;
}

static qlora_result qlora__graph_capture(qlora_ctx* ctx, uint64_t key, qlora_graph_fn fn,
                                         void* user, qlora_graph** out) {
    return qlora__graph_make(ctx, key, fn, user, true, out);
}

qlora_result qlora_graph_capture(qlora_ctx* ctx, uint64_t key, qlora_graph_fn fn, void* user,
                                 qlora_graph** out) {
    QLORA__ENTER(ctx, "qlora_graph_capture");
    return qlora__leave(ctx, qlora__graph_capture(ctx, key, fn, user, out));
}

static bool qlora__graph_is_valid(const qlora_graph* graph) {
    return graph->watch.invalid[0] == '\0';
}

static qlora_ctx* qlora__graph_ctx(const qlora_graph* graph) {
    return graph != NULL ? graph->owner : NULL;
}

static qlora_result qlora__graph_replay(qlora_ctx* ctx, qlora_graph* graph, uint64_t key) {
    QLORA__TRY(qlora__not_in_capture(ctx, "replaying a graph"));
    if (graph->watch.key != key) {
        return qlora__fail(
            ctx, QLORA_ERR_STATE,
            "the graph was captured for key %llu and cannot be replayed for key %llu; capture "
            "another graph",
            (unsigned long long)graph->watch.key, (unsigned long long)key);
    }
    if (!qlora__graph_is_valid(graph)) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "graph %llu cannot be replayed: %s; capture it again",
                           (unsigned long long)key, graph->watch.invalid);
    }
    QLORA__TRY(qlora__away_wait(ctx, ~0u));
    QLORA__TRY(qlora__on_cpu(ctx) ? graph->fn(ctx, graph->user) : qlora__graph_launch(ctx, graph));
    graph->replays++;
    return QLORA_OK;
}

qlora_result qlora_graph_replay(qlora_graph* graph, uint64_t key) {
    qlora_ctx* ctx = qlora__graph_ctx(graph);
    QLORA__ENTER(ctx, "qlora_graph_replay");
    return qlora__leave(ctx, qlora__graph_replay(ctx, graph, key));
}

static qlora_result qlora__graph_destroy(qlora_ctx* ctx, qlora_graph* graph) {
    if (graph == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "destroying a graph"));
    qlora__watch** link = &ctx->watches;
    while (*link != &graph->watch) {
        link = &(*link)->next;
    }
    *link = graph->watch.next;
    qlora__graph_drop_exec(ctx, graph);
    qlora__graph_free(ctx, graph);
    ctx->living[QLORA__GRAPHS]--;
    return QLORA_OK;
}

qlora_result qlora_graph_destroy(qlora_graph* graph) {
    if (graph == NULL) {
        return QLORA_OK;
    }
    qlora_ctx* ctx = graph->owner;
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_graph_destroy"));
    return qlora__leave(ctx, qlora__graph_destroy(ctx, graph));
}

static qlora_result qlora__graph_query(qlora_ctx* ctx, const qlora_graph* graph,
                                       qlora_graph_info* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    out->key = graph->watch.key;
    out->replays = graph->replays;
    out->nodes = graph->nodes;
    out->valid = qlora__graph_is_valid(graph);
    return QLORA_OK;
}

qlora_result qlora_graph_query(const qlora_graph* graph, qlora_graph_info* out) {
    qlora_ctx* ctx = qlora__graph_ctx(graph);
    QLORA__ENTER(ctx, "qlora_graph_query");
    return qlora__leave(ctx, qlora__graph_query(ctx, graph, out));
}
