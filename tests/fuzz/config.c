// config.c - libFuzzer target: any text as config.json, generation_config.json, an adapter's
// config, a weight index, a 4-bit tensor's state, or a pattern.

#include "formats_world.h"

static qlora_result fuzz_config_adapter(world* w, const uint8_t* data, size_t size) {
    static qlora__peft peft;
    qlora__peft_module module;
    QLORA__TRY(qlora__peft_parse(&w->env, "fuzz", data, size, &peft));
    qlora_result result =
        qlora__peft_lookup(&w->env, &peft, "model.layers.11.self_attn.q_proj", &module);
    if (result == QLORA_OK && module.rank > 0 && !(module.scale > 0.0)) {
        abort();
    }
    qlora__peft_close(&w->env, &peft);
    return result;
}

static qlora_result fuzz_config_model(world* w, const uint8_t* data, size_t size) {
    qlora_model_config config;
    QLORA__TRY(qlora__config_parse(&w->env, "fuzz", data, size, &config));
    if (config.heads % config.kv_heads != 0 || config.head_dim % 2 != 0 || config.hidden < 1 ||
        config.layers < 1 || config.layers > QLORA_MAX_LAYERS || !(config.rope.theta > 1.0)) {
        abort();
    }
    return qlora__config_parse_generation(&w->env, "fuzz", data, size, &config);
}

static qlora_result fuzz_config_index(world* w, const uint8_t* data, size_t size) {
    static const char empty[] = "\x08\0\0\0\0\0\0\0{}      ";
    static qlora__folder folder;
    world_put(w, "m/model.safetensors.index.json", data, size);
    world_put(w, "m/a", empty, sizeof empty - 1);
    QLORA__TRY(qlora__folder_open(&w->env, "m", &folder));
    qlora__folder_close(&w->env, &folder);
    return QLORA_OK;
}

static qlora_result fuzz_config_state(world* w, const uint8_t* data, size_t size) {
    qlora__json json;
    qlora__linear_source source;
    memset(&source, 0, sizeof source);
    QLORA__TRY(qlora__json_parse(&w->env, "fuzz", data, size, QLORA__JSON_UNIQUE, &json));
    qlora_result result = qlora__bnb_state(&w->env, &json, &source);
    qlora__json_free(&w->env, &json);
    return result;
}

static qlora_result fuzz_config_pattern(world* w, const uint8_t* data, size_t size) {
    static qlora__re re;
    char pattern[512];
    size_t n = size < sizeof pattern ? size : sizeof pattern - 1;
    memcpy(pattern, data, n);
    pattern[n] = '\0';
    qlora__re_compile(&re, pattern);
    if (re.wrong) {
        return qlora__env_fail(&w->env, QLORA_ERR_UNSUPPORTED, "%s", re.wrong);
    }
    qlora__re_match(&re, "model.layers.11.self_attn.q_proj");
    return QLORA_OK;
}

static int fuzz_config(const uint8_t* data, size_t size) {
    static world w;
    if (size == 0) {
        return 0;
    }
    world_begin(&w);
    static qlora_result (*const targets[])(world*, const uint8_t*, size_t) = {
        fuzz_config_model, fuzz_config_adapter, fuzz_config_index, fuzz_config_state,
        fuzz_config_pattern};
    qlora_result result = targets[data[0] % 5](&w, data + 1, size - 1);
    if (result != QLORA_OK && w.env.error[0] == '\0') {
        abort();
    }
    if (!world_end(&w)) {
        abort();
    }
    return 0;
}
