// ---- arena --------------------------------------------------------------------------------------

// With base NULL it only counts bytes; otherwise it hands out memory. Planning and allocation run
// the same code, so that exactly the planned memory is allocated.
typedef struct qlora__arena {
    qlora_ctx* ctx;
    char* base;
    size_t used;
} qlora__arena;

static char* qlora__arena_take(qlora__arena* arena, size_t bytes) {
    char* p = arena->base != NULL ? arena->base + arena->used : NULL;
    arena->used += qlora__align_up(bytes, 256);
    return p;
}

// Two arenas that began at the same place and are used in turn: continues after the larger one.
static void qlora__arena_join(qlora__arena* arena, const qlora__arena* other) {
    arena->used = arena->used > other->used ? arena->used : other->used;
}

// Allocates a contiguous matrix.
static void qlora__arena_tensor(qlora__arena* arena, qlora_dtype dtype, int64_t rows, int64_t cols,
                                qlora_tensor* out) {
    memset(out, 0, sizeof *out);
    out->bytes = (size_t)rows * (size_t)cols * qlora_dtype_bytes(dtype);
    out->data = qlora__arena_take(arena, out->bytes);
    out->dtype = dtype;
    out->rows = rows;
    out->cols = cols;
    out->ld = cols;
    out->batch = 1;
    out->batch_stride = rows * cols;
    out->owner = arena->ctx;
}

// A view of part of a contiguous one-row tensor as a matrix.
static void qlora__arena_window(const qlora_tensor* flat, int64_t at, int64_t rows, int64_t cols,
                                qlora_tensor* out) {
    *out = *flat;
    size_t size = qlora_dtype_bytes(flat->dtype);
    out->data = flat->data != NULL ? (char*)flat->data + (size_t)at * size : NULL;
    out->bytes = (size_t)rows * (size_t)cols * size;
    out->rows = rows;
    out->cols = cols;
    out->ld = cols;
    out->batch_stride = rows * cols;
}

static int64_t qlora__q_width(const qlora_model_config* c) {
    return c->heads * c->head_dim;
}

static int64_t qlora__kv_width(const qlora_model_config* c) {
    return c->kv_heads * c->head_dim;
}

// Whether q is multiplied by a factor that depends on the position, within the planned lengths.
static bool qlora__scales_queries(const qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    return c->query_beta != 0.0 && (double)m->positions > c->query_period;
}

// Whether the gradient of the output of attention and MLP differs from that of the residual stream.
static bool qlora__has_own_d_out(const qlora_model* m) {
    return qlora__has_norm(m, QLORA__NORM_ATTENTION_OUT) ||
           qlora__has_norm(m, QLORA__NORM_MLP_OUT) || m->plan.config.residual_scale != 1.0 ||
           m->dora; // the gains of o and down must not change the residual stream
}

// Whether decoding reads the codes of a weight as they are stored, with its scales as f32.
static bool qlora__streams(const qlora_model* m, const qlora__projection* p) {
    int64_t block = p->nf4_desc.block != 0 ? p->nf4_desc.block : QLORA__STREAM_STEP;
    return qlora__on_cpu(m->ctx) && m->ctx->cpu->stream != NULL && m->desc.generate_tokens > 0 &&
           p->in % QLORA__STREAM_STEP == 0 && block % QLORA__STREAM_STEP == 0;
}

// A frozen weight: in the arena, or where its file is mapped.
static void qlora__layout_weight(qlora__arena* arena, const qlora_model* m,
                                 const qlora__mapped* mapped, int64_t rows, int64_t cols,
                                 qlora_tensor* out) {
    if (mapped->data == NULL) {
        qlora__arena_tensor(arena, m->compute, rows, cols, out);
        return;
    }
    memset(out, 0, sizeof *out);
    out->data = (void*)(uintptr_t)mapped->data; // only read
    out->dtype = mapped->dtype;
    out->bytes = (size_t)rows * (size_t)cols * qlora_dtype_bytes(mapped->dtype);
    out->rows = rows;
    out->cols = cols;
    out->ld = cols;
    out->batch = 1;
    out->batch_stride = rows * cols;
    out->owner = arena->ctx;
}

static void qlora__layout_projection(qlora__arena* arena, qlora_model* m, qlora__projection* p) {
    if (p->is_nf4) {
        qlora_tensor memory;
        qlora__arena_tensor(arena, QLORA_U8, 1, (int64_t)qlora_nf4_bytes(&p->nf4_desc), &memory);
        p->nf4.memory = memory; // wrapped once the arena is allocated
        memset(&p->ready, 0, sizeof p->ready);
        if (qlora__streams(m, p)) {
            qlora__arena_tensor(arena, QLORA_F32, 1, p->out * p->in / QLORA__STREAM_STEP,
                                &p->ready);
        }
    } else if (p->is_fp8) {
        qlora__arena_tensor(arena, QLORA_U8, 1, (int64_t)qlora__fp8_weight_bytes(p->out, p->in),
                            &p->fp8.memory);
    } else {
        qlora__layout_weight(arena, m, &p->mapped, p->out, p->in, &p->dense);
    }
    if (p->has_bias) {
        qlora__arena_tensor(arena, m->compute, 1, p->out, &p->bias);
    }
}

static void qlora__layout_base(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    if (!m->plan.offloaded_embedding) {
        qlora__layout_weight(arena, m, &m->embed_mapped, c->vocab, c->hidden, &m->embed);
    }
    m->head = m->embed;
    if (m->head_is_nf4) {
        int64_t bytes = (int64_t)qlora_nf4_bytes(&m->head_desc);
        memset(&m->head, 0, sizeof m->head);
        qlora__arena_tensor(arena, QLORA_U8, 1, bytes, &m->head_nf4.memory);
    } else if (!c->tied) {
        qlora__layout_weight(arena, m, &m->head_mapped, c->vocab, c->hidden, &m->head);
    }
    qlora__arena_tensor(arena, QLORA_F32, m->positions, c->rope_dims, &m->rope);
    m->rope_sliding = m->rope;
    m->rope_query = m->rope;
    if (memcmp(&c->rope, &c->rope_sliding, sizeof c->rope) != 0) {
        qlora__arena_tensor(arena, QLORA_F32, m->positions, c->rope_dims, &m->rope_sliding);
    }
    if (qlora__scales_queries(m)) {
        qlora__arena_tensor(arena, QLORA_F32, m->positions, c->rope_dims, &m->rope_query);
    }
    if (!m->desc.train_norms) {
        qlora__arena_tensor(arena, QLORA_F32, 1, c->hidden, &m->final_norm);
    }
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int i = 0; i < m->arch->layout->count; i++) {
            qlora__layout_projection(arena, m, &layer->projections[i]);
        }
        if (c->qkv_bias && !c->qk_norm) {
            qlora__arena_tensor(arena, m->compute, 1, qlora__q_width(c) + 2 * qlora__kv_width(c),
                                &layer->qkv_bias);
        }
        for (int i = 0; i < QLORA__NORMS && !m->desc.train_norms; i++) {
            if (qlora__has_norm(m, i)) {
                qlora__arena_tensor(arena, QLORA_F32, 1, qlora__arch_norm_width(m->arch, c, i),
                                    &layer->norms[i]);
            }
        }
    }
}

// The FP8 weights and the joined adapters of a stack. Without a cache, both forms of the weights
// share their memory: each is written when it is needed.
static void qlora__layout_fp8(qlora__arena* arena, const qlora_model* m, qlora__layer* layer,
                              int group) {
    qlora__fp8* f = &layer->fp8[group];
    int64_t in = layer->linears[group].in;
    int64_t out = qlora_linear_out(&layer->linears[group]);
    int64_t pad = layer->pads[group];
    size_t before = arena->used;
    qlora__arena_tensor(arena, QLORA_U8, out, qlora__fp8_pitch(in), &f->weights);
    size_t after = arena->used;
    if (!layer->cached) {
        arena->used = before;
    }
    if (qlora__trains(m)) {
        qlora__arena_tensor(arena, QLORA_U8, qlora__fp8_width(in), qlora__fp8_pitch(out),
                            &f->turned);
    }
    arena->used = arena->used > after ? arena->used : after;
    qlora__arena_tensor(arena, m->compute, out + pad, pad, &f->sb);
    qlora__arena_tensor(arena, m->compute, pad, in + pad, &f->a);
}

static void qlora__layout_cache(qlora__arena* arena, qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int g = 0; g < QLORA__GROUPS && layer->cached; g++) {
            const qlora_linear_desc* linear = &layer->linears[g];
            if (qlora__is_fp8(m)) {
                qlora__layout_fp8(arena, m, layer, g);
                continue;
            }
            qlora__arena_tensor(arena, m->compute, qlora_linear_out(linear) + layer->pads[g],
                                linear->in + layer->pads[g], &layer->operands[g]);
        }
    }
}

static void qlora__window_norm(qlora_model* m, int64_t at, int64_t width, qlora_tensor* w,
                               qlora_tensor* dw) {
    qlora__arena_window(&m->parameters, at, 1, width, w);
    if (qlora__trains(m)) {
        qlora__arena_window(&m->gradients, at, 1, width, dw);
    }
}

// Views of the shadow and the gradients for one projection.
static void qlora__window_projection(qlora_model* m, qlora__projection* p) {
    qlora__arena_window(&m->shadow, p->a_at, p->rank, p->in, &p->a);
    qlora__arena_window(&m->shadow, p->b_at, p->out, p->rank, &p->sb);
    if (qlora__trains(m)) {
        qlora__arena_window(&m->gradients, p->a_at, p->rank, p->in, &p->da);
        qlora__arena_window(&m->gradients, p->b_at, p->out, p->rank, &p->db);
    }
    if (m->dora) {
        qlora__window_norm(m, p->m_at, p->out, &p->magnitude, &p->dm);
    }
}

// Views of a trained matrix in the shadow and the gradients.
static void qlora__window_saved(qlora_model* m, int64_t at, int64_t rows, qlora_tensor* own,
                                qlora_tensor* d) {
    qlora__arena_window(&m->shadow, at, rows, m->plan.config.hidden, own);
    if (qlora__trains(m)) {
        qlora__arena_window(&m->gradients, at, rows, m->plan.config.hidden, d);
    }
}

static void qlora__layout_adapters(qlora__arena* arena, qlora_model* m) {
    qlora__arena_tensor(arena, QLORA_F32, 1, m->elements, &m->parameters);
    qlora__arena_tensor(arena, m->compute, 1, m->elements, &m->shadow);
    qlora__arena_tensor(arena, QLORA_U8, 1, m->range_count * (int64_t)sizeof(qlora_adamw_range),
                        &m->ranges);
    for (int64_t l = 0; l < m->plan.config.layers && m->dora; l++) {
        for (int g = 0; g < QLORA__GROUPS; g++) {
            int64_t out = qlora_linear_out(&m->layers[l].linears[g]);
            qlora__arena_tensor(arena, QLORA_F32, 1, out, &m->layers[l].gains[g]);
            qlora__arena_tensor(arena, QLORA_F32, 1, out, &m->layers[l].inverses[g]);
        }
    }
    if (m->token_count > 0) {
        qlora__arena_tensor(arena, QLORA_I32, 1, m->token_count, &m->token_rows);
        qlora__arena_tensor(arena, m->compute, m->token_count, m->plan.config.hidden,
                            &m->base_tokens);
    }
    if (m->tokens_twice || m->head_rows) {
        qlora__arena_tensor(arena, m->compute, m->token_count, m->plan.config.hidden,
                            &m->head_tokens);
    }
}

// Elements of an entry of the stack of partial sums: the gradients, then its small numbers, which
// start at qlora__partial_small.
static int64_t qlora__partial_small(const qlora_model* m) {
    return (int64_t)qlora__align_up((size_t)m->elements, 64);
}

static int64_t qlora__partial_stride(const qlora_model* m) {
    return qlora__partial_small(m) + 64;
}

// Entries of the stack that a step of `count` micro-batches needs.
static int64_t qlora__partial_levels(int64_t count) {
    int64_t levels = 0;
    for (; count > 1; count /= 2) {
        levels++;
    }
    return levels;
}

static void qlora__layout_optimizer(qlora__arena* arena, qlora_model* m) {
    if (!qlora__trains(m)) {
        return;
    }
    qlora__arena_tensor(arena, QLORA_F32, 1, m->elements, &m->gradients);
    memset(&m->partials, 0, sizeof m->partials);
    if (m->desc.accumulate > 1) {
        qlora__arena_tensor(arena, QLORA_F32, qlora__partial_levels(m->desc.accumulate),
                            qlora__partial_stride(m), &m->partials);
    }
    if (m->desc.optimizer == QLORA_OPTIMIZER_ADAMW_8BIT) {
        size_t bytes = qlora__moments_head(m->range_count) + m->moment_bytes;
        qlora__arena_tensor(arena, QLORA_U8, 1, (int64_t)bytes, &m->moments);
    } else {
        qlora__arena_tensor(arena, QLORA_F32, 1, m->elements, &m->moment1);
        qlora__arena_tensor(arena, QLORA_F32, 1, m->elements, &m->moment2);
    }
    qlora__arena_tensor(arena, QLORA_U8, 1, (int64_t)sizeof(qlora_adamw_state), &m->adamw);
    int32_t groups = (int32_t)m->plan.config.layers + 1; // clipped layer by layer, or all as one
    char* clip =
        qlora__arena_take(arena, qlora__clip_place(m->ctx, m->elements, groups, NULL, &m->clip));
    qlora__clip_place(m->ctx, m->elements, groups, clip, &m->clip);
}

static void qlora__layout_windows(qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int i = 0; i < m->arch->layout->count; i++) {
            if (layer->projections[i].rank > 0) {
                qlora__window_projection(m, &layer->projections[i]);
            }
        }
        for (int i = 0; i < QLORA__NORMS && m->desc.train_norms; i++) {
            if (qlora__has_norm(m, i)) {
                qlora__window_norm(m, layer->norms_at[i], qlora__arch_norm_width(m->arch, c, i),
                                   &layer->norms[i], &layer->d_norms[i]);
            }
        }
    }
    if (m->desc.train_norms) {
        qlora__window_norm(m, m->final_norm_at, c->hidden, &m->final_norm, &m->d_final_norm);
    }
    if (m->saved_embed) {
        qlora__window_saved(m, m->embed_at, c->vocab, &m->own_embed, &m->d_embed);
    }
    if (m->saved_head) {
        qlora__window_saved(m, m->head_at, c->vocab, &m->own_head, &m->d_head);
    }
    if (m->token_count > 0) {
        qlora__window_saved(m, m->tokens_at, m->token_count, &m->own_tokens, &m->d_tokens);
    }
    if (m->head_rows) {
        qlora__window_saved(m, m->head_tokens_at, m->token_count, &m->own_head_tokens,
                            &m->d_head_tokens);
    }
}

// Rows of the buffers that are used for one tile at a time.
static int64_t qlora__tile_rows(const qlora_model* m) {
    return m->plan.tile > 0 ? qlora__min(m->plan.tile, m->plan.tokens) : m->plan.tokens;
}

// The output of attention, with room for z of o_proj, and its row statistics.
static void qlora__layout_attention(qlora__arena* arena, qlora_model* m,
                                    const int64_t pads[QLORA__GROUPS], qlora__kept* kept) {
    const qlora_model_config* c = &m->plan.config;
    int64_t T = m->plan.tokens;
    qlora__arena_tensor(arena, m->compute, T, qlora__q_width(c) + pads[QLORA__O], &kept->o);
    qlora__arena_tensor(arena, QLORA_F32, c->heads, T, &kept->lse);
}

// Whether q, k and v are in the memory that layers use in turn, if attention is offloaded: those of
// layers that are not recomputed are.
static bool qlora__turns_have_heads(const qlora_model* m) {
    return m->plan.offloaded_attention > 0 &&
           (m->plan.heads_layers > 0 || m->plan.recompute_layers == 0);
}

// q, k and v, also before their norms.
static void qlora__layout_heads(qlora__arena* arena, qlora_model* m, qlora__kept* kept) {
    const qlora_model_config* c = &m->plan.config;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    qlora__arena_tensor(arena, m->compute, m->plan.tokens, q + 2 * kv, &kept->qkv);
    if (c->qk_norm) {
        qlora__arena_tensor(arena, m->compute, m->plan.tokens, q + kv, &kept->qk);
    }
}

// Whether z of the forward pass is the one that the gradients need. With dropout, DoRA or several
// adapters, and on the CPU, it is computed in other ways.
static bool qlora__keeps_z(const qlora_model* m) {
    return qlora__trains(m) && m->on_gpu && !(m->desc.dropout > 0.0f) && !m->dora &&
           !qlora__has_several(m);
}

// Whether the backward pass of the activation computes dB of gate and up and dA of down as well.
// ranks: of gate, up and down; may be NULL.
static bool qlora__gated_ranks(const qlora_model* m, const qlora__layer* layer, int64_t* ranks) {
    const qlora_model_config* c = &m->plan.config;
    const qlora_linear_desc* l = &layer->linears[QLORA__GATE_UP];
    int64_t own[3] = {l->parts[0].rank, l->parts[l->count - 1].rank,
                      layer->linears[QLORA__DOWN].parts[0].rank};
    if (ranks != NULL) {
        memcpy(ranks, own, sizeof own);
    }
    return qlora__gated_takes(own) && qlora__keeps_z(m) && m->compute == QLORA_BF16 &&
           qlora__tile_rows(m) * c->intermediate >= QLORA__GATED_FROM && c->hidden % 8 == 0 &&
           c->intermediate % 8 == 0;
}

// Whether it does in any layer.
static bool qlora__has_gated(const qlora_model* m) {
    bool any = false;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        any = any || qlora__gated_ranks(m, &m->layers[l], NULL);
    }
    return any;
}

// f32 elements of the parts of sums that the gradients of any stack need. Several adapters have
// none: their ranks may differ, and those side by side are too wide.
static int64_t qlora__skinny_most(const qlora_model* m) {
    int64_t most = 0;
    bool any = m->on_gpu && m->compute == QLORA_BF16 && !(m->desc.dropout > 0.0f) &&
               !qlora__has_several(m);
    for (int64_t l = 0; l < m->plan.config.layers && any; l++) {
        for (int g = 0; g < QLORA__GROUPS; g++) {
            int64_t room = qlora__linear_parts(&m->layers[l].linears[g], qlora__tile_rows(m));
            most = qlora__max(most, room);
        }
    }
    return most;
}

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

// Of which stacks it is kept: those that leave no other trace of it. A recomputed layer has that of
// gate and up in x and that of down in s when it is needed; if the activation is not written once
// more (ops/gated.h), it has its own of down.
#define QLORA__Z_KEPT (1u << QLORA__QKV | 1u << QLORA__GATE_UP | 1u << QLORA__DOWN)
#define QLORA__Z_SHARED (1u << QLORA__QKV)
#define QLORA__Z_OWN (1u << QLORA__DOWN)

// Of pads, only those of o and of gate/up are used. heads, attention: q, k and v, and the output of
// attention, are among the activations.
static void qlora__layout_kept(qlora__arena* arena, qlora_model* m,
                               const int64_t pads[QLORA__GROUPS], bool heads, bool attention,
                               qlora__kept* kept) {
    const qlora_model_config* c = &m->plan.config;
    int64_t some = qlora__tile_rows(m);
    if (heads) {
        qlora__layout_heads(arena, m, kept);
    }
    if (attention) {
        qlora__layout_attention(arena, m, pads, kept);
    }
    qlora__arena_tensor(arena, m->compute, some, c->hidden, &kept->h2);
    qlora__arena_tensor(arena, m->compute, some, 2 * c->intermediate + pads[QLORA__GATE_UP],
                        &kept->gu);
    if (qlora__has_norm(m, QLORA__NORM_ATTENTION_OUT)) {
        qlora__arena_tensor(arena, m->compute, some, c->hidden, &kept->out[0]);
    }
    if (qlora__has_norm(m, QLORA__NORM_MLP_OUT)) {
        qlora__arena_tensor(arena, m->compute, some, c->hidden, &kept->out[1]);
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

// Memory that layers use in turn for what they keep of attention while it is copied. One copy takes
// all of it, so it is in one piece; what fewer layers keep is at the end.
static void qlora__layout_turn(qlora__arena* arena, qlora_model* m,
                               const int64_t pads[QLORA__GROUPS], qlora__kept* turn) {
    size_t first = arena->used;
    memset(turn, 0, sizeof *turn);
    qlora__layout_attention(arena, m, pads, turn);
    m->turn_bytes[0] = arena->used - first;
    if (qlora__turns_have_heads(m)) {
        qlora__layout_heads(arena, m, turn);
        qlora__layout_z(arena, m, pads, QLORA__Z_SHARED, turn);
    }
    m->turn_bytes[1] = arena->used - first;
}

// Bytes of what a layer keeps of it.
static size_t qlora__turn_bytes(const qlora_model* m, const qlora__layer* layer) {
    return m->turn_bytes[layer->keeps_heads || !layer->recompute ? 1 : 0];
}

// What a layer has of attention is in the memory of its turn.
static void qlora__layer_turn(qlora_model* m, qlora__layer* layer) {
    const qlora__kept* turn = &m->turns[(layer - m->layers) % 2];
    qlora__kept* kept = &layer->kept;
    kept->o = turn->o;
    kept->lse = turn->lse;
    if (qlora__turns_have_heads(m)) {
        kept->qkv = turn->qkv;
        kept->qk = turn->qk;
        kept->z[QLORA__QKV] = turn->z[QLORA__QKV];
    }
}

// What a recomputed layer keeps besides its input.
static void qlora__layout_again(qlora__arena* arena, qlora_model* m, qlora__layer* layer) {
    layer->kept = m->again;
    if (qlora__gated_ranks(m, layer, NULL)) {
        qlora__layout_z(arena, m, layer->pads, QLORA__Z_OWN, &layer->kept);
    }
    if (m->plan.offloaded_attention > 0) {
        qlora__layer_turn(m, layer);
    } else if (layer->keeps_attention) {
        qlora__layout_attention(arena, m, layer->pads, &layer->kept);
    }
}

// What a layer that is not recomputed keeps besides its input.
static void qlora__layout_whole(qlora__arena* arena, qlora_model* m, qlora__layer* layer) {
    bool leaves = layer - m->layers < m->plan.offloaded_attention;
    unsigned z = leaves ? QLORA__Z_KEPT & ~QLORA__Z_SHARED : QLORA__Z_KEPT;
    qlora__layout_kept(arena, m, layer->pads, !leaves, !leaves, &layer->kept);
    memset(layer->kept.z, 0, sizeof layer->kept.z);
    qlora__layout_z(arena, m, layer->pads, z, &layer->kept);
    if (leaves) {
        qlora__layer_turn(m, layer);
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
        qlora__arena_tensor(arena, m->compute, m->plan.tokens, c->hidden, &m->streams[i]);
    }
    if (away) {
        m->last_h = m->streams[c->layers % 2];
    } else {
        qlora__arena_tensor(arena, m->compute, m->plan.tokens, c->hidden, &m->last_h);
    }
    memset(&m->again, 0, sizeof m->again);
    if (!qlora__trains(m) || m->plan.recompute_layers > 0) {
        // Without a layer that uses it, the shared output of attention has no memory.
        bool attention =
            !qlora__trains(m) || (m->plan.offloaded_attention == 0 &&
                                  m->plan.attention_layers < m->plan.recompute_layers);
        bool heads = !qlora__turns_have_heads(m);
        qlora__layout_kept(arena, m, pads, heads, attention, &m->again);
        qlora__layout_z(arena, m, pads, heads ? QLORA__Z_SHARED : 0, &m->again);
    }
    for (int i = 0; i < 2 && m->plan.offloaded_attention > 0; i++) {
        qlora__layout_turn(arena, m, pads, &m->turns[i]);
    }
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        if (!qlora__trains(m)) {
            layer->kept = m->again;
            layer->kept.h = m->last_h;
            layer->kept.h2 = m->last_h;
            continue;
        }
        if (layer->recompute) {
            qlora__layout_again(arena, m, layer);
        } else {
            qlora__layout_whole(arena, m, layer);
        }
        if (away) {
            layer->kept.h = m->streams[l % 2];
        } else {
            qlora__arena_tensor(arena, m->compute, m->plan.tokens, c->hidden, &layer->kept.h);
        }
    }
}

// What is in host memory: the embedding, the inputs of layers, and what they keep of attention. The
// input of the last layer is still on the device when the backward pass needs it, and so are that
// of the last layer of a group and the attention of the last two layers that use memory in turn.
// The inputs inside a group have the same memory in every group: the backward pass is in one at a
// time.
static void qlora__layout_host(qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    qlora__arena host;
    host.ctx = m->ctx;
    host.base = (char*)m->host.data;
    host.used = 0;
    if (m->plan.offloaded_embedding) {
        qlora__arena_tensor(&host, m->compute, c->vocab, c->hidden, &m->embed);
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
    qlora__arena turn;
    memset(&turn, 0, sizeof turn);
    int64_t pads[QLORA__GROUPS];
    qlora__most_pads(m, pads);
    qlora__layout_turn(&turn, m, pads, &m->turns[0]); // counts its bytes
    int64_t users = m->plan.recompute_layers > 0 ? c->layers : m->plan.offloaded_attention;
    for (int64_t l = 0; l < c->layers; l++) {
        bool leaves = l < m->plan.offloaded_attention && l < users - 2;
        m->layers[l].away_attention =
            leaves ? qlora__arena_take(&host, qlora__turn_bytes(m, &m->layers[l])) : NULL;
    }
    m->plan.host = host.used;
}

// The most elements that the operand of a stack has in a layer without a cache.
static int64_t qlora__operand_most(const qlora_model* m, int group) {
    int64_t most = 0;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__layer* layer = &m->layers[l];
        if (layer->cached) {
            continue;
        }
        const qlora_linear_desc* linear = &layer->linears[group];
        int64_t rows = qlora_linear_out(linear) + layer->pads[group];
        int64_t n = rows * (linear->in + layer->pads[group]);
        if (qlora__is_fp8(m)) {
            qlora__arena own;
            memset(&own, 0, sizeof own);
            qlora__layout_fp8(&own, m, layer, group);
            n = (int64_t)(own.used / qlora_dtype_bytes(m->compute));
        }
        most = qlora__max(most, n);
    }
    return (int64_t)qlora__align_up((size_t)most, 128);
}

// A 4-bit head is quantised in slices of multiples of this many rows, which are whole blocks.
#define QLORA__HEAD_ROWS 64

// In training, the operands of a layer whose weights have no copies are written by one launch, if
// they have at most this many bytes. On an H200, a launch for every weight and one for the adapters
// of every stack cost 3 to 5 us each besides the bytes, and a step of 0.5B with 2,048 tokens took
// 1.16 times as long without copies as with them. A larger layer takes so long that its launches
// matter less than the memory for all of its stacks at once. That memory, beyond what the largest
// stack needs, is at most QLORA__PLACE_EXTRA times the activation's: with few tokens, it would
// decide whether a model fits.
#define QLORA__PLACE_MOST ((int64_t)128 << 20)
#ifndef QLORA__PLACE_EXTRA
#define QLORA__PLACE_EXTRA 1
#endif

static bool qlora__can_place_layers(const qlora_model* m) {
    int64_t all = 0;
    int64_t largest = 0;
    bool can = m->on_gpu && qlora__trains(m) && m->compute == QLORA_BF16 && m->plan.tile == 0 &&
               !qlora__is_fp8(m) && !qlora__has_several(m) && !m->dora;
    for (int g = 0; g < QLORA__GROUPS && can; g++) {
        int64_t n = qlora__operand_most(m, g);
        all += n;
        largest = qlora__max(largest, n);
    }
    int64_t activation = m->plan.tokens * m->plan.config.intermediate;
    can = can && all - largest <= QLORA__PLACE_EXTRA * activation;
    for (int64_t l = 0; l < m->plan.config.layers && can; l++) {
        for (int i = 0; i < m->arch->layout->count; i++) {
            can = can && m->layers[l].projections[i].is_nf4;
        }
    }
    return can && all * (int64_t)qlora_dtype_bytes(m->compute) <= QLORA__PLACE_MOST;
}

// The shared operand must also hold the largest weight while it is being quantised. With tiles,
// it holds o, gate/up and down at once.
static int64_t qlora__operand_elements(qlora_model* m) {
    int64_t most = 0;
    int64_t at = 0;
    m->places_layers = qlora__can_place_layers(m);
    static const int order[QLORA__GROUPS] = {QLORA__GATE_UP, QLORA__DOWN, QLORA__O, QLORA__QKV};
    for (int i = 0; i < QLORA__GROUPS; i++) {
        int64_t n = qlora__operand_most(m, order[i]);
        bool tiled = m->plan.tile > 0 && order[i] != QLORA__QKV;
        m->operand_at[order[i]] = tiled || m->places_layers ? at : 0;
        at += n;
        most = qlora__max(most, m->operand_at[order[i]] + n);
    }
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->arch->layout->count; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            most = qlora__max(most, p->in * p->out); // a weight to quantise, from a file or random
        }
    }
    int64_t head = m->head_is_nf4 ? QLORA__HEAD_ROWS * m->plan.config.hidden : 0;
    return qlora__max(most, 2 * head); // rows of the head to quantise, in f32
}

// Tables and matrices of adapters that stand side by side.
static void qlora__layout_wide(qlora__arena* arena, qlora_model* m) {
    int64_t most = 0;
    for (int64_t l = 0; l < m->plan.config.layers && m->wide != NULL; l++) {
        qlora__wide_layer* wide = &m->wide[l];
        for (int g = 0; g < QLORA__GROUPS; g++) {
            int64_t a_at[QLORA_LINEAR_PARTS];
            int64_t b_at[QLORA_LINEAR_PARTS];
            most = qlora__max(most, qlora__wide_places(m, l, g, a_at, b_at));
            qlora__arena_tensor(arena, QLORA_I32, 1, m->layers[l].pads[g], &wide->columns[g]);
            wide->share_count[g] = qlora__trains(m) ? qlora__wide_shares(m, l, g) : 0;
            qlora__arena_tensor(arena, QLORA_U8, 1,
                                wide->share_count[g] * (int64_t)sizeof(qlora__share),
                                &wide->shares[g]);
        }
        for (int i = 0; i < m->arch->layout->count; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            int64_t rank = qlora__wide_first(m, m->adapters, l, i);
            if (!qlora__wide_in_operand(m, &m->layers[l], m->arch->layout->rows[i].group)) {
                qlora__arena_tensor(arena, m->compute, rank, p->in, &wide->loras[i].a);
                qlora__arena_tensor(arena, m->compute, p->out, rank, &wide->loras[i].sb);
            }
        }
    }
    qlora__arena_tensor(arena, QLORA_F32, 1, m->wide != NULL && qlora__trains(m) ? most : 0,
                        &m->wide_grads);
}

// Views of a stack of adapters that stand side by side: of its operand and of the gradients.
static void qlora__window_wide(qlora_model* m, int64_t index, int group) {
    qlora__layer* layer = &m->layers[index];
    int64_t a_at[QLORA_LINEAR_PARTS];
    int64_t b_at[QLORA_LINEAR_PARTS];
    qlora_tensor a;
    qlora_tensor sb;
    qlora_linear_desc linear = layer->linears[group];
    linear.operand = qlora__wide_in_operand(m, layer, group) ? &layer->operands[group] : NULL;
    bool inside = qlora__linear_joined(&linear, layer->pads[group], &a, &sb);
    size_t size = qlora_dtype_bytes(m->compute);
    int64_t row = 0;
    int64_t col = 0;
    m->wide[index].most[group] = 0;
    qlora__wide_places(m, index, group, a_at, b_at);
    for (int i = 0; i < linear.count; i++) {
        int number = m->arch->layout->groups[group].first + i;
        const qlora__projection* p = &layer->projections[number];
        qlora__lora* lora = &m->wide[index].loras[number];
        lora->rank = qlora__wide_first(m, m->adapters, index, number);
        lora->scale = 1.0f; // those of the adapters are in sB and in the shares
        if (inside) {
            lora->a = a;
            lora->a.rows = lora->rank;
            lora->a.data = (char*)a.data + (size_t)(col * a.ld) * size;
            lora->a.bytes -= (size_t)(col * a.ld) * size;
            lora->sb = sb;
            lora->sb.rows = p->out;
            lora->sb.cols = lora->rank;
            lora->sb.data = (char*)sb.data + (size_t)(row * sb.ld + col) * size;
            lora->sb.bytes -= (size_t)(row * sb.ld + col) * size;
        }
        if (qlora__trains(m)) {
            qlora__arena_window(&m->wide_grads, a_at[i], lora->rank, p->in, &lora->da);
            qlora__arena_window(&m->wide_grads, b_at[i], p->out, lora->rank, &lora->db);
        }
        int64_t most = qlora__max(p->in, p->out) * lora->rank;
        m->wide[index].most[group] = qlora__max(m->wide[index].most[group], most);
        row += p->out;
        col += lora->rank;
    }
}

// What the FP8 products of all stacks share.
static void qlora__layout_fp8_shared(qlora__arena* arena, qlora_model* m) {
    int64_t widest = 0;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int g = 0; g < QLORA__GROUPS; g++) {
            const qlora_linear_desc* linear = &m->layers[l].linears[g];
            widest = qlora__max(widest, qlora__max(linear->in, qlora_linear_out(linear)));
        }
    }
    int64_t pitch = qlora__fp8_pitch(widest); // not less than the width of a result
    qlora__arena_tensor(arena, QLORA_U8, 1, qlora__tile_rows(m) * pitch, &m->fp8_codes);
    qlora__arena_tensor(arena, QLORA_F32, 1, qlora__tile_rows(m), &m->fp8_scales);
    qlora__arena_tensor(arena, QLORA_F32, 1, pitch, &m->fp8_ones);
    qlora__arena_tensor(arena, QLORA_F32, m->plan.config.layers * QLORA__GROUPS, 2,
                        &m->fp8_factors);
}

// Labelled rows, in whole chunks of the head.
static int64_t qlora__head_rows(const qlora_model* m) {
    return qlora__ceil_div(m->plan.tokens, m->plan.head_chunk) * m->plan.head_chunk;
}

// The input of a stack, and of the head. A chunk of the head writes the gradients of its rows over
// inputs that it and the chunks before it have read: labelled row i is token i or a later one. They
// are used up when the first layer begins. Tiles are too small for that: see qlora__layout_dqkv.
static void qlora__layout_x(qlora__arena* arena, qlora_model* m, int64_t pad) {
    int64_t width = m->plan.config.hidden;
    qlora__arena shared = *arena;
    qlora__arena_tensor(arena, m->compute, qlora__tile_rows(m), width + pad, &m->x);
    if (qlora__trains(m) && m->plan.tile == 0) {
        qlora__arena_tensor(&shared, m->compute, qlora__head_rows(m) + 1, width, &m->rows_dx);
        qlora__arena_join(arena, &shared);
    }
}

// The gradients of q, k and v. With tiles, those of the rows of the head, which are used up when
// the first layer begins, share their memory.
static void qlora__layout_dqkv(qlora__arena* arena, qlora_model* m, int64_t pad) {
    const qlora_model_config* c = &m->plan.config;
    int64_t wide = qlora__q_width(c) + 2 * qlora__kv_width(c) + pad;
    qlora__arena shared = *arena;
    qlora__arena_tensor(arena, m->compute, m->plan.tokens, wide, &m->dqkv);
    if (m->plan.tile > 0) {
        qlora__arena_tensor(&shared, m->compute, qlora__head_rows(m) + 1, c->hidden, &m->rows_dx);
        qlora__arena_join(arena, &shared);
    }
}

// Attention keeps two numbers per head and token, in the scratch buffer unless they would fill it.
static bool qlora__has_own_stats(const qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    return m->on_gpu && (uint64_t)(c->heads * m->plan.tokens) * 8 > ((uint64_t)32 << 20);
}

// What is not needed while the head runs, which has its logits in the same memory: they begin at
// m->head_place, and may go beyond the end. A 4-bit head needs the operand. s is for the MLP of a
// layer, d_o for its attention; with tiles, both are used at once.
static void qlora__layout_turns(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    int64_t some = qlora__tile_rows(m);
    int64_t pads[QLORA__GROUPS];
    qlora__most_pads(m, pads);
    int64_t dh_pad = qlora__max(pads[QLORA__O], pads[QLORA__DOWN]);
    // FP8 products fill the columns of ds up; those are the ones of z, which is computed later.
    int64_t wide = qlora__is_fp8(m) ? qlora__fp8_width(c->intermediate) : c->intermediate;
    if (m->head_is_nf4) {
        qlora__arena_tensor(arena, m->compute, 1, qlora__operand_elements(m), &m->operand);
    }
    m->head_place = arena->used;
    qlora__arena shared = *arena;
    qlora__arena_tensor(arena, m->compute, some, wide + pads[QLORA__DOWN], &m->s);
    if (qlora__trains(m) && m->plan.tile == 0) {
        qlora__arena_tensor(&shared, m->compute, m->plan.tokens, qlora__q_width(c), &m->d_o);
        qlora__arena_join(arena, &shared);
    }
    if (!m->head_is_nf4) {
        qlora__arena_tensor(arena, m->compute, 1, qlora__operand_elements(m), &m->operand);
    }
    qlora__arena_tensor(arena, m->compute, some, c->hidden, &m->delta);
    if (!qlora__trains(m)) {
        return;
    }
    m->ds = m->s;
    if (m->desc.dropout > 0.0f || m->dora) {
        qlora__arena_tensor(arena, m->compute, some, wide, &m->ds);
    }
    qlora__arena_tensor(arena, m->compute, m->plan.tokens, c->hidden + dh_pad, &m->dh);
    m->d_out = m->dh;
    if (qlora__has_own_d_out(m)) {
        qlora__arena_tensor(arena, m->compute, some, c->hidden + dh_pad, &m->d_out);
    }
    if (m->plan.tile > 0) {
        qlora__arena_tensor(arena, m->compute, m->plan.tokens, qlora__q_width(c), &m->d_o);
    }
    if (m->dora) {
        int64_t heads = qlora__q_width(c) + 2 * qlora__kv_width(c);
        int64_t widest = qlora__max(heads, qlora__max(c->hidden, 2 * c->intermediate));
        qlora__arena_tensor(arena, m->compute, some, widest, &m->raw);
    }
}

static void qlora__layout_workspace(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    int64_t some = qlora__tile_rows(m);
    int64_t pads[QLORA__GROUPS];
    qlora__most_pads(m, pads);
    qlora__layout_x(arena, m, qlora__max(pads[QLORA__QKV], pads[QLORA__GATE_UP]));
    qlora__arena_tensor(arena, QLORA_I32, 1, 1, &m->flag);
    qlora__layout_wide(arena, m);
    if (qlora__is_fp8(m)) {
        qlora__layout_fp8_shared(arena, m);
    }
    memset(&m->stats, 0, sizeof m->stats);
    if (qlora__trains(m)) {
        int64_t parts = qlora__has_gated(m) ? qlora__gated_room(some, c->intermediate) : 0;
        qlora__arena_tensor(arena, QLORA_F32, 1, parts, &m->gated_parts);
        qlora__arena_tensor(arena, QLORA_F32, 1, qlora__skinny_most(m), &m->skinny_parts);
        for (int i = 0; i < 2; i++) {
            qlora__arena_tensor(arena, QLORA_F32, 1, qlora__keeps_z(m) ? some : 0, &m->rstd[i]);
        }
        qlora__layout_dqkv(arena, m, pads[QLORA__QKV]);
        if (qlora__has_own_stats(m)) {
            qlora__arena_tensor(arena, QLORA_F32, c->heads, 2 * m->plan.tokens, &m->stats);
        }
    }
    qlora__layout_turns(arena, m); // the last, so that the head can go beyond its end
}

static void qlora__layout_batch(qlora__arena* arena, qlora_model* m) {
    int64_t T = m->plan.tokens;
    int64_t R = qlora__head_rows(m);
    qlora__batch_block* b = &m->batch;
    size_t before = arena->used;
    char* start = arena->base != NULL ? arena->base + before : NULL;
    qlora__arena_tensor(arena, QLORA_I32, 1, T, &b->ids);
    qlora__arena_tensor(arena, QLORA_I32, 1, T, &b->positions);
    qlora__arena_tensor(arena, QLORA_I32, 1, T, &b->sequences);
    qlora__arena_tensor(arena, QLORA_I32, 1, m->plan.max_sequences + 1, &b->seqs);
    qlora__arena_tensor(arena, QLORA_I32, 1, R, &b->rows);
    qlora__arena_tensor(arena, QLORA_I32, 1, R, &b->labels);
    qlora__arena_tensor(arena, QLORA_F32, 1, R, &b->weights);
    qlora__arena_tensor(arena, QLORA_I32, 1, T, &b->inverse);
    if (m->desc.dropout > 0.0f && qlora__trains(m)) {
        qlora__arena_tensor(arena, QLORA_I32, 1, R, &b->row_positions);
        qlora__arena_tensor(arena, QLORA_I32, 1, R, &b->row_sequences);
    }
    qlora__arena_tensor(arena, QLORA_F32, 1, m->adapters, &b->scale);
    if (m->wide != NULL) {
        qlora__arena_tensor(arena, QLORA_I32, 1, T, &b->owners);
        qlora__arena_tensor(arena, QLORA_I32, 1, R, &b->claims);
        qlora__arena_tensor(arena, QLORA_I32, 1, m->adapters, &b->states);
    }
    qlora__arena_tensor(arena, QLORA_I32, 1, 4, &b->dropout);
    int64_t S = m->plan.max_sequences;
    qlora__arena_tensor(arena, QLORA_I32, 1, S + 1, &b->starts);
    qlora__arena_tensor(arena, QLORA_I32, 1, S, &b->roles);
    qlora__arena_tensor(arena, QLORA_U8, 1, (int64_t)sizeof(qlora__preference_numbers),
                        &b->numbers);
    qlora__arena_tensor(arena, QLORA_U8, 1, S * (int64_t)sizeof(double), &b->references);
    m->preference.starts = b->starts;
    m->preference.roles = b->roles;
    m->preference.numbers = b->numbers;
    m->preference.references = b->references;
    b->all = b->ids;
    b->all.data = start;
    b->all.dtype = QLORA_U8;
    b->all.bytes = arena->used - before;
    b->all.cols = (int64_t)b->all.bytes;
    b->all.ld = b->all.cols;
}

// The totals of several adapters are this many elements apart, as the arena places them.
#define QLORA__TOTALS_STRIDE 64

static void qlora__layout_totals(qlora__arena* arena, qlora_model* m) {
    for (int32_t k = 0; k < m->adapters; k++) {
        qlora__adapter_focus(m, k);
        qlora__arena_tensor(arena, QLORA_F32, 1, 6, &m->totals);
    }
    qlora__adapter_focus(m, 0);
}

static void qlora__layout_head(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    int64_t R = qlora__head_rows(m);
    qlora__arena shared = *arena;
    shared.used = m->head_place;
    qlora__arena_tensor(&shared, m->compute, m->plan.head_chunk, c->hidden, &m->rows_x);
    qlora__arena_tensor(&shared, m->compute, m->plan.head_chunk, c->vocab, &m->logits);
    qlora__arena_join(arena, &shared);
    qlora__arena_tensor(arena, QLORA_F32, 1, R, &m->losses);
    qlora__layout_totals(arena, m);
    int64_t S = m->plan.max_sequences * (int64_t)sizeof(double);
    qlora__arena_tensor(arena, QLORA_U8, 1, S, &m->preference.logps);
    qlora__arena_tensor(arena, QLORA_U8, 1, QLORA__PREFERENCE_SUMS * (int64_t)sizeof(double),
                        &m->preference.sums);
    if (qlora__trains(m)) {
        qlora__arena_tensor(arena, QLORA_U8, 1, S * QLORA__PREFERENCE_VALUES,
                            &m->preference.values);
        qlora__arena_tensor(arena, QLORA_F32, 1, m->plan.max_sequences, &m->preference.factors);
    }
}
