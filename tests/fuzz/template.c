// template.c - libFuzzer target: any bytes as a chat template and a conversation.
//
// The template ends at the first zero byte; what follows is the conversation, in JSON. If there is
// none, a fixed conversation is used. The first byte selects the options. Run it in the root of the
// repository: it uses a small tokenizer in tests/golden.

static const char usual[] =
    "{\"messages\":[{\"role\":\"user\",\"content\":\"hi <s>\"},{\"role\":\"assistant\",\"content\":"
    "\"yo\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"a\\\":1}\"}}]},{"
    "\"role\":"
    "\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"reasoning_content\":\"t\",\"content\":"
    "\"<think>x</think>bye\"}],\"tools\":[{\"type\":\"function\"}],\"d\":{\"a\":[1,2.5,null]}}";

// The rendering alone. Spans lie inside it.
static void render(const char* source, size_t size, const char* json, size_t json_size,
                   bool prompt) {
    qlora_text_template* compiled = NULL;
    qlora_text_render_desc desc;
    qlora_text_bytes out = {0};
    qlora_text_spans spans = {0};
    memset(&desc, 0, sizeof(desc));
    desc.conversation = json;
    desc.conversation_size = json_size;
    desc.generation_prompt = prompt;
    desc.bos_token = "<s>";
    desc.eos_token = "</s>";
    if (qlora_text_template_compile(lib(), "t", source, size, &compiled) == QLORA_OK &&
        qlora_text_template_render(compiled, &desc, &out, &spans) == QLORA_OK) {
        for (size_t i = 0; i < spans.count; i++) {
            if (spans.data[i].begin > spans.data[i].end) {
                abort();
            }
        }
    } else if (out.count > 0 || qlora_text_last_error(lib())[0] == 0) {
        abort();
    }
    qlora_text_bytes_free(lib(), &out);
    qlora_text_spans_free(lib(), &spans);
    must(qlora_text_template_close(compiled));
}

// As tokenize shows it: a label for every id.
static void show(qlora_text_chat* chat, const char* json, size_t json_size) {
    qlora_text_bytes text = {0};
    qlora_text_ids ids = {0};
    qlora_text_ids labels = {0};
    qlora_result r =
        qlora_text_chat_encode_json(chat, json, json_size, false, &text, &ids, &labels);
    if (ids.count != labels.count || (r != QLORA_OK && ids.count > 0)) {
        abort();
    }
    for (size_t i = 0; i < ids.count; i++) {
        if (labels.data[i] != -100 && labels.data[i] != ids.data[i]) {
            abort();
        }
    }
    qlora_text_bytes_free(lib(), &text);
    qlora_text_ids_free(lib(), &ids);
    qlora_text_ids_free(lib(), &labels);
}

// As a chat: ids and labels of a training sample.
static void train(const char* source, size_t size, const char* json, size_t json_size) {
    static qlora_text_tok* tok;
    qlora_text_chat* chat = NULL;
    qlora_text_chat_desc desc;
    qlora_text_data_desc data_desc;
    qlora_text_data* data = NULL;
    if (tok == NULL) {
        must(qlora_text_tok_open(lib(), "tests/golden/text_byte.json", &tok));
    }
    memset(&desc, 0, sizeof(desc));
    memset(&data_desc, 0, sizeof(data_desc));
    desc.tok = tok;
    desc.name = "plain";
    must(qlora_text_chat_open(lib(), &desc, &chat));
    qlora__jin_template_free(&lib()->env, chat->template_);
    chat->template_ = NULL;
    chat->built_in = false;
    if (qlora__text_chat_compile(chat, "t", source, size) == QLORA_OK) {
        data_desc.chat = chat;
        data_desc.path = "x.jsonl";
        if (qlora_text_data_load(lib(), &data_desc, json, json_size, &data) == QLORA_OK) {
            for (size_t i = 0; i < qlora_text_data_count(data); i++) {
                qlora_text_sample sample;
                must(qlora_text_sample_read(data, i, &sample));
                for (size_t k = 0; k < sample.count; k++) {
                    if (sample.labels[k] != -100 && sample.labels[k] != sample.ids[k]) {
                        abort();
                    }
                }
            }
        }
    }
    must(qlora_text_data_close(data));
    if (chat->template_ != NULL) {
        show(chat, json, json_size);
    }
    must(qlora_text_chat_close(chat));
}

static int fuzz_template(const uint8_t* data, size_t size) {
    if (size < 2) {
        return 0;
    }
    const char* source = (const char*)data + 1;
    const char* zero = (const char*)memchr(source, 0, size - 1);
    size_t length = zero != NULL ? (size_t)(zero - source) : size - 1;
    const char* json = zero != NULL ? zero + 1 : usual;
    size_t json_size = zero != NULL ? size - 2 - length : sizeof(usual) - 1;
    render(source, length, json, json_size, (data[0] & 1) != 0);
    if ((data[0] & 2) != 0) {
        train(source, length, json, json_size);
    }
    return 0;
}
