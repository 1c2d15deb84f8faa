// ---- choosing a plan ----------------------------------------------------------------------------

// Fills in what this machine has. The CPU's limit is the memory that is available now and what this
// context holds of it; a CPU context that plans for a GPU has no limit of its own.
static qlora_plan_desc qlora__machine_resolve(qlora_ctx* ctx, const qlora_plan_desc* given) {
    qlora_plan_desc d;
    memset(&d, 0, sizeof d);
    if (given != NULL) {
        d = *given;
    }
#ifndef QLORA_NO_CUDA
    if (ctx->gpu != NULL) {
        // FP8 runs on 9.0 only: a later device that is limited to that target is planned as it is.
        int own = ctx->gpu->target_number == 90 ? ctx->gpu->capability : ctx->gpu->target_number;
        d.capability = d.capability != 0 ? d.capability : own;
        size_t free_bytes = 0;
        size_t total = 0;
        if (d.bytes == 0 && ctx->gpu->cu.MemGetInfo(&free_bytes, &total) == 0) {
            size_t margin = (size_t)512 << 20; // for cuBLAS, graphs and the driver
            d.bytes = (free_bytes > margin ? free_bytes - margin : 0) + ctx->device_bytes;
        }
    }
#endif
    if (d.host_bytes == 0 && !qlora__on_cpu(ctx)) {
        uint64_t left = qlora__os_memory(""); // 0: unknown
        d.host_bytes = left - left / 4;       // pinned memory cannot be swapped out
    }
    if (d.bytes == 0 && d.capability == 0 && qlora__on_cpu(ctx)) {
        uint64_t left = qlora__os_memory("");
        d.bytes = left != 0 ? left + ctx->device_bytes : 0;
    }
    return d;
}

// What the plan of a model chooses.
typedef struct qlora__choices {
    int64_t recompute;
    int64_t attention; // the first n layers keep its output, if they are recomputed
    int64_t heads;     // and the first n q, k and v, if it is offloaded
    int64_t away;      // n layers have both on the host, if none is recomputed
    bool here;         // what recomputed layers keep of attention is on the device
    int64_t cached;
    int64_t tile;
    int64_t head_chunk;
    bool offload;
    int64_t every; // see qlora_plan.offload_every; 0 = 1
} qlora__choices;

// Operations that a layer must compute for each byte that is copied to the host meanwhile, so that
// copies cost no time (H200: 48 GB/s and about 550 TFLOP/s). There, steps with what attention needs
// on the host, and copies of weights in its place, were 1 % faster with 1B (12,700 operations) and
// 8B (22,100), and as fast as before with 0.5B (7,500). The tests set it to 0.
#ifndef QLORA__AWAY_OPERATIONS
#define QLORA__AWAY_OPERATIONS 10000
#endif

// Whether copies of so many elements for each token are hidden behind the forward pass of a layer.
static bool qlora__copies_hide(const qlora_model* m, int64_t elements, int64_t operations) {
    int64_t bytes = elements * (int64_t)qlora_dtype_bytes(m->compute);
    return QLORA__TRAINS && (double)(bytes * operations) <= qlora__least_layer(m);
}

// Elements for each token of q, k and v, also before their norms, and of the output of attention.
static int64_t qlora__attention_elements(const qlora_model_config* c) {
    return (c->qk_norm ? 3 : 2) * (qlora__q_width(c) + qlora__kv_width(c));
}

// What layers keep of attention is in host memory: if none is recomputed as planned, otherwise with
// their inputs, unless it is chosen to be here or these are in groups because the host has too
// little memory.
static void qlora__plan_attention(qlora_model* m, const qlora__choices* choices) {
    const qlora_model_config* c = &m->plan.config;
    qlora_plan* p = &m->plan;
    bool hides = qlora__copies_hide(m, c->hidden + qlora__q_width(c), QLORA__AWAY_OPERATIONS);
    bool all = qlora__copies_hide(m, c->hidden + qlora__attention_elements(c),
                                  QLORA__AWAY_OPERATIONS);
    bool host = p->offload_every == 1 && hides && !choices->here;
    p->offloaded_attention = p->recompute_layers == 0 ? choices->away
                             : host                   ? p->attention_layers
                                                      : 0;
    p->heads_layers = all ? qlora__min(choices->heads, p->offloaded_attention) : 0;
    p->heads_layers = p->recompute_layers > 0 ? p->heads_layers : 0;
}

// Which layers have what they keep of attention in memory that they use in turn, while it is copied
// to the host: all, or, if none is recomputed, as many as planned. The others are spread evenly
// among them: with each, the copies catch up by the time of a layer, if they take longer than those
// do (1B in FP8 on an H200: 1.8 ms, a layer 1.5).
static void qlora__plan_offload_slots(qlora_model* m) {
    int64_t layers = m->plan.config.layers;
    int64_t others = m->plan.recompute_layers > 0 ? 0 : layers - m->plan.offloaded_attention;
    int64_t passed = 0;
    for (int64_t l = 0; l < layers; l++) {
        bool own = m->plan.offloaded_attention == 0 ||
                   (passed < others && l == (passed + 1) * layers / (others + 1));
        m->layers[l].offload_number = own ? -1 : l - passed;
        passed += own ? 1 : 0;
    }
}

static void qlora__plan_apply(qlora_model* m, const qlora__choices* choices) {
    const qlora_model_config* c = &m->plan.config;
    m->plan.recompute_layers = choices->recompute;
    m->plan.attention_layers = qlora__min(choices->attention, choices->recompute);
    m->plan.cached_layers = choices->cached;
    m->plan.tile = choices->tile;
    m->plan.head_chunk = choices->head_chunk;
    m->plan.offloaded_layers = choices->offload && qlora__trains(m) ? c->layers - 1 : 0;
    m->plan.offload_every = m->plan.offloaded_layers > 0 ? qlora__max(choices->every, 1) : 0;
    m->plan.offloaded_embedding =
        choices->offload && !c->tied && !m->tables.saved_embed && m->tables.token_count == 0;
    qlora__plan_attention(m, choices);
    qlora__plan_offload_slots(m);
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        layer->recompute = l < choices->recompute;
        layer->keeps_attention = l < m->plan.attention_layers;
        layer->keeps_heads = l < m->plan.heads_layers;
        layer->cached = l < choices->cached;
    }
    if (QLORA__TRAINS) {
        qlora__work_sum(m);
    }
    qlora__model_layout(m, NULL);
}

static bool qlora__plan_fits(const qlora_model* m, uint64_t bytes) {
    return bytes == 0 || m->plan.total + m->plan.context <= bytes;
}

// Reports the smallest plan that the settings allow. It suggests nothing: a smaller setting would
// have to be planned before it is known to fit.
static qlora_result qlora__plan_too_large(qlora_ctx* ctx, const qlora_model* m, uint64_t bytes) {
    static const char* const units[] = {"GiB", "MiB", "KiB"};
    const qlora_plan* p = &m->plan;
    bool all = p->recompute_layers == p->config.layers;
    uint64_t other = p->workspace + p->head + p->generation + p->batches + p->cache + p->context;
    double unit = 1073741824.0;
    int k = 0;
    for (; k < 2 && (double)bytes < 0.1 * unit; k++) { // small amounts would be printed as 0.00
        unit /= 1024.0;
    }
    return qlora__fail(ctx, QLORA_ERR_DEVICE_MEMORY,
                       "the model needs %.2f %s%s%s%s, but only %.2f %s are available (base %.2f, "
                       "adapters and optimizer %.2f, activations %.2f, other %.2f)",
                       (double)(p->total + p->context) / unit, units[k],
                       all ? " even with every layer recomputed" : "",
                       p->tile > 0 ? ", in tiles" : "", p->host > 0 ? ", offloaded" : "",
                       (double)bytes / unit, units[k], (double)p->base / unit,
                       (double)(p->adapters + p->optimizer) / unit, (double)p->activations / unit,
                       (double)other / unit);
}

// Refuses choices that exclude each other, and offloading where there is nothing to offload from.
static qlora_result qlora__choices_check(qlora_ctx* ctx, const qlora_model* m,
                                         const qlora__choices* choices) {
    const char* what = choices->offload ? "offload is ON" : "tile is set";
    if (choices->offload && !m->on_gpu) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "desc.offload is ON, which needs a GPU; use AUTO or OFF on the CPU");
    }
    if ((choices->offload || choices->tile > 0) && qlora__trains(m) &&
        choices->recompute != m->plan.config.layers) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.%s, which needs every layer recomputed, but desc.recompute is OFF",
                           what);
    }
    return QLORA_OK;
}

static qlora_result qlora__plan_host_short(qlora_ctx* ctx, const qlora_model* m, uint64_t bytes) {
    return qlora__fail(ctx, QLORA_ERR_MEMORY,
                       "offloading needs %.2f GiB of host memory, but only %.2f GiB are available",
                       (double)m->plan.host / 1073741824.0, (double)bytes / 1073741824.0);
}

// The steps by which a plan becomes smaller once every layer is recomputed, the cheapest first. The
// last ones trade speed for memory that no longer depends on the tokens. Offloading comes with
// tiles, because large ones cost next to nothing (8B, 4 x 2048 tokens on an H200: a step of 709 ms
// without tiles, 667 ms with tiles of 2048).
typedef struct qlora__squeeze {
    bool offload;
    int64_t tile;       // 0 = all tokens at once
    int64_t head_chunk; // at most
} qlora__squeeze;

static const qlora__squeeze qlora__squeezes[] = {
    {false, 0, INT64_MAX},   {false, 4096, INT64_MAX}, {false, 2048, INT64_MAX},
    {true, 4096, INT64_MAX}, {true, 2048, INT64_MAX},  {false, 1024, 512},
    {true, 1024, 512},       {false, 256, 256},        {true, 256, 256}};

#define QLORA__SQUEEZES ((int)(sizeof qlora__squeezes / sizeof qlora__squeezes[0]))

// Sets the choices of a step; false if the settings exclude it. Step 0 is what the caller asked
// for.
static bool qlora__squeeze_at(const qlora_model* m, int step, qlora__choices* out) {
    const qlora__squeeze* s = &qlora__squeezes[step];
    const qlora_model_desc* d = &m->desc;
    bool first = step == 0;
    out->offload = first ? d->offload == QLORA_CHOICE_ON : s->offload;
    out->tile = first ? (d->tile > 0 ? d->tile : 0) : s->tile;
    out->every = 1;
    out->head_chunk = m->own_chunk ? d->head_chunk : qlora__min(d->head_chunk, s->head_chunk);
    if (first) {
        return true;
    }
    bool offload = d->offload == QLORA_CHOICE_AUTO ? m->on_gpu || !s->offload
                                                   : s->offload == (d->offload == QLORA_CHOICE_ON);
    // A tile of the caller's is kept; one that holds all tokens is none.
    bool tiles = d->tile == 0 && s->tile < m->plan.tokens;
    out->tile = d->tile > 0 ? d->tile : tiles ? s->tile : 0;
    return offload && d->recompute != QLORA_CHOICE_OFF;
}

static bool qlora__plan_fits_host(const qlora_model* m, const qlora_plan_desc* machine) {
    return machine->host_bytes == 0 || m->plan.host <= machine->host_bytes;
}

// Applies choices; with `groups`, with the smallest groups of layers that fit the host, or with
// those that need the least of it. A larger group means more to compute once more and, up to about
// the root of the number of layers, less memory.
static void qlora__plan_host(qlora_model* m, const qlora_plan_desc* machine, bool groups,
                             qlora__choices* choices) {
    qlora__plan_apply(m, choices);
    uint64_t least = m->plan.host;
    int64_t best = choices->every;
    for (int64_t n = 2; groups && choices->offload && n < m->plan.config.layers; n++) {
        if (qlora__plan_fits_host(m, machine)) {
            return;
        }
        choices->every = n;
        qlora__plan_apply(m, choices);
        best = m->plan.host < least ? n : best;
        least = m->plan.host < least ? m->plan.host : least;
    }
    if (!qlora__plan_fits_host(m, machine) && choices->every != best) {
        choices->every = best;
        qlora__plan_apply(m, choices);
    }
}

// Finds the first step that fits, with every layer recomputed: first those that keep the input of
// every layer. If none does, the smallest is left in place.
static bool qlora__plan_squeeze(qlora_model* m, const qlora_plan_desc* machine,
                                qlora__choices* choices) {
    uint64_t least = UINT64_MAX;
    qlora__choices best = *choices;
    for (int i = 0; i < 2 * QLORA__SQUEEZES; i++) {
        bool groups = i >= QLORA__SQUEEZES;
        if (!qlora__squeeze_at(m, i % QLORA__SQUEEZES, choices)) {
            continue;
        }
        qlora__plan_host(m, machine, groups, choices);
        bool host = qlora__plan_fits_host(m, machine);
        if (host && qlora__plan_fits(m, machine->bytes)) {
            return true;
        }
        if (host ? m->plan.total < least : groups && least == UINT64_MAX) {
            least = host ? m->plan.total : UINT64_MAX;
            best = *choices;
        }
    }
    *choices = best;
    qlora__plan_apply(m, choices);
    return false;
}

// Sequences from this length on keep the output of attention before whole layers: it is what gains
// most time for its bytes (8B on an H200: at 2,048 tokens attention takes 5 % of the forward pass
// of a layer and its output 7 % of the layer's activations, at 32,768 tokens 45 %).
#define QLORA__LONG_ATTENTION 4096

static bool qlora__plan_fits_both(const qlora_model* m, const qlora_plan_desc* machine) {
    return qlora__plan_fits(m, machine->bytes) && qlora__plan_fits_host(m, machine);
}

// Which of the choices is counted.
typedef enum qlora__count_of {
    QLORA__COUNT_WHOLE,     // layers that are not recomputed
    QLORA__COUNT_ATTENTION, // recomputed layers that keep the output of attention
    QLORA__COUNT_HEADS,     // of these, those that keep q, k and v
    QLORA__COUNT_CACHED,    // layers with 16-bit copies
    QLORA__COUNT_HERE       // layers that have attention on the device
} qlora__count_of;

static void qlora__plan_count(qlora_model* m, qlora__count_of what, int64_t count,
                              qlora__choices* choices) {
    if (what == QLORA__COUNT_WHOLE) {
        choices->recompute = m->plan.config.layers - count;
    } else if (what == QLORA__COUNT_ATTENTION) {
        choices->attention = count;
    } else if (what == QLORA__COUNT_HEADS) {
        choices->heads = count;
    } else if (what == QLORA__COUNT_HERE) {
        choices->away = m->plan.config.layers - count;
    } else {
        choices->cached = count;
    }
    qlora__plan_apply(m, choices);
}

// Raises a choice as far as the memory goes, which grows with each of them, so bisection finds it.
// The end is tried first: without any recomputed layer, there is no room for one either.
static void qlora__plan_most(qlora_model* m, const qlora_plan_desc* machine, qlora__count_of what,
                             int64_t low, int64_t high, qlora__choices* choices) {
    qlora__plan_count(m, what, high, choices);
    if (qlora__plan_fits_both(m, machine)) {
        return;
    }
    high--;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        qlora__plan_count(m, what, middle, choices);
        if (qlora__plan_fits_both(m, machine)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    qlora__plan_count(m, what, low, choices);
}

// Whether any weight has codes: a folder may leave some projections in 16 bits.
static bool qlora__any_coded(const qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            if (qlora__is_coded(&m->layers[l].projections[i])) {
                return true;
            }
        }
    }
    return false;
}

// How the memory that is left is used. Results depend on the rows of logits that are computed at a
// time, so their number never depends on what happens to be free.
typedef enum qlora__filling {
    QLORA__FILL_NOT,
    QLORA__FILL_FREE, // up to what is free now
    QLORA__FILL_ASKED // up to what the caller has set
} qlora__filling;

// Half as many rows of logits at a time are a little slower, and leave memory for copies: taken if
// they are those of an eighth of the layers (0.5B with 2048 tokens in 2.45 GiB on an H200: 11
// instead of 6 of 24, 1.4 % more tokens per second; 1.5B: hardly any more, 0.9 % less).
static void qlora__plan_halve(qlora_model* m, const qlora_plan_desc* machine,
                              qlora__choices* choices) {
    int64_t layers = m->plan.config.layers;
    qlora__choices half = *choices;
    half.head_chunk = choices->head_chunk / 2;
    if (m->own_chunk || !m->on_gpu || half.head_chunk < 512 || choices->cached == layers) {
        return;
    }
    qlora__plan_most(m, machine, QLORA__COUNT_CACHED, choices->cached, layers, &half);
    if (8 * (half.cached - choices->cached) >= layers) {
        *choices = half;
    }
    qlora__plan_apply(m, choices);
}

// With attention in host memory, more layers have copies of their weights. If they do, it is that
// of as few layers as these copies need.
static void qlora__plan_away(qlora_model* m, const qlora_plan_desc* machine,
                             qlora__choices* choices) {
    int64_t layers = m->plan.config.layers;
    qlora__choices away = *choices;
    if (!m->on_gpu || !qlora__trains(m) || m->desc.offload != QLORA_CHOICE_AUTO ||
        choices->cached == layers ||
        !qlora__copies_hide(m, qlora__attention_elements(&m->plan.config),
                            QLORA__AWAY_OPERATIONS)) {
        return;
    }
    away.away = layers;
    qlora__plan_most(m, machine, QLORA__COUNT_CACHED, choices->cached, layers, &away);
    if (away.cached > choices->cached && qlora__plan_fits_both(m, machine)) {
        qlora__plan_most(m, machine, QLORA__COUNT_HERE, 0, layers - 3, &away);
        *choices = away;
    }
    qlora__plan_apply(m, choices);
}

// Offloading comes with tiles, so that it fits. If the memory suffices for all tokens at once, also
// with q, k and v of every layer, one tile has all of them (8B, 4 x 2048 tokens in 7.5 GiB on an
// H200: a step of 593 ms instead of 603 with tiles of 4096). Not for long sequences, whose
// attention needs the memory more. Results depend on tiles, so this does not depend on what the
// host can hold.
static void qlora__plan_widen(qlora_model* m, const qlora_plan_desc* machine,
                              qlora__choices* choices) {
    int64_t layers = m->plan.config.layers;
    qlora__choices wide = *choices;
    if (m->desc.tile != 0 || choices->tile == 0 || !choices->offload ||
        m->plan.max_length >= QLORA__LONG_ATTENTION) {
        return;
    }
    wide.tile = m->plan.tokens;
    wide.every = 1;
    wide.attention = layers;
    wide.heads = layers;
    qlora__plan_apply(m, &wide);
    bool fits = m->plan.heads_layers == layers && qlora__plan_fits(m, machine->bytes);
    wide = *choices;
    wide.tile = m->plan.tokens;
    qlora__plan_apply(m, &wide);
    if (fits && qlora__plan_fits_both(m, machine)) {
        *choices = wide;
    }
    qlora__plan_apply(m, choices);
}

// As many recomputed layers as possible keep the output of attention: on the host, or, if that has
// room for too few, on the device.
static void qlora__plan_keep(qlora_model* m, const qlora_plan_desc* machine,
                             qlora__choices* choices) {
    int64_t layers = m->plan.config.layers;
    qlora__plan_most(m, machine, QLORA__COUNT_ATTENTION, 0, layers, choices);
    if (choices->offload && choices->attention < layers) {
        qlora__choices here = *choices;
        here.here = true;
        qlora__plan_most(m, machine, QLORA__COUNT_ATTENTION, 0, layers, &here);
        *choices = here.attention > choices->attention ? here : *choices;
        qlora__plan_apply(m, choices);
    }
}

// Uses the memory that is left for what saves time: the fewest recomputed layers that fit, outputs
// of attention of the others, then, if the memory is to be filled, cached layers.
static void qlora__plan_fill(qlora_model* m, const qlora_plan_desc* machine, qlora__filling how,
                             qlora__choices* choices) {
    bool fill = how != QLORA__FILL_NOT;
    int64_t layers = m->plan.config.layers;
    const qlora_model_desc* d = &m->desc;
    bool free_to = d->recompute == QLORA_CHOICE_AUTO && qlora__trains(m);
    bool whole = choices->offload || choices->tile > 0; // these recompute every layer
    bool attention_first = whole || m->plan.max_length >= QLORA__LONG_ATTENTION;
    if (free_to && fill && attention_first) {
        qlora__plan_widen(m, machine, choices);
        qlora__plan_keep(m, machine, choices);
    }
    if (free_to && fill && choices->attention == layers && m->plan.offloaded_attention > 0) {
        qlora__plan_most(m, machine, QLORA__COUNT_HEADS, 0, layers, choices);
    }
    if (free_to && !whole && (choices->attention == 0 || choices->attention == layers)) {
        qlora__plan_most(m, machine, QLORA__COUNT_WHOLE, 0, layers, choices);
    }
    if (free_to && fill && !attention_first) {
        qlora__plan_most(m, machine, QLORA__COUNT_ATTENTION, 0, choices->recompute, choices);
    }
    bool coded = qlora__any_coded(m) && qlora__computes(m);
    if (d->cache == QLORA_CHOICE_AUTO && fill && choices->recompute == 0 && coded && !whole) {
        qlora__plan_most(m, machine, QLORA__COUNT_CACHED, 0, layers, choices);
        if (how == QLORA__FILL_ASKED) {
            qlora__plan_away(m, machine, choices);
            qlora__plan_halve(m, machine, choices);
        }
    }
}

static qlora_result qlora__plan_choose(qlora_ctx* ctx, qlora_model* m,
                                       const qlora_plan_desc* machine, qlora__filling how) {
    int64_t layers = m->plan.config.layers;
    const qlora_model_desc* d = &m->desc;
    bool trains = qlora__trains(m);
    // What offloads or has tiles recomputes every layer.
    bool all = d->recompute == QLORA_CHOICE_ON || (d->recompute == QLORA_CHOICE_AUTO &&
                                                   (d->offload == QLORA_CHOICE_ON || d->tile > 0));
    int64_t low = all && trains ? layers : 0;
    qlora__choices choices;
    memset(&choices, 0, sizeof choices);
    choices.recompute = d->recompute == QLORA_CHOICE_AUTO && trains ? layers : low;
    choices.cached = d->cache == QLORA_CHOICE_ON && qlora__computes(m) ? layers : 0;
    qlora__squeeze_at(m, 0, &choices);
    QLORA__TRY(qlora__choices_check(ctx, m, &choices));
    if (!qlora__plan_squeeze(m, machine, &choices)) {
        return machine->host_bytes != 0 && m->plan.host > machine->host_bytes
                   ? qlora__plan_host_short(ctx, m, machine->host_bytes)
                   : qlora__plan_too_large(ctx, m, machine->bytes);
    }
    qlora__plan_fill(m, machine, how, &choices);
    return QLORA_OK;
}

static qlora_result qlora__plan_build(qlora_ctx* ctx, const qlora_model_desc* desc,
                                      const qlora_plan_desc* given, qlora_model** out) {
    qlora_plan_desc machine = qlora__machine_resolve(ctx, given);
    qlora_model* m = NULL;
    QLORA__TRY(qlora__skeleton(ctx, desc, &machine, &m));
    // When a CPU context plans for a GPU, the default memory of a CUDA context is counted.
    bool other = given != NULL && given->capability != 0 && qlora__on_cpu(ctx);
    m->plan.context = other                ? QLORA__SCRATCH_BYTES + 2 * QLORA__WORKSPACE_BYTES
                      : qlora__on_cpu(ctx) ? ctx->scratch->bytes + qlora__packing_bytes(ctx)
                                           : ctx->device_bytes;
    // Other programs also use the memory of the CPU: what was not asked for is left to them.
    qlora__filling how = given != NULL && given->bytes != 0              ? QLORA__FILL_ASKED
                         : machine.bytes != 0 && !qlora__on_cpu(ctx) ? QLORA__FILL_FREE
                                                                     : QLORA__FILL_NOT;
    qlora_result r = qlora__plan_choose(ctx, m, &machine, how);
    if (r != QLORA_OK) {
        qlora__model_free(m);
        return r;
    }
    *out = m;
    return QLORA_OK;
}

static qlora_result qlora__plan_make(qlora_ctx* ctx, const qlora_model_desc* model,
                                     const qlora_plan_desc* desc, qlora_plan* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    if (model != NULL && model->plan != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "plan of the model desc is set; it must be NULL here");
    }
    qlora_model* m = NULL;
    QLORA__TRY(qlora__plan_build(ctx, model, desc, &m));
    *out = m->plan;
    qlora__model_free(m);
    return QLORA_OK;
}

qlora_result qlora_plan_make(qlora_ctx* ctx, const qlora_model_desc* model,
                             const qlora_plan_desc* desc, qlora_plan* out) {
    QLORA__ENTER(ctx, "qlora_plan_make");
    return qlora__leave(ctx, qlora__plan_make(ctx, model, desc, out));
}

static void qlora__append_trained(const qlora_plan* plan, char* buffer, size_t size, size_t* used) {
    static const char* const names[QLORA_PLACES] = {"attention", "MLP",   "experts",
                                                    "router",    "norms", "embedding and head"};
    const char* between = "";
    for (int i = 0; i < QLORA_PLACES; i++) {
        if (plan->trained[i] > 0) {
            qlora__append(buffer, size, used, "%s%s %lld", between, names[i],
                          (long long)plan->trained[i]);
            between = ", ";
        }
    }
}

size_t qlora_places_describe(const qlora_plan* plan, char* buffer, size_t size) {
    size_t used = 0;
    if (buffer != NULL && size > 0) {
        buffer[0] = '\0';
    }
    if (plan != NULL) {
        qlora__append_trained(plan, buffer, size, &used);
    }
    return used + 1;
}

// The lines of a plan about what only some plans have.
static void qlora__plan_notes(const qlora_plan* plan, char* buffer, size_t size, size_t* used) {
    if (plan->attention_layers > 0) {
        qlora__append(buffer, size, used,
                      "  the output of attention is kept in %lld of the recomputed layers\n",
                      (long long)plan->attention_layers);
    }
    if (plan->heads_layers > 0) {
        qlora__append(buffer, size, used, "  q, k and v are kept in %lld of them\n",
                      (long long)plan->heads_layers);
    }
    if (plan->offloaded_attention > 0) {
        qlora__append(buffer, size, used,
                      "  what %lld layers keep of attention is in the memory of the host\n",
                      (long long)plan->offloaded_attention);
    }
    if (plan->generate_positions > 0) {
        qlora__append(buffer, size, used, "  the texts have room for %lld positions together\n",
                      (long long)plan->generate_positions);
    }
    if (plan->tile > 0) {
        qlora__append(buffer, size, used, "  everything but attention in tiles of %lld tokens\n",
                      (long long)plan->tile);
    }
}

size_t qlora_plan_describe(const qlora_plan* plan, char* buffer, size_t size) {
    size_t used = 0;
    if (buffer != NULL && size > 0) {
        buffer[0] = '\0';
    }
    if (plan == NULL) {
        return 1;
    }
    bool fp8 = plan->mode == QLORA_MODE_FP8;
    const struct {
        const char* name;
        uint64_t bytes;
    } rows[] = {{"base weights", plan->base},
                {fp8 ? "FP8 weight cache" : "16-bit weight cache", plan->cache},
                {"adapters", plan->adapters},
                {"optimizer", plan->optimizer},
                {"activations", plan->activations},
                {"workspace", plan->workspace},
                {"head", plan->head},
                {"generation", plan->generation},
                {"batches", plan->batches},
                {"context", plan->context}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        qlora__append(buffer, size, &used, "  %-22s %12.3f MiB\n", rows[i].name,
                      (double)rows[i].bytes / 1048576.0);
    }
    qlora__append(buffer, size, &used, "  %-22s %12.3f MiB\n", "total",
                  (double)(plan->total + plan->context) / 1048576.0);
    if (plan->mapped > 0) {
        qlora__append(buffer, size, &used, "  %-22s %12.3f MiB in the files, not counted\n",
                      "mapped weights", (double)plan->mapped / 1048576.0);
    }
    if (plan->host > 0) {
        qlora__append(buffer, size, &used, "  %-22s %12.3f MiB of the host, not counted\n",
                      "offloaded", (double)plan->host / 1048576.0);
    }
    if (plan->offload_every > 1) {
        qlora__append(buffer, size, &used,
                      "  the input of one layer in %lld is kept, the others are computed again\n",
                      (long long)plan->offload_every);
    }
    qlora__append(
        buffer, size, &used,
        "  %lld tokens per micro-batch, %lld trained parameters, %lld of %lld layers recomputed, "
        "%lld cached in %s\n",
        (long long)plan->tokens, (long long)plan->parameters, (long long)plan->recompute_layers,
        (long long)plan->config.layers, (long long)plan->cached_layers, fp8 ? "FP8" : "16 bits");
    if (plan->parameters > 0) {
        qlora__append(buffer, size, &used, "  trained: ");
        qlora__append_trained(plan, buffer, size, &used);
        qlora__append(buffer, size, &used, "\n");
    }
    qlora__plan_notes(plan, buffer, size, &used);
    return used + 1;
}

static qlora_result qlora__config_read_public(qlora_ctx* ctx, const char* dir,
                                              qlora_model_config* out) {
    if (dir == NULL || out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", dir == NULL ? "dir" : "out");
    }
    return qlora__config_read(&ctx->env, dir, out);
}

qlora_result qlora_config_read(qlora_ctx* ctx, const char* dir, qlora_model_config* out) {
    QLORA__ENTER(ctx, "qlora_config_read");
    return qlora__leave(ctx, qlora__config_read_public(ctx, dir, out));
}

static qlora_result qlora__config_scale_public(qlora_ctx* ctx, const char* scale,
                                               qlora_model_config* config) {
    if (scale == NULL || config == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL",
                           scale == NULL ? "scale" : "config");
    }
    qlora_model_config checked = *config;
    QLORA__TRY(qlora__config_check(ctx, &checked));
    QLORA__TRY(qlora__config_scale(&ctx->env, scale, &checked));
    *config = checked;
    return QLORA_OK;
}

qlora_result qlora_config_scale(qlora_ctx* ctx, const char* scale, qlora_model_config* config) {
    QLORA__ENTER(ctx, "qlora_config_scale");
    return qlora__leave(ctx, qlora__config_scale_public(ctx, scale, config));
}
