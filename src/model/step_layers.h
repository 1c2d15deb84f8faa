// ---- all layers of a decoding step in one launch ------------------------------------------------

#ifndef QLORA_NO_CUDA

// Same layout as decode_layer in kernels/decode/decode_layers.cuh.
typedef struct qlora__decode_layer {
    qlora__decode_product stacks[QLORA__GROUPS];
    qlora__decode_attention attention;
    const void* a[QLORA__GROUPS][QLORA_LINEAR_PARTS];
    const void* norms[2];
    int32_t ranks[QLORA__GROUPS][QLORA_LINEAR_PARTS];
    int64_t unused;
} qlora__decode_layer;

typedef char
    qlora__decode_layer_size[sizeof(qlora__decode_layer) == QLORA__DECODE_LAYER_BYTES ? 1 : -1];

// Same layout as decode_layers.
typedef struct qlora__decode_layers {
    const void* layers;
    void* h;
    void* rows[QLORA__MARKS_QKV + 1];
    void* z;
    void* partials;
    void* shares;
    int32_t count;
    int32_t hidden;
    int32_t ldz;
    int32_t units;
    int32_t pages;
    float eps;
    float scale;
    int32_t split;
} qlora__decode_layers;

enum {
    QLORA__LAYERS_WARPS = 16, // as in kernels/decode/decode_layers.cuh
    QLORA__LAYERS_SHARED = 256 * 32 * 4 + 256 * 4 + 16 * 3 * 2176 + 6512,
    QLORA__LAYERS_ATTENTION = 17936 // of attention_shared
};

// Blocks of the launch: one per multiprocessor, if there is something to do for so many.
static int64_t qlora__decode_layers_blocks(const qlora_model* m,
                                           const qlora__decode_layer* layer) {
    int64_t most = m->decode.counters.cols * m->decode.pages;
    for (int g = 0; g < QLORA__GROUPS; g++) {
        most = qlora__max(most, qlora__decode_units(&layer->stacks[g]));
    }
    return qlora__min(most, m->ctx->gpu->sm_count);
}

#ifndef QLORA__LAYERS_SPLIT_FROM
#define QLORA__LAYERS_SPLIT_FROM 12 // pieces; what blocks that share tiles cost each other
#endif

// Whether blocks divide the pieces of a stack instead of its tiles: if it makes the largest share
// smaller by enough. Every block has at least as many pieces as a tile, so two share one at most.
static bool qlora__decode_layers_split(const qlora__decode_product* p, int64_t blocks) {
    int64_t units = qlora__decode_units(p);
    int64_t pieces = p->K / 256;
    int64_t saved =
        qlora__ceil_div(units, blocks) * pieces - qlora__ceil_div(units * pieces, blocks);
    return p->gated == 0 && units >= blocks && blocks <= QLORA__DECODE_SHARES &&
           saved >= QLORA__LAYERS_SPLIT_FROM;
}

// What a block with `all` pieces of `tiles` tiles needs for a stack; z: the sum of the ranks.
static int64_t qlora__decode_stack_shared(const qlora__decode_product* p, int64_t z, int64_t tiles,
                                          int64_t all) {
    int64_t pieces = p->K / 256;
    int64_t each = qlora__max(1, qlora__ceil_div(all, QLORA__LAYERS_WARPS));
    int64_t slots = (pieces - 1 + each - 1) / each + 1;
    int64_t rows =
        qlora__min(tiles * 16, QLORA__LAYERS_WARPS * 32) * p->parts[0].rank * 2; // of sB
    return pieces * 512 + (z + 3) / 4 * 16 + tiles * slots * 64 + rows;
}

// What the block that needs most of it needs for a stack.
static int64_t qlora__decode_stack_most(const qlora__decode_layer* layer, int g, bool split,
                                        int64_t blocks) {
    const qlora__decode_product* p = &layer->stacks[g];
    int64_t units = qlora__decode_units(p);
    int64_t z = (int64_t)layer->ranks[g][0] + layer->ranks[g][1] + layer->ranks[g][2];
    int64_t pieces = p->K / 256;
    int64_t most = 0;
    for (int64_t i = 0; i < 2; i++) { // the smaller share, and the larger one
        int64_t tiles = (units + i * (blocks - 1)) / blocks * (p->gated != 0 ? 2 : 1);
        int64_t all = tiles * pieces;
        if (split) {
            all = (units * pieces + i * (blocks - 1)) / blocks;
            tiles = qlora__ceil_div(pieces - 1 + all, pieces);
        }
        most = qlora__max(most, qlora__decode_stack_shared(p, z, tiles, all));
    }
    return most;
}

// Bit g: stack g is divided by pieces. Not if only whole tiles leave room for a block.
static int qlora__decode_layers_mask(const qlora_model* m, const qlora__decode_layer* layer,
                                     int64_t blocks) {
    int mask = 0;
    for (int g = 0; g < QLORA__GROUPS; g++) {
        bool split = qlora__decode_layers_split(&layer->stacks[g], blocks) &&
                     QLORA__LAYERS_SHARED + qlora__decode_stack_most(layer, g, true, blocks) <=
                         m->ctx->gpu->max_shared;
        mask |= split ? 1 << g : 0;
    }
    return mask;
}

// The shared memory of a block: that of the stack or the attention that needs most.
static int64_t qlora__decode_layers_shared(const qlora_model* m, const qlora__decode_layer* layer,
                                           int64_t blocks) {
    int64_t most = QLORA__LAYERS_ATTENTION + qlora__decode_tiles_shared(m);
    int mask = qlora__decode_layers_mask(m, layer, blocks);
    for (int g = 0; g < QLORA__GROUPS; g++) {
        bool split = (mask >> g & 1) != 0;
        most = qlora__max(most, qlora__decode_stack_most(layer, g, split, blocks));
    }
    return QLORA__LAYERS_SHARED + most;
}

// Whether the kernel can read a stack.
static bool qlora__decode_layers_take(const qlora__decode_product* p, bool nf4) {
    bool fits = nf4 && p->K % 256 == 0;
    for (int i = 0; i < p->count; i++) {
        const qlora__decode_part* part = &p->parts[i];
        fits = fits && part->N % 16 == 0 && part->absmax == NULL && part->block_shift == 6 &&
               part->group_shift >= 2;
    }
    return fits;
}

// The parameters of a layer; false if the kernel cannot take it.
static bool qlora__decode_layer_of(const qlora_model* m, int64_t index, qlora__decode_layer* to) {
    const qlora__decode* d = &m->decode;
    const qlora__layer* layer = &m->layers[index];
    const void* x[QLORA__GROUPS];
    void* y[QLORA__GROUPS];
    bool fits = qlora__layer_norm(m, layer, QLORA__NORM_ATTENTION_OUT) == NULL &&
                qlora__layer_norm(m, layer, QLORA__NORM_MLP_OUT) == NULL && !qlora__norms_mean(m) &&
                qlora__decode_leaves_z(m);
    const qlora_tensor* norms[2] = {qlora__layer_norm(m, layer, QLORA__NORM_ATTENTION),
                                    qlora__layer_norm(m, layer, QLORA__NORM_MLP)};
    memset(to, 0, sizeof *to);
    memset(x, 0, sizeof x);
    memset(y, 0, sizeof y);
    x[QLORA__O] = d->o.data;
    x[QLORA__DOWN] = d->s.data;
    y[QLORA__QKV] = d->qkv.data;
    y[QLORA__GATE_UP] = d->s.data;
    for (int i = 0; i < 2; i++) {
        fits = fits && norms[i] != NULL;
        to->norms[i] = norms[i] != NULL ? norms[i]->data : NULL;
    }
    for (int g = 0; g < QLORA__GROUPS; g++) {
        const qlora_linear_desc* linear = &layer->linears[g];
        qlora__decode_product* p = &to->stacks[g];
        qlora__decode_stack(m, layer, g, false, p);
        p->gated = g != QLORA__GATE_UP ? 0 : (m->arch->has & QLORA__HAS_GELU) != 0 ? 2 : 1;
        p->x = x[g];
        p->y = y[g];
        p->y_is_bf16 = 1;
        for (int i = 0; m->use_adapters && i < linear->count; i++) {
            to->ranks[g][i] = (int32_t)linear->parts[i].rank;
            to->a[g][i] = linear->parts[i].rank > 0 ? linear->parts[i].a->data : NULL;
        }
        fits = fits && qlora__decode_layers_take(p, linear->parts[0].nf4 != NULL);
    }
    const qlora__mixer_kind* mixer = qlora__mixer_of(layer);
    fits = fits && mixer->layers != NULL;
    if (fits) {
        to->attention = mixer->layers(m, index);
    }
    return fits;
}

// Whether there are blocks large enough for all layers of a step; the kernel is loaded only then.
static bool qlora__decode_has_shared(const qlora_model* m) {
    return m->decode.planned && m->decode.texts == 1 &&
           m->ctx->gpu->max_shared >= QLORA__LAYERS_BYTES;
}

// Whether the stacks of two layers have the same shapes.
static bool qlora__decode_layers_alike(const qlora__decode_layer* a, const qlora__decode_layer* b) {
    bool alike = true;
    for (int g = 0; g < QLORA__GROUPS; g++) {
        const qlora__decode_product* p = &a->stacks[g];
        const qlora__decode_product* q = &b->stacks[g];
        alike = alike && p->count == q->count && p->K == q->K && p->gated == q->gated;
        for (int i = 0; alike && i < p->count; i++) {
            alike = p->parts[i].N == q->parts[i].N;
        }
    }
    return alike;
}

// Whether one launch takes all layers; with its grid and shared memory.
static bool qlora__decode_layers_fit(const qlora_model* m, int64_t* blocks, int64_t* shared) {
    const qlora__gpu* gpu = m->ctx->gpu;
    const qlora_model_config* c = &m->plan.config;
    bool fits = (m->decode.variants & QLORA__DECODE_LAYERS) != 0 && qlora__decode_has_shared(m) &&
                m->decode.alike && !m->decode.refused && m->decode.sent != NULL &&
                gpu->cooperative != 0 && gpu->cu.LaunchKernelEx != NULL &&
                gpu->driver_version >= 12030 && c->hidden <= 8192;
    qlora__decode_layer first;
    *blocks = 1;
    *shared = 0;
    for (int64_t l = 0; l < c->layers && fits; l++) {
        qlora__decode_layer layer;
        fits = qlora__decode_layer_of(m, l, &layer);
        first = l == 0 ? layer : first;
        fits = fits && qlora__decode_layers_alike(&first, &layer);
        *blocks = qlora__max(*blocks, qlora__decode_layers_blocks(m, &layer));
    }
    for (int64_t l = 0; l < c->layers && fits; l++) {
        qlora__decode_layer layer;
        // The launch has one mask for all layers.
        fits = qlora__decode_layer_of(m, l, &layer) &&
               qlora__decode_layers_mask(m, &layer, *blocks) ==
                   qlora__decode_layers_mask(m, &first, *blocks);
        *shared = qlora__max(*shared, qlora__decode_layers_shared(m, &layer, *blocks));
    }
    return fits && *shared <= gpu->max_shared;
}

// Brings the parameters to the device, unless it has them.
static qlora_result qlora__decode_layers_send(qlora_ctx* ctx, qlora_model* m) {
    qlora__decode* d = &m->decode;
    int64_t blocks;
    int64_t shared;
    if (!qlora__decode_layers_fit(m, &blocks, &shared)) {
        return QLORA_OK;
    }
    int64_t first = m->use_adapters ? m->plan.config.layers : 0;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__decode_layer layer;
        size_t at = (size_t)(first + l) * sizeof layer;
        if (qlora__decode_layer_of(m, l, &layer) &&
            memcmp(d->sent + at, &layer, sizeof layer) != 0) {
            memset(d->sent + at, 0, sizeof layer); // a copy that fails may have changed some of it
            QLORA__TRY(
                qlora__copy_in(ctx, (char*)d->params.data + at, &layer, sizeof layer));
            memcpy(d->sent + at, &layer, sizeof layer);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__decode_layers_run(const qlora_model* m, int stream, int64_t blocks,
                                             int64_t shared) {
    const qlora_model_config* c = &m->plan.config;
    const qlora__decode* d = &m->decode;
    qlora__decode_layers p;
    memset(&p, 0, sizeof p);
    p.layers = (const char*)d->params.data +
               (m->use_adapters ? c->layers * QLORA__DECODE_LAYER_BYTES : 0);
    p.h = d->h[stream].data;
    int64_t at[QLORA__MARKS_COUNT];
    (void)qlora__decode_marks(m, at);
    for (int i = 0; i <= QLORA__MARKS_QKV; i++) {
        p.rows[i] = (int32_t*)d->marks.data + at[i];
    }
    p.z = (int32_t*)d->marks.data + at[QLORA__MARKS_Z];
    p.partials = (int32_t*)d->marks.data + at[QLORA__MARKS_PARTIALS];
    p.shares = (int32_t*)d->marks.data + at[QLORA__MARKS_SHARES];
    p.count = (int32_t)c->layers;
    p.hidden = (int32_t)c->hidden;
    p.ldz = (int32_t)d->wide;
    p.units = (int32_t)d->counters.cols;
    p.pages = (int32_t)d->pages;
    p.eps = (float)c->rms_eps;
    p.scale = (float)c->residual_scale;
    qlora__decode_layer first;
    (void)qlora__decode_layer_of(m, 0, &first); // it fits
    p.split = qlora__decode_layers_mask(m, &first, blocks);
    void* args[] = {&p};
    size_t bytes = (size_t)d->marks.cols * 4;
    QLORA__TRY(qlora__zero(m->ctx, d->marks.data, bytes, bytes, 1));
    qlora__launch_size size = {blocks, 1, 1, QLORA__LAYERS_WARPS * 32, (uint32_t)shared};
    return qlora__launch_as(m->ctx, QLORA__K_decode_layers, QLORA__LAUNCH_TOGETHER, size, args);
}

#endif // QLORA_NO_CUDA
