// ---- adapters side by side ----------------------------------------------------------------------
//
// How the rows of several adapters are computed:
//
//   side by side   on the GPU, if the sum of the ranks is small (qlora__wide_fits). The matrices of
//                  all adapters are one adapter of that rank, so that every product runs once, over
//                  all rows; what a row has of other adapters is zero (ops/owners.h). The owners of
//                  the rows are data, so one graph serves any assignment of rows to adapters.
//   run by run     otherwise. Neighbouring rows of one adapter are computed with the code for one
//                  (qlora__run_at), so that on the CPU it has the bits of a training of its own.
//
// The columns of z and u are those of the first projection of a stack for all adapters in order,
// then those of the next one. AdamW writes A and s B of an adapter to their places: in the operand
// of a layer with a cached one, otherwise in matrices of their own. Gradients of all adapters are
// computed in memory that all stacks share, and then added to those of each adapter.

// The highest sum of ranks: the wasted part of the products grows with it, and what is saved, base
// products with few rows, does not. Wider models have more work in the base for each rank.
static int64_t qlora__wide_limit(const qlora_model* m) {
    return qlora__max(128, m->plan.config.hidden / 8);
}

// The first column of an adapter among those of projection `i`; that of number m->adapters is the
// sum of the ranks.
static int64_t qlora__wide_first(const qlora_model* m, int32_t adapter, int64_t layer, int i) {
    int64_t first = 0;
    for (int32_t k = 0; k < adapter; k++) {
        first += qlora__lora_at(m, k, layer, i)->rank;
    }
    return first;
}

static bool qlora__wide_fits(const qlora_model* m) {
    bool fits = qlora__has_several(m) && m->on_gpu && qlora__computes(m) && !qlora__is_fp8(m);
    for (int64_t l = 0; l < m->plan.config.layers && fits; l++) {
        for (int i = 0; i < m->layers[l].layout->count; i++) {
            fits = fits && qlora__wide_first(m, m->adapters, l, i) <= qlora__wide_limit(m);
        }
    }
    return fits;
}

// Chooses the way; the ranks of all adapters are known.
static qlora_result qlora__wide_choose(qlora_ctx* ctx, qlora_model* m) {
    qlora__adapter_keep(m);
    if (!qlora__wide_fits(m)) {
        return QLORA_OK;
    }
    size_t bytes = (size_t)m->plan.config.layers * sizeof *m->wide;
    m->wide = (qlora__wide_layer*)qlora__alloc_zero(ctx, bytes);
    return m->wide != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
}

// Columns of z and u of a stack.
static int64_t qlora__wide_pad(const qlora_model* m, int64_t layer, int group) {
    const qlora__layout* layout = m->layers[layer].layout;
    int64_t rank = 0;
    for (int i = 0; i < layout->groups[group].count; i++) {
        int number = layout->groups[group].first + i;
        rank += qlora__wide_first(m, m->adapters, layer, number);
    }
    return (rank + 7) / 8 * 8;
}

// Whether the matrices of a stack are in the operand of the layer.
static bool qlora__wide_in_operand(const qlora__layer* layer, int group) {
    bool any = false;
    for (int i = 0; i < layer->layout->groups[group].count; i++) {
        any = any || qlora__is_coded(&layer->projections[layer->layout->groups[group].first + i]);
    }
    return any && layer->cached;
}

// Where the gradients of a stack are in m->work.wide_grads: dA of its projections without gaps, so
// that one product computes them, then dB of each. Returns their elements.
static int64_t qlora__wide_places(const qlora_model* m, int64_t layer, int group,
                                  int64_t a_at[QLORA_LINEAR_PARTS],
                                  int64_t b_at[QLORA_LINEAR_PARTS]) {
    int first = m->layers[layer].layout->groups[group].first;
    int count = m->layers[layer].layout->groups[group].count;
    int64_t at = 0;
    for (int i = 0; i < count; i++) {
        a_at[i] = at;
        at += qlora__wide_first(m, m->adapters, layer, first + i) *
              m->layers[layer].projections[first + i].in;
    }
    for (int i = 0; i < count; i++) {
        at = (int64_t)qlora__align_up((size_t)at, 64);
        b_at[i] = at;
        at += qlora__wide_first(m, m->adapters, layer, first + i) *
              m->layers[layer].projections[first + i].out;
    }
    return at;
}

// Shares of a stack: dA and dB of every adapter and projection that has one.
static int64_t qlora__wide_shares(const qlora_model* m, int64_t layer, int group) {
    const qlora__layout* layout = m->layers[layer].layout;
    int64_t count = 0;
    for (int i = 0; i < layout->groups[group].count; i++) {
        for (int32_t k = 0; k < m->adapters; k++) {
            int number = layout->groups[group].first + i;
            count += qlora__lora_at(m, k, layer, number)->rank > 0 ? 2 : 0;
        }
    }
    return count;
}

// Fills the tables of a stack, on the host.
static void qlora__wide_fill(const qlora_model* m, int64_t layer, int group, int32_t* columns,
                             qlora__share* shares) {
    const qlora__wide_layer* wide = &m->wide[layer];
    size_t size = qlora_dtype_bytes(QLORA_F32);
    const qlora__layout* layout = m->layers[layer].layout;
    int64_t column = 0;
    for (int i = 0; i < layout->groups[group].count; i++) {
        int number = layout->groups[group].first + i;
        const qlora__lora* all = &wide->loras[number];
        int64_t first = 0;
        for (int32_t k = 0; k < m->adapters; k++) {
            const qlora__lora* own = qlora__lora_at(m, k, layer, number);
            for (int64_t c = 0; c < own->rank; c++) {
                columns[column++] = k;
            }
            if (own->rank == 0 || shares == NULL) {
                continue;
            }
            const qlora__share a = {own->da.data,
                                    (char*)all->da.data + (size_t)(first * all->da.ld) * size,
                                    own->rank,
                                    all->da.cols,
                                    all->da.ld,
                                    1.0f,
                                    k};
            const qlora__share b = {own->db.data,
                                    (char*)all->db.data + (size_t)first * size,
                                    all->db.rows,
                                    own->rank,
                                    all->db.ld,
                                    own->scale,
                                    k};
            *shares++ = a;
            *shares++ = b;
            first += own->rank;
        }
    }
    for (; column < wide->columns[group].cols; column++) {
        columns[column] = -2;
    }
}

// Writes the tables of all stacks to the device.
static qlora_result qlora__wide_upload(qlora_ctx* ctx, qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers && m->wide != NULL; l++) {
        for (int g = 0; g < QLORA__GROUPS; g++) {
            qlora__wide_layer* wide = &m->wide[l];
            size_t columns = (size_t)wide->columns[g].cols * sizeof(int32_t);
            size_t shares = (size_t)wide->share_count[g] * sizeof(qlora__share);
            if (columns == 0) {
                continue;
            }
            char* memory = (char*)qlora__alloc_zero(ctx, shares + columns);
            if (memory == NULL) {
                return QLORA_ERR_MEMORY;
            }
            qlora__wide_fill(m, l, g, (int32_t*)(void*)(memory + shares),
                             shares > 0 ? (qlora__share*)(void*)memory : NULL);
            qlora_result r =
                qlora__copy_in(ctx, wide->columns[g].data, memory + shares, columns);
            r = r == QLORA_OK && shares > 0
                    ? qlora__copy_in(ctx, wide->shares[g].data, memory, shares)
                    : r;
            qlora__free(ctx, memory, shares + columns);
            QLORA__TRY(r);
        }
    }
    return QLORA_OK;
}
