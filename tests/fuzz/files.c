// files.c - libFuzzer target: a valid data or tokenizer file with one change.
//
// The first byte selects the file, the second the options, the others the change (see mutate.h).
// Loading must succeed or fail with a message, leak nothing, and need at most ten times the size of
// the file beyond what the valid one needs. What is accepted is read a second time, and must mean
// the same (judge_data.h, judge_tokens.h). How much of what was accepted could be judged is printed
// at the end; of the valid files it must be nearly everything. Run it in the root of the
// repository, with -timeout=5.
#include "fuzz/mutate.h"
#include "fuzz/second.h"

#include "fuzz/judge_data.h"
#include "fuzz/judge_tokens.h"

// ---- the valid files

static const char answers[] =
    "{\"text\":\"some text\",\"id\":7}\n"
    "{\"prompt\":\"2 and 3 is\",\"completion\":\" five\"}\n"
    "{\"messages\":[{\"role\":\"system\",\"content\":\"Stern\"},{\"role\":\"user\",\"content\":[{"
    "\"type\":\"text\",\"text\":\"hid\"},{\"type\":\"text\",\"text\":\"den\"}]},{\"role\":"
    "\"assistant\",\"content\":\"hops\",\"weight\":1},{\"role\":\"user\",\"content\":\"more?\"},{"
    "\"role\":\"assistant\",\"content\":\"shown\",\"weight\":0}]}\n"
    "{\"messages\":[{\"role\":\"user\",\"content\":\"one\"},{\"role\":\"assistant\",\"content\":"
    "\"two\",\"train\":false},{\"role\":\"user\",\"content\":\"three\"},{\"role\":\"assistant\","
    "\"content\":\" four \"}]}\n"
    "{\"conversations\":[{\"from\":\"human\",\"value\":\"hallo\"},{\"from\":\"gpt\",\"value\":"
    "\"guten Tag\"}],\"system\":\"Sober\"}\n"
    "{\"instruction\":\"Indent\",\"context\":\"Cabbage\",\"response\":\"Rapid\",\"history\":[[\""
    "unit\",\"vowel\"]]}\n"
    "{\"question\":\"Quail\",\"answer\":\"Apricot\",\"input\":\"\"}\n"
    "{\"input\":\"Inlet\",\"output\":\"Outlet\",\"system\":\"Sea\"}\n"
    "{\"input_ids\":[1,2,3,0],\"labels\":[-100,2,3,-100],\"attention_mask\":[1,1,1,0]}\n"
    "{\"input_ids\":[9,8,7],\"position_ids\":[0,1,2]}\n"
    "{\"prompt\":[{\"role\":\"user\",\"content\":\"query\"}],\"completion\":[{\"role\":"
    "\"assistant\",\"content\":\"aloud\",\"train\":true}]}\n";

// For a template of one's own only.
static const char thoughts[] =
    "{\"messages\":[{\"role\":\"user\",\"content\":\"why?\"},{\"role\":\"assistant\","
    "\"reasoning_content\":\"thought\",\"content\":\"so\"},{\"role\":\"tool\",\"content\":\"wet\"},"
    "{\"role\":\"assistant\",\"reasoning_content\":\"\",\"content\":\"rain\"}],\"tools\":[]}\n";

static const char pairs[] =
    "{\"prompt\":\"2 and 3 is\",\"chosen\":\" five\",\"rejected\":\" six\"}\n"
    "{\"prompt\":[{\"role\":\"user\",\"content\":\"quest\"}],\"chosen\":[{\"role\":\"assistant\","
    "\"content\":\"yes\"}],\"rejected\":[{\"role\":\"assistant\",\"content\":\"no\"}],\"system\":"
    "\"Short\"}\n"
    "{\"chosen\":[{\"role\":\"user\",\"content\":\"u\"},{\"role\":\"assistant\",\"content\":\"v\"}"
    ",{\"role\":\"user\",\"content\":\"w\"},{\"role\":\"assistant\",\"content\":\"xy\"}],"
    "\"rejected\":[{\"role\":\"user\",\"content\":\"u\"},{\"role\":\"assistant\",\"content\":"
    "\"z\",\"train\":true}]}\n";

static const char judged[] =
    "{\"prompt\":\"2 and 3 is\",\"completion\":\" five\",\"label\":true}\n"
    "{\"messages\":[{\"role\":\"user\",\"content\":\"hum\"},{\"role\":\"assistant\",\"content\":"
    "\"song\"},{\"role\":\"user\",\"content\":\"di\"},{\"role\":\"assistant\",\"content\":"
    "\"dum\"}],\"label\":false}\n"
    "{\"instruction\":\"Indent\",\"input\":\"Ibis\",\"output\":\"Ode\",\"label\":true}\n";

static const char* const tables[] = {
    "prompt,completion,id\n2 and 3 is, five,1\n\"a, b\",\"say \"\"so\"\"\",2\n\"two\nlines\",c,3\n",
    "instruction,input,output\nIndent,Ibis,Ode\nQuail,,Apricot\n",
    "text\r\n\"some text\"\r\n\r\nNA\r\n\"\"\r\n"};

static const char documents[] = "A first document,\nof two lines.\n\n<|endoftext|>\nThe second.\n"
                                "<|endoftext|>  \r\n\n<|endoftext|>\nAnd a third one";

// Members that a record or a message may have: the change adds one of them somewhere.
static const char* const members[] = {
    "\"weight\":0",
    "\"weight\":0.5",
    "\"train\":false",
    "\"train\":1",
    "\"system\":\"Silence\"",
    "\"system\":\"\"",
    "\"input\":\"Iron\"",
    "\"context\":\"Copper\"",
    "\"history\":[[\"un\",\"deux\"]]",
    "\"prompt\":\"Put\"",
    "\"completion\":\"Cut\"",
    "\"response\":\"Rut\"",
    "\"output\":\"Out\"",
    "\"answer\":\"Ant\"",
    "\"text\":\"Tent\"",
    "\"role\":\"user\"",
    "\"from\":\"gpt\"",
    "\"content\":\"Cork\"",
    "\"content\":[{\"text\":\"Clay\"}]",
    "\"value\":\"Vat\"",
    "\"type\":\"image\"",
    "\"reasoning_content\":\"Reason\"",
    "\"thinking\":\"Think\"",
    "\"tool_calls\":[{\"name\":\"f\"}]",
    "\"label\":true",
    "\"label\":0",
    "\"labels\":[1,2,3]",
    "\"attention_mask\":[0,1,1]",
    "\"position_ids\":[0,1,2]",
    "\"loss_mask\":[0,1,1]",
    "\"tools\":[{\"name\":\"f\"}]",
    "\"images\":[\"a.png\"]",
    "\"messages\":[{\"role\":\"assistant\",\"content\":\"Moss\"}]",
    "\"chosen\":\"Chalk\"",
    "\"rejected\":\"Rye\"",
    "\"data\":[{\"text\":\"Dune\"}]"};

// ---- memory

static size_t memory_now;
static size_t memory_peak;

static void* counted_alloc(size_t bytes, size_t align, void* user) {
    (void)align;
    (void)user;
    memory_now += bytes;
    memory_peak = memory_now > memory_peak ? memory_now : memory_peak;
    return malloc(bytes);
}

static void counted_free(void* pointer, size_t bytes, void* user) {
    (void)user;
    memory_now -= bytes;
    free(pointer);
}

static void require(bool ok) {
    if (!ok) {
        abort();
    }
}

static qlora_text* text_open(void) {
    qlora_text_desc d;
    qlora_text* text = NULL;
    memset(&d, 0, sizeof d);
    d.allocator.alloc = counted_alloc;
    d.allocator.free = counted_free;
    require(qlora_text_create(&d, &text) == QLORA_OK);
    return text;
}

// ---- judging

static judge_count counts[2]; // data, tokenizers

static void counts_print(void) {
    static const char* const names[] = {"samples", "tokenizers"};
    for (int i = 0; i < 2; i++) {
        fprintf(stderr, "%s: %lu accepted, %lu judged (%.1f %%)\n", names[i],
                (unsigned long)counts[i].accepted, (unsigned long)counts[i].judged,
                100.0 * (double)counts[i].judged /
                    (double)(counts[i].accepted > 0 ? counts[i].accepted : 1));
    }
}

static void data_judge(const buffer* b, const char* path, const judge_options* o,
                       qlora_text_data* data) {
    bool ok = true;
    if (strcmp(path, "x.txt") == 0) {
        documents_judge(b, data, &counts[0]);
        return;
    }
    second* records =
        o->text_only ? second_rows(b->data, b->size, &ok) : second_records(b->data, b->size, &ok);
    finding(ok, "a file that cannot be read was accepted", path);
    records_judge(records, o, data, &counts[0]);
    second_free(records);
}

static void data_try(const buffer* b, const char* path, const judge_options* o) {
    static const char* const names[] = {"chatml", "plain", "alpaca", "llama3", NULL};
    static qlora_text* text;
    static qlora_text_tok* tok;
    qlora_text_chat_desc cd;
    qlora_text_data_desc dd;
    qlora_text_data* data = NULL;
    memset(&cd, 0, sizeof cd);
    memset(&dd, 0, sizeof dd);
    if (text == NULL) {
        text = text_open();
        require(qlora_text_tok_open(text, "tests/golden/text_byte.json", &tok) == QLORA_OK);
    }
    cd.tok = tok;
    cd.name = names[o->chat];
    cd.template_file = o->chat == OWN ? "tests/fuzz/answers.jinja" : NULL;
    require(qlora_text_chat_open(text, &cd, &dd.chat) == QLORA_OK);
    dd.path = path;
    dd.train_prompt = o->train_prompt;
    dd.last_turn_only = o->last_only;
    dd.preference = o->preference;
    memory_peak = memory_now;
    size_t before = memory_now;
    qlora_result r = qlora_text_data_load(text, &dd, b->data, b->size, &data);
    require((r == QLORA_OK) == (qlora_text_last_error(text)[0] == '\0'));
    require((r == QLORA_OK) == (data != NULL));
    require(memory_peak - before <= 10 * b->size + 65536); // and the smallest arrays
    for (size_t i = 0; i < qlora_text_data_count(data); i++) {
        qlora_text_sample s;
        require(qlora_text_sample_read(data, i, &s) == QLORA_OK && s.line > 0);
        for (size_t k = 0; k < s.count; k++) {
            require(s.ids[k] >= 0 && (s.labels[k] >= 0 || s.labels[k] == -100));
        }
    }
    if (data != NULL) {
        data_judge(b, path, o, data);
    } else if (getenv("QLORA_FUZZ_SAVE") != NULL) {
        fprintf(stderr, "refused: %s\n", qlora_text_last_error(text));
    }
    require(qlora_text_data_close(data) == QLORA_OK);
    require(qlora_text_chat_close(dd.chat) == QLORA_OK);
}

// Returns the memory that was needed. `valid` is the file without the change.
static size_t tokenizer_try(const buffer* b, const buffer* valid) {
    static const char sample[] = "The caf\xC3\xA9's e\xCC\x81 <s> 12345\r\n\t x \xFF";
    size_t started = memory_now;
    qlora_text* text = text_open();
    qlora_text_tok* tok = NULL;
    qlora_text_ids ids;
    qlora_text_bytes back;
    memset(&ids, 0, sizeof ids);
    memset(&back, 0, sizeof back);
    memory_peak = memory_now;
    size_t before = memory_now;
    qlora_result r = qlora_text_tok_load(text, "fuzz", b->data, b->size, &tok);
    require((r == QLORA_OK) == (qlora_text_last_error(text)[0] == '\0'));
    if (r == QLORA_OK) {
        require(qlora_text_encode(tok, sample, sizeof sample - 1, QLORA_TEXT_SPECIAL, &ids) ==
                QLORA_OK);
        require(qlora_text_decode(tok, ids.data, ids.count, QLORA_TEXT_REPLACE, &back) == QLORA_OK);
    }
    size_t used = memory_peak - before;
    if (r == QLORA_OK) {
        tokenizer_judge(text, tok, b, valid, &counts[1]);
    } else if (getenv("QLORA_FUZZ_SAVE") != NULL) {
        fprintf(stderr, "refused: %s\n", qlora_text_last_error(text));
    }
    qlora_text_ids_free(text, &ids);
    qlora_text_bytes_free(text, &back);
    require(qlora_text_tok_close(tok) == QLORA_OK && qlora_text_destroy(text) == QLORA_OK);
    require(memory_now == started);
    return used;
}

// ---- one input

enum { TOKENIZERS = 2 };

static buffer files[TOKENIZERS];
static size_t valid_memory[TOKENIZERS];

// To look at a finding: QLORA_FUZZ_SAVE=FILE build/fuzz_files INPUT keeps the changed file, and
// prints why it was refused.
static void file_save(const buffer* b) {
    const char* name = getenv("QLORA_FUZZ_SAVE");
    FILE* file = name != NULL ? fopen(name, "wb") : NULL;
    if (file != NULL) {
        require(fwrite(b->data, 1, b->size, file) == b->size);
        require(fclose(file) == 0);
    }
}

// The data that the options are for. With `list`, the lines are the elements of an array.
static buffer data_make(const judge_options* o, bool list) {
    const char* text = o->preference == QLORA_TEXT_PAIRS    ? pairs
                       : o->preference == QLORA_TEXT_JUDGED ? judged
                                                            : answers;
    buffer b = buffer_make(text, strlen(text));
    if (o->chat == OWN && o->preference == QLORA_TEXT_ANSWERS) {
        buffer_splice(&b, b.size, b.size, thoughts, sizeof thoughts - 1);
    }
    for (size_t i = 0; list && i + 1 < b.size; i++) {
        b.data[i] = b.data[i] == '\n' ? ',' : b.data[i];
    }
    if (list) {
        b.data[b.size - 1] = ']';
        buffer_splice(&b, 0, 0, "[", 1);
    }
    return b;
}

// Every valid file, with all options: all of it must be accepted, and nearly all be judged.
static void valid_try(void) {
    static const char* const names[] = {"tests/golden/text_byte.json",
                                        "tests/golden/text_spm.json"};
    size_t wanted = 0;
    for (size_t i = 0; i < TOKENIZERS; i++) {
        require(buffer_file(names[i], &files[i]));
        valid_memory[i] = tokenizer_try(&files[i], &files[i]);
    }
    for (unsigned i = 0; i < 3 * 4 * CHATS; i++) {
        judge_options o = {(int)(i % CHATS), i / CHATS % 2 == 1, i / CHATS / 2 % 2 == 1,
                           (qlora_text_preference)(i / CHATS / 4), false};
        for (int list = 0; list < 2; list++) {
            buffer b = data_make(&o, list == 1);
            data_try(&b, list == 1 ? "x.json" : "x.jsonl", &o);
            free(b.data);
        }
        wanted += 2 * (o.preference == QLORA_TEXT_PAIRS    ? 6u
                       : o.preference == QLORA_TEXT_JUDGED ? 3u
                       : o.chat == OWN                     ? 12u
                                                           : 11u);
        o.text_only = true;
        for (size_t k = 0; k < 3 && o.preference == QLORA_TEXT_ANSWERS; k++) {
            buffer b = buffer_make(tables[k], strlen(tables[k]));
            data_try(&b, "x.csv", &o);
            free(b.data);
            wanted += k == 1 ? 2 : 3;
        }
    }
    judge_options o = {PLAIN, false, false, QLORA_TEXT_ANSWERS, false};
    buffer b = buffer_make(documents, sizeof documents - 1);
    data_try(&b, "x.txt", &o);
    free(b.data);
    wanted += 3;
    finding(counts[0].accepted == wanted, "a valid record was refused", "");
    finding(10 * counts[0].judged > 9 * counts[0].accepted && counts[1].judged == TOKENIZERS,
            "a valid file was not judged", "");
    memset(counts, 0, sizeof counts);
    atexit(counts_print);
}

static void data_input(qlora__env* env, choices* c, size_t kind, unsigned options) {
    judge_options o;
    memset(&o, 0, sizeof o);
    o.chat = (int)(options % CHATS);
    o.train_prompt = options / CHATS % 4 == 1;
    o.last_only = options / CHATS % 4 == 2;
    o.text_only = kind == 4;
    o.preference = kind < 4 ? (qlora_text_preference)(choose(c, 5) % 3) : QLORA_TEXT_ANSWERS;
    const char* path = kind == 5 ? "x.txt" : kind == 4 ? "x.csv" : kind == 3 ? "x.json" : "x.jsonl";
    const char* table = tables[choose(c, 3)];
    buffer b = kind == 5   ? buffer_make(documents, sizeof documents - 1)
               : kind == 4 ? buffer_make(table, strlen(table))
                           : data_make(&o, kind == 3);
    const char* member = members[choose(c, sizeof members / sizeof members[0])];
    if (kind < 4 && choose(c, 3) == 0) {
        kind == 3 ? mutate_member(env, c, &b, member) : mutate_line(env, c, &b, member);
    } else {
        mutate_file(env, c, path, &b);
    }
    file_save(&b);
    data_try(&b, path, &o);
    free(b.data);
}

static int fuzz_files(const uint8_t* data, size_t size) {
    qlora_text* text = NULL;
    if (files[0].data == NULL) {
        valid_try();
    }
    if (size < 4) {
        return 0;
    }
    choices c = choices_of(data + 2, size - 2);
    size_t kind = data[0] % 8;
    require(qlora_text_create(NULL, &text) == QLORA_OK); // for its env
    if (kind < 6) {
        data_input(&text->env, &c, kind, data[1]);
    } else {
        size_t i = kind - 6;
        buffer b = buffer_make(files[i].data, files[i].size);
        mutate_file(&text->env, &c, "tokenizer.json", &b);
        file_save(&b);
        // and tables of 9 bytes for each of the 4096 ids that a file may leave out, which grow by
        // half and are copied
        require(tokenizer_try(&b, &files[i]) <= valid_memory[i] + 10 * b.size + 3 * 9 * 4096);
        free(b.data);
    }
    require(qlora_text_destroy(text) == QLORA_OK);
    return 0;
}
