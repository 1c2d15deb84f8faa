// ---- memory of activations ----------------------------------------------------------------------

// z of stacks (one bit each), if they have adapters. Rows of x or s that are not multiples of 8
// have z where it is not aligned, and other kernels would add up the gradients: it stays there, in
// layers that are recomputed and in others.
static void qlora__layout_z(qlora__arena* arena, qlora_model* m, const int64_t pads[QLORA__GROUPS],
                            unsigned stacks, qlora__kept* kept) {
    for (int g = 0; g < QLORA__GROUPS && qlora__keeps_z(m); g++) {
        bool aligned = m->layers[0].linears[g].in % 8 == 0;
        if ((stacks & 1u << g) != 0 && pads[g] > 0 && aligned) {
            qlora__arena_tensor(arena, m->compute, m->plan.tokens, pads[g], &kept->z[g]);
        }
    }
}

// The slots of a layer.
static qlora__kept_slots qlora__slots_of_layer(const qlora_model* m, const qlora__layer* layer) {
    qlora__kept_slots slots;
    memset(&slots, 0, sizeof slots);
    qlora__mixer_plan_of(layer)->keep(m, layer, &slots);
    qlora__ffn_plan_of(layer)->keep(m, layer, &slots);
    return slots;
}

// Those of layers that use the same memory, in turn.
static qlora__kept_slots qlora__slots_most(const qlora_model* m) {
    qlora__kept_slots slots;
    memset(&slots, 0, sizeof slots);
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__mixer_plan_of(&m->layers[l])->keep(m, &m->layers[l], &slots);
        qlora__ffn_plan_of(&m->layers[l])->keep(m, &m->layers[l], &slots);
    }
    return slots;
}

// The stacks whose z mixers of the model keep: also in recomputed layers, which share its memory. z
// of the MLP is in x and s of such a layer when it is needed; where the activation is not written
// once more, it has its own.
static unsigned qlora__mixers_z(const qlora_model* m) {
    unsigned z = 0;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        z |= qlora__mixer_plan_of(&m->layers[l])->z;
    }
    return z;
}

// What a layer has after mixing: also the stream, and what the norms after its branches read.
static void qlora__layout_kept(qlora__arena* arena, qlora_model* m, const qlora__kept_slots* slots,
                               qlora__kept* kept) {
    int64_t width = m->plan.config.hidden;
    int64_t some = qlora__tile_rows(m);
    qlora__arena_tensor(arena, m->compute, some, width, &kept->h2);
    qlora__layout_slots(arena, slots, QLORA__KEPT_TILE, kept);
    for (int i = 0; i < QLORA__BRANCHES; i++) {
        if (qlora__has_norm(m, qlora__branches[i].after)) {
            qlora__arena_tensor(arena, m->compute, some, width, &kept->out[i]);
        }
    }
}

static void qlora__most_pads(const qlora_model* m, int64_t pads[QLORA__GROUPS]) {
    memset(pads, 0, QLORA__GROUPS * sizeof pads[0]);
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int g = 0; g < QLORA__GROUPS; g++) {
            pads[g] = qlora__max(pads[g], m->layers[l].pads[g]);
        }
    }
}

// Whether what mixing reads is in the memory that layers use in turn, if attention is offloaded:
// that of layers that are not recomputed is.
static bool qlora__slots_have_heads(const qlora_model* m) {
    return m->plan.offloaded_attention > 0 &&
           (m->plan.heads_layers > 0 || m->plan.recompute_layers == 0);
}

// Memory that layers use in turn for what they keep of attention while it is copied. One copy can
// take all of it, so it is in one piece; what fewer layers keep is at the end, and last what mixing
// reads, which is there before the rest.
static void qlora__layout_offload(qlora__arena* arena, qlora_model* m,
                                  const int64_t pads[QLORA__GROUPS], qlora__kept* kept) {
    size_t first = arena->used;
    qlora__kept_slots slots = qlora__slots_most(m);
    memset(kept, 0, sizeof *kept);
    qlora__layout_slots(arena, &slots, QLORA__KEPT_MIXED, kept);
    m->work.offload_bytes[0] = arena->used - first;
    m->work.offload_bytes[1] = m->work.offload_bytes[0];
    if (qlora__slots_have_heads(m)) {
        qlora__layout_z(arena, m, pads, qlora__mixers_z(m), kept);
        m->work.offload_bytes[1] = arena->used - first;
        qlora__layout_slots(arena, &slots, QLORA__KEPT_IN, kept);
    }
    m->work.offload_bytes[2] = arena->used - first;
}

// Bytes of what a layer keeps of it.
static size_t qlora__offload_bytes(const qlora_model* m, const qlora__layer* layer) {
    return m->work.offload_bytes[layer->keeps_heads || !layer->recompute ? 2 : 0];
}

// What a layer has of attention is in that memory.
static void qlora__layer_offload(qlora_model* m, qlora__layer* layer,
                                 const qlora__kept_slots* slots) {
    qlora__kept* from = &m->work.offload_slots[layer->offload_number % 2];
    unsigned z = qlora__mixer_plan_of(layer)->z;
    qlora__borrow_slots(slots, QLORA__KEPT_MIXED, from, &layer->kept);
    if (qlora__slots_have_heads(m)) {
        qlora__borrow_slots(slots, QLORA__KEPT_IN, from, &layer->kept);
        for (int g = 0; g < QLORA__GROUPS; g++) {
            layer->kept.z[g] = (z & 1u << g) != 0 ? from->z[g] : layer->kept.z[g];
        }
    }
}

// What a recomputed layer keeps besides its input.
static void qlora__layout_again(qlora__arena* arena, qlora_model* m, qlora__layer* layer) {
    qlora__kept_slots slots = qlora__slots_of_layer(m, layer);
    layer->kept = m->work.again;
    if (qlora__ffn_sums(m, layer)) {
        qlora__layout_z(arena, m, layer->pads, qlora__ffn_plan_of(layer)->z_sums, &layer->kept);
    }
    if (m->plan.offloaded_attention > 0) {
        qlora__layer_offload(m, layer, &slots);
    } else if (layer->keeps_attention) {
        qlora__layout_slots(arena, &slots, QLORA__KEPT_MIXED, &layer->kept);
    }
}

// What a layer that is not recomputed keeps besides its input.
static void qlora__layout_whole(qlora__arena* arena, qlora_model* m, qlora__layer* layer) {
    bool leaves = layer->offload_number >= 0;
    unsigned mixed = leaves ? 0 : qlora__mixer_plan_of(layer)->z;
    qlora__kept_slots slots = qlora__slots_of_layer(m, layer);
    if (!leaves) {
        qlora__layout_slots(arena, &slots, QLORA__KEPT_IN, &layer->kept);
        qlora__layout_slots(arena, &slots, QLORA__KEPT_MIXED, &layer->kept);
    }
    qlora__layout_kept(arena, m, &slots, &layer->kept);
    memset(layer->kept.z, 0, sizeof layer->kept.z);
    qlora__layout_z(arena, m, layer->pads, mixed | qlora__ffn_plan_of(layer)->z, &layer->kept);
    if (leaves) {
        qlora__layer_offload(m, layer, &slots);
    }
}

// In training, each layer keeps its own activations. Otherwise all layers share one set, and the
// residual stream is updated in place.
static void qlora__layout_activations(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    int64_t pads[QLORA__GROUPS];
    qlora__most_pads(m, pads);
    bool away = m->plan.offloaded_layers > 0;
    for (int i = 0; i < 2 && away; i++) {
        qlora__arena_tensor(arena, m->compute, m->plan.tokens, c->hidden, &m->work.streams[i]);
    }
    if (away) {
        m->work.last_h = m->work.streams[c->layers % 2];
    } else {
        qlora__arena_tensor(arena, m->compute, m->plan.tokens, c->hidden, &m->work.last_h);
    }
    memset(&m->work.again, 0, sizeof m->work.again);
    if (!qlora__trains(m) || m->plan.recompute_layers > 0) {
        // Without a layer that uses it, the shared output of attention has no memory.
        bool attention =
            !qlora__trains(m) || (m->plan.offloaded_attention == 0 &&
                                  m->plan.attention_layers < m->plan.recompute_layers);
        bool heads = !qlora__slots_have_heads(m);
        qlora__kept_slots slots = qlora__slots_most(m);
        if (heads) {
            qlora__layout_slots(arena, &slots, QLORA__KEPT_IN, &m->work.again);
        }
        if (attention) {
            qlora__layout_slots(arena, &slots, QLORA__KEPT_MIXED, &m->work.again);
        }
        qlora__layout_kept(arena, m, &slots, &m->work.again);
        qlora__layout_z(arena, m, pads, heads ? qlora__mixers_z(m) : 0, &m->work.again);
    }
    for (int i = 0; i < 2 && m->plan.offloaded_attention > 0; i++) {
        qlora__layout_offload(arena, m, pads, &m->work.offload_slots[i]);
    }
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        if (!qlora__trains(m)) {
            layer->kept = m->work.again;
            layer->kept.h = m->work.last_h;
            layer->kept.h2 = m->work.last_h;
            continue;
        }
        if (layer->recompute) {
            qlora__layout_again(arena, m, layer);
        } else {
            qlora__layout_whole(arena, m, layer);
        }
        if (away) {
            layer->kept.h = m->work.streams[l % 2];
        } else {
            qlora__arena_tensor(arena, m->compute, m->plan.tokens, c->hidden, &layer->kept.h);
        }
    }
}

// What is in host memory: the embedding, the inputs of layers, and what they keep of attention. The
// input of the last layer is still on the device when the backward pass needs it, and so are that
// of the last layer of a group and the attention of the last two layers that use memory in slot.
// The inputs inside a group have the same memory in every group: the backward pass is in one at a
// time.
static void qlora__layout_host(qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    qlora__arena host;
    host.ctx = m->ctx;
    host.base = (char*)m->host.data;
    host.used = 0;
    if (m->plan.offloaded_embedding) {
        qlora__arena_tensor(&host, m->compute, c->vocab, c->hidden, &m->base.embed);
    }
    size_t bytes = (size_t)m->plan.tokens * (size_t)c->hidden * qlora_dtype_bytes(m->compute);
    int64_t every = qlora__max(m->plan.offload_every, 1);
    for (int64_t l = 0; l < c->layers; l++) {
        int64_t place = l % every;
        bool on_device = l >= m->plan.offloaded_layers || (place > 0 && place == every - 1);
        m->layers[l].away = on_device              ? NULL
                            : place > 0 && l > every ? m->layers[place].away
                                                     : qlora__arena_take(&host, bytes);
    }
    qlora__arena slot;
    memset(&slot, 0, sizeof slot);
    int64_t pads[QLORA__GROUPS];
    qlora__most_pads(m, pads);
    qlora__layout_offload(&slot, m, pads, &m->work.offload_slots[0]); // counts its bytes
    int64_t users = m->plan.recompute_layers > 0 ? c->layers : m->plan.offloaded_attention;
    for (int64_t l = 0; l < c->layers; l++) {
        int64_t number = m->layers[l].offload_number;
        bool leaves = number >= 0 && number < qlora__min(m->plan.offloaded_attention, users - 2);
        m->layers[l].away_attention =
            leaves ? qlora__arena_take(&host, qlora__offload_bytes(m, &m->layers[l])) : NULL;
    }
    m->plan.host = host.used;
}
