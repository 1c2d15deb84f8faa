// ---- copies of what attention keeps to the host -------------------------------------------------
//
// Of any kind of mixer: what it keeps is one piece of memory, its output first.

// A copy of bytes [from, end) of what a layer keeps of attention, to the host or back.
static qlora_result qlora__offload_copy(const qlora__pass* pass, const qlora__layer* layer,
                                     size_t from, size_t end, bool back) {
    if (layer->away_attention == NULL || from == end) {
        return QLORA_OK;
    }
    qlora_tensor some = layer->kept.o;
    some.data = (char*)some.data + from;
    some.dtype = QLORA_U8;
    some.rows = 1;
    some.cols = (int64_t)(end - from);
    some.ld = some.cols;
    return qlora__away_copy(pass->ctx, 2 + (int)(layer->offload_number % 2), back, &some,
                            (char*)layer->away_attention + from);
}

// The copy back.
static qlora_result qlora__offload_back(const qlora__pass* pass, const qlora__layer* layer) {
    return qlora__offload_copy(pass, layer, 0, qlora__offload_bytes(pass->m, layer), true);
}

// Waits for the copies of the slot of a layer: of what it keeps of attention, or before that of the
// last layer that had this slot.
static qlora_result qlora__offload_wait(const qlora__pass* pass, const qlora__layer* layer) {
    return layer->offload_number >= 0
               ? qlora__away_wait(pass->ctx, 4u << layer->offload_number % 2)
               : QLORA_OK;
}

// Begins the copies to the host, each as soon as its part is there. Those of a layer take longer
// than the layer itself if its products are fast. A recomputed layer has one, before o_proj, whose
// z is computed once more before it is needed.
typedef enum qlora__offload_part {
    QLORA__OFFLOAD_HEADS,     // q, k and v, rotated
    QLORA__OFFLOAD_ATTENTION, // its output
    QLORA__OFFLOAD_O          // z of o_proj, in the same rows
} qlora__offload_part;

static qlora_result qlora__offload_begin(const qlora__pass* pass, const qlora__layer* layer,
                                     qlora__offload_part part) {
    const qlora_model* m = pass->m;
    if (!pass->training || layer->away_attention == NULL ||
        layer->recompute != (part == QLORA__OFFLOAD_ATTENTION)) {
        return QLORA_OK;
    }
    if (part == QLORA__OFFLOAD_HEADS) {
        return qlora__offload_copy(pass, layer, m->work.offload_bytes[1], m->work.offload_bytes[2],
                                   false);
    }
    QLORA__TRY(qlora__beside_wait(pass->ctx, 1u << QLORA__QKV)); // z of q, k and v
    size_t end = layer->recompute ? qlora__offload_bytes(m, layer) : m->work.offload_bytes[1];
    return qlora__offload_copy(pass, layer, 0, end, false);
}

// Waits for what a layer keeps of attention and starts the copy of that of the layer below, if they
// are not recomputed: it is the one with the number before. The second stream no longer reads that
// memory: it has finished the gradients of o of the layer above, and is waited for here with those
// of q, k and v.
static qlora_result qlora__offload_next(const qlora__pass* pass, const qlora__layer* layer) {
    const qlora__layer* below = layer;
    QLORA__TRY(qlora__offload_wait(pass, layer));
    if (layer->offload_number < 1 || layer->recompute) {
        return QLORA_OK;
    }
    while (below->offload_number != layer->offload_number - 1) {
        below--;
    }
    if (below->away_attention == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__beside_wait(pass->ctx, 1u << QLORA__QKV));
    return qlora__offload_back(pass, below);
}
