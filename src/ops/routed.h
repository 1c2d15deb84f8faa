// ---- routing and rows of experts on a GPU -------------------------------------------------------
//
// What ops/experts.h has for the CPU: the choice, its gradient, and what is done with rows that are
// sorted by expert. Nothing waits for the device: how many rows an expert has is read there.

#define QLORA__ROUTING_CHUNK 256 // choices of a block; CHUNK in kernels/experts/routing.cu

// Blocks of choices.
static int64_t qlora__routing_chunks(int64_t choices) {
    return qlora__ceil_div(choices, QLORA__ROUTING_CHUNK);
}

// Words of the list of tiles.
static int64_t qlora__routing_tiles(int64_t experts, int64_t choices) {
    return 1 + 2 * qlora__grouped_tiles(experts, choices);
}

#ifndef QLORA_NO_CUDA

#define QLORA__ROUTED_GATHERED 8 // rows of a block; GATHERED in kernels/experts/routed.cuh

// Same layout as routing_rule in kernels/experts/routing.cuh.
typedef struct qlora__routing_rule {
    int32_t score;
    int32_t experts;
    int32_t chosen;
    int32_t groups;
    int32_t groups_used;
    int32_t divides;
    float scale;
    float floor;
} qlora__routing_rule;

static qlora__routing_rule qlora__routing_rule_of(const qlora__route_rule* rule) {
    qlora__routing_rule r;
    r.score = (int32_t)rule->score;
    r.experts = (int32_t)rule->experts;
    r.chosen = (int32_t)rule->chosen;
    r.groups = (int32_t)rule->groups;
    r.groups_used = (int32_t)rule->groups_used;
    r.divides = rule->renormalise || rule->score == QLORA__ROUTER_SOFTMAX_CHOSEN;
    r.scale = (float)rule->scale;
    r.floor = rule->score == QLORA__ROUTER_SIGMOID ? (float)QLORA__ROUTE_FLOOR : 0.0f;
    return r;
}

// Memory of a route on the device, besides what qlora__route has.
typedef struct qlora__routing {
    float* weights; // by choice
    float* sorted;  // by sorted row
    int32_t* counts;
    int32_t* tiles;
} qlora__routing;

// The scores of r, in f32 -> its choice, place, tokens and starts, and what w has.
static qlora_result qlora__routing_choose(qlora_ctx* ctx, qlora__route* r, qlora__routing* w) {
    qlora__routing_rule rule = qlora__routing_rule_of(&r->rule);
    qlora_tensor scores = *r->scores; // parameters are passed by address
    int64_t choices = r->rows * r->rule.chosen;
    int64_t chunks = qlora__routing_chunks(choices);
    int32_t experts = rule.experts;
    int32_t chosen = rule.chosen;
    void* choose[] = {&scores.data, &scores.ld, (void*)&r->rule.correction, &r->choice, &w->weights,
                      &r->rows,     &rule};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_routing_choose, qlora__ceil_div(r->rows, 4), 1, 1, 128,
                             (uint32_t)(48 * r->rule.experts), choose));
    void* count[] = {&r->choice, &choices, &experts, &w->counts};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_routing_count, chunks, 1, 1, QLORA__ROUTING_CHUNK,
                             (uint32_t)(4 * r->rule.experts), count));
    void* totals[] = {&w->counts, &chunks, &experts, &r->starts};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_routing_totals, qlora__ceil_div(r->rule.experts, 8), 1,
                             1, 256, 0, totals));
    void* starts[] = {&experts, &r->starts, &w->tiles};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_routing_starts, 1, 1, 1, 1024, 0, starts));
    void* spread[] = {&r->choice, &w->weights, &choices,  &chosen,    &experts,
                      &w->counts, &r->starts,  &r->place, &r->tokens, &w->sorted};
    return qlora__launch(ctx, QLORA__K_routing_spread, chunks, 1, 1, QLORA__ROUTING_CHUNK, 0,
                         spread);
}

// dw: f32, by sorted row.
static qlora_result qlora__routing_backward(qlora_ctx* ctx, const qlora__route* r, const void* dw,
                                            const qlora_tensor* dz) {
    qlora__routing_rule rule = qlora__routing_rule_of(&r->rule);
    qlora__route own = *r;
    qlora_tensor scores = *r->scores;
    qlora_tensor to = *dz;
    void* args[] = {&scores.data, &scores.ld, &own.choice, &own.place, (void*)&dw,
                    &to.data,     &to.ld,     &own.rows,   &rule,      (void*)&own.slopes,
                    (void*)&own.bound, &own.first};
    return qlora__launch(
        ctx, dz->dtype == QLORA_F32 ? QLORA__K_routing_bwd_f32 : QLORA__K_routing_bwd_bf16,
        qlora__ceil_div(r->rows, 4), 1, 1, 128, (uint32_t)(16 * r->rule.experts), args);
}

// to[i] = from[list[i]], as qlora__rows_gather does.
static qlora_result qlora__routed_gather(qlora_ctx* ctx, const qlora_tensor* from,
                                         const int32_t* list, const qlora_tensor* to) {
    qlora_tensor x = *from;
    qlora_tensor y = *to;
    void* args[] = {&x.data, &x.ld, (void*)&list, &y.data, &y.ld, &y.rows, &y.cols};
    qlora__point_shape shape = qlora__point_shape_of(y.cols, qlora__piece(y.dtype));
    return qlora__launch(
        ctx, y.dtype == QLORA_F32 ? QLORA__K_routed_gather_f32 : QLORA__K_routed_gather_bf16,
        shape.blocks, qlora__grid_cap(qlora__ceil_div(y.rows, QLORA__ROUTED_GATHERED)), 1,
        shape.threads, 0, args);
}

// to[t] = the sum of the rows of its experts in `from`, to which its own row may be added.
static qlora_result qlora__routed_sum(qlora_ctx* ctx, const qlora__route* r,
                                      const qlora_tensor* from, const qlora_tensor* to, bool adds) {
    qlora_tensor x = *from;
    qlora_tensor y = *to;
    int32_t* place = r->place;
    int32_t chosen = (int32_t)r->rule.chosen;
    int32_t add = adds ? 1 : 0;
    void* args[] = {&x.data, &x.ld, &place, &chosen, &y.data, &y.ld, &y.rows, &y.cols, &add};
    qlora__point_shape shape = qlora__point_shape_of(y.cols, qlora__piece(y.dtype));
    return qlora__launch(ctx,
                         y.dtype == QLORA_F32 ? QLORA__K_routed_sum_f32 : QLORA__K_routed_sum_bf16,
                         shape.blocks, qlora__grid_cap(y.rows), 1, shape.threads, 0, args);
}

// Rows with factors, through a gated activation.
typedef struct qlora__routed_rows {
    const qlora_tensor* gate; // backward: overwritten with their gradients
    const qlora_tensor* up;
    const float* factors;  // of the rows
    const qlora_tensor* s; // backward: the gradient, overwritten with s itself
    float* dots;           // backward: the gradients of the factors
    bool gelu;
} qlora__routed_rows;

// s = factor act(gate) up.
static qlora_result qlora__routed_gated(qlora_ctx* ctx, const qlora__routed_rows* r) {
    qlora_tensor gate = *r->gate;
    qlora_tensor up = *r->up;
    qlora_tensor s = *r->s;
    const float* factors = r->factors;
    int32_t gelu = r->gelu ? 1 : 0;
    void* args[] = {&gate.data, &gate.ld, &up.data, &up.ld,  (void*)&factors,
                    &s.data,    &s.ld,    &s.rows,  &s.cols, &gelu};
    qlora__point_shape shape = qlora__point_shape_of(s.cols, qlora__piece(s.dtype));
    return qlora__launch(
        ctx, s.dtype == QLORA_F32 ? QLORA__K_routed_gated_f32 : QLORA__K_routed_gated_bf16,
        shape.blocks, qlora__grid_cap(s.rows), 1, shape.threads, 0, args);
}

static qlora_result qlora__routed_gated_backward(qlora_ctx* ctx, const qlora__routed_rows* r) {
    qlora_tensor gate = *r->gate;
    qlora_tensor up = *r->up;
    qlora_tensor s = *r->s;
    const float* factors = r->factors;
    float* dots = r->dots;
    int32_t gelu = r->gelu ? 1 : 0;
    void* args[] = {&s.data, &s.ld,           &gate.data, &gate.ld, &up.data,
                    &up.ld,  (void*)&factors, &dots,      &s.cols,  &gelu};
    qlora__point_shape shape = qlora__point_shape_of(s.cols, qlora__piece(s.dtype));
    return qlora__launch(
        ctx, s.dtype == QLORA_F32 ? QLORA__K_routed_bwd_gated_f32 : QLORA__K_routed_bwd_gated_bf16,
        s.rows, 1, 1, shape.threads, 0, args);
}

// factors = sigmoid(z), for z [rows, 1].
static qlora_result qlora__routed_factors(qlora_ctx* ctx, const qlora_tensor* z, float* factors) {
    qlora_tensor own = *z;
    void* args[] = {&own.data, &own.ld, &factors, &own.rows};
    return qlora__launch(
        ctx, z->dtype == QLORA_F32 ? QLORA__K_routed_factors_f32 : QLORA__K_routed_factors_bf16,
        qlora__ceil_div(z->rows, 256), 1, 1, 256, 0, args);
}

// dz = dots factor (1 - factor).
static qlora_result qlora__routed_factors_backward(qlora_ctx* ctx, const float* dots,
                                                   const float* factors, const qlora_tensor* dz) {
    qlora_tensor own = *dz;
    void* args[] = {(void*)&dots, (void*)&factors, &own.data, &own.ld, &own.rows};
    return qlora__launch(ctx,
                         dz->dtype == QLORA_F32 ? QLORA__K_routed_bwd_factors_f32
                                                : QLORA__K_routed_bwd_factors_bf16,
                         qlora__ceil_div(dz->rows, 256), 1, 1, 256, 0, args);
}

#endif // QLORA_NO_CUDA
