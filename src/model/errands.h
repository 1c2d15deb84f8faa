// ---- slices of an errand with a model -----------------------------------------------------------

// Runs a slice of an errand that uses a model. Between two slices the model has the adapter that is
// chosen, switched on or off, as if nothing were under way.
static void qlora__model_slice(qlora_model* m, qlora__errand* e, double until) {
    int32_t adapter = m->adapter;
    bool use_adapters = m->use_adapters;
    qlora__adapter_focus(m, e->adapter);
    m->use_adapters = e->use_adapters;
    qlora__errand_slice(m->ctx, e, until);
    e->adapter = m->adapter;
    e->use_adapters = m->use_adapters;
    qlora__adapter_focus(m, adapter);
    m->use_adapters = use_adapters;
}

// Prepares an errand that begins with the model as it is; see qlora__errand_take.
static QLORA__UNUSED qlora_result qlora__model_errand(qlora_model* m, qlora__errand_fn fn,
                                                      void* user, qlora__errand** out) {
    QLORA__TRY(qlora__errand_take(m->ctx, fn, user, out));
    if (*out != NULL) {
        (*out)->adapter = m->adapter;
        (*out)->use_adapters = m->use_adapters;
    }
    return QLORA_OK;
}

// Gives an errand back, which first has to end: it is finished, or dropped as soon as possible.
static QLORA__UNUSED void qlora__model_errand_end(qlora_model* m, qlora__errand* e, bool drop) {
    e->dropped = drop;
    if (e->under_way) {
        qlora__model_slice(m, e, 1e300);
    }
    e->taken = false;
}

// Ends an evaluation in slices: it is done, has failed, or is dropped.
static void qlora__evaluation_end(qlora_model* m) {
    if (m->evaluation.errand != NULL) {
        qlora__model_errand_end(m, m->evaluation.errand, true);
    }
    memset(&m->evaluation, 0, sizeof m->evaluation);
}

// For calls that read parameters: finishes an update in slices that has changed some of them.
static qlora_result qlora__model_settle(qlora_model* m) {
    qlora__errand* e = m->updating;
    if (e == NULL) {
        return QLORA_OK;
    }
    qlora__model_slice(m, e, 1e300);
    return e->result;
}
