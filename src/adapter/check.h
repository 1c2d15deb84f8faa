// ---- what was saved of experts ------------------------------------------------------------------
//
// The matrices of experts have another order in PEFT's files than in memory, and a mistake there
// would make another adapter under the same names and shapes. So every file with them is read back
// before it replaces an older one: a token goes through the adapter of every expert, once as PEFT
// multiplies and once as the model does, and must give the same.

typedef struct qlora__check {
    const qlora_model* m;
    const qlora__st* file;
    float* a;    // as in memory
    float* b;    // the same
    float* row;  // of a tensor of the file
    double* z;   // A x of the file, [experts, rank]
    double* own; // A x of one matrix of the model
    size_t floats;
    size_t doubles;
} qlora__check;

// Element `i` of a token, from -1 to 1.
static double qlora__check_token(int64_t i) {
    uint32_t x = (uint32_t)i * 2654435761u + 12345u;
    x = (x ^ (x >> 16)) * 2246822519u;
    x ^= x >> 13;
    return (double)(x % 20001u) / 10000.0 - 1.0;
}

static qlora_result qlora__check_wrong(qlora_ctx* ctx, const qlora__trained* t, const char* what) {
    return qlora__fail(ctx, QLORA_ERR_FILE,
                       "%s was written and read back, but %s; nothing was replaced. The disk or "
                       "the memory may be faulty: save again, to another disk",
                       t->name, what);
}

// Finds what was written for a trained tensor.
static qlora_result qlora__check_find(qlora_ctx* ctx, const qlora__check* c,
                                      const qlora__trained* t, const qlora__st_tensor** out) {
    char name[224];
    snprintf(name, sizeof name, "base_model.model.%.190s", t->name);
    *out = qlora__st_find(c->file, name);
    bool good = *out != NULL && (*out)->rank == 2 && (*out)->shape[0] == t->rows &&
                (*out)->shape[1] == t->cols && (*out)->dtype == QLORA__ST_F32;
    return good ? QLORA_OK : qlora__check_wrong(ctx, t, "has another shape");
}

// Row `row` of B of all experts, from the file, against the projection of the model that it belongs
// to: number `i` for the first expert, of which it is row `own`.
static bool qlora__check_row(const qlora__check* c, const qlora__layer* layer,
                             const qlora__trained* b, int i, int64_t own) {
    int64_t experts = c->m->plan.config.experts;
    int64_t rank = b->cols / experts;
    bool same = true;
    for (int64_t e = 0; e < experts && same; e++) {
        const qlora__projection* p =
            &layer->projections[i + (int)e * layer->layout->experts->count];
        const float* ours = c->b + (p->b_at - b->at) + own * rank;
        double theirs = 0.0;
        double mine = 0.0;
        for (int64_t j = 0; j < rank; j++) {
            theirs += (double)c->row[j * experts + e] * c->z[e * rank + j];
            mine += (double)ours[j] * c->own[e * rank + j];
        }
        // values that are not finite are as they were
        same = fabs(theirs - mine) <= 1e-9 * fabs(mine) || !(fabs(mine) < 1e300);
    }
    return same;
}

// One unit of a layer, whose first projection is number `i`.
static qlora_result qlora__check_unit(qlora_ctx* ctx, const qlora__check* c, int64_t l, int i) {
    const qlora__layer* layer = &c->m->layers[l];
    int64_t experts = c->m->plan.config.experts;
    qlora__trained t[2];
    const qlora__st_tensor* file[2];
    for (int k = 0; k < 2; k++) {
        qlora_tensor window;
        memset(&t[k], 0, sizeof t[k]);
        qlora__trained_part(c->m, l, i, k, &t[k]);
        QLORA__TRY(qlora__check_find(ctx, c, &t[k], &file[k]));
        qlora__arena_window(&c->m->parameters, t[k].at, t[k].rows, t[k].cols, &window);
        QLORA__TRY(
            qlora__floats_out(ctx, window.data, t[k].rows * t[k].cols, k == 0 ? c->a : c->b));
    }
    int64_t rank = t[0].rows / experts;
    for (int64_t j = 0; j < experts * rank; j++) {
        const qlora__projection* p =
            &layer->projections[i + (int)(j / rank) * layer->layout->experts->count];
        const float* ours = c->a + (p->a_at - t[0].at) + j % rank * p->in;
        qlora__st_read_f32(file[0], (uint64_t)(j * p->in), (uint64_t)p->in, c->row);
        c->z[j] = 0.0;
        c->own[j] = 0.0;
        for (int64_t k = 0; k < p->in; k++) {
            c->z[j] += (double)c->row[k] * qlora__check_token(k);
            c->own[j] += (double)ours[k] * qlora__check_token(k);
        }
    }
    for (int64_t row = 0; row < t[1].rows; row++) {
        int64_t out = layer->projections[i].out;
        qlora__st_read_f32(file[1], (uint64_t)(row * t[1].cols), (uint64_t)t[1].cols, c->row);
        if (!qlora__check_row(c, layer, &t[1], i + (int)(row / out), row % out)) {
            return qlora__check_wrong(ctx, &t[1], "gives other products than the adapter");
        }
    }
    return QLORA_OK;
}

static void qlora__check_close(qlora_ctx* ctx, qlora__check* c) {
    qlora__free(ctx, c->a, 3 * c->floats * sizeof *c->a);
    qlora__free(ctx, c->z, 2 * c->doubles * sizeof *c->z);
}

// Checks a file with matrices that is complete, under the name `path`.
static qlora_result qlora__check_experts(qlora_ctx* ctx, const qlora_model* m, const char* path) {
    qlora__check c;
    qlora__st st;
    if (m->plan.config.experts == 0) {
        return QLORA_OK;
    }
    memset(&c, 0, sizeof c);
    c.m = m;
    c.file = &st;
    c.floats = (size_t)m->longest_range;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            int64_t rank = m->layers[l].projections[i].rank * m->plan.config.experts;
            c.doubles = (size_t)rank > c.doubles ? (size_t)rank : c.doubles;
        }
    }
    if (c.doubles == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__st_open(&ctx->env, path, &st));
    c.a = (float*)qlora__alloc(ctx, 3 * c.floats * sizeof *c.a);
    c.z = c.a != NULL ? (double*)qlora__alloc(ctx, 2 * c.doubles * sizeof *c.z) : NULL;
    qlora_result r = c.z != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    c.b = c.a + c.floats;
    c.row = c.b + c.floats;
    c.own = c.z + c.doubles;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        const qlora__layer* layer = &m->layers[l];
        for (int u = 0; u < qlora__unit_count(layer) && r == QLORA_OK; u++) {
            int i = qlora__unit_at(layer, u);
            bool stack = qlora__is_stack(layer, i) != 0 && layer->projections[i].rank > 0;
            r = stack ? qlora__check_unit(ctx, &c, l, i) : r;
        }
    }
    qlora__check_close(ctx, &c);
    qlora__st_close(&ctx->env, &st);
    return r;
}
