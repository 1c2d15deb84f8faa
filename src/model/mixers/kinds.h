// ---- the kinds of mixers ------------------------------------------------------------------------
//
// What the passes through a model call of the part of a layer in which tokens look at each other; a
// new kind is a row here and in plans.h, and a room beside them.

typedef struct qlora__mixer_kind {
    // m->work.x, or, tile by tile, the layer's input once more if it is computed `again` -> what
    // tokens show each other, with z of the stack.
    qlora_result (*in)(const qlora__pass* pass, qlora__layer* layer, bool again);
    // That -> what each token has seen, in kept.o.
    qlora_result (*mix)(const qlora__pass* pass, qlora__layer* layer);
    // kept.o, or some of its rows -> the output of the branch.
    qlora_result (*out)(const qlora__pass* pass, qlora__layer* layer, const qlora_tensor* o);
    // Backward: the gradient of that output -> the one of kept.o, in m->work.d_o -> the one of what
    // tokens show each other, in m->work.dqkv -> the one of the output of the stack, in its place.
    qlora_result (*out_backward)(const qlora__pass* pass, qlora__layer* layer);
    qlora_result (*mix_backward)(const qlora__pass* pass, qlora__layer* layer);
    qlora_result (*in_backward)(const qlora__pass* pass, qlora__layer* layer);
    // What a text in flight needs of rows that went through `in`, into its state; and `mix` for
    // rows that continue a text, which see that state.
    qlora_result (*store)(const qlora__pass* pass, int64_t index);
    qlora_result (*text)(const qlora__pass* pass, int64_t index);
#ifndef QLORA_NO_CUDA
    // The whole branch in a step on the device, from its input in x to its output in y.
    qlora_result (*step)(qlora_model* m, int64_t index);
    // Its parameters in the kernel of all layers; NULL if that cannot have it.
    qlora__decode_attention (*layers)(const qlora_model* m, int64_t index);
#endif
} qlora__mixer_kind;

// Indexed by qlora__mixer.
static const qlora__mixer_kind qlora__mixer_kinds[] = {
    {qlora__softmax_in, qlora__softmax_mix, qlora__softmax_out,
     QLORA__TRAINS ? qlora__softmax_out_backward : NULL,
     QLORA__TRAINS ? qlora__softmax_mix_backward : NULL,
     QLORA__TRAINS ? qlora__softmax_in_backward : NULL,
     QLORA__GENERATES ? qlora__softmax_store : NULL,
     QLORA__GENERATES ? qlora__softmax_text : NULL,
#ifndef QLORA_NO_CUDA
     QLORA__GENERATES ? qlora__softmax_step : NULL, QLORA__GENERATES ? qlora__softmax_layers : NULL
#endif
    }};

static const qlora__mixer_kind* qlora__mixer_of(const qlora__layer* layer) {
    return &qlora__mixer_kinds[layer->layout->mixer];
}
