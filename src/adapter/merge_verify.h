// ---- what was merged, read back -----------------------------------------------------------------
//
// A random token x goes through every matrix W' of the merged model, of every expert, and through
// the base W and the adapter: W' x = W x + s B (A x), but for the rounding of W'.

typedef struct qlora__verify {
    qlora__merge* g;
    qlora__folder folder; // what was written
    double unit;          // rounding error of a value, as a share of it or of the largest of a row
    bool blocks;          // of the largest
    float* row;
    double* z;
    size_t room;
} qlora__verify;

// Element `i` of the token, from -1 to 1.
static double qlora__verify_token(int64_t i) {
    uint32_t x = (uint32_t)i * 2246822519u + 99991u;
    x = (x ^ (x >> 15)) * 2654435761u;
    x ^= x >> 14;
    return (double)(x % 20001u) / 10000.0 - 1.0;
}

// Of one row: what W' x and the base with the adapter differ by, squared, and what rounding can
// make of it.
static void qlora__verify_row(const qlora__verify* v, const float* base, int64_t cols,
                              double adapter, double* difference, double* noise) {
    double theirs = 0.0;
    double mine = adapter;
    double most = 0.0;
    double sum = 0.0;
    for (int64_t i = 0; i < cols; i++) {
        double x = qlora__verify_token(i);
        theirs += (double)v->row[i] * x;
        mine += (double)base[i] * x;
        most = fabs((double)v->row[i]) > most ? fabs((double)v->row[i]) : most;
        sum += v->blocks ? x * x : (double)v->row[i] * (double)v->row[i] * x * x;
    }
    *difference += (theirs - mine) * (theirs - mine);
    *noise += sum * v->unit * v->unit * (v->blocks ? most * most : 1.0);
}

// One projection with an adapter. `item` has it alone.
static qlora_result qlora__verify_item(qlora__verify* v, const qlora__merge_item* item, int64_t l,
                                       int i) {
    qlora__merge* g = v->g;
    const qlora__projection* p = item->projection;
    qlora__projection bare = *p; // without the adapter
    qlora__merge_item base = *item;
    qlora__merge_module module;
    qlora__merge_module none;
    qlora__weight_source found;
    double difference = 0.0;
    double noise = 0.0;
    bare.rank = 0;
    base.projection = &bare;
    memset(&module, 0, sizeof module);
    memset(&none, 0, sizeof none);
    qlora_result r = qlora__projection_source(g->ctx, &v->folder, g->m, l, i, &found);
    r = r == QLORA_OK ? qlora__merge_module_open(g->ctx, g->m, item, &module) : r;
    r = r == QLORA_OK ? qlora__merge_module_open(g->ctx, g->m, &base, &none) : r;
    for (int64_t j = 0; j < p->rank && r == QLORA_OK; j++) {
        v->z[j] = 0.0;
        for (int64_t k = 0; k < p->in; k++) {
            v->z[j] += (double)module.a[j * p->in + k] * qlora__verify_token(k);
        }
    }
    int64_t most = (int64_t)g->elements / p->in;
    for (int64_t row = 0; row < p->out && r == QLORA_OK; row++) {
        double adapter = 0.0;
        if (row % most == 0) {
            r = qlora__merge_rows_make(g, &base, &none, row, qlora__min(most, p->out - row));
        }
        for (int64_t j = 0; j < p->rank; j++) {
            adapter += (double)module.b[row * p->rank + j] * v->z[j] * (double)p->scale;
        }
        qlora__st_read_f32(found.linear.weight, (uint64_t)(row * p->in), (uint64_t)p->in, v->row);
        qlora__verify_row(v, g->values + row % most * p->in, p->in, adapter, &difference, &noise);
    }
    qlora__merge_module_close(g->ctx, &module);
    qlora__merge_module_close(g->ctx, &none);
    if (r == QLORA_OK && !(difference <= 4.0 * noise + 1e-12)) {
        char name[200];
        qlora__base_module(g->m, l, i, name, sizeof name);
        r = qlora__fail(g->ctx, QLORA_ERR_FILE,
                        "%s: %s does not give what the base and the adapter give: a random token "
                        "differs by %.3g, where rounding makes %.3g; do not use this model",
                        g->dir, name, sqrt(difference), sqrt(noise));
    }
    return r;
}

// The place of a projection in the model.
static void qlora__verify_place(const qlora_model* m, const qlora__projection* p, int64_t* layer,
                                int* number) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            if (&m->layers[l].projections[i] == p) {
                *layer = l;
                *number = i;
            }
        }
    }
}

static qlora_result qlora__verify_items(qlora__verify* v) {
    qlora__merge* g = v->g;
    for (uint32_t n = 0; n < g->count; n++) {
        const qlora__merge_item* item = &g->items[n];
        bool stack = item->layer >= 0;
        int64_t count = stack ? g->m->plan.config.experts * item->parts : 1;
        for (int64_t k = 0; k < count; k++) {
            qlora__merge_slice slice;
            qlora__merge_item one = *item;
            int64_t l = 0;
            int i = 0;
            if (stack) {
                qlora__merge_stack_one(g, item, k, &slice, &one);
            }
            if (one.projection == NULL || one.projection->rank == 0) {
                continue;
            }
            qlora__verify_place(g->m, one.projection, &l, &i);
            QLORA__TRY(qlora__verify_item(v, &one, l, i));
        }
    }
    return QLORA_OK;
}

// What a value is rounded by, in the type that was written.
static void qlora__verify_unit(qlora__verify* v, const qlora_merge_desc* d) {
    v->blocks = d->gguf != QLORA_GGUF_AS_DTYPE;
    v->unit = d->gguf == QLORA_GGUF_Q8_0   ? 1.0 / 254.0
              : d->gguf == QLORA_GGUF_Q4_0 ? 1.0 / 8.0
              : d->dtype == QLORA_BF16     ? 1.0 / 512.0
              : d->dtype == QLORA_F16      ? 1.0 / 4096.0
                                           : 1.0 / 4194304.0;
}

// The file may name what it has in another way: that of its architecture.
static qlora_result qlora__verify_same_names(qlora__merge* g) {
    qlora_model_config* file =
        (qlora_model_config*)qlora__alloc(g->ctx, sizeof(qlora_model_config));
    if (file == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__config_read(&g->ctx->env, g->dir, file);
    if (r == QLORA_OK && qlora__arch_of(file->family)->layout != g->m->arch->layout) {
        r = qlora__fail(g->ctx, QLORA_ERR_UNSUPPORTED,
                        "%s: what was written is read as another family (%s), whose matrices are "
                        "divided in another way; verify a folder instead",
                        g->dir, qlora__arch_of(file->family)->model_type);
    }
    qlora__free(g->ctx, file, sizeof *file);
    return r;
}

static qlora_result qlora__merge_verify(qlora__merge* g, const qlora_merge_desc* d) {
    qlora__verify v;
    memset(&v, 0, sizeof v);
    if (g->m->dora) {
        return qlora__fail(g->ctx, QLORA_ERR_UNSUPPORTED,
                           "what DoRA merges cannot be verified; leave desc.verify out");
    }
    QLORA__TRY(qlora__verify_same_names(g));
    v.g = g;
    qlora__verify_unit(&v, d);
    v.room = (size_t)g->most_cols;
    QLORA__TRY(qlora__folder_open(&g->ctx->env, g->dir, &v.folder));
    v.row = (float*)qlora__alloc(g->ctx, v.room * sizeof *v.row);
    v.z = v.row != NULL ? (double*)qlora__alloc(g->ctx, 65536 * sizeof *v.z) : NULL;
    qlora_result r = v.z != NULL ? qlora__verify_items(&v) : QLORA_ERR_MEMORY;
    qlora__free(g->ctx, v.row, v.room * sizeof *v.row);
    qlora__free(g->ctx, v.z, 65536 * sizeof *v.z);
    qlora__folder_close(&g->ctx->env, &v.folder);
    return r;
}
