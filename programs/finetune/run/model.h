// model.h - numbers that follow from the config of a model.
#ifndef FINETUNE_MODEL_H
#define FINETUNE_MODEL_H

// How many parameters are trained, and where.
static const char* trained_text(const qlora_plan* plan, char out[256]) {
    char places[200];
    qlora_trained_describe(plan, places, sizeof places);
    snprintf(out, 256, "%lld trainable parameters%s%s%s", (long long)plan->parameters,
             plan->parameters > 0 ? " (" : "", places, plan->parameters > 0 ? ")" : "");
    return out;
}

// Rows of the matrices of all MLPs that are as long as the hidden size. `chosen`: only those that a
// token uses.
static double mlp_rows(const qlora_model_config* c, bool chosen) {
    double rows = 0.0;
    for (int64_t l = 0; l < c->layers; l++) {
        double experts = (double)(chosen ? c->experts_per_token : c->experts);
        bool mixed = c->experts > 0 && c->dense[l] == 0;
        rows += mixed ? experts * (3.0 * (double)c->expert_intermediate + (chosen ? 0.0 : 1.0)) +
                            3.0 * (double)c->shared_intermediate
                      : 3.0 * (double)c->intermediate;
    }
    return rows;
}

// All parameters of the model, trained or not.
static double model_parameters(const qlora_model_config* c) {
    double hidden = (double)c->hidden;
    double rows = 2.0 * (double)(c->heads * c->head_dim + c->kv_heads * c->head_dim);
    return hidden * ((double)c->layers * rows + mlp_rows(c, false)) +
           (double)c->vocab * hidden * (c->tied ? 1.0 : 2.0);
}

// Trained parameters that a token uses: those of experts only where it is sent to them.
static double active_parameters(const app* a) {
    const qlora_model_config* c = &a->config;
    double hidden = (double)c->hidden;
    double width = (double)c->expert_intermediate;
    double all = 0.0;
    for (int64_t l = 0; l < c->layers && c->experts > 0; l++) {
        bool in = (a->o.adapter.targets & QLORA_TARGET_EXPERTS_IN) != 0;
        bool out = (a->o.adapter.targets & QLORA_TARGET_EXPERTS_OUT) != 0;
        double each = (in ? hidden + 2.0 * width : 0.0) + (out ? width + hidden : 0.0);
        all += c->dense[l] == 0 ? each * (double)(c->experts * a->o.adapter.rank) : 0.0;
    }
    double unused = c->experts > 0 ? 1.0 - (double)c->experts_per_token / (double)c->experts : 0.0;
    return fmax((double)a->plan.parameters - all * unused, 0.0);
}

#endif
