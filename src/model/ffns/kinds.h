// ---- the kinds of feed-forward parts ------------------------------------------------------------
//
// What the passes through a model call; a new kind is a row here and in plans.h, and a room beside
// them.

typedef struct qlora__ffn_kind {
    // m->work.x -> what the backward pass needs, in kept.gu.
    qlora_result (*in)(const qlora__pass* pass, qlora__layer* layer);
    // kept.gu -> the output of the branch.
    qlora_result (*out)(const qlora__pass* pass, qlora__layer* layer);
    // The gradient of that output -> the one of kept.gu, in its place, and those of the adapters.
    qlora_result (*out_backward)(const qlora__pass* pass, qlora__layer* layer);
    // That of kept.gu -> that of the residual stream, of which the branch reads `h`.
    qlora_result (*in_backward)(const qlora__pass* pass, qlora__layer* layer,
                                const qlora_tensor* h);
    // After `in` of a training pass: notes what the backward pass must know of all layers. May be
    // NULL.
    qlora_result (*note)(const qlora__pass* pass, const qlora__layer* layer);
#ifndef QLORA_NO_CUDA
    // In a step on the device, from x to the input of down in s.
    qlora_result (*step)(const qlora_model* m, const qlora__layer* layer);
#endif
} qlora__ffn_kind;

// Of kinds that begin with a stack.
static qlora_result qlora__stack_in_backward(const qlora__pass* pass, qlora__layer* layer,
                                             const qlora_tensor* h) {
    return qlora__branch_input_backward(pass, layer, QLORA__MLP, &layer->kept.gu, h, true);
}

// Indexed by qlora__ffn.
static const qlora__ffn_kind qlora__ffn_kinds[] = {
    {qlora__gated_in, qlora__gated_out, QLORA__TRAINS ? qlora__gated_out_backward : NULL,
     QLORA__TRAINS ? qlora__stack_in_backward : NULL, NULL,
#ifndef QLORA_NO_CUDA
     QLORA__GENERATES ? qlora__gated_step : NULL
#endif
    },
    {qlora__plain_in, qlora__plain_out, QLORA__TRAINS ? qlora__plain_out_backward : NULL,
     QLORA__TRAINS ? qlora__stack_in_backward : NULL, NULL,
#ifndef QLORA_NO_CUDA
     QLORA__GENERATES ? qlora__plain_step : NULL
#endif
    },
    {qlora__experts_in, qlora__experts_out, QLORA__TRAINS ? qlora__experts_out_backward : NULL,
     QLORA__TRAINS ? qlora__experts_in_backward : NULL,
     QLORA__TRAINS ? qlora__balance_note : NULL,
#ifndef QLORA_NO_CUDA
     NULL
#endif
    }};

static const qlora__ffn_kind* qlora__ffn_of(const qlora__layer* layer) {
    return &qlora__ffn_kinds[layer->layout->ffn];
}
