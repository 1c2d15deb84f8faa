// template_side.c - renders many templates in one process, for template_check.py.
//
// Reads cases from the standard input: a line with 1 for a generation prompt and the sizes of the
// template and of the conversation, then both. Writes for each a line with 0 or 1 (an error) and a
// size, then the text or the message.

#define QLORA_STATIC // the compiler leaves out what is not used
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"

#define NOW 1785067200 // 2026-07-26 12:00:00

static char* take(size_t size) {
    char* data = (char*)malloc(size + 1);
    if (data != NULL && fread(data, 1, size, stdin) != size) {
        free(data);
        data = NULL;
    }
    return data;
}

static int answer(int status, const char* data, size_t size) {
    printf("%d %lu\n", status, (unsigned long)size);
    return fwrite(data, 1, size, stdout) == size && fflush(stdout) == 0 ? 0 : 1;
}

static int render(qlora_text* text, const char* source, size_t size, const char* json,
                  size_t json_size, bool prompt) {
    qlora_text_template* compiled = NULL;
    qlora_text_render_desc desc;
    qlora_text_bytes out;
    memset(&desc, 0, sizeof desc);
    memset(&out, 0, sizeof out);
    desc.conversation = json;
    desc.conversation_size = json_size;
    desc.generation_prompt = prompt;
    desc.clock = NOW;
    desc.bos_token = "<s>";
    desc.eos_token = "</s>";
    desc.pad_token = "<pad>";
    desc.unk_token = "<unk>";
    qlora_result r = qlora_text_template_compile(text, "t", source, size, &compiled);
    r = r == QLORA_OK ? qlora_text_template_render(compiled, &desc, &out, NULL) : r;
    const char* error = qlora_text_last_error(text);
    int status = r == QLORA_OK ? answer(0, out.data != NULL ? out.data : "", out.count)
                               : answer(1, error, strlen(error));
    qlora_text_bytes_free(text, &out);
    (void)qlora_text_template_close(compiled);
    return status;
}

int main(void) {
    qlora_text* text = NULL;
    unsigned long size = 0;
    unsigned long json_size = 0;
    int prompt = 0;
    int status = qlora_text_create(NULL, &text) == QLORA_OK ? 0 : 1;
    while (status == 0 && scanf("%d %lu %lu", &prompt, &size, &json_size) == 3 &&
           getchar() == '\n') {
        char* source = take(size);
        char* json = take(json_size);
        status = source != NULL && json != NULL
                     ? render(text, source, size, json, json_size, prompt != 0)
                     : 1;
        free(source);
        free(json);
    }
    (void)qlora_text_destroy(text);
    return status;
}
