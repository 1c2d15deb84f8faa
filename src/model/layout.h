// ---- memory of generation, and the layout of a model --------------------------------------------

// How a step is made; models use QLORA__DECODE_USED, tests and measurements other sets as well.
#define QLORA__DECODE_ONE 1u       // a kernel of its own for NF4 products of a single row
#define QLORA__DECODE_EARLY 2u     // kernels may begin before the one before them has ended
#define QLORA__DECODE_MANY 4u      // kernels of their own for products of more than 8 rows
#define QLORA__DECODE_WARPGROUP 8u // warpgroup instructions: NF4 products of more than 8 rows, head
#define QLORA__DECODE_LAYERS 16u   // one kernel for all layers of a single text
#define QLORA__DECODE_ALL 31u
#define QLORA__DECODE_USED QLORA__DECODE_ALL

#define QLORA__DECODE_SLICES 64 // as in kernels/decode/decode.cuh
#define QLORA__DECODE_LOW 256 // partial sums of z of a single text, at most
#define QLORA__DECODE_ROWS 8
#define QLORA__DECODE_LAYER_BYTES 1920 // of qlora__decode_layer
#define QLORA__DECODE_SHARES 256       // blocks that may share tiles
#define QLORA__DECODE_PARTS 8          // LAYER_PARTS in kernels/decode/decode_layers.cuh
#define QLORA__DECODE_MANY_ROWS 64   // of a block, as in kernels/decode/decode_many.cuh
#define QLORA__DECODE_MANY_TILE 256  // rows of W of a block
#define QLORA__DECODE_MANY_TILES 144 // blocks whose sums have room
#define QLORA__DECODE_HEADS 8   // query heads of a block of attention
#define QLORA__DECODE_TILE 128  // positions
#define QLORA__SAMPLE_PART 2048 // logits of a block
#define QLORA__SAMPLE_PART_BYTES 32

// Whether the kernels of a decoding step can read a weight.
static bool qlora__decode_reads(const qlora__projection* p) {
    int64_t block = p->nf4_desc.block != 0 ? p->nf4_desc.block : 64;
    return p->is_fp8   ? false
           : p->is_nf4 ? p->in % 64 == 0 && block >= 64 : p->in % 8 == 0;
}

// Whether the kernels of a decoding step fit the model: bf16, heads and widths that are multiples
// of 8, and stacks whose weights are all bf16, or all NF4 with the same kind of scales. Otherwise a
// step is made of the operators of a pass.
static bool qlora__decode_fits(const qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    bool fits = m->desc.generate_tokens > 0 && m->compute == QLORA_BF16 && c->head_dim % 8 == 0 &&
                c->hidden % 8 == 0 && c->hidden <= 16384 && !m->dora && !qlora__has_several(m) &&
                (!m->base.head_is_nf4 || c->hidden % 64 == 0);
    for (int64_t l = 0; l < c->layers && fits; l++) {
        const qlora__layout* layout = m->layers[l].layout;
        fits = qlora__ffn_plan_of(&m->layers[l])->steps;
        for (int i = 0; i < layout->count; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            int first = layout->groups[layout->rows[i].group].first;
            const qlora__projection* q = &m->layers[l].projections[first];
            bool alike = p->is_nf4 == q->is_nf4 &&
                         (!p->is_nf4 || p->nf4_desc.plain_scales == q->nf4_desc.plain_scales);
            fits = fits && alike && qlora__decode_reads(p);
        }
    }
    return fits;
}

// What the blocks of decode_layers leave for each other, in words of 32 bits: x of the four stacks
// and qkv, a word for each value; z, sums of shared tiles and of pages, two words for each.
enum {
    QLORA__MARKS_QKV = QLORA__GROUPS,
    QLORA__MARKS_Z,
    QLORA__MARKS_SHARES,
    QLORA__MARKS_PARTIALS,
    QLORA__MARKS_COUNT
};

// Where each of them begins; returns how many words there are.
static int64_t qlora__decode_marks(const qlora_model* m, int64_t* at) {
    const qlora_model_config* c = &m->plan.config;
    const qlora__decode* d = &m->decode;
    int64_t words[QLORA__MARKS_COUNT];
    int64_t all = 0;
    words[QLORA__QKV] = c->hidden;
    words[QLORA__O] = qlora__q_width(c);
    words[QLORA__GATE_UP] = c->hidden;
    words[QLORA__DOWN] = c->intermediate;
    words[QLORA__MARKS_QKV] = qlora__q_width(c) + 2 * qlora__kv_width(c);
    words[QLORA__MARKS_Z] = QLORA__GROUPS * QLORA__DECODE_PARTS * d->wide * 2;
    words[QLORA__MARKS_SHARES] = QLORA__DECODE_SHARES * 16 * 2;
    words[QLORA__MARKS_PARTIALS] = c->heads * d->pages * (c->head_dim + 2) * 2;
    for (int i = 0; i < QLORA__MARKS_COUNT; i++) {
        at[i] = all;
        all += (words[i] + 3) / 4 * 4;
    }
    return all;
}

static void qlora__layout_decode(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    qlora__decode* d = &m->decode;
    int64_t room = m->desc.generate_tokens;
    int64_t group = c->heads / c->kv_heads;
    int64_t pads[QLORA__GROUPS];
    d->variants = QLORA__DECODE_USED;
    d->planned = qlora__decode_fits(m);
    if (!d->planned) {
        return;
    }
    qlora__most_pads(m, pads);
    int64_t n = m->desc.generate_sequences;
    // Not more pages, so that joining them stays cheap.
    int64_t tiles = qlora__ceil_div(room, QLORA__MOST_PAGES * QLORA__DECODE_TILE);
    d->texts = n;
    d->chunk = tiles * QLORA__DECODE_TILE;
    d->pages = qlora__ceil_div(room, d->chunk);
    d->z_rank = qlora__max(1, qlora__max(pads[QLORA__O], pads[QLORA__DOWN]));
    int64_t pad = qlora__max(pads[QLORA__QKV], pads[QLORA__GATE_UP]);
    qlora__arena_tensor(arena, m->compute, n, c->hidden, &d->h[0]);
    qlora__arena_tensor(arena, m->compute, n, c->hidden, &d->h[1]);
    qlora__arena_tensor(arena, m->compute, n, c->hidden + pad, &d->x);
    qlora__arena_tensor(arena, m->compute, n, qlora__q_width(c) + 2 * qlora__kv_width(c), &d->qkv);
    qlora__arena_tensor(arena, m->compute, n, qlora__q_width(c), &d->o);
    qlora__arena_tensor(arena, m->compute, n, c->intermediate, &d->s);
    qlora__arena_tensor(arena, QLORA_F32, n, c->hidden, &d->y);
    int64_t slices = QLORA__DECODE_SLICES; // of many texts, one per block of the kernel before
    if (n > QLORA__DECODE_ROWS) {
        slices = qlora__max(slices, c->heads);
        slices = qlora__max(slices, qlora__ceil_div(c->intermediate, QLORA__DECODE_MANY_TILE / 2));
    }
    qlora__arena_tensor(arena, QLORA_F32, qlora__max(slices * n, QLORA__DECODE_LOW), d->z_rank,
                        &d->z);
    qlora__arena_tensor(arena, m->compute, n, c->vocab, &d->logits);
    qlora__arena_tensor(arena, QLORA_F32, n * c->heads * d->pages, c->head_dim + 2, &d->partials);
    int64_t blocks = c->kv_heads * qlora__ceil_div(group, QLORA__DECODE_HEADS);
    qlora__arena_tensor(arena, QLORA_I32, n, blocks, &d->counters);
    if (n > QLORA__DECODE_ROWS) {
        int64_t groups = qlora__ceil_div(n, QLORA__DECODE_MANY_ROWS);
        qlora__arena_tensor(arena, QLORA_F32, groups * QLORA__DECODE_MANY_ROWS,
                            QLORA__DECODE_MANY_TILES * QLORA__DECODE_MANY_TILE, &d->split_sums);
        qlora__arena_tensor(arena, QLORA_I32, groups, QLORA__DECODE_MANY_TILES, &d->arrivals);
    }
    if (n == 1) {
        int64_t at[QLORA__MARKS_COUNT];
        d->wide = qlora__max(pad, d->z_rank);
        qlora__arena_tensor(arena, QLORA_I32, 1, qlora__decode_marks(m, at), &d->marks);
        qlora__arena_tensor(arena, QLORA_U8, 1, 2 * c->layers * QLORA__DECODE_LAYER_BYTES,
                            &d->params);
    }
    qlora__arena_tensor(arena, QLORA_I32, n, d->pages, &d->table);
    qlora__arena_tensor(arena, QLORA_U8, n, (int64_t)sizeof(qlora__decode_text), &d->state);
    int64_t parts = qlora__ceil_div(c->vocab, QLORA__SAMPLE_PART);
    qlora__arena_tensor(arena, QLORA_U8, n * parts, QLORA__SAMPLE_PART_BYTES, &d->parts);
    qlora__arena_tensor(arena, QLORA_U8, n, c->vocab, &d->seen);
}

static void qlora__layout_generation(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    int64_t n = m->desc.generate_tokens;
    int64_t texts = m->desc.generate_sequences;
    qlora__layout_decode(arena, m);
    if (n > 0) {
        // Texts begin with a page, if there are several.
        m->texts.cache_rows =
            m->decode.planned && texts > 1 ? m->decode.pages * m->decode.chunk : n;
        m->texts.cache_all = texts * m->texts.cache_rows;
        if (m->desc.generate_positions > 0) {
            qlora__paging* pool = &m->texts.paging;
            pool->size = m->decode.planned ? m->decode.chunk
                                           : qlora__max(16, qlora__ceil_div(n, QLORA__MOST_PAGES));
            pool->pages = qlora__ceil_div(m->desc.generate_positions, pool->size);
            pool->free = pool->pages;
            m->texts.cache_all = (pool->pages + 1) * pool->size;
            m->plan.generate_positions = pool->pages * pool->size;
        }
        qlora__arena_tensor(arena, m->compute, c->layers * m->texts.cache_all,
                            2 * qlora__kv_width(c), &m->texts.kv_cache);
        int64_t wide = (int64_t)qlora__align_up((size_t)n, 8); // rows start aligned
        qlora__arena_tensor(arena, QLORA_F32, c->heads, wide, &m->texts.scores);
        m->texts.chances = m->texts.scores;
        if (m->compute != QLORA_F32) {
            qlora__arena_tensor(arena, m->compute, c->heads, wide, &m->texts.chances);
        }
    }
}

// Lays out the whole model, category by category.
static void qlora__model_layout(qlora_model* m, char* base) {
    qlora__arena arena;
    arena.ctx = m->ctx;
    arena.base = base;
    arena.used = 0;
    const struct {
        void (*lay)(qlora__arena* arena, qlora_model* m);
        uint64_t* bytes;
    } steps[] = {{qlora__layout_base, &m->plan.base},
                 {qlora__layout_cache, &m->plan.cache},
                 {qlora__layout_adapters, &m->plan.adapters},
                 {qlora__layout_optimizer, &m->plan.optimizer},
                 {qlora__layout_activations, &m->plan.activations},
                 {qlora__layout_workspace, &m->plan.workspace},
                 {qlora__layout_head, &m->plan.head},
                 {qlora__layout_generation, &m->plan.generation},
                 {qlora__layout_batch, &m->plan.batches}};
    qlora__layout_host(m);
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        size_t before = arena.used;
        bool own =
            steps[i].lay == qlora__layout_adapters || steps[i].lay == qlora__layout_optimizer;
        for (int32_t k = 0; k < (own ? m->adapters : 1); k++) {
            qlora__adapter_focus(m, k);
            if (qlora__computes(m) || steps[i].lay == qlora__layout_adapters) {
                steps[i].lay(&arena, m);
            }
        }
        qlora__adapter_focus(m, 0);
        *steps[i].bytes = arena.used - before;
    }
    for (int32_t k = m->adapters - 1; k >= 0; k--) {
        qlora__adapter_focus(m, k);
        qlora__layout_windows(m);
    }
    qlora__adapter_keep(m);
    for (int64_t l = 0; l < m->plan.config.layers && m->wide != NULL && base != NULL; l++) {
        for (int g = 0; g < QLORA__GROUPS; g++) {
            qlora__window_wide(m, l, g);
        }
    }
    m->plan.total = arena.used;
}
