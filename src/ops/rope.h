// ---- rotary position embedding ------------------------------------------------------------------
//
// Of the columns of a head, the first 2 half are rotated, in pairs (u, v) = (i, i + half) or, for
// some families, (2 i, 2 i + 1). With angle = position f_i:
//   a = x[u] + bias[u], b = x[v] + bias[v]
//   x[u] = a cos - b sin,  x[v] = b cos + a sin;   backward: with -angle
// The table follows transformers: inverse frequencies and angles in fp32, then accurate cosines and
// sines.

// Wavelengths above original / low are stretched by `factor`, those below original / high are kept,
// with a blend in between.
static float qlora__rope_llama3(const qlora_rope_desc* d, float frequency) {
    float low = (float)(d->low_freq_factor != 0 ? d->low_freq_factor : 1);
    float high = (float)(d->high_freq_factor != 0 ? d->high_freq_factor : 4);
    float original = (float)d->original_max_position;
    float factor = (float)d->factor;
    float wavelength = (float)(2 * QLORA__PI) / frequency;
    if (wavelength > original / low) {
        return frequency / factor;
    }
    if (wavelength < original / high) {
        return frequency;
    }
    float smooth = (original / wavelength - low) / (high - low);
    return (1 - smooth) * (frequency / factor) + smooth * frequency;
}

// Returns the dimension that makes `turns` rotations within the original context.
static double qlora__rope_yarn_dim(const qlora_rope_desc* d, double turns, int64_t head_dim) {
    return (double)head_dim * log(d->original_max_position / (turns * 2 * QLORA__PI)) /
           (2 * log(d->theta));
}

// Low dimensions (many rotations) keep their frequency, high ones are divided by `factor`, with a
// blend in between.
static float qlora__rope_yarn(const qlora_rope_desc* d, float frequency, int64_t i,
                              int64_t head_dim) {
    double low = qlora__rope_yarn_dim(d, d->beta_fast != 0 ? d->beta_fast : 32, head_dim);
    double high = qlora__rope_yarn_dim(d, d->beta_slow != 0 ? d->beta_slow : 1, head_dim);
    if (!d->no_truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = low > 0 ? low : 0;
    high = high < (double)(head_dim - 1) ? high : (double)(head_dim - 1);
    if (low == high) {
        high += 0.001;
    }
    float ramp = ((float)i - (float)low) / (float)(high - low);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    float keep = 1 - ramp;
    return frequency / (float)d->factor * (1 - keep) + frequency * keep;
}

static double qlora__rope_mscale(double factor, double mscale) {
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

// Returns the factor of the cosines and sines.
static float qlora__rope_attention_factor(const qlora_rope_desc* d) {
    if (d->type != QLORA_ROPE_YARN && d->type != QLORA_ROPE_LONGROPE) {
        return 1;
    }
    if (d->attention_factor != 0) {
        return (float)d->attention_factor;
    }
    if (d->type == QLORA_ROPE_LONGROPE) {
        return d->factor <= 1 ? 1 : (float)sqrt(1 + log(d->factor) / log(d->original_max_position));
    }
    if (d->mscale != 0 && d->mscale_all_dim != 0) {
        return (float)(qlora__rope_mscale(d->factor, d->mscale) /
                       qlora__rope_mscale(d->factor, d->mscale_all_dim));
    }
    return (float)qlora__rope_mscale(d->factor, 1);
}

static float qlora__rope_frequency(const qlora_rope_desc* d, int64_t i, int64_t head_dim) {
    float exponent = (float)(2 * i) / (float)head_dim;
    float power = (float)pow(d->theta, (double)exponent);
    float frequency = 1.0f / power;
    switch (d->type) {
    case QLORA_ROPE_DEFAULT:
        break;
    case QLORA_ROPE_LINEAR:
        return frequency / (float)d->factor;
    case QLORA_ROPE_LLAMA3:
        return qlora__rope_llama3(d, frequency);
    case QLORA_ROPE_YARN:
        return qlora__rope_yarn(d, frequency, i, head_dim);
    case QLORA_ROPE_LONGROPE:
        return 1.0f / ((d->use_long ? d->long_factor[i] : d->short_factor[i]) * power);
    }
    return frequency;
}

// Describes what is wrong with the arguments, with the desc called `name`; the text is empty if
// nothing is. Replaces the zero fields of d by their defaults.
static void qlora__rope_fault(qlora_rope_desc* d, const char* name, int64_t head_dim,
                              int64_t positions, char* text, size_t size) {
    d->theta = d->theta != 0 ? d->theta : 10000;
    d->factor = d->factor != 0 ? d->factor : 1;
    bool longrope = d->type == QLORA_ROPE_LONGROPE;
    bool needs_original = d->type == QLORA_ROPE_LLAMA3 || d->type == QLORA_ROPE_YARN || longrope;
    text[0] = '\0';
    if (head_dim <= 0 || head_dim % 2 != 0) {
        snprintf(text, size, "head_dim is %lld; it must be even and positive", (long long)head_dim);
    } else if (positions < 0) {
        snprintf(text, size, "positions is %lld; it must not be negative", (long long)positions);
    } else if ((int)d->type < 0 || d->type > QLORA_ROPE_LONGROPE) {
        snprintf(text, size, "%s.type is %d; it must be one of qlora_rope_type", name,
                 (int)d->type);
    } else if (!(d->theta > 1)) {
        snprintf(text, size, "%s.theta is %g; it must be greater than 1", name, d->theta);
    } else if (!(d->factor > 0)) {
        snprintf(text, size, "%s.factor is %g; it must be positive", name, d->factor);
    } else if (needs_original && !(d->original_max_position > 0)) {
        snprintf(text, size, "%s.original_max_position is %g; for this type it must be positive",
                 name, d->original_max_position);
    } else if (longrope && head_dim > 2 * QLORA_MAX_ROPE_FACTORS) {
        snprintf(text, size, "head_dim is %lld; with longrope it must be at most %d",
                 (long long)head_dim, 2 * QLORA_MAX_ROPE_FACTORS);
    }
    for (int64_t i = 0; text[0] == '\0' && longrope && i < head_dim / 2; i++) {
        if (!(d->short_factor[i] > 0) || !(d->long_factor[i] > 0)) {
            snprintf(text, size, "%s.%s[%lld] is %g; it must be positive", name,
                     d->short_factor[i] > 0 ? "long_factor" : "short_factor", (long long)i,
                     (double)(d->short_factor[i] > 0 ? d->long_factor[i] : d->short_factor[i]));
        }
    }
}

static qlora_result qlora__rope_table(qlora_ctx* ctx, const qlora_rope_desc* desc, const char* name,
                                      int64_t head_dim, int64_t positions, float* out) {
    qlora_rope_desc d;
    char text[160] = "desc is NULL";
    memset(&d, 0, sizeof d);
    if (desc != NULL) {
        d = *desc;
        qlora__rope_fault(&d, name, head_dim, positions, text, sizeof text);
    }
    if (text[0] == '\0' && out == NULL && positions > 0) {
        snprintf(text, sizeof text, "out is NULL");
    }
    if (text[0] != '\0') {
        return ctx != NULL ? qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s", text) : QLORA_ERR_ARGUMENT;
    }
    int64_t half = head_dim / 2;
    float attention = qlora__rope_attention_factor(&d);
    for (int64_t i = 0; i < half; i++) {
        float frequency = qlora__rope_frequency(&d, i, head_dim);
        for (int64_t p = 0; p < positions; p++) {
            float angle = (float)p * frequency;
            out[p * head_dim + i] = (float)cos((double)angle) * attention;
            out[p * head_dim + half + i] = (float)sin((double)angle) * attention;
        }
    }
    return QLORA_OK;
}

qlora_result qlora_rope_table(qlora_ctx* ctx, const qlora_rope_desc* desc, int64_t head_dim,
                              int64_t positions, float* out) {
    if (ctx == NULL) {
        return qlora__rope_table(NULL, desc, "desc", head_dim, positions, out);
    }
    QLORA__ENTER(ctx, "qlora_rope_table");
    return qlora__leave(ctx, qlora__rope_table(ctx, desc, "desc", head_dim, positions, out));
}

#define QLORA__ROPE_CHUNK 128

typedef struct qlora__rope_job {
    const qlora_tensor* x;
    const qlora_tensor* positions;
    const qlora_tensor* table;
    const qlora_tensor* bias; // or NULL
    const qlora_tensor* flag; // or NULL
    int64_t rotated;
    int64_t head_dim;
    bool neighbours;
    float sign;
} qlora__rope_job;

// Every `step`-th of n elements of a row: in place if possible, otherwise converted into `room`.
static QLORA__REAL* qlora__rope_get(const qlora__cpu_rows* rows, const qlora_tensor* x, int64_t row,
                                    int64_t col, int64_t step, int64_t n, QLORA__REAL* room) {
    if (step == 1) {
        (void)qlora__row_in(rows, x, row, col, n, room);
        return qlora__row_target(x, row, col, room);
    }
    for (int64_t i = 0; i < n; i++) {
        room[i] = qlora__at(x, row, col + step * i);
    }
    return room;
}

static void qlora__rope_put(const qlora__cpu_rows* rows, const qlora_tensor* x, int64_t row,
                            int64_t col, int64_t step, int64_t n, const QLORA__REAL* from) {
    if (step == 1) {
        qlora__row_done(rows, x, row, col, n, from);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        qlora__put(x, row, col + step * i, from[i]);
    }
}

// Rotates pairs [i, i + n) of one head, whose first column is `first`. With neighbours, the two
// elements of a pair are next to each other.
static void qlora__rope_pairs(const qlora__cpu_rows* rows, const qlora__rope_job* job, int64_t row,
                              int64_t first, int64_t i, int64_t n, bool turn) {
    QLORA__REAL room[2][QLORA__ROPE_CHUNK];
    QLORA__REAL other[2][QLORA__ROPE_CHUNK];
    int64_t half = job->table->cols / 2;
    int64_t step = job->neighbours ? 2 : 1;
    int64_t u = first + step * i;
    int64_t v = u + (job->neighbours ? 1 : half);
    QLORA__REAL* a = qlora__rope_get(rows, job->x, row, u, step, n, room[0]);
    QLORA__REAL* b = qlora__rope_get(rows, job->x, row, v, step, n, room[1]);
    if (job->bias != NULL) {
        const QLORA__REAL* a_bias = qlora__rope_get(rows, job->bias, 0, u, step, n, other[0]);
        const QLORA__REAL* b_bias = qlora__rope_get(rows, job->bias, 0, v, step, n, other[1]);
        rows->point[QLORA__POINT_ADD](a, a_bias, 0, n, a);
        rows->point[QLORA__POINT_ADD](b, b_bias, 0, n, b);
    }
    const QLORA__REAL* cosine = other[0];
    const QLORA__REAL* sine = other[1];
    if (turn) {
        int64_t position = qlora__index_at(job->positions, row);
        cosine = qlora__row_in(rows, job->table, position, i, n, other[0]);
        sine = qlora__row_in(rows, job->table, position, half + i, n, other[1]);
    } else {
        rows->point[QLORA__POINT_FILL](NULL, NULL, 1, n, other[0]);
        rows->point[QLORA__POINT_FILL](NULL, NULL, 0, n, other[1]);
    }
    rows->rope(a, b, cosine, sine, (QLORA__REAL)job->sign, n);
    qlora__rope_put(rows, job->x, row, u, step, n, a);
    qlora__rope_put(rows, job->x, row, v, step, n, b);
}

static void qlora__rope_rows(void* user, int64_t begin, int64_t end) {
    const qlora__rope_job* job = (const qlora__rope_job*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(job->x->owner);
    int64_t half = job->table->cols / 2;
    int64_t heads = job->bias != NULL ? job->x->cols / job->head_dim : job->rotated;
    for (int64_t row = begin; row < end; row++) {
        for (int64_t head = 0; head < heads; head++) {
            int64_t first = head * job->head_dim;
            for (int64_t i = 0; i < half; i += QLORA__ROPE_CHUNK) {
                int64_t n = qlora__min(QLORA__ROPE_CHUNK, half - i);
                qlora__rope_pairs(rows, job, row, first, i, n, head < job->rotated);
            }
            for (int64_t i = 2 * half; i < job->head_dim && job->bias != NULL; i++) {
                int64_t at = first + i;
                qlora__put(job->x, row, at,
                           qlora__at(job->x, row, at) + qlora__at(job->bias, 0, at));
            }
        }
    }
}

static qlora_result qlora__rope_check(qlora_ctx* ctx, const qlora__rope_job* job) {
    const qlora_tensor* x = job->x;
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_F32_BF16, -1, -1));
    QLORA__TRY(qlora__need_vector(ctx, job->positions, "positions", QLORA__IS_I32, x->rows));
    QLORA__TRY(qlora__need(ctx, job->table, "table", QLORA__IS_F32, -1, -1));
    QLORA__TRY(qlora__need_flag(ctx, job->flag));
    QLORA__TRY(qlora__need_apart(ctx, "x", x, "table", job->table));
    QLORA__TRY(qlora__need_apart(ctx, "x", x, "positions", job->positions));
    if (job->bias != NULL) {
        QLORA__TRY(qlora__need_vector(ctx, job->bias, "bias", QLORA__IS_F32_BF16, x->cols));
        QLORA__TRY(qlora__need_apart(ctx, "x", x, "bias", job->bias));
    }
    int64_t dims = job->table->cols;
    QLORA__TRY(qlora__need_whole(ctx, "table.cols", dims, 2, INT32_MAX));
    QLORA__TRY(qlora__need_whole(ctx, "head_dim", job->head_dim, dims, INT32_MAX));
    QLORA__TRY(qlora__need_whole(ctx, "table.rows", job->table->rows, 0, INT32_MAX));
    QLORA__TRY(qlora__need_whole(ctx, "x.cols", x->cols, 0, INT32_MAX));
    if (dims % 2 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "table.cols is %lld; it must be even",
                           (long long)dims);
    }
    if (x->cols % job->head_dim != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "x.cols is %lld; it must be a multiple of the head size, %lld",
                           (long long)x->cols, (long long)job->head_dim);
    }
    QLORA__TRY(qlora__need_whole(ctx, "rotated", job->rotated, 0, x->cols / job->head_dim));
    for (int64_t row = 0; qlora__on_cpu(ctx) && row < x->rows; row++) {
        int32_t position = qlora__index_at(job->positions, row);
        if (position < 0 || position >= job->table->rows) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "positions[%lld] is %d; the table has %lld rows", (long long)row,
                               (int)position, (long long)job->table->rows);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__rope(qlora_ctx* ctx, qlora__rope_job* job) {
    QLORA__TRY(qlora__rope_check(ctx, job));
    const qlora_tensor* x = job->x;
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->rows, 1 + 4096 / (1 + x->cols), qlora__rope_rows, job);
        return QLORA_OK;
    }
    int32_t half = (int32_t)(job->table->cols / 2);
    int32_t rotated = (int32_t)job->rotated;
    int32_t dim = (int32_t)job->head_dim;
    int32_t neighbours = job->neighbours ? 1 : 0;
    int32_t heads = job->bias != NULL ? (int32_t)(x->cols / job->head_dim) : rotated;
    int32_t max_pos = (int32_t)job->table->rows;
    void* bias = job->bias != NULL ? job->bias->data : NULL;
    int32_t bias_bf16 = job->bias != NULL && job->bias->dtype == QLORA_BF16;
    void* flag = NULL;
    QLORA__TRY(qlora__flag_pointer(ctx, job->flag, &flag));
    // Each thread rotates one piece of two heads.
    int64_t items = qlora__ceil_div(heads, 2) * qlora__ceil_div(half, qlora__piece(x->dtype));
    uint32_t threads = (uint32_t)qlora__max(32, qlora__min(256, qlora__ceil_div(items, 32) * 32));
    void* args[] = {(void*)&x->data,
                    (void*)&x->ld,
                    (void*)&job->positions->data,
                    (void*)&job->table->data,
                    (void*)&job->table->ld,
                    &max_pos,
                    &bias,
                    &bias_bf16,
                    &heads,
                    &rotated,
                    &half,
                    &job->sign,
                    &flag,
                    &dim,
                    &neighbours};
    return qlora__launch(ctx, x->dtype == QLORA_F32 ? QLORA__K_rope_f32 : QLORA__K_rope_bf16,
                         items > 0 ? x->rows : 0, 1, 1, threads, 0, args);
}

// Pairs, and other columns, of a row that the kernel below takes.
#define QLORA__ROPE_CODED 4096

// Rotates the first heads of x back, half of whose columns are as many as the table's cosines, and
// writes the codes and scales of x for the products of f. On a GPU, in bf16.
static QLORA__UNUSED qlora_result qlora__rope_coded(qlora_ctx* ctx, const qlora_tensor* x,
                                                    int64_t heads, const qlora_tensor* positions,
                                                    const qlora_tensor* table,
                                                    const qlora_tensor* flag,
                                                    const qlora__fp8* f) {
    qlora_tensor to = *x; // parameters are passed by address
    qlora__fp8 codes = *f;
    int64_t pitch = qlora__fp8_pitch(x->cols);
    int32_t half = (int32_t)(table->cols / 2);
    int32_t rotated = (int32_t)(heads * table->cols);
    int32_t cols = (int32_t)x->cols;
    int32_t max_pos = (int32_t)table->rows;
    int64_t most = qlora__max(rotated / 2, pitch - rotated);
    uint32_t threads = (uint32_t)(qlora__ceil_div(most, 32 * 8) * 32);
    void* bad = NULL;
    QLORA_ASSERT(x->dtype == QLORA_BF16 && (uintptr_t)x->data % 16 == 0 && x->ld % 8 == 0 &&
                 (uintptr_t)table->data % 16 == 0 && table->ld % 4 == 0 && cols % 8 == 0 &&
                 half % 8 == 0 && rotated <= cols && most <= QLORA__ROPE_CODED);
    QLORA__TRY(qlora__flag_pointer(ctx, flag, &bad));
    void* args[] = {&to.data, &to.ld,   (void*)&positions->data, (void*)&table->data,
                    (void*)&table->ld,  &max_pos, &rotated, &cols, &half, &bad,
                    &codes.factors.data, &codes.codes.data, &pitch, &codes.scales.data};
    return qlora__launch(ctx, QLORA__K_fp8_rope, x->rows, 1, 1, threads, 0, args);
}

static qlora_result qlora__rope_apply(qlora_ctx* ctx, const qlora_rotation_desc* desc,
                                      const qlora_tensor* x, const qlora_tensor* positions,
                                      const qlora_tensor* table, const qlora_tensor* bias,
                                      const qlora_tensor* flag) {
    if (desc == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc is NULL");
    }
    if (desc->backward && bias != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "bias must be NULL in the backward pass");
    }
    qlora__rope_job job;
    job.x = x;
    job.positions = positions;
    job.table = table;
    job.bias = bias;
    job.flag = flag;
    job.rotated = desc->heads;
    job.head_dim = desc->head_dim;
    job.neighbours = desc->neighbours;
    job.sign = desc->backward ? -1.0f : 1.0f;
    return qlora__rope(ctx, &job);
}

qlora_result qlora_rope_apply(qlora_ctx* ctx, const qlora_rotation_desc* desc,
                              const qlora_tensor* x, const qlora_tensor* positions,
                              const qlora_tensor* table, const qlora_tensor* bias,
                              const qlora_tensor* flag) {
    QLORA__ENTER(ctx, "qlora_rope_apply");
    return qlora__leave(ctx, qlora__rope_apply(ctx, desc, x, positions, table, bias, flag));
}

// The usual form: heads as wide as the table, pairs half a head apart.
static qlora_rotation_desc qlora__rope_usual(const qlora_tensor* table, int64_t rotated,
                                             bool backward) {
    qlora_rotation_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.head_dim = table != NULL ? table->cols : 0;
    desc.heads = rotated;
    desc.backward = backward;
    return desc;
}

qlora_result qlora_rope_forward(qlora_ctx* ctx, const qlora_tensor* x, int64_t rotated,
                                const qlora_tensor* positions, const qlora_tensor* table,
                                const qlora_tensor* bias, const qlora_tensor* flag) {
    QLORA__ENTER(ctx, "qlora_rope_forward");
    qlora_rotation_desc desc = qlora__rope_usual(table, rotated, false);
    return qlora__leave(ctx, qlora__rope_apply(ctx, &desc, x, positions, table, bias, flag));
}

qlora_result qlora_rope_backward(qlora_ctx* ctx, const qlora_tensor* dx, int64_t rotated,
                                 const qlora_tensor* positions, const qlora_tensor* table,
                                 const qlora_tensor* flag) {
    QLORA__ENTER(ctx, "qlora_rope_backward");
    qlora_rotation_desc desc = qlora__rope_usual(table, rotated, true);
    return qlora__leave(ctx, qlora__rope_apply(ctx, &desc, dx, positions, table, NULL, flag));
}
