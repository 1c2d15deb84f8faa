// ---- the kinds of feed-forward parts ------------------------------------------------------------
//
// What the passes through a model call; a new kind is a row here and a room beside this one.

typedef struct qlora__ffn_kind {
    const char* name;
    // m->work.x -> what the backward pass needs, in kept.gu.
    qlora_result (*in)(const qlora__pass* pass, qlora__layer* layer);
    // kept.gu -> the output of the branch.
    qlora_result (*out)(const qlora__pass* pass, qlora__layer* layer);
    // The gradient of that output -> the one of kept.gu, in its place, and those of the adapters.
    qlora_result (*out_backward)(const qlora__pass* pass, qlora__layer* layer);
    // That of kept.gu -> that of the residual stream, of which the branch reads `h`.
    qlora_result (*in_backward)(const qlora__pass* pass, qlora__layer* layer,
                                const qlora_tensor* h);
} qlora__ffn_kind;

// Of kinds that begin with a stack.
static qlora_result qlora__stack_in_backward(const qlora__pass* pass, qlora__layer* layer,
                                             const qlora_tensor* h) {
    return qlora__branch_input_backward(pass, layer, QLORA__MLP, &layer->kept.gu, h, true);
}

// Indexed by qlora__ffn.
static const qlora__ffn_kind qlora__ffn_kinds[] = {
    {"gated", qlora__gated_in, qlora__gated_out, qlora__gated_out_backward,
     qlora__stack_in_backward},
    {"plain", qlora__plain_in, qlora__plain_out, qlora__plain_out_backward,
     qlora__stack_in_backward},
    {"experts", qlora__experts_in, qlora__experts_out, qlora__experts_out_backward,
     qlora__experts_in_backward}};

static const qlora__ffn_kind* qlora__ffn_of(const qlora__layer* layer) {
    return &qlora__ffn_kinds[layer->layout->ffn];
}
