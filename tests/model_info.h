// model_info.h - what tests ask of a model, in one call each.
#ifndef QLORA_MODEL_INFO_H
#define QLORA_MODEL_INFO_H

#include <string.h>

static inline qlora_model_info model_info(const qlora_model* model) {
    qlora_model_info info;
    memset(&info, 0, sizeof info);
    if (qlora_model_query(model, &info) != QLORA_OK) {
        memset(&info, 0, sizeof info);
    }
    return info;
}

static inline const qlora_plan* model_plan(const qlora_model* model) {
    return model_info(model).plan;
}

static inline qlora_ctx* model_ctx(const qlora_model* model) {
    return model_info(model).ctx;
}

static inline int64_t model_parameters(const qlora_model* model) {
    return model_info(model).parameters;
}

#endif
