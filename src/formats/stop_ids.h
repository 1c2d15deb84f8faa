#ifndef QLORA__PART_STOP_IDS
#define QLORA__PART_STOP_IDS

// ---- the ids that end a text --------------------------------------------------------------------

// As transformers (5.22) reads them: where there is a generation_config.json, it alone decides,
// even if it names none; else config.json does (in "text_config", where a model that also sees or
// hears keeps its language part). The key "eos_token_id" holds one id or a list; null and an empty
// list name none.
#define QLORA__MAX_STOP_IDS 16

typedef struct qlora__stop_ids {
    int32_t id[QLORA__MAX_STOP_IDS];
    int32_t count;
} qlora__stop_ids;

// Reads one object, which replaces *out. Ids must be below `vocab`.
static QLORA__UNUSED qlora_result qlora__stop_ids_read(qlora__env* env, const qlora__json* json,
                                                       uint32_t object, int64_t vocab,
                                                       qlora__stop_ids* out) {
    uint32_t value = qlora__json_find(json, object, "eos_token_id");
    if (value == 0 || qlora__json_kind_of(json, value) == QLORA__JSON_NULL) {
        out->count = 0;
        return QLORA_OK;
    }
    bool list = qlora__json_kind_of(json, value) == QLORA__JSON_ARRAY;
    uint32_t count = list ? json->tokens[value].count : 1;
    if (count > QLORA__MAX_STOP_IDS) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: eos_token_id lists %u ids; %d at most", json->label, count,
                               QLORA__MAX_STOP_IDS);
    }
    qlora__stop_ids ids;
    memset(&ids, 0, sizeof ids);
    for (uint32_t i = 0; i < count; i++) {
        int64_t id = 0;
        if (!qlora__json_int(json, list ? value + 1 + i : value, &id) || id < 0 || id >= vocab) {
            const qlora__json_token* t = &json->tokens[value];
            bool string = t->kind == QLORA__JSON_STRING;
            return qlora__env_fail(
                env, QLORA_ERR_FORMAT,
                "%s: eos_token_id is %.*s; ids must be from 0 to vocab_size - 1 (%lld)",
                json->label, t->end - t->begin < 44 ? (int)(t->end - t->begin) : 44,
                (string ? json->strings : json->text) + t->begin, (long long)vocab - 1);
        }
        ids.id[i] = (int32_t)id;
    }
    ids.count = (int32_t)count;
    *out = ids;
    return QLORA_OK;
}

#endif // QLORA__PART_STOP_IDS
