// What of a conversation is trained.
//
// With generation blocks, the template says what the assistant wrote. Otherwise a turn is what the
// rendering up to it has more than the rendering before it with the generation prompt: what a model
// continues. A template that changes earlier turns when later ones follow (it drops their thoughts,
// say) cannot be trained on one text: then each turn is a sample of its own, as inference sees it.

static size_t qlora__text_common(const qlora_text_bytes* a, const qlora_text_bytes* b) {
    size_t same = 0;
    while (same < a->count && same < b->count && a->data[same] == b->data[same]) {
        same++;
    }
    while (same > 0 && same < a->count && ((unsigned char)a->data[same] & 0xC0) == 0x80) {
        same--; // not inside a character
    }
    return same;
}

static bool qlora__text_starts(const qlora_text_bytes* text, const qlora_text_bytes* start,
                               size_t size) {
    return text->count >= size && start->count >= size &&
           (size == 0 || memcmp(text->data, start->data, size) == 0);
}

// Whether the answer talk->after[begin, end) ends with an end marker: not with the one before its
// content, if it has none.
static qlora_result qlora__text_answer_ended(qlora__env* env, const qlora__text_talk* talk,
                                             size_t begin, size_t end, bool* ended) {
    const qlora_text_chat* chat = talk->chat;
    qlora__text_marks_seen seen;
    QLORA__TRY(qlora__text_see_markers(env, chat, talk->after.data + begin, end - begin, &seen));
    *ended = seen.last && (seen.final != chat->opens || qlora__text_chat_stops(chat, seen.final));
    return QLORA_OK;
}

// The end marker of an answer that the template writes without one. A marker that follows it in a
// longer rendering, `next`, counts if generation stops at it, or if another one follows at once:
// then it ends the turn and does not begin the next one. If the answer is the `last` of the text,
// it gets what follows answers elsewhere, or EOS. `same`: the bytes that both texts start with.
static qlora_result qlora__text_answer_mark(qlora__env* env, qlora__text_talk* talk,
                                            const qlora_text_bytes* next, size_t same, bool last) {
    const qlora_text_chat* chat = talk->chat;
    qlora_text_bytes* after = &talk->after;
    qlora__text_marks_seen seen;
    if (same == after->count && next->count > same) {
        QLORA__TRY(
            qlora__text_see_markers(env, chat, next->data + same, next->count - same, &seen));
        bool closes = seen.first >= 0 && seen.first != chat->bos &&
                      (seen.run > 1 || qlora__text_chat_stops(chat, seen.first));
        if (closes) {
            return qlora__text_bytes_add(env, after, next->data + same, seen.first_end);
        }
    }
    if (!last) {
        return QLORA_OK;
    }
    if (chat->closes.size > 0) {
        return qlora__text_bytes_add(env, after, chat->closes.data, chat->closes.size);
    }
    const qlora__text_owned* eos = &chat->tokens[1];
    return chat->eos >= 0 && qlora__text_is_marker(chat->tok, chat->eos) && eos->size > 0
               ? qlora__text_bytes_add(env, after, eos->data, eos->size)
               : QLORA_OK;
}

// Where the answer ends in talk->after. What follows its end marker is not generated: whitespace,
// and what the template writes only at the end of a conversation (such as EOS). A template that
// writes no end marker gets it here. `next` is a longer rendering.
static qlora_result qlora__text_answer_end(qlora__env* env, qlora__text_talk* talk, size_t begin,
                                           const qlora_text_bytes* next, bool last, size_t* end) {
    const qlora_text_chat* chat = talk->chat;
    qlora_text_bytes* after = &talk->after;
    qlora__text_marks_seen seen;
    bool ended = false;
    size_t same = qlora__text_common(after, next);
    *end = after->count;
    // two markers may start alike, so the difference may begin inside one
    for (size_t back = 0; back < 24 && same > begin + back && same < after->count; back++) {
        size_t from = same - back;
        QLORA__TRY(
            qlora__text_see_markers(env, chat, after->data + from, after->count - from, &seen));
        if (seen.alone) {
            *end = from;
            break;
        }
    }
    for (int i = 0; i < 2 && !ended; i++) { // without what only the last answer has, or with it
        size_t cut = qlora__jin_back_space(after->data, begin, i == 0 ? *end : after->count);
        QLORA__TRY(qlora__text_answer_ended(env, talk, begin, cut, &ended));
        *end = ended ? cut : after->count;
    }
    if (!ended) {
        QLORA__TRY(qlora__text_answer_mark(env, talk, next, same, last));
        *end = after->count;
    }
    return QLORA_OK;
}

// A rendering that goes on after turn k: the whole conversation, or with a question added.
static qlora_result qlora__text_talk_next(qlora__env* env, qlora__text_talk* talk, size_t k,
                                          const qlora_text_bytes** out) {
    *out = &talk->whole;
    if (k + 1 < talk->count) {
        return QLORA_OK;
    }
    char error[QLORA__ERROR_SIZE];
    memcpy(error, env->error, sizeof error);
    talk->asks = true;
    qlora_result r = qlora__text_talk_render(env, talk, k + 1, false, &talk->next, NULL);
    talk->asks = false;
    *out = &talk->next;
    if (r == QLORA_ERR_FORMAT) { // not every turn may be followed by a question
        memcpy(env->error, error, sizeof error);
        talk->next.count = 0;
        return QLORA_OK;
    }
    return r;
}

// A template that ignores tool calls would train an empty answer.
static qlora_result qlora__text_turn_calls(qlora__env* env, const qlora__text_talk* talk, size_t k,
                                           size_t begin, size_t end) {
    const qlora__json_token* node = talk->turns[k].node;
    const qlora__json_token* calls =
        node != NULL ? qlora__text_json_get(talk->json, node, "tool_calls") : NULL;
    qlora__text_marks_seen seen;
    if (calls == NULL || calls->kind != QLORA__JSON_ARRAY || calls->count == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(
        qlora__text_see_markers(env, talk->chat, talk->after.data + begin, end - begin, &seen));
    return seen.alone && talk->turns[k].length == 0
               ? qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                 "message %lu has tool_calls, which the template does not render",
                                 (unsigned long)k + 1)
               : QLORA_OK;
}

// The answer of turn k: talk->after is the text up to it, *begin and *end its place there.
// `last`: no turn follows in the text that is made of it.
static qlora_result qlora__text_turn_span(qlora__env* env, qlora__text_talk* talk, size_t k,
                                          bool last, size_t* begin, size_t* end) {
    const qlora_text_bytes* next = NULL;
    QLORA__TRY(qlora__text_talk_render(env, talk, k, true, &talk->before, NULL));
    QLORA__TRY(qlora__text_talk_render(env, talk, k + 1, false, &talk->after, NULL));
    size_t size = talk->before.count;
    if (!qlora__text_starts(&talk->after, &talk->before, size)) {
        size_t same = qlora__text_common(&talk->before, &talk->after);
        size_t shown = size - same < 40 ? size - same : 40;
        return qlora__env_fail(
            env, QLORA_ERR_UNSUPPORTED,
            "message %lu: the template's generation prompt goes on with \"%.*s\", but its answer "
            "does not start like that, so what to train is unclear; use a template with "
            "{%% generation %%} blocks (--chat-template)",
            (unsigned long)k + 1, (int)shown, talk->before.data + same);
    }
    *begin = size;
    QLORA__TRY(qlora__text_talk_next(env, talk, k, &next));
    QLORA__TRY(qlora__text_answer_end(env, talk, size, next, last, end));
    return qlora__text_turn_calls(env, talk, k, *begin, *end);
}

static bool qlora__text_is_trained(const qlora__text_turn* turn) {
    return strcmp(turn->role, "assistant") == 0 && !turn->masked;
}

// Generation blocks: one span for each assistant turn, unless nothing has to be left out.
static qlora_result qlora__text_talk_blocks(qlora__env* env, qlora__text_talk* talk) {
    size_t answers = 0;
    size_t masked = 0;
    size_t kept = 0;
    size_t at = 0;
    for (size_t i = 0; i < talk->count; i++) {
        bool assistant = strcmp(talk->turns[i].role, "assistant") == 0;
        answers += assistant ? 1 : 0;
        masked += assistant && talk->turns[i].masked ? 1 : 0;
    }
    if (masked > 0 && talk->spans.count != answers) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "the template has %lu generation blocks for %lu answers, so it is "
                               "unclear which of them are not to be trained",
                               (unsigned long)talk->spans.count, (unsigned long)answers);
    }
    for (size_t i = 0; masked > 0 && i < talk->count; i++) {
        if (strcmp(talk->turns[i].role, "assistant") == 0) {
            if (!talk->turns[i].masked) {
                talk->spans.data[kept++] = talk->spans.data[at];
            }
            at++;
        }
    }
    talk->spans.count = masked > 0 ? kept : talk->spans.count;
    return QLORA_OK;
}

// Renders the whole conversation and finds its trained spans; talk->stable is false when one text
// cannot have them all.
static qlora_result qlora__text_talk_plan(qlora__env* env, qlora__text_talk* talk) {
    bool blocks = qlora__text_talk_template(talk)->generation;
    talk->spans.count = 0;
    talk->stable = true;
    talk->chat->blocks = blocks;
    QLORA__TRY(qlora__text_talk_render(env, talk, talk->count, false, &talk->whole,
                                       blocks ? &talk->spans : NULL));
    if (blocks) {
        return qlora__text_talk_blocks(env, talk);
    }
    for (size_t k = 0; k < talk->count && (talk->stable || talk->literal); k++) {
        size_t begin = 0;
        size_t end = 0;
        if (!qlora__text_is_trained(&talk->turns[k])) {
            continue;
        }
        QLORA__TRY(qlora__text_turn_span(env, talk, k, k + 1 == talk->count, &begin, &end));
        if (k + 1 == talk->count &&
            qlora__text_starts(&talk->after, &talk->whole, talk->whole.count)) {
            // the last answer may have got its end marker
            QLORA__TRY(qlora__text_bytes_add(env, &talk->whole,
                                             talk->after.data + talk->whole.count,
                                             talk->after.count - talk->whole.count));
        }
        bool same = qlora__text_starts(&talk->whole, &talk->after, end);
        talk->stable = talk->stable && same;
        if (same) {
            QLORA__TRY(qlora__jin_spans_add(env, &talk->spans, begin, end));
        }
    }
    return QLORA_OK;
}

// The sample of turn k alone, for templates that change earlier turns.
static QLORA__UNUSED qlora_result qlora__text_talk_turn(qlora__env* env, qlora__text_talk* talk,
                                                        size_t k, qlora__text_output* o) {
    size_t begin = 0;
    size_t end = 0;
    QLORA__TRY(qlora__text_turn_span(env, talk, k, true, &begin, &end));
    talk->spans.count = 0;
    QLORA__TRY(qlora__jin_spans_add(env, &talk->spans, begin, end));
    return qlora__text_output_text(env, o, talk->chat, &talk->after, &talk->spans);
}

// Appends ids and labels of the whole conversation.
static qlora_result qlora__text_talk_encode(qlora__env* env, qlora__text_talk* talk, bool prompt,
                                            qlora_text_ids* ids, qlora_text_ids* labels) {
    qlora__text_output o = qlora__text_output_start(ids, labels);
    o.complete = talk->literal;
    // a built-in format adds EOS to answers that have no end marker, with labels and without
    if (prompt || (labels == NULL && !talk->chat->built_in)) {
        talk->spans.count = 0;
        QLORA__TRY(qlora__text_talk_render(env, talk, talk->count, prompt, &talk->whole, NULL));
        return qlora__text_output_text(env, &o, talk->chat, &talk->whole, &talk->spans);
    }
    QLORA__TRY(qlora__text_talk_plan(env, talk));
    if (!talk->stable && !talk->literal) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "the template renders earlier turns differently when later ones "
                               "follow, so one text cannot train them all");
    }
    return qlora__text_output_text(env, &o, talk->chat, &talk->whole, &talk->spans);
}
