// ---- the load of experts in a pass --------------------------------------------------------------
//
// The training pass notes what the routers of its layers have chosen, and computes the
// load-balancing loss between forward and backward; see ops/balance.h.

// Whether the model has the memory for it.
static bool qlora__balances(const qlora_model* m) {
    return QLORA__TRAINS && m->work.experts.balance.layers > 0;
}

// After the router of a tile of rows has chosen. Layers that are computed once more do not count.
static qlora_result qlora__balance_note(const qlora__pass* pass, const qlora__layer* layer) {
    const qlora_model* m = pass->m;
    const qlora__balance* b = &m->work.experts.balance;
    int64_t number = 0; // among the layers with experts
    for (const qlora__layer* other = m->layers; other < layer; other++) {
        number += other->experts != NULL ? 1 : 0;
    }
    qlora__route route = qlora__experts_route(pass, layer);
    qlora__balance_tile tile;
    tile.balance = b;
    tile.route = &route;
    tile.slot = number * b->slots + pass->row / qlora__tile_rows(m) * b->ranges;
    tile.weighs = b->coefficient > 0.0;
    return qlora__balance_count(pass->ctx, &tile);
}

// After the forward pass.
static qlora_result qlora__balance_turn(const qlora__pass* pass) {
    const qlora_model* m = pass->m;
    const qlora__balance* b = &m->work.experts.balance;
    qlora_tensor total = qlora__window(&m->totals, 1, 3, 1);
    qlora__balance_use use;
    use.shares = &m->batch.balance;
    use.total = b->coefficient > 0.0 ? &total : NULL;
    use.used = qlora__ceil_div(pass->rows, qlora__tile_rows(m)) * b->ranges;
    return qlora__balance_close(pass->ctx, b, &use);
}
