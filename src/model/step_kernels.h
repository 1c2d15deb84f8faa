// ---- kernels of a decoding step -----------------------------------------------------------------

// What each kernel of a step (model/step.h) is given, and how it is chosen and launched.

#ifndef QLORA_NO_CUDA

// Same layout as decode_part in kernels/decode/decode.cuh.
typedef struct qlora__decode_part {
    const void* w;
    const float* absmax;
    const uint8_t* q;
    const float* scales;
    const float* offset;
    const void* sb;
    const void* bias;
    int64_t ld;
    int32_t first;
    int32_t N;
    int32_t rank;
    int32_t z_at;
    int32_t y_at;
    int32_t block_shift;
    int32_t group_shift;
    int32_t unused;
} qlora__decode_part;

// Same layout as decode_product.
typedef struct qlora__decode_product {
    qlora__decode_part parts[QLORA_LINEAR_PARTS];
    const float* maps;
    const void* x;
    void* y;
    const void* a;
    void* z;
    int64_t ldx;
    int64_t ldy;
    int32_t count;
    int32_t K;
    int32_t rows;
    int32_t y_is_bf16;
    int32_t gated;
    int32_t a_rank;
    float alpha;
    float cap;
    const void* low;
    int32_t slices;
    int32_t unused;
} qlora__decode_product;

// Same layout as decode_many in kernels/decode/decode_many.cuh.
typedef struct qlora__decode_many {
    qlora__decode_product p;
    void* split_sums;
    void* counters;
    int32_t each;
    int32_t apart;
} qlora__decode_many;

// Same layout as decode_norm in kernels/decode/decode_args.cuh.
typedef struct qlora__decode_norm {
    const void* h;
    void* h_out;
    const void* embed;
    const void* texts;
    const void* y;
    const void* sb;
    const void* z;
    const void* after;
    const void* w;
    void* x;
    const void* a[QLORA_LINEAR_PARTS];
    int64_t ld_embed;
    int64_t ldx;
    int32_t ranks[QLORA_LINEAR_PARTS];
    int32_t z_rank;
    int32_t hidden;
    int32_t rows;
    float scale;
    float eps;
    int32_t slices;
    int32_t splits;
    int32_t mean;
} qlora__decode_norm;

// Same layout as decode_attention in kernels/decode/decode_args.cuh.
typedef struct qlora__decode_attention {
    const void* qkv;
    const void* bias;
    const void* q_norm;
    const void* k_norm;
    const void* rotary;
    const void* rotary_q;
    void* cache;
    const void* pages;
    const void* texts;
    void* partials;
    void* counters;
    void* o;
    int64_t ld;
    int64_t ld_cache;
    int64_t ldo;
    int32_t heads;
    int32_t kv_heads;
    int32_t dim;
    int32_t half;
    int32_t neighbours;
    int32_t window;
    int32_t chunk;
    int32_t norm_heads;
    float scale;
    float cap;
    float eps;
    int32_t a_rank;
    const void* a;
    void* z;
} qlora__decode_attention;

// Same layout as decode_many_attention in kernels/decode/decode_many_attention.cu.
typedef struct qlora__decode_many_attention {
    qlora__decode_attention p;
    int32_t each;
    int32_t all_pages;
    int32_t rows;
    int32_t splits;
    const void* sums;
} qlora__decode_many_attention;

static qlora__launch_kind qlora__decode_way(const qlora_model* m) {
    return (m->decode.variants & QLORA__DECODE_EARLY) != 0 ? QLORA__LAUNCH_EARLY
                                                           : QLORA__LAUNCH_PLAIN;
}

// Launches a kernel of a step. The first one of a step waits for everything before it: what the
// others read before they wait was written before that.
static qlora_result qlora__decode_launch(const qlora_model* m, qlora__kernel_id id, int64_t grid_x,
                                         int64_t grid_y, int64_t grid_z, uint32_t threads,
                                         uint32_t shared, void** args) {
    qlora__launch_size size = {grid_x, grid_y, grid_z, threads, shared};
    return qlora__launch_as(m->ctx, id, qlora__decode_way(m), size, args);
}

// Tiles of 16 rows that a product has; gate and up count once.
static int64_t qlora__decode_units(const qlora__decode_product* p) {
    int64_t units = 0;
    for (int i = 0; i < (p->gated != 0 ? 1 : p->count); i++) {
        units += qlora__ceil_div(p->parts[i].N, 16);
    }
    return units;
}

// The kinds of product: what a warp multiplies at a time, its tables in shared memory, and how many
// blocks of a multiprocessor these leave room for.
typedef struct qlora__decode_kind {
    qlora__kernel_id kernel;
    int64_t step;
    uint32_t shared;
    int64_t together;
} qlora__decode_kind;

static const qlora__decode_kind qlora__decode_kinds[3] = {
    {QLORA__K_decode_dense, 128, 0, 4},
    {QLORA__K_decode_nf4, 256, 256 * 32 * 4 + 256 * 4, 4},
    {QLORA__K_decode_row_nf4, 256, 256 * 32 * 4 + 256 * 4, 1},
};

// How a product of one row is launched.
typedef struct qlora__decode_one_form {
    int64_t warps;
    int64_t blocks;
    int64_t shared;
} qlora__decode_one_form;

// The shared memory of a block with `units` tiles: table, map, rings, x, z, the sums of warps that
// share a tile, and what z of the next stack needs.
static int64_t qlora__decode_one_shared(const qlora__decode_product* p, int64_t warps,
                                        int64_t units) {
    const qlora__decode_kind* kind = &qlora__decode_kinds[2];
    int64_t z = p->low != NULL ? p->parts[0].rank : 0;
    for (int i = 0; i < p->count && p->low == NULL; i++) {
        int64_t end = p->parts[i].sb != NULL ? p->parts[i].z_at + p->parts[i].rank - p->K : 0;
        z = qlora__max(z, end);
    }
    int64_t pieces = qlora__ceil_div(p->K, kind->step);
    int64_t tiles = units * (p->gated != 0 ? 2 : 1);
    int64_t each = qlora__ceil_div(tiles * pieces, warps);
    int64_t slots = (pieces - 1 + each - 1) / each + 1; // as in kernels/decode/decode_row.cuh
    int64_t low = p->a != NULL ? units * (p->a_rank * 32 + 64) : 0;
    return (int64_t)kind->shared + warps * 2 * 2048 + pieces * kind->step * 2 + (z + 3) / 4 * 16 +
           tiles * slots * 64 + low;
}

// A block on every multiprocessor, more only if the sums of its tiles would not fit. 16 warps, or 8
// on devices with little shared memory. False if one row is too long.
static bool qlora__decode_one_find(const qlora_model* m, const qlora__decode_product* p,
                                   qlora__decode_one_form* f) {
    const qlora__gpu* gpu = m->ctx->gpu;
    int64_t units = qlora__decode_units(p);
    for (f->warps = 16; f->warps >= 8; f->warps /= 2) {
        int64_t most = qlora__ceil_div(units, gpu->sm_count);
        while (most > 1 && qlora__decode_one_shared(p, f->warps, most) > gpu->max_shared) {
            most--;
        }
        f->blocks = qlora__min(units, qlora__max(gpu->sm_count, qlora__ceil_div(units, most)));
        // More than half of what a multiprocessor has: its blocks are to be spread evenly.
        f->shared = gpu->max_shared / 2;
        for (int64_t i = units / f->blocks; i <= qlora__ceil_div(units, f->blocks); i++) {
            f->shared = qlora__max(f->shared, qlora__decode_one_shared(p, f->warps, i));
        }
        if (f->shared <= gpu->max_shared) {
            return f->blocks <= QLORA__DECODE_LOW;
        }
    }
    return false;
}

static qlora_result qlora__decode_one(const qlora_model* m, qlora__decode_product* p) {
    qlora__decode_one_form f;
    if (!qlora__decode_one_find(m, p, &f)) {
        return qlora__fail(m->ctx, QLORA_ERR_STATE, "a product of %d columns has no kernel",
                           (int)p->K);
    }
    void* args[] = {p};
    return qlora__decode_launch(m, qlora__decode_kinds[2].kernel, f.blocks, 1, 1,
                                (uint32_t)f.warps * 32, (uint32_t)f.shared, args);
}

// Whether the products of a step are those of many rows.
static bool qlora__decode_is_many(const qlora_model* m) {
    return m->decode.texts > QLORA__DECODE_ROWS && (m->decode.variants & QLORA__DECODE_MANY) != 0;
}

// The shared memory of a norm of many rows: x, the row, sums of the warps, and z.
static int64_t qlora__decode_norm_shared(const qlora_model* m, const qlora_linear_desc* next,
                                         int64_t z_rank) {
    int64_t hidden = m->plan.config.hidden;
    int64_t ranks = 0;
    for (int i = 0; next != NULL && i < next->count; i++) {
        ranks += next->parts[i].rank;
    }
    return qlora__ceil_div(hidden, 64) * 128 + hidden * 4 + qlora__ceil_div(ranks, 16) * 2048 +
           z_rank * 4;
}

// Whether the norms of a step are those of many rows; rows that are too long do not fit. Then, z of
// a stack is a product of its own.
static bool qlora__decode_norms_many(const qlora_model* m) {
    bool fits = qlora__decode_is_many(m);
    for (int64_t l = 0; l < m->plan.config.layers && fits; l++) {
        for (int g = 0; g < QLORA__GROUPS; g++) {
            const qlora_linear_desc* next = &m->layers[l].linears[g];
            fits = fits && qlora__decode_norm_shared(m, next, m->decode.z_rank) <= 69632;
        }
    }
    return fits;
}

// Whether attention is that of many rows.
static bool qlora__decode_attends_many(const qlora_model* m) {
    int64_t dim = m->plan.config.head_dim;
    return qlora__decode_is_many(m) && (dim == 64 || dim == 128) &&
           m->ctx->gpu->max_shared >= 98304 + 3072;
}

// Whether the product of gate and up leaves z of down: not without a gate, and not where z of o may
// still be there, as attention and MLP read the same input.
static bool qlora__decode_leaves_z(const qlora_model* m) {
    bool joins = true;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        joins = joins && qlora__ffn_plan_of(&m->layers[l])->joins;
    }
    return joins && !qlora__stands_beside(m);
}

// The partial sums of z of a stack that the kernel before it leaves: o or down.
static int64_t qlora__decode_slices(const qlora_model* m, int group) {
    if (!qlora__decode_is_many(m)) {
        return QLORA__DECODE_SLICES;
    }
    bool leaves = group == QLORA__O ? qlora__decode_attends_many(m) : qlora__decode_leaves_z(m);
    if (!qlora__decode_norms_many(m) || !leaves) {
        return 1; // a product of its own
    }
    return group == QLORA__O ? m->decode.counters.cols
                             : qlora__ceil_div(m->plan.config.intermediate, 128);
}

// Whether the warpgroup instructions can take a product of many rows.
static bool qlora__decode_is_warpgroup(const qlora_model* m, const qlora__decode_product* p) {
    bool fits = (m->decode.variants & QLORA__DECODE_WARPGROUP) != 0 &&
                qlora__has_warpgroups(m->ctx) && p->K % 128 == 0;
    for (int i = 0; i < p->count; i++) {
        const qlora__decode_part* part = &p->parts[i];
        fits = fits && part->block_shift == 6 && (part->absmax != NULL || part->group_shift > 0);
    }
    return fits;
}

// How a product of many rows is divided: tiles of rows, groups of texts, splits of `each` chunks.
typedef struct qlora__decode_cut {
    int64_t tiles;
    int64_t groups;
    int64_t splits;
    int64_t each;
} qlora__decode_cut;

// Columns are split so that there is about one block per multiprocessor.
static qlora__decode_cut qlora__decode_cut_of(const qlora_model* m,
                                              const qlora__decode_product* p) {
    qlora__decode_cut c;
    int64_t chunks = qlora__ceil_div(p->K, 64);
    c.tiles = qlora__ceil_div(qlora__decode_units(p), p->gated != 0 ? 8 : 16);
    c.groups = qlora__ceil_div(p->rows, QLORA__DECODE_MANY_ROWS);
    int64_t splits = qlora__min(m->ctx->gpu->sm_count / (c.tiles * c.groups),
                                QLORA__DECODE_MANY_TILES / c.tiles);
    splits = qlora__min(splits, 32); // joining them takes time, too
    c.each = qlora__ceil_div(chunks, 2 * qlora__max(1, splits)) * 2;
    c.splits = qlora__ceil_div(chunks, c.each);
    return c;
}

// The columns of z that a product of many rows has room for, if z is in partial sums.
static int64_t qlora__decode_low_most(bool warpgroup) {
    return warpgroup ? 128 : 32;
}

// A product of many rows. With `apart`, the sums of the splits are left to the next kernel.
static qlora_result qlora__decode_all(const qlora_model* m, bool nf4, bool apart,
                                      const qlora__decode_product* p) {
    qlora__decode_cut cut = qlora__decode_cut_of(m, p);
    bool warpgroup = nf4 && qlora__decode_is_warpgroup(m, p);
    qlora__decode_many many;
    memset(&many, 0, sizeof many);
    many.p = *p;
    many.split_sums = m->decode.split_sums.data;
    many.counters = m->decode.arrivals.data;
    many.each = (int32_t)cut.each;
    if (apart && cut.splits > 1) {
        many.apart = 1;
        many.p.y = m->decode.split_sums.data;
        many.p.y_is_bf16 = 0;
        many.p.ldy = 0;
        for (int i = 0; i < p->count; i++) {
            many.p.ldy += p->parts[i].N;
        }
    }
    void* args[] = {&many};
    // Room to align the stages of two chunks of x and W, these, table and map; or tables or
    // results, then three stages of x. z follows.
    uint32_t shared = warpgroup ? 1024 + 4 * (64 * 256 + 256 * 64) + 256 * 256 + 256 * 4
                                : 64 * 260 * 4 + 3 * 64 * 144;
    if (p->low != NULL) {
        shared += 64 * 2 * ((uint32_t)qlora__ceil_div(p->parts[0].rank, 16) * 16 + 8);
    }
    return qlora__decode_launch(m,
                                warpgroup ? QLORA__K_decode_many_wg
                                : nf4     ? QLORA__K_decode_many_nf4
                                          : QLORA__K_decode_many_dense,
                                cut.tiles, cut.splits, cut.groups, 512, shared, args);
}

// z of the adapters of a stack, for products of many rows: x A^T, for all parts one after another.
static qlora_result qlora__decode_low(const qlora_model* m, const qlora_linear_desc* l,
                                      const qlora_tensor* x, void* y, int64_t ldy, bool bf16) {
    qlora__decode_product p;
    int64_t rank = 0;
    memset(&p, 0, sizeof p);
    for (int i = 0; m->use_adapters && i < l->count; i++) {
        if (l->parts[i].rank > 0) {
            qlora__decode_part* part = &p.parts[p.count++];
            part->w = l->parts[i].a->data;
            part->ld = l->parts[i].a->ld;
            part->N = (int32_t)l->parts[i].rank;
            part->y_at = (int32_t)rank;
            rank += l->parts[i].rank;
        }
    }
    if (rank == 0) {
        return QLORA_OK;
    }
    p.x = x->data;
    p.ldx = x->ld;
    p.y = y;
    p.ldy = ldy;
    p.y_is_bf16 = bf16 ? 1 : 0;
    p.K = (int32_t)l->in;
    p.rows = (int32_t)m->decode.texts;
    p.alpha = 1.0f;
    return qlora__decode_all(m, false, false, &p);
}

// Whether a product of a single row has a kernel of its own. The whole row must fit in shared
// memory, of which many devices have 99 KB.
static bool qlora__decode_is_one(const qlora_model* m, bool nf4, const qlora__decode_product* p) {
    uint32_t v = m->decode.variants;
    for (int i = 0; i < p->count; i++) {
        nf4 = nf4 && p->parts[i].N % 16 == 0;
    }
    qlora__decode_one_form f;
    return p->rows == 1 && nf4 && (v & QLORA__DECODE_ONE) != 0 && qlora__decode_one_find(m, p, &f);
}

static qlora_result qlora__decode_multiply(const qlora_model* m, bool nf4, bool one,
                                           qlora__decode_product* p) {
    if (qlora__decode_is_many(m)) {
        return qlora__decode_all(m, nf4, false, p);
    }
    if (one) {
        return qlora__decode_one(m, p);
    }
    const qlora__decode_kind* kind = &qlora__decode_kinds[nf4 ? 1 : 0];
    int64_t steps = qlora__ceil_div(p->K, kind->step);
    int64_t warps = qlora__ceil_div(steps, qlora__ceil_div(steps, 8));
    // As many blocks as run at once: registers allow 16 warps, shared memory a few tables. Two
    // blocks per multiprocessor, so that one reads while the other finishes a tile.
    int64_t together = qlora__min(16 / warps, kind->together);
    int64_t groups = qlora__ceil_div(p->rows, QLORA__DECODE_ROWS);
    int64_t most = qlora__max(1, m->ctx->gpu->sm_count * together / groups);
    int64_t blocks = qlora__min(qlora__decode_units(p), most);
    uint32_t shared = kind->shared + (2 * (uint32_t)warps + 1) * 512;
    void* args[] = {p};
    return qlora__decode_launch(m, kind->kernel, groups, blocks, 1, (uint32_t)warps * 32, shared,
                                args);
}

static qlora__decode_part qlora__decode_part_of(const qlora_linear_part* from, int64_t first,
                                                int64_t rows, int64_t rank) {
    qlora__decode_part p;
    memset(&p, 0, sizeof p);
    p.first = (int32_t)first;
    p.N = (int32_t)rows;
    p.rank = (int32_t)rank;
    if (from->nf4 != NULL) {
        p.w = from->nf4->codes;
        p.absmax = from->nf4->absmax;
        p.q = from->nf4->absmax_codes;
        p.scales = from->nf4->absmax_scales;
        p.offset = from->nf4->offset;
        p.block_shift = qlora__log2(from->nf4->block);
        p.group_shift = qlora__log2(from->nf4->block2);
    } else {
        p.w = from->dense->data;
        p.ld = from->dense->ld;
    }
    if (rank > 0) {
        p.sb = (const uint16_t*)from->sb->data + first * rank;
    }
    if (from->bias != NULL) {
        p.bias = (const uint16_t*)from->bias->data + first;
    }
    return p;
}

// Sets the weights of a stack. Gate and up that are one matrix become two parts. With `later`, the
// adapter is left to the next kernel.
static void qlora__decode_stack(const qlora_model* m, const qlora__layer* layer, int group,
                                bool later, qlora__decode_product* p) {
    const qlora_linear_desc* l = &layer->linears[group];
    int64_t wide = m->plan.config.intermediate;
    bool halves =
        group == QLORA__GATE_UP && l->count == 1 && qlora__ffn_plan_of(layer)->joins;
    int64_t z_at = l->in;
    int64_t y_at = 0;
    memset(p, 0, sizeof *p);
    p->count = halves ? 2 : l->count;
    for (int i = 0; i < p->count; i++) {
        const qlora_linear_part* from = &l->parts[halves ? 0 : i];
        int64_t rank = m->use_adapters && !later ? from->rank : 0;
        int64_t rows = halves ? wide : from->out;
        p->parts[i] = qlora__decode_part_of(from, halves ? i * wide : 0, rows, rank);
        p->parts[i].z_at = (int32_t)z_at;
        p->parts[i].y_at = (int32_t)(group == QLORA__GATE_UP ? 0 : y_at);
        y_at += rows;
        z_at += halves ? 0 : rank;
    }
    const qlora_linear_part* first = &l->parts[0];
    p->maps = first->nf4 != NULL ? first->nf4->maps : NULL;
    p->K = (int32_t)l->in;
    p->rows = (int32_t)m->decode.texts;
    p->alpha = 1.0f;
    if (later && m->use_adapters && first->rank > 0 && !qlora__decode_is_many(m)) {
        p->a = first->a->data;
        p->a_rank = (int32_t)first->rank;
        p->z = m->decode.z.data;
    }
}

static bool qlora__decode_is_later(int group) {
    return group == QLORA__O || group == QLORA__DOWN;
}

// How many partial sums of a stack's output are left for the next kernel to add: attention, or the
// norm after o and down. 1 = none.
static int64_t qlora__decode_apart(const qlora_model* m, const qlora__layer* layer, int group) {
    const qlora_model_config* c = &m->plan.config;
    bool whole = c->qk_norm && (m->arch->has & QLORA__HAS_WIDE_QK_NORM) != 0;
    bool adds = group == QLORA__QKV ? qlora__decode_attends_many(m) && !whole
                                    : qlora__decode_is_later(group) && qlora__decode_norms_many(m);
    qlora__decode_product p;
    qlora__decode_stack(m, layer, group, true, &p);
    return adds ? qlora__decode_cut_of(m, &p).splits : 1;
}

// Whether a product of many rows, o or down, adds its adapter from partial sums of z itself.
static bool qlora__decode_lifts(const qlora_model* m, const qlora__layer* layer, int group) {
    const qlora_linear_part* part = &layer->linears[group].parts[0];
    qlora__decode_product p;
    if (!qlora__decode_is_many(m) || !qlora__decode_is_later(group)) {
        return false;
    }
    qlora__decode_stack(m, layer, group, true, &p);
    bool warpgroup = part->nf4 != NULL && qlora__decode_is_warpgroup(m, &p);
    return part->rank <= qlora__decode_low_most(warpgroup);
}

// Whether the stacks of a layer, all of them, are multiplied by the kernel for a single row. The
// adapters of o and down then need no other kernel.
static bool qlora__decode_row_fits(const qlora_model* m, const qlora__layer* layer) {
    bool fits = m->decode.texts == 1 && m->decode.counters.cols <= QLORA__DECODE_LOW &&
                qlora__decode_leaves_z(m);
    for (int g = 0; g < QLORA__GROUPS && fits; g++) {
        qlora__decode_product p;
        qlora__decode_stack(m, layer, g, false, &p);
        if (g == QLORA__GATE_UP) { // which also leaves z of down
            p.gated = 1;
            p.a = m->decode.z.data;
            p.a_rank = (int32_t)m->decode.z_rank;
        }
        fits = qlora__decode_is_one(m, layer->linears[g].parts[0].nf4 != NULL, &p);
    }
    return fits;
}

// Gate and up of one row leave z of down.
static void qlora__decode_row_leave(const qlora_model* m, const qlora__layer* layer,
                                    qlora__decode_product* p) {
    const qlora_linear_part* down = &layer->linears[QLORA__DOWN].parts[0];
    if (m->use_adapters && down->rank > 0) {
        p->a = down->a->data;
        p->a_rank = (int32_t)down->rank;
        p->z = m->decode.z.data;
    }
}

// The adapters of o and down in products of one row: z of down is left by gate and up, that of o by
// attention.
static void qlora__decode_row_low(const qlora_model* m, const qlora__layer* layer, int group,
                                  qlora__decode_product* p) {
    if (group == QLORA__GATE_UP) {
        qlora__decode_row_leave(m, layer, p);
    } else if (m->use_adapters && qlora__decode_is_later(group) && p->parts[0].rank > 0) {
        p->low = m->decode.z.data;
        p->slices = (int32_t)m->decode.counters.cols;
        if (group == QLORA__DOWN) {
            qlora__decode_product before;
            qlora__decode_stack(m, layer, QLORA__GATE_UP, false, &before);
            before.gated = 1;
            qlora__decode_row_leave(m, layer, &before);
            qlora__decode_one_form f;
            p->slices = qlora__decode_one_find(m, &before, &f) ? (int32_t)f.blocks : 0;
        }
    }
}

static qlora_result qlora__decode_product_run(const qlora_model* m, const qlora__layer* layer,
                                              int group, const qlora_tensor* x,
                                              const qlora_tensor* y) {
    qlora__decode_product p;
    bool row = qlora__decode_row_fits(m, layer);
    bool lifts = qlora__decode_lifts(m, layer, group);
    bool later = qlora__decode_is_later(group) && !row;
    qlora__decode_stack(m, layer, group, later && !lifts, &p);
    if (lifts && p.parts[0].rank > 0) {
        p.low = m->decode.z.data;
        p.slices = (int32_t)qlora__decode_slices(m, group);
    }
    const qlora_linear_part* down = &layer->linears[QLORA__DOWN].parts[0];
    if (group == QLORA__GATE_UP && m->use_adapters && down->rank > 0 && qlora__decode_is_many(m) &&
        qlora__decode_slices(m, QLORA__DOWN) > 1) {
        p.a = down->a->data;
        p.a_rank = (int32_t)down->rank;
        p.z = m->decode.z.data;
    }
    if (later && qlora__decode_is_many(m) && qlora__decode_slices(m, group) == 1) {
        QLORA__TRY(qlora__decode_low(m, &layer->linears[group], x, m->decode.z.data,
                                     layer->linears[group].parts[0].rank, false));
    }
    p.x = x->data;
    p.ldx = x->ld;
    p.y = y->data;
    p.ldy = y->ld;
    p.y_is_bf16 = y->dtype == QLORA_BF16 ? 1 : 0;
    if (group == QLORA__GATE_UP && qlora__ffn_plan_of(layer)->joins) {
        p.gated = (m->arch->has & QLORA__HAS_GELU) != 0 ? 2 : 1;
    }
    if (row) {
        qlora__decode_row_low(m, layer, group, &p);
    }
    bool nf4 = layer->linears[group].parts[0].nf4 != NULL;
    if (qlora__decode_is_many(m)) {
        return qlora__decode_all(m, nf4, qlora__decode_apart(m, layer, group) > 1, &p);
    }
    return qlora__decode_multiply(m, nf4, row, &p);
}

// The shared memory of a block of attention: keys and values of a tile, as in
// kernels/decode/decode_attention.cuh.
static int64_t qlora__decode_tiles_shared(const qlora_model* m) {
    int64_t dim = m->plan.config.head_dim;
    int64_t tile = dim <= 128 ? QLORA__DECODE_TILE : QLORA__DECODE_TILE / 2;
    return 2 * tile * (qlora__ceil_div(dim, 16) * 16 + 8) * 2;
}

// The norm before a stack (`next`; NULL = the head). `before` is the stack whose output is added to
// the stream first, with the norm `after`; NULL = the stream starts with the embedding.
typedef struct qlora__decode_between {
    const qlora__layer* layer; // of `before`
    int before;
    const qlora_tensor* after;
    const qlora_tensor* norm;
    const qlora_linear_desc* next;
    int flip;   // which of the two streams is read
    bool added; // the output of `before` is part of it already
    bool again; // only x and z, once more, of the stream that was written last
} qlora__decode_between;

// What the norm adds to the stream, or where the stream begins.
static void qlora__decode_norm_input(const qlora_model* m, const qlora__decode_between* b,
                                     qlora__decode_norm* p) {
    const qlora_model_config* c = &m->plan.config;
    const qlora__decode* d = &m->decode;
    const qlora_tensor* table = qlora__embed_table(m);
    if (b->again) {
        p->h = d->h[1 - b->flip].data;
        p->h_out = NULL;
    } else if (b->added) {
        p->h = d->h[b->flip].data;
    } else if (b->layer != NULL) {
        const qlora_linear_part* part = &b->layer->linears[b->before].parts[0];
        bool has = qlora__decode_row_fits(m, b->layer) || // y has the adapter already
                   qlora__decode_lifts(m, b->layer, b->before);
        p->splits = (int32_t)qlora__decode_apart(m, b->layer, b->before);
        p->h = d->h[b->flip].data;
        p->y = p->splits > 1 ? d->split_sums.data : d->y.data;
        p->z = d->z.data;
        p->z_rank = m->use_adapters && !has ? (int32_t)part->rank : 0;
        p->sb = part->rank > 0 ? part->sb->data : NULL;
        p->after = b->after != NULL ? b->after->data : NULL;
        p->scale = (float)c->residual_scale;
    } else {
        p->embed = table->data;
        p->ld_embed = table->ld;
        p->scale = (float)c->embedding_scale;
    }
}

static qlora_result qlora__decode_norm_run(const qlora_model* m, const qlora__decode_between* b) {
    const qlora_model_config* c = &m->plan.config;
    const qlora__decode* d = &m->decode;
    qlora__decode_norm p;
    int64_t rank = 0;
    memset(&p, 0, sizeof p);
    p.texts = d->state.data;
    p.h_out = d->h[1 - b->flip].data;
    p.w = b->norm != NULL ? b->norm->data : NULL;
    p.x = d->x.data;
    p.ldx = d->x.ld;
    p.hidden = (int32_t)c->hidden;
    p.rows = (int32_t)d->texts;
    p.eps = (float)c->rms_eps;
    p.mean = qlora__norms_mean(m) ? 1 : 0;
    qlora__decode_norm_input(m, b, &p);
    bool many = qlora__decode_is_many(m);
    bool whole = qlora__decode_norms_many(m);
    bool first = b->layer == NULL && !b->added && !b->again; // of a step
    p.slices = (int32_t)qlora__decode_slices(m, b->before);
    for (int i = 0; b->next != NULL && m->use_adapters && (whole || !many) && i < b->next->count;
         i++) {
        const qlora_linear_part* part = &b->next->parts[i];
        p.ranks[i] = (int32_t)part->rank;
        p.a[i] = part->rank > 0 ? part->a->data : NULL;
        rank += part->rank;
    }
    // With many rows, the blocks of one would repeat too much of each other's work.
    int64_t blocks = qlora__min(whole ? qlora__ceil_div(rank, 16) : rank,
                                m->ctx->gpu->sm_count / d->texts);
    void* args[] = {&p};
    int64_t shared = whole ? qlora__decode_norm_shared(m, b->next, p.z_rank)
                           : (int64_t)(p.hidden + p.z_rank) * 4;
    qlora__kernel_id id = whole ? QLORA__K_decode_many_norm : QLORA__K_decode_norm;
    uint32_t threads = p.z_rank == 0 && d->texts == 1 ? 512 : 1024; // the next kernel fits beside
    qlora__launch_kind kind = first ? QLORA__LAUNCH_PLAIN : qlora__decode_way(m);
    qlora__launch_size size = {qlora__max(1, blocks), d->texts, 1, threads, (uint32_t)shared};
    qlora_result r = qlora__launch_as(m->ctx, id, kind, size, args);
    if (r != QLORA_OK || !many || whole || b->next == NULL) {
        return r;
    }
    void* z = (uint16_t*)d->x.data + c->hidden;
    return qlora__decode_low(m, b->next, &d->x, z, d->x.ld, true);
}

#endif // QLORA_NO_CUDA
