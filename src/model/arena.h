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
    return qlora__arch_width(c, QLORA__WIDTH_Q);
}

static int64_t qlora__kv_width(const qlora_model_config* c) {
    return qlora__arch_width(c, QLORA__WIDTH_KV);
}

// Columns of the output of a stack, in the widest layer.
static int64_t qlora__stack_most(const qlora_model* m, int group) {
    int64_t most = 0;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        const qlora__layout* layout = m->layers[l].layout;
        int64_t out = 0;
        for (int i = 0; i < layout->groups[group].count; i++) {
            const qlora__projection_row* row = &layout->rows[layout->groups[group].first + i];
            out += qlora__arch_width(&m->plan.config, row->out);
        }
        most = qlora__max(most, out);
    }
    return most;
}

// Columns of its input, in the widest layer.
static int64_t qlora__stack_most_in(const qlora_model* m, int group) {
    int64_t most = 0;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        most = qlora__max(most, m->layers[l].linears[group].in);
    }
    return most;
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
    return !m->on_gpu && m->ctx->cpu->stream != NULL && m->desc.generate_tokens > 0 &&
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
        qlora__layout_weight(arena, m, &m->base.embed_mapped, c->vocab, c->hidden, &m->base.embed);
    }
    m->base.head = m->base.embed;
    if (m->base.head_is_nf4) {
        int64_t bytes = (int64_t)qlora_nf4_bytes(&m->base.head_desc);
        memset(&m->base.head, 0, sizeof m->base.head);
        qlora__arena_tensor(arena, QLORA_U8, 1, bytes, &m->base.head_nf4.memory);
    } else if (!c->tied) {
        qlora__layout_weight(arena, m, &m->base.head_mapped, c->vocab, c->hidden, &m->base.head);
    }
    qlora__arena_tensor(arena, QLORA_F32, m->angle_rows, c->rope_dims, &m->base.rope);
    m->base.rope_sliding = m->base.rope;
    m->base.rope_query = m->base.rope;
    if (memcmp(&c->rope, &c->rope_sliding, sizeof c->rope) != 0) {
        qlora__arena_tensor(arena, QLORA_F32, m->angle_rows, c->rope_dims, &m->base.rope_sliding);
    }
    if (qlora__scales_queries(m)) {
        qlora__arena_tensor(arena, QLORA_F32, m->angle_rows, c->rope_dims, &m->base.rope_query);
    }
    if (!m->desc.train_norms) {
        qlora__arena_tensor(arena, QLORA_F32, 1, c->hidden, &m->base.final_norm);
    }
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int i = 0; i < layer->count; i++) {
            qlora__layout_projection(arena, m, &layer->projections[i]);
        }
        if (c->qkv_bias && !c->qk_norm) {
            qlora__arena_tensor(arena, m->compute, 1, qlora__q_width(c) + 2 * qlora__kv_width(c),
                                &layer->qkv_bias);
        }
        if (layer->experts != NULL && layer->layout->experts->correction != NULL) {
            qlora__arena_tensor(arena, QLORA_F32, 1, c->experts, &layer->experts->correction);
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
                            &f->transposed);
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
    if (m->tables.token_count > 0) {
        qlora__arena_tensor(arena, QLORA_I32, 1, m->tables.token_count, &m->tables.token_rows);
        qlora__arena_tensor(arena, m->compute, m->tables.token_count, m->plan.config.hidden,
                            &m->tables.base_tokens);
    }
    if (m->tables.tokens_twice || m->tables.head_rows) {
        qlora__arena_tensor(arena, m->compute, m->tables.token_count, m->plan.config.hidden,
                            &m->tables.head_tokens);
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
        for (int i = 0; i < layer->count; i++) {
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
        qlora__window_norm(m, m->tables.final_norm_at, c->hidden, &m->base.final_norm,
                           &m->tables.d_final_norm);
    }
    if (m->tables.saved_embed) {
        qlora__window_saved(m, m->tables.embed_at, c->vocab, &m->tables.own_embed,
                            &m->tables.d_embed);
    }
    if (m->tables.saved_head) {
        qlora__window_saved(m, m->tables.head_at, c->vocab, &m->tables.own_head, &m->tables.d_head);
    }
    if (m->tables.token_count > 0) {
        qlora__window_saved(m, m->tables.tokens_at, m->tables.token_count, &m->tables.own_tokens,
                            &m->tables.d_tokens);
    }
    if (m->tables.head_rows) {
        qlora__window_saved(m, m->tables.head_tokens_at, m->tables.token_count,
                            &m->tables.own_head_tokens, &m->tables.d_head_tokens);
    }
}

// Rows of the buffers that are used for one tile at a time.
static int64_t qlora__tile_rows(const qlora_model* m) {
    return m->plan.tile > 0 ? qlora__min(m->plan.tile, m->plan.tokens) : m->plan.tokens;
}

// Whether z of the forward pass is the one that the gradients need. With dropout, DoRA or several
// adapters, and on the CPU, it is computed in other ways.
static bool qlora__keeps_z(const qlora_model* m) {
    return qlora__trains(m) && m->on_gpu && !(m->desc.dropout > 0.0f) && !m->dora &&
           !qlora__has_several(m);
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
