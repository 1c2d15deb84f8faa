// evaluate.h - the evaluation of a micro-batch.
#ifndef FINETUNE_EVALUATE_H
#define FINETUNE_EVALUATE_H

#define SLICE_MS 200.0

// Which micro-batch of an evaluation it is.
typedef struct eval_place {
    const char* what; // is being done
    size_t at;
    size_t count;
} eval_place;

// Finer than micro-batches: on a CPU, one may take minutes.
static void eval_progress(app* a, const eval_place* place, double share) {
    uint64_t done = (uint64_t)(1000.0 * ((double)place->at + share));
    (void)load_progress(a, place->what, done, 1000 * (uint64_t)place->count);
}

// Evaluates a batch in slices, so that Ctrl-C is answered between two of them; *cut is then set.
// The results are those of qlora_eval and, unless it is NULL, qlora_eval_sequences, bit for bit.
static bool eval_batch(app* a, const eval_place* place, const qlora_batch* batch,
                       qlora_eval_info* info, double* sequences, bool* cut) {
    bool done = false;
    if (!lib(a, qlora_eval_begin(a->model, batch), place->what)) {
        return false;
    }
    while (!done) {
        if (stop_asked != 0) {
            *cut = true;
            return lib(a, qlora_eval_cancel(a->model), "stopping");
        }
        if (!lib(a, qlora_eval_slice(a->model, SLICE_MS, info, sequences, &done), place->what)) {
            return false;
        }
        eval_progress(a, place, info->share);
    }
    return true;
}

#endif
