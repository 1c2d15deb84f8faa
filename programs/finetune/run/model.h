// model.h - numbers that follow from the plan of a model.
#ifndef FINETUNE_MODEL_H
#define FINETUNE_MODEL_H

// How many parameters are trained, and where.
static const char* trained_text(const qlora_plan* plan, char out[256]) {
    char places[200];
    qlora_places_describe(plan, places, sizeof places);
    snprintf(out, 256, "%lld trainable parameters%s%s%s", (long long)plan->parameters,
             plan->parameters > 0 ? " (" : "", places, plan->parameters > 0 ? ")" : "");
    return out;
}

// All parameters of the model, trained or not.
static double model_parameters(const qlora_plan* plan) {
    const qlora_model_config* c = &plan->config;
    return plan->work.weights + (double)c->vocab * (double)c->hidden * (c->tied ? 1.0 : 2.0);
}

#endif
