// ---- preparing a model --------------------------------------------------------------------------

// Sets the pointers and maps of weights with codes once the arena is allocated.
static qlora_result qlora__model_wrap(qlora_ctx* ctx, qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int i = 0; i < layer->count; i++) {
            qlora__projection* p = &layer->projections[i];
            if (p->is_nf4) {
                qlora_tensor memory = p->nf4.memory;
                QLORA__TRY(qlora_nf4_wrap(ctx, &p->nf4_desc, &memory, &p->nf4));
            } else if (p->is_fp8) {
                qlora__fp8_weight_wrap(ctx, p->out, p->in, &p->fp8.memory, &p->fp8);
            }
        }
    }
    qlora_tensor head = m->base.head_nf4.memory;
    return m->base.head_is_nf4 ? qlora_nf4_wrap(ctx, &m->base.head_desc, &head, &m->base.head_nf4)
                               : QLORA_OK;
}

typedef struct qlora__ready_job {
    const qlora__cpu_stream* stream;
    const qlora_nf4* w;
    float* scales;
    uint8_t* failed; // one per part
} qlora__ready_job;

#define QLORA__READY_PART 1024 // scales

static void qlora__ready_parts(void* user, int64_t begin, int64_t end) {
    const qlora__ready_job* job = (const qlora__ready_job*)user;
    int64_t all = job->w->rows * job->w->cols / QLORA__STREAM_STEP;
    for (int64_t part = begin; part < end; part++) {
        int64_t first = part * QLORA__READY_PART;
        int64_t steps = qlora__min(QLORA__READY_PART, all - first);
        job->failed[part] =
            !qlora__stream_prepare(job->stream, job->w, first, steps, job->scales + first);
    }
}

// Prepares the scales of the weights that decoding streams. A weight with scales that cannot be
// prepared keeps its own.
static qlora_result qlora__model_ready(qlora_ctx* ctx, qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            qlora__projection* p = &m->layers[l].projections[i];
            int64_t parts = qlora__ceil_div(p->ready.cols, QLORA__READY_PART);
            qlora__ready_job job;
            bool failed = false;
            if (p->ready.data == NULL) {
                continue;
            }
            job.stream = ctx->cpu->stream;
            job.w = &p->nf4;
            job.scales = (float*)p->ready.data;
            job.failed = (uint8_t*)qlora__alloc_zero(ctx, (size_t)parts);
            if (job.failed == NULL) {
                return QLORA_ERR_MEMORY;
            }
            qlora__parallel(ctx, parts, 1, qlora__ready_parts, &job);
            for (int64_t k = 0; k < parts; k++) {
                failed = failed || job.failed[k] != 0;
            }
            qlora__free(ctx, job.failed, (size_t)parts);
            p->nf4.ready = failed ? NULL : job.scales;
        }
    }
    return QLORA_OK;
}

#undef QLORA__READY_PART

// Points a stack at its FP8 weights and at what all stacks share.
static void qlora__model_fp8(qlora_model* m, int64_t l, int group) {
    qlora__layer* layer = &m->layers[l];
    qlora__fp8* f = &layer->fp8[group];
    if (!layer->cached) {
        qlora__arena own;
        own.ctx = m->ctx;
        own.base = (char*)m->work.operand.data +
                   (size_t)m->work.operand_at[group] * qlora_dtype_bytes(m->work.operand.dtype);
        own.used = 0;
        qlora__layout_fp8(&own, m, layer, group);
    }
    f->codes = m->work.fp8_codes;
    f->scales = m->work.fp8_scales;
    f->most = m->work.fp8_most;
    f->ones = m->work.fp8_ones;
    qlora__arena_window(&m->work.fp8_factors, (l * QLORA__GROUPS + group) * 2, 1, 2, &f->factors);
    layer->linears[group].operand = NULL;
    layer->linears[group].fp8 = f;
}

// Whether products read the weights where they are, and the adapters apart from them: in the tiers
// of the CPU that widen weights while they pack them.
static bool qlora__model_reads_weights(const qlora_model* m) {
    return qlora__on_cpu(m->ctx) && m->ctx->cpu->gemm != NULL;
}

// The operands of layers without a cache are views of the shared one. A stack of dense weights
// needs none.
static void qlora__model_operands(qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int g = 0; g < QLORA__GROUPS; g++) {
            qlora_linear_desc* linear = &layer->linears[g];
            if (qlora__is_fp8(m)) {
                qlora__model_fp8(m, l, g);
                continue;
            }
            bool any_coded = false;
            for (int i = 0; i < linear->count; i++) {
                any_coded = any_coded || linear->parts[i].dense == NULL;
            }
            bool needed = any_coded && (layer->cached || !qlora__model_reads_weights(m));
            linear->operand = needed ? &layer->operands[g] : NULL;
            if (!layer->cached) {
                qlora__arena_window(&m->work.operand, m->work.operand_at[g],
                                    qlora_linear_out(linear) + layer->pads[g],
                                    linear->in + layer->pads[g], &layer->operands[g]);
            }
        }
    }
}

// Where products read the weights themselves, the copies of cached layers take their place.
static qlora_result qlora__model_use_copies(qlora_ctx* ctx, qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int g = 0; g < QLORA__GROUPS && layer->cached; g++) {
            qlora_linear_desc* linear = &layer->linears[g];
            if (linear->operand == NULL || !qlora__model_reads_weights(m)) {
                continue;
            }
            int64_t row = 0;
            for (int i = 0; i < linear->count; i++) {
                qlora__projection* p = &layer->projections[layer->layout->groups[g].first + i];
                qlora_linear_part* part = &linear->parts[i];
                if (part->dense == NULL) {
                    QLORA__TRY(qlora__tensor_view(ctx, &layer->operands[g], row, part->out, 0,
                                                  linear->in, &p->dense));
                    part->dense = &p->dense;
                    part->nf4 = NULL;
                    part->fp8 = NULL;
                }
                row += part->out;
            }
            linear->operand = NULL;
        }
    }
    return QLORA_OK;
}

// The factor of q at a position.
static double qlora__query_factor(const qlora_model_config* c, int64_t position) {
    return c->query_beta != 0.0
               ? 1.0 + c->query_beta * log(1.0 + floor((double)position / c->query_period))
               : 1.0;
}

// Fills the rows of a rotary table as qlora__angle_row has them.
static qlora_result qlora__model_angles(qlora_ctx* ctx, const qlora_model* m,
                                        const qlora_rope_desc* desc, const char* name,
                                        float* out) {
    int64_t dims = m->plan.config.rope_dims;
    QLORA__TRY(qlora__rope_table(ctx, desc, name, dims, m->positions, out));
    if (!qlora__has_two_rotations(m)) {
        return QLORA_OK;
    }
    size_t n = (size_t)(m->positions * dims);
    size_t first = (size_t)(m->short_texts * dims);
    float* longer = (float*)qlora__alloc(ctx, n * sizeof *longer);
    if (longer == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_rope_desc other = *desc;
    other.use_long = qlora__rope_short(desc, m->positions) < m->positions; // or it has one set
    qlora_result r = qlora__rope_table(ctx, &other, name, dims, m->positions, longer);
    if (r == QLORA_OK) {
        memcpy(out + first, longer + first, (n - first) * sizeof *longer);
        memcpy(out + n, longer, first * sizeof *longer);
    }
    qlora__free(ctx, longer, n * sizeof *longer);
    return r;
}

static qlora_result qlora__model_rope(qlora_ctx* ctx, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    const struct {
        const qlora_rope_desc* desc;
        const char* name;
        const qlora_tensor* table;
        bool query;
    } tables[] = {{&c->rope, "config.rope", &m->base.rope, false},
                  {&c->rope_sliding, "config.rope_sliding", &m->base.rope_sliding, false},
                  {&c->rope, "config.rope", &m->base.rope_query, true}};
    int count = qlora__scales_queries(m) ? 3 : 2;
    size_t n = (size_t)(m->angle_rows * c->rope_dims);
    float* host = (float*)qlora__alloc(ctx, n * 4);
    QLORA__REAL* real = (QLORA__REAL*)qlora__alloc(ctx, n * sizeof *real);
    qlora_result r = host != NULL && real != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    for (int i = 0; i < count && r == QLORA_OK; i++) {
        r = qlora__model_angles(ctx, m, tables[i].desc, tables[i].name, host);
        if (r != QLORA_OK) {
            break;
        }
        for (size_t j = 0; j < n; j++) {
            int64_t row = (int64_t)j / c->rope_dims;
            int64_t position = row < m->positions ? row : row - m->positions;
            float factor = tables[i].query ? (float)qlora__query_factor(c, position) : 1.0f;
            real[j] = (QLORA__REAL)(host[j] * factor);
        }
        r = qlora__copy_in(ctx, tables[i].table->data, real, n * sizeof *real);
    }
    qlora__free(ctx, host, n * 4);
    qlora__free(ctx, real, n * sizeof *real);
    return r;
}

// The AdamW settings of a step: the first fields of qlora_adamw_state.
typedef struct qlora__adamw_numbers {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
} qlora__adamw_numbers;

// Writes the tables of the clip: all gradients as one group, or one group per layer, with the final
// norm in a group of its own.
static qlora_result qlora__clip_model(qlora_ctx* ctx, qlora_model* m, bool layers,
                                      double max_norm) {
    int64_t starts[QLORA_MAX_LAYERS + 1];
    int32_t groups = 1;
    memset(starts, 0, sizeof starts);
    if (layers) {
        groups = (int32_t)m->plan.config.layers;
        for (int32_t l = 0; l < groups; l++) {
            starts[l] = m->layers[l].projections[0].a_at;
        }
        if (m->desc.train_norms) {
            starts[groups++] = m->tables.final_norm_at;
        }
    }
    return qlora__clip_start(ctx, &m->clip, &m->gradients, starts, groups, (float)max_norm);
}

// Writes the tables of the clip and the state of the optimizer before the first step.
static qlora_result qlora__optimizer_start(qlora_ctx* ctx, qlora_model* m, bool layers,
                                           double max_norm, const qlora__adamw_numbers* numbers) {
    if (!QLORA__TRAINS || !qlora__trains(m)) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__clip_model(ctx, m, layers, max_norm));
    qlora_adamw_state state;
    memset(&state, 0, sizeof state);
    state.lr = numbers->lr;
    state.beta1 = numbers->beta1;
    state.beta2 = numbers->beta2;
    state.eps = numbers->eps;
    state.weight_decay = numbers->weight_decay;
    QLORA__TRY(qlora__copy_in(ctx, m->adamw.data, &state, sizeof state));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->gradients));
    if (m->desc.optimizer == QLORA_OPTIMIZER_ADAMW_8BIT) {
        return qlora__moments_start(ctx, m);
    }
    QLORA__TRY(qlora__tensor_zero(ctx, &m->moment1));
    return qlora__tensor_zero(ctx, &m->moment2);
}

static qlora_result qlora__model_warm_kernels(qlora_ctx* ctx, qlora_model* m) {
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        bool nf4 = m->desc.base == QLORA_BASE_NF4 || m->base.head_is_nf4;
        bool fp8 = m->desc.base == QLORA_BASE_FP8;
        // What depends on rare settings is compiled when the dry run needs it.
        const qlora_model_config* c = &m->plan.config;
        for (int64_t l = 0; l < c->layers; l++) {
            for (int i = 0; i < m->layers[l].count; i++) {
                nf4 = nf4 || m->layers[l].projections[i].is_nf4;
                fp8 = fp8 || m->layers[l].projections[i].is_fp8;
            }
        }
        qlora__needs need = qlora__kernels_needed(ctx, m->compute, c->head_dim,
                                                  c->attention_cap > 0.0, nf4, true);
        need |= m->desc.generate_tokens > 0 // later pieces of a prompt
                    ? qlora__attention_need(ctx, m->compute, c->head_dim, c->attention_cap > 0.0,
                                            true)
                    : 0;
        need |= m->decode.planned ? QLORA__NEED_TEXTS : 0;
        need |= qlora__decode_has_shared(m) ? QLORA__NEED_LAYERS : 0;
        need |= fp8 ? QLORA__NEED_FP8_BASE : 0;
        need |= c->logits_cap > 0.0 ? QLORA__NEED_CAP : 0;
        need |= m->base.head_is_nf4 ? QLORA__NEED_HEAD_NF4 : 0;
        need |= qlora__is_fp8(m) ? QLORA__NEED_FP8_MODE : 0;
        need |= (m->arch->has & QLORA__HAS_MEAN_NORM) != 0 ? QLORA__NEED_MEAN_NORM : 0;
        for (int64_t l = 0; l < c->layers; l++) {
            need |= qlora__ffn_plan_of(&m->layers[l])->needs(m, &m->layers[l]);
        }
        // What several adapters run depends on the batch, not on the model alone.
        need |= qlora__has_several(m) || m->dora ? QLORA__NEED_ANY : 0;
        return qlora__cache_warm(ctx, need, false);
    }
#else
    (void)m;
#endif
    (void)ctx;
    return QLORA_OK;
}

// FP8 products on a GPU need cuBLASLt.
static qlora_result qlora__model_open_fp8(qlora_ctx* ctx, const qlora_model* m) {
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx) && qlora__is_fp8(m) && qlora__computes(m)) {
        return qlora__lt_open(ctx);
    }
#endif
    (void)ctx;
    (void)m;
    return QLORA_OK;
}
