// ---- what a trainer computes with ---------------------------------------------------------------
//
// The settings and facts on which results depend, as a table of numbers: a checkpoint stores them,
// and processes that train together compare them.

#define QLORA__STATE_ROWS 81
#define QLORA__STATE_PREFERENCE (QLORA__PREFERENCE_SUMS + 3)

// The numbers stored in a checkpoint. SAME: a different value is an error, because it would change
// the results or their meaning; NOTED: a different value is logged; BACK: the value is restored.
// PRINT: a hash, of which only the difference can be told.
typedef enum qlora__state_kind {
    QLORA__SAME,
    QLORA__PRINT,
    QLORA__NOTED,
    QLORA__BACK
} qlora__state_kind;

typedef struct qlora__state_row {
    const char* name;
    qlora__state_kind kind;
    bool real;  // value holds the bits of a double
    bool later; // older checkpoints lack it and have the default
    int64_t value;
    int64_t* back;
} qlora__state_row;

typedef struct qlora__state {
    int64_t step;
    int64_t tokens;
    int64_t lr_bits;
    int64_t updates;
    int64_t skipped;
    int64_t skip;
    float record[6]; // totals of a qlora__record, norm of the gradients, scale of the first group
    double preference[QLORA__STATE_PREFERENCE]; // sums; then total, chosen_labels, sft_alpha
    qlora__state_row rows[QLORA__STATE_ROWS];
    int count;
} qlora__state;

static void qlora__state_add(qlora__state* s, const char* name, qlora__state_kind kind,
                             int64_t value) {
    QLORA_ASSERT(s->count < QLORA__STATE_ROWS);
    qlora__state_row* row = &s->rows[s->count++];
    memset(row, 0, sizeof *row);
    row->name = name;
    row->kind = kind;
    row->value = value;
}

static void qlora__state_add_real(qlora__state* s, const char* name, qlora__state_kind kind,
                                  double value) {
    int64_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    qlora__state_add(s, name, kind, bits);
    s->rows[s->count - 1].real = true;
}

// A setting that older checkpoints lack. Nothing is stored for the default, so that a checkpoint
// that does not use it stays as it was.
static void qlora__state_add_later(qlora__state* s, const char* name, qlora__state_kind kind,
                                   double value) {
    qlora__state_add_real(s, name, kind, value);
    s->rows[s->count - 1].later = true;
}

static void qlora__state_add_back(qlora__state* s, const char* name, int64_t* back) {
    qlora__state_add(s, name, QLORA__BACK, *back);
    s->rows[s->count - 1].back = back;
}

static void qlora__state_add_machine(qlora__state* s, qlora_ctx* ctx) {
    int64_t capability = 0;
    int64_t driver = 0;
    int64_t cublas = 0;
    int64_t target = 0; // unless the environment limits it
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        capability = ctx->gpu->capability;
        driver = ctx->gpu->driver_version;
        target = ctx->gpu->target_limit < ctx->gpu->capability ? ctx->gpu->target_number : 0;
        cublas = ctx->gpu->cublas != NULL ? ctx->gpu->cublas_version : 0;
    }
#endif
    qlora__state_add(s, "version", QLORA__NOTED, QLORA_VERSION);
    qlora__state_add(s, "cuda", QLORA__NOTED, qlora__on_cpu(ctx) ? 0 : 1);
    qlora__state_add(s, "capability", QLORA__NOTED, capability);
    qlora__state_add_later(s, "gpu_target", QLORA__NOTED, (double)target);
    qlora__state_add(s, "driver", QLORA__NOTED, driver);
    qlora__state_add(s, "cublas", QLORA__NOTED, cublas);
}

// The tier that made the numbers, by name, so that a checkpoint can be read by a person. Of tiers
// with the same bits in this mode, the first.
static const char* qlora__state_tier(const qlora_model* m) {
    const qlora__cpu_table* cpu = m->ctx->cpu;
    return !qlora__on_cpu(m->ctx)            ? "none"
           : m->plan.mode == QLORA_MODE_BF16 ? cpu->name
                                             : cpu->f32_name;
}

static void qlora__state_add_method(qlora__state* s, const qlora_train_desc* d) {
    const struct {
        const char* name;
        qlora__state_kind kind;
        double value;
        double usual;
    } rows[] = {{"method", QLORA__SAME, (double)d->method, 0.0},
                {"beta", QLORA__NOTED, d->beta, 0.0},
                {"label_smoothing", QLORA__NOTED, d->label_smoothing, 0.0},
                {"sft_alpha", QLORA__NOTED, d->sft_alpha, 0.0},
                {"desirable_weight", QLORA__NOTED, d->desirable_weight, 0.0},
                {"undesirable_weight", QLORA__NOTED, d->undesirable_weight, 0.0},
                {"loraplus_ratio", QLORA__NOTED, d->loraplus_ratio, 1.0},
                {"neftune", QLORA__SAME, d->neftune, 0.0},
                {"router_aux_loss", QLORA__SAME, d->router_aux_loss, 0.0}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        qlora__state_add_later(s, rows[i].name, rows[i].kind, rows[i].value - rows[i].usual);
    }
    static const char* const factors[QLORA_LR_FACTORS] = {
        "lr_factor_0",  "lr_factor_1",  "lr_factor_2",  "lr_factor_3",  "lr_factor_4",
        "lr_factor_5",  "lr_factor_6",  "lr_factor_7",  "lr_factor_8",  "lr_factor_9",
        "lr_factor_10", "lr_factor_11", "lr_factor_12", "lr_factor_13", "lr_factor_14"};
    for (int i = 0; i < QLORA_LR_FACTORS; i++) {
        qlora__state_add_later(s, factors[i], QLORA__NOTED, d->lr_factors[i] - 1.0);
    }
}

// Fills the table from the trainer. The caller has set the fields of s that are restored.
static void qlora__state_fill(const qlora_trainer* t, qlora__state* s) {
    const qlora_model* m = t->m;
    const qlora_model_config* c = &m->plan.config;
    const qlora_train_desc* d = &t->desc;
    // On the GPU, every micro-batch has the planned number of rows, on which the choice of cuBLAS
    // kernels depends.
    qlora__state_kind tokens = qlora__on_cpu(t->ctx) ? QLORA__NOTED : QLORA__SAME;
    s->count = 0;
    qlora__state_add(s, "state_format", QLORA__SAME, 2);
    qlora__state_add(s, "mode", QLORA__SAME, (int64_t)m->plan.mode);
    qlora__state_add(s, "math", QLORA__SAME, (int64_t)m->math);
    qlora__state_add(s, "base", QLORA__SAME, (int64_t)m->desc.base);
    qlora__state_add(s, "single_quant", QLORA__SAME, m->desc.single_quant ? 1 : 0);
    qlora__state_add(s, "family", QLORA__SAME, (int64_t)c->family);
    qlora__state_add(s, "vocab", QLORA__SAME, c->vocab);
    qlora__state_add(s, "hidden", QLORA__SAME, c->hidden);
    qlora__state_add(s, "intermediate", QLORA__SAME, c->intermediate);
    qlora__state_add(s, "layers", QLORA__SAME, c->layers);
    qlora__state_add(s, "heads", QLORA__SAME, c->heads);
    qlora__state_add(s, "kv_heads", QLORA__SAME, c->kv_heads);
    qlora__state_add(s, "head_dim", QLORA__SAME, c->head_dim);
    qlora__state_add(s, "base_config", QLORA__PRINT, (int64_t)m->base.base_config);
    qlora__state_add(s, "base_weights", QLORA__PRINT, (int64_t)m->base.base_weights);
    qlora__state_add(s, "long_rope", QLORA__SAME, 0); // 1: short texts had the long factors, too
    qlora__state_add(s, "train_norms", QLORA__SAME, m->desc.train_norms ? 1 : 0);
    qlora__state_add_real(s, "dropout", QLORA__SAME, (double)m->desc.dropout);
    qlora__state_add(s, "dropout_seed", QLORA__SAME, (int64_t)d->seed);
    qlora__state_add(s, "tokens", tokens, m->plan.tokens);
    qlora__state_add(s, "head_chunk", QLORA__NOTED, m->plan.head_chunk);
    // It divides attention's sums.
    bool divides = !qlora__on_cpu(t->ctx) && m->plan.max_length < m->plan.tokens;
    qlora__state_add_later(s, "max_length", QLORA__NOTED,
                           divides ? (double)m->plan.max_length : 0.0);
    qlora__state_add(s, "recompute_layers", QLORA__NOTED, m->plan.recompute_layers);
    qlora__state_add(s, "cached_layers", QLORA__NOTED, m->plan.cached_layers);
    qlora__state_add_real(s, "lr", QLORA__NOTED, d->lr);
    qlora__state_add_real(s, "beta1", QLORA__NOTED, d->beta1);
    qlora__state_add_real(s, "beta2", QLORA__NOTED, d->beta2);
    qlora__state_add_real(s, "eps", QLORA__NOTED, d->eps);
    qlora__state_add_real(s, "weight_decay", QLORA__NOTED, d->weight_decay);
    qlora__state_add_real(s, "max_norm", QLORA__NOTED, d->max_norm);
    qlora__state_add(s, "clip", QLORA__NOTED, (int64_t)d->clip);
    qlora__state_add(s, "schedule", QLORA__NOTED, (int64_t)d->schedule);
    qlora__state_add(s, "warmup_steps", QLORA__NOTED, d->warmup_steps);
    qlora__state_add(s, "total_steps", QLORA__NOTED, d->total_steps);
    qlora__state_add_later(s, "tile", QLORA__NOTED, (double)m->plan.tile);
    // Columns of z of the first stack, with those of the adapters that stand beside this one.
    qlora__state_add_later(s, "side_by_side", QLORA__NOTED,
                           m->wide != NULL ? (double)qlora__wide_pad(m, 0, QLORA__QKV) : 0.0);
    qlora__state_add_method(s, d);
    qlora__state_add_later(s, "head", QLORA__SAME, (double)m->desc.head);
    qlora__state_add_later(s, "optimizer", QLORA__SAME, (double)m->desc.optimizer);
    qlora__state_add_machine(s, t->ctx);
    qlora__state_add_back(s, "step", &s->step);
    qlora__state_add_back(s, "last_tokens", &s->tokens);
    qlora__state_add_back(s, "last_lr", &s->lr_bits);
    qlora__state_add_back(s, "updates", &s->updates);
    qlora__state_add_back(s, "skipped", &s->skipped);
    qlora__state_add_back(s, "last_skipped", &s->skip);
}
