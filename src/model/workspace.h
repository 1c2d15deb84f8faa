// ---- memory that all layers use, of the head and of batches -------------------------------------

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
        for (int i = 0; i < m->layers[l].layout->count; i++) {
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
    m->work.places_layers = qlora__can_place_layers(m);
    static const int order[QLORA__GROUPS] = {QLORA__GATE_UP, QLORA__DOWN, QLORA__O, QLORA__QKV};
    for (int i = 0; i < QLORA__GROUPS; i++) {
        int64_t n = qlora__operand_most(m, order[i]);
        bool tiled = m->plan.tile > 0 && order[i] != QLORA__QKV;
        m->work.operand_at[order[i]] = tiled || m->work.places_layers ? at : 0;
        at += n;
        most = qlora__max(most, m->work.operand_at[order[i]] + n);
    }
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            most = qlora__max(most, p->in * p->out); // a weight to quantise, from a file or random
        }
    }
    int64_t head = m->base.head_is_nf4 ? QLORA__HEAD_ROWS * m->plan.config.hidden : 0;
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
        for (int i = 0; i < m->layers[l].layout->count; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            int64_t rank = qlora__wide_first(m, m->adapters, l, i);
            if (!qlora__wide_in_operand(&m->layers[l], m->layers[l].layout->rows[i].group)) {
                qlora__arena_tensor(arena, m->compute, rank, p->in, &wide->loras[i].a);
                qlora__arena_tensor(arena, m->compute, p->out, rank, &wide->loras[i].sb);
            }
        }
    }
    qlora__arena_tensor(arena, QLORA_F32, 1, m->wide != NULL && qlora__trains(m) ? most : 0,
                        &m->work.wide_grads);
}

// Views of a stack of adapters that stand side by side: of its operand and of the gradients.
static void qlora__window_wide(qlora_model* m, int64_t index, int group) {
    qlora__layer* layer = &m->layers[index];
    int64_t a_at[QLORA_LINEAR_PARTS];
    int64_t b_at[QLORA_LINEAR_PARTS];
    qlora_tensor a;
    qlora_tensor sb;
    qlora_linear_desc linear = layer->linears[group];
    linear.operand = qlora__wide_in_operand(layer, group) ? &layer->operands[group] : NULL;
    bool inside = qlora__linear_joined(&linear, layer->pads[group], &a, &sb);
    size_t size = qlora_dtype_bytes(m->compute);
    int64_t row = 0;
    int64_t col = 0;
    m->wide[index].most[group] = 0;
    qlora__wide_places(m, index, group, a_at, b_at);
    for (int i = 0; i < linear.count; i++) {
        int number = layer->layout->groups[group].first + i;
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
            qlora__arena_window(&m->work.wide_grads, a_at[i], lora->rank, p->in, &lora->da);
            qlora__arena_window(&m->work.wide_grads, b_at[i], p->out, lora->rank, &lora->db);
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
    qlora__arena_tensor(arena, QLORA_U8, 1, qlora__tile_rows(m) * pitch, &m->work.fp8_codes);
    qlora__arena_tensor(arena, QLORA_F32, 1, qlora__tile_rows(m), &m->work.fp8_scales);
    qlora__arena_tensor(arena, QLORA_F32, 1, qlora__any_ffn_sums(m) ? qlora__tile_rows(m) : 0,
                        &m->work.fp8_most);
    qlora__arena_tensor(arena, QLORA_F32, 1, pitch, &m->work.fp8_ones);
    qlora__arena_tensor(arena, QLORA_F32, m->plan.config.layers * QLORA__GROUPS, 2,
                        &m->work.fp8_factors);
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
    qlora__arena_tensor(arena, m->compute, qlora__tile_rows(m), width + pad, &m->work.x);
    if (qlora__trains(m) && m->plan.tile == 0) {
        qlora__arena_tensor(&shared, m->compute, qlora__head_rows(m) + 1, width, &m->work.rows_dx);
        qlora__arena_join(arena, &shared);
    }
}

// The gradients of what mixing reads. With tiles, those of the rows of the head, which are used up
// when the first layer begins, share their memory.
static void qlora__layout_dqkv(qlora__arena* arena, qlora_model* m, int64_t pad) {
    int64_t wide = qlora__stack_most(m, QLORA__QKV) + pad;
    qlora__arena shared = *arena;
    qlora__arena_tensor(arena, m->compute, m->plan.tokens, wide, &m->work.dqkv);
    if (m->plan.tile > 0) {
        qlora__arena_tensor(&shared, m->compute, qlora__head_rows(m) + 1, m->plan.config.hidden,
                            &m->work.rows_dx);
        qlora__arena_join(arena, &shared);
    }
}

// What is not needed while the head runs, which has its logits in the same memory: they begin at
// m->work.head_place, and may go beyond the end. A 4-bit head needs the operand. s is for the MLP
// of a layer, d_o for its attention; with tiles, both are used at once.
static void qlora__layout_overlaid(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    int64_t some = qlora__tile_rows(m);
    int64_t pads[QLORA__GROUPS];
    qlora__most_pads(m, pads);
    int64_t dh_pad = qlora__max(pads[QLORA__O], pads[QLORA__DOWN]);
    // FP8 products fill the columns of ds up; those are the ones of z, which is computed later.
    int64_t wide = qlora__stack_most_in(m, QLORA__DOWN);
    int64_t mixed = qlora__stack_most_in(m, QLORA__O);
    wide = qlora__is_fp8(m) ? qlora__fp8_width(wide) : wide;
    if (m->base.head_is_nf4) {
        qlora__arena_tensor(arena, m->compute, 1, qlora__operand_elements(m), &m->work.operand);
    }
    m->work.head_place = arena->used;
    qlora__ffns_share(arena, m, QLORA__SHARED_LAYERS);
    qlora__arena shared = *arena;
    qlora__arena_tensor(arena, m->compute, some, wide + pads[QLORA__DOWN], &m->work.s);
    if (qlora__trains(m) && m->plan.tile == 0) {
        qlora__arena_tensor(&shared, m->compute, m->plan.tokens, mixed, &m->work.d_o);
        qlora__arena_join(arena, &shared);
    }
    if (!m->base.head_is_nf4) {
        qlora__arena_tensor(arena, m->compute, 1, qlora__operand_elements(m), &m->work.operand);
    }
    qlora__arena_tensor(arena, m->compute, some, c->hidden, &m->work.delta);
    if (!qlora__trains(m)) {
        return;
    }
    m->work.ds = m->work.s;
    if (m->desc.dropout > 0.0f || m->dora || qlora__any_ffn_adds(m)) {
        qlora__arena_tensor(arena, m->compute, some, wide, &m->work.ds);
    }
    qlora__arena_tensor(arena, m->compute, m->plan.tokens, c->hidden + dh_pad, &m->work.dh);
    m->work.d_out = m->work.dh;
    if (qlora__has_own_d_out(m)) {
        qlora__arena_tensor(arena, m->compute, some, c->hidden + dh_pad, &m->work.d_out);
    }
    if (qlora__stands_beside(m) || qlora__any_ffn_adds(m)) {
        qlora__arena_tensor(arena, m->compute, m->plan.tokens, c->hidden, &m->work.d_beside);
    }
    if (m->plan.tile > 0) {
        qlora__arena_tensor(arena, m->compute, m->plan.tokens, mixed, &m->work.d_o);
    }
    if (m->dora) {
        int64_t widest = 0;
        for (int g = 0; g < QLORA__GROUPS; g++) {
            widest = qlora__max(widest, qlora__stack_most(m, g));
        }
        qlora__arena_tensor(arena, m->compute, some, widest, &m->work.raw);
    }
}

static void qlora__layout_workspace(qlora__arena* arena, qlora_model* m) {
    int64_t some = qlora__tile_rows(m);
    int64_t pads[QLORA__GROUPS];
    qlora__most_pads(m, pads);
    qlora__layout_x(arena, m, qlora__max(pads[QLORA__QKV], pads[QLORA__GATE_UP]));
    qlora__arena_tensor(arena, QLORA_I32, 1, 1, &m->flag);
    qlora__ffns_share(arena, m, QLORA__SHARED_ALWAYS);
    qlora__layout_wide(arena, m);
    if (qlora__is_fp8(m)) {
        qlora__layout_fp8_shared(arena, m);
    }
    memset(&m->work.stats, 0, sizeof m->work.stats);
    if (qlora__trains(m)) {
        qlora__ffns_share(arena, m, QLORA__SHARED_TRAINING);
        qlora__arena_tensor(arena, QLORA_F32, 1, qlora__skinny_most(m), &m->work.skinny_parts);
        for (int i = 0; i < 2; i++) {
            qlora__arena_tensor(arena, QLORA_F32, 1, qlora__keeps_z(m) ? some : 0,
                                &m->work.rstd[i]);
        }
        qlora__layout_dqkv(arena, m, pads[QLORA__QKV]);
        qlora__mixers_share(arena, m);
    }
    qlora__layout_overlaid(arena, m); // the last, so that the head can go beyond its end
}

static void qlora__layout_batch(qlora__arena* arena, qlora_model* m) {
    int64_t T = m->plan.tokens;
    int64_t R = qlora__head_rows(m);
    qlora__batch_block* b = &m->batch;
    size_t before = arena->used;
    char* start = arena->base != NULL ? arena->base + before : NULL;
    qlora__arena_tensor(arena, QLORA_I32, 1, T, &b->ids);
    qlora__arena_tensor(arena, QLORA_I32, 1, T, &b->positions);
    b->angles = b->positions;
    if (qlora__has_two_rotations(m)) {
        qlora__arena_tensor(arena, QLORA_I32, 1, T, &b->angles);
    }
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
    if (qlora__trains(m) && m->plan.config.experts > 0) {
        qlora__arena_tensor(arena, QLORA_F32, 1, 2, &b->balance);
    }
    qlora__arena_tensor(arena, QLORA_I32, 1, 4, &b->dropout);
    int64_t S = m->plan.max_sequences;
    qlora__arena_tensor(arena, QLORA_I32, 1, S + 1, &b->starts);
    qlora__arena_tensor(arena, QLORA_I32, 1, S, &b->roles);
    qlora__arena_tensor(arena, QLORA_U8, 1, (int64_t)sizeof(qlora__preference_numbers),
                        &b->numbers);
    qlora__arena_tensor(arena, QLORA_U8, 1, S * (int64_t)sizeof(double), &b->references);
    m->work.preference.starts = b->starts;
    m->work.preference.roles = b->roles;
    m->work.preference.numbers = b->numbers;
    m->work.preference.references = b->references;
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
        qlora__arena_tensor(arena, QLORA_F32, 1, 7, &m->totals);
    }
    qlora__adapter_focus(m, 0);
}

static void qlora__layout_head(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    int64_t R = qlora__head_rows(m);
    qlora__arena shared = *arena;
    shared.used = m->work.head_place;
    qlora__arena_tensor(&shared, m->compute, m->plan.head_chunk, c->hidden, &m->work.rows_x);
    qlora__arena_tensor(&shared, m->compute, m->plan.head_chunk, c->vocab, &m->work.logits);
    qlora__arena_join(arena, &shared);
    qlora__arena_tensor(arena, QLORA_F32, 1, R, &m->work.losses);
    qlora__layout_totals(arena, m);
    int64_t S = m->plan.max_sequences * (int64_t)sizeof(double);
    qlora__arena_tensor(arena, QLORA_U8, 1, S, &m->work.preference.logps);
    qlora__arena_tensor(arena, QLORA_U8, 1, QLORA__PREFERENCE_SUMS * (int64_t)sizeof(double),
                        &m->work.preference.sums);
    if (qlora__trains(m)) {
        qlora__arena_tensor(arena, QLORA_U8, 1, S * QLORA__PREFERENCE_VALUES,
                            &m->work.preference.values);
        qlora__arena_tensor(arena, QLORA_F32, 1, m->plan.max_sequences,
                            &m->work.preference.factors);
    }
}
