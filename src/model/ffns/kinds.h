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
} qlora__ffn_kind;

// Indexed by qlora__ffn.
static const qlora__ffn_kind qlora__ffn_kinds[] = {
    {"gated", qlora__gated_in, qlora__gated_out, qlora__gated_out_backward},
    {"plain", qlora__plain_in, qlora__plain_out, qlora__plain_out_backward}};

static const qlora__ffn_kind* qlora__ffn_of(const qlora__layer* layer) {
    return &qlora__ffn_kinds[layer->layout->ffn];
}
