// advice.h - settings that fit when a plan does not: each one is planned before it is suggested.
#ifndef ADVICE_H
#define ADVICE_H

#include "messages.h"

#include <inttypes.h>

// Bytes as people read them: GiB, and below 0.1 GiB MiB.
static inline const char* bytes_text(uint64_t bytes, char out[32]) {
    double gib = (double)bytes / 1073741824.0;
    snprintf(out, 32, gib >= 0.1 ? "%.2f GiB" : "%.1f MiB", gib >= 0.1 ? gib : gib * 1024.0);
    return out;
}

// How a program's options set the size of a micro-batch.
typedef enum advice_options {
    ADVICE_TOKENS, // --tokens and --length, with as many sequences as fit
    ADVICE_BATCH   // --batch and --length
} advice_options;

typedef struct advice {
    qlora_ctx* ctx;
    const qlora_model_desc* wanted; // does not fit
    const qlora_plan_desc* budget;
    advice_options options;
    qlora_model_desc now; // the settings that are tried
} advice;

static inline bool advice_fits(advice* a) {
    qlora_plan plan;
    return qlora_plan_make(a->ctx, &a->now, a->budget, &plan) == QLORA_OK;
}

// Sets the micro-batch to 1 / 2^halvings of what was wanted: fewer tokens or sequences first, and
// then shorter ones. False if that would be less than 16 tokens.
static inline bool advice_shrink(advice* a, int halvings) {
    const qlora_model_desc* w = a->wanted;
    int64_t length = w->max_length;
    int64_t count = a->options == ADVICE_BATCH ? w->max_sequences : w->tokens / w->max_length;
    for (int i = 0; i < halvings; i++) {
        if (count > 1) {
            count /= 2;
        } else {
            length /= 2;
        }
    }
    a->now.max_length = length;
    a->now.tokens = halvings == 0 ? w->tokens : count * length;
    a->now.max_sequences = a->options == ADVICE_BATCH ? count
                           : halvings == 0            ? w->max_sequences
                           : a->now.tokens >= 16      ? a->now.tokens / 8
                                                      : 1;
    if (a->now.generate_tokens > length) {
        a->now.generate_tokens = length;
    }
    return length >= 16;
}

// Finds the largest micro-batch that fits with the other settings as they are.
static inline bool advice_size(advice* a) {
    int most = 0;
    while (advice_shrink(a, most + 1)) {
        most++;
    }
    advice_shrink(a, most);
    if (!advice_fits(a)) {
        return false;
    }
    for (int halvings = 0; halvings <= most; halvings++) {
        advice_shrink(a, halvings);
        if (advice_fits(a)) {
            return true;
        }
    }
    return false;
}

// The options that differ from what was wanted, as the user would type them.
static inline void advice_write(const advice* a, char out[256]) {
    const qlora_model_desc* w = a->wanted;
    const qlora_model_desc* n = &a->now;
    size_t used = (size_t)snprintf(out, 256, "it would fit with");
    if (n->recompute != w->recompute) {
        used += (size_t)snprintf(out + used, 256 - used, " --recompute auto");
    }
    if (n->cache != w->cache) {
        used += (size_t)snprintf(out + used, 256 - used, " --cache auto");
    }
    if (n->base != w->base) {
        used += (size_t)snprintf(out + used, 256 - used, " --base %s",
                                 qlora_base_format_name(n->base));
    }
    if (n->rank != w->rank) {
        used += (size_t)snprintf(out + used, 256 - used, " --rank %d", (int)n->rank);
    }
    if (a->options == ADVICE_TOKENS && n->tokens != w->tokens) {
        used += (size_t)snprintf(out + used, 256 - used, " --tokens %" PRId64, n->tokens);
    }
    if (a->options == ADVICE_BATCH && n->max_sequences != w->max_sequences) {
        used += (size_t)snprintf(out + used, 256 - used, " --batch %" PRId64, n->max_sequences);
    }
    if (n->max_length != w->max_length) {
        snprintf(out + used, 256 - used, " --length %" PRId64, n->max_length);
    }
}

// Writes settings that fit, or that none does and why. The smallest change comes first: what the
// library chooses by itself, the size of the micro-batch, the rank, the format of the base.
static inline void advice_find(qlora_ctx* ctx, const qlora_model_desc* wanted,
                               const qlora_plan_desc* budget, advice_options options,
                               char out[256]) {
    static const int32_t ranks[] = {0, 8, 4, 1}; // 0: as wanted
    advice a;
    memset(&a, 0, sizeof a);
    a.ctx = ctx;
    a.wanted = wanted;
    a.budget = budget;
    a.options = options;
    for (int base = 0; base < (wanted->base != QLORA_BASE_NF4 ? 2 : 1); base++) {
        for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
            if (ranks[i] != 0 && (wanted->adapter != NULL || ranks[i] >= wanted->rank)) {
                continue;
            }
            a.now = *wanted;
            a.now.recompute = QLORA_CHOICE_AUTO;
            a.now.cache = wanted->cache == QLORA_CHOICE_ON ? QLORA_CHOICE_AUTO : wanted->cache;
            a.now.base = base == 0 ? wanted->base : QLORA_BASE_NF4;
            a.now.rank = ranks[i] != 0 ? ranks[i] : wanted->rank;
            if (advice_size(&a)) {
                advice_write(&a, out);
                return;
            }
        }
    }
    qlora_plan_desc any = *budget;
    qlora_plan plan;
    char size[32];
    any.bytes = UINT64_MAX / 2;
    if (qlora_plan_make(ctx, &a.now, &any, &plan) != QLORA_OK) {
        snprintf(out, 256, "no smaller setting fits");
        return;
    }
    bool context = plan.context > plan.base; // of the GPU, whatever the model is
    snprintf(out, 256, "no smaller setting fits: the %s alone take%s %s",
             context ? "GPU context" : "frozen weights", context ? "s" : "",
             bytes_text(context ? plan.context : plan.base, size));
}

#endif
