// bench_data.h - reading training data: JSON to packed tokens, on one core.
//
//     build/bench data TOKENIZER FILE [TOKENS] [--stream] [--template NAME]
//
// FILE has records {"question", "answer"}, one per line. They are written as conversations
// ("messages") into a temporary file, again and again until it has TOKENS tokens (10 million).
// That file is then read, tokenized with the chat format NAME (chatml), and packed into
// micro-batches of 4096 tokens, as finetune does it. Times are those of the processor, so that a
// busy machine does not count.
#ifndef BENCH_DATA_H
#define BENCH_DATA_H

#include "qlora_text.h"

#include <sys/resource.h>
#include <unistd.h>

enum { DATA_PACK = 4096, DATA_OPEN = 32 };

typedef struct data_bench {
    const char* tokenizer;
    const char* file;
    const char* template_name;
    char path[64];
    double wanted; // tokens
    bool stream;
    qlora_text* text;
    qlora_text_tok* tok;
    qlora_text_chat* chat;
    qlora_text_data* data;
} data_bench;

static double data_seconds(void) { // user time of this process
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_utime.tv_sec + 1e-6 * (double)usage.ru_utime.tv_usec;
}

static double data_memory(void) { // peak, in MiB
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_maxrss / 1024.0;
}

static bool data_fail(const data_bench* b) {
    fprintf(stderr, "bench: %s\n", qlora_text_last_error(b->text));
    return false;
}

static bool data_read(data_bench* b, const char* path) {
    qlora_text_data_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.chat = b->chat;
    desc.stream = b->stream;
    return qlora_text_data_open(b->text, &desc, &b->data) == QLORA_OK || data_fail(b);
}

// The tokens of all samples.
static double data_tokens(const data_bench* b) {
    double tokens = 0.0;
    for (size_t i = 0; i < qlora_text_data_count(b->data); i++) {
        qlora_text_sample sample;
        if (qlora_text_sample_read(b->data, i, &sample) == QLORA_OK) {
            tokens += (double)sample.count;
        }
    }
    return tokens;
}

// {"question": Q, "answer": A} on a line as messages; Q and A stay as JSON spells them.
static bool data_message(FILE* to, const char* line) {
    static const char ask[] = "\"question\": \"";
    static const char reply[] = "\", \"answer\": \"";
    const char* question = strstr(line, ask);
    const char* answer = strstr(line, reply);
    const char* end = strrchr(line, '"');
    if (question == NULL || answer == NULL || end < answer + sizeof reply - 1) {
        return false;
    }
    question += sizeof ask - 1;
    int asked = (int)(answer - question);
    answer += sizeof reply - 1;
    return fprintf(to,
                   "{\"messages\": [{\"role\": \"user\", \"content\": \"%.*s\"}, "
                   "{\"role\": \"assistant\", \"content\": \"%.*s\"}]}\n",
                   asked, question, (int)(end - answer), answer) > 0;
}

// Writes the conversations `times` times.
static bool data_write(const data_bench* b, int times) {
    static char line[65536];
    FILE* to = fopen(b->path, "wb");
    bool ok = to != NULL;
    for (int i = 0; i < times && ok; i++) {
        FILE* from = fopen(b->file, "rb");
        ok = from != NULL;
        while (ok && fgets(line, sizeof line, from) != NULL) {
            ok = data_message(to, line);
        }
        if (from != NULL) {
            fclose(from);
        }
    }
    if (to != NULL && fclose(to) != 0) {
        ok = false;
    }
    if (!ok) {
        fprintf(stderr, "bench: cannot write conversations of %s to %s\n", b->file, b->path);
    }
    return ok;
}

// Copies every sample into the first of a few open packs that has room; returns the packs.
static size_t data_pack(const data_bench* b, double* tokens) {
    static int32_t packs[DATA_OPEN][2][DATA_PACK];
    size_t used[DATA_OPEN] = {0};
    size_t made = 0;
    *tokens = 0.0;
    for (size_t i = 0; i < qlora_text_data_count(b->data); i++) {
        qlora_text_sample s;
        if (qlora_text_sample_read(b->data, i, &s) != QLORA_OK || s.count > DATA_PACK) {
            continue;
        }
        size_t at = 0;
        size_t fullest = 0;
        while (at < DATA_OPEN && used[at] + s.count > DATA_PACK) {
            fullest = used[at] > used[fullest] ? at : fullest;
            at++;
        }
        at = at == DATA_OPEN ? fullest : at;
        if (used[at] == 0 || used[at] + s.count > DATA_PACK) {
            used[at] = 0;
            made++;
        }
        memcpy(packs[at][0] + used[at], s.ids, s.count * sizeof *s.ids);
        memcpy(packs[at][1] + used[at], s.labels, s.count * sizeof *s.labels);
        used[at] += s.count;
        *tokens += (double)s.count;
    }
    return made;
}

static bool data_open(data_bench* b) {
    qlora_text_chat_desc desc;
    memset(&desc, 0, sizeof desc);
    if (qlora_text_create(NULL, &b->text) != QLORA_OK) {
        return false;
    }
    if (qlora_text_tok_open(b->text, b->tokenizer, &b->tok) != QLORA_OK) {
        return data_fail(b);
    }
    desc.tok = b->tok;
    desc.name = b->template_name;
    if (b->template_name != NULL && strchr(b->template_name, '.') != NULL) {
        desc.name = NULL;
        desc.template_file = b->template_name;
    }
    return qlora_text_chat_open(b->text, &desc, &b->chat) == QLORA_OK || data_fail(b);
}

static bool data_measure(data_bench* b) {
    double tokens = 0.0;
    snprintf(b->path, sizeof b->path, "bench_data_%ld.jsonl", (long)getpid());
    if (!data_open(b) || !data_write(b, 1) || !data_read(b, b->path)) {
        return false;
    }
    double once = data_tokens(b);
    qlora_text_data_close(b->data);
    b->data = NULL;
    if (!data_write(b, (int)(b->wanted / once) + 1)) {
        return false;
    }
    double before = data_memory();
    double start = data_seconds();
    if (!data_read(b, b->path)) {
        return false;
    }
    double read = data_seconds() - start;
    size_t packs = data_pack(b, &tokens);
    double all = data_seconds() - start;
    printf("%zu samples, %.0f tokens, %zu packs of %d tokens\n", qlora_text_data_count(b->data),
           tokens, packs, DATA_PACK);
    printf("%.2f s to read, %.2f s in all: %.2f M tokens/s on one core\n", read, all,
           1e-6 * tokens / all);
    printf("peak memory %.1f MiB; %.1f MiB before, to load the tokenizer\n", data_memory(), before);
    return true;
}

static int bench_data_main(int argc, char** argv) {
    data_bench b;
    int given = 0;
    memset(&b, 0, sizeof b);
    b.wanted = 1e7;
    b.template_name = "chatml";
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--stream") == 0) {
            b.stream = true;
        } else if (strcmp(argv[i], "--template") == 0 && i + 1 < argc) {
            b.template_name = argv[++i];
        } else if (given++ == 0) {
            b.tokenizer = argv[i];
        } else if (given == 2) {
            b.file = argv[i];
        } else {
            b.wanted = strtod(argv[i], NULL);
        }
    }
    if (b.file == NULL || given > 3 || !(b.wanted > 0.0 && b.wanted <= 1e10)) {
        fprintf(stderr, "usage: bench data TOKENIZER FILE [TOKENS] [--stream] [--template NAME]\n");
        return 1;
    }
    bool ok = data_measure(&b);
    remove(b.path);
    qlora_text_data_close(b.data);
    qlora_text_chat_close(b.chat);
    qlora_text_tok_close(b.tok);
    qlora_text_destroy(b.text);
    return ok ? 0 : 1;
}

#endif
