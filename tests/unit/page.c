// page.c - what finetune writes about a run: curves of any length, event files, samples in the log,
// and text that may contain anything.
//
// The program is included, with its main under another name, to test its parts.
#define QLORA_IMPLEMENTATION_DONE
#define QLORA_TEXT_IMPLEMENTATION_DONE
#define main finetune_main
int finetune_main(int argc, char** argv);
#include "programs/finetune.c"
#undef main

#include "test.h"

#define ASSERT_WHOLE(EXP, GOT) ASSERT_EQ_FMT((long long)(EXP), (long long)(GOT), "%lld")

// ---- TensorBoard's files ----

TEST checksums_are_crc32c(void) {
    // Test vectors of RFC 3720, appendix B.4.
    unsigned char block[32];
    memset(block, 0, sizeof block);
    ASSERT_EQ_FMT(0x8a9136aau, crc32c(block, sizeof block), "%#x");
    memset(block, 0xff, sizeof block);
    ASSERT_EQ_FMT(0x62a8ab43u, crc32c(block, sizeof block), "%#x");
    for (int i = 0; i < 32; i++) {
        block[i] = (unsigned char)i;
    }
    ASSERT_EQ_FMT(0x46dd794eu, crc32c(block, sizeof block), "%#x");
    for (int i = 0; i < 32; i++) {
        block[i] = (unsigned char)(31 - i);
    }
    ASSERT_EQ_FMT(0x113fdb5cu, crc32c(block, sizeof block), "%#x");
    ASSERT_EQ_FMT(0xe3069283u, crc32c("123456789", 9), "%#x");
    // Rotated right by 15 bits and a constant added: 0xe3069283 becomes 0x2507c60d + 0xa282ead8.
    ASSERT_EQ_FMT(0xc78ab0e5u, crc32c_masked("123456789", 9), "%#x");
    PASS();
}

TEST records_have_their_frame(void) {
    // A record as TensorFlow writes it: the first one of a file at time 0.
    static const unsigned char start[] = {26, 0, 0, 0, 0, 0, 0, 0};
    blob out;
    memset(&out, 0, sizeof out);
    ASSERT(event_version(&out, 0.0));
    ASSERT_EQ_FMT((size_t)(12 + 26 + 4), out.count, "%zu");
    ASSERT_MEM_EQ(start, out.data, 8);
    const unsigned char* bytes = (const unsigned char*)out.data;
    ASSERT_EQ_FMT(crc32c_masked(start, 8), (unsigned)event_number(bytes + 8, 4), "%#x");
    ASSERT_EQ_FMT(crc32c_masked(bytes + 12, 26), (unsigned)event_number(bytes + 38, 4), "%#x");
    ASSERT_MEM_EQ("\x1a\x0d"
                  "brain.Event:2",
                  out.data + 12 + 11, 15);
    blob_free(&out);
    blob summary;
    memset(&summary, 0, sizeof summary);
    ASSERT(event_scalar(&summary, "a/b", 0.5f));
    ASSERT_EQ_FMT((size_t)12, summary.count, "%zu");
    ASSERT_MEM_EQ("\x0a\x0a\x0a\x03"
                  "a/b\x15\x00\x00\x00\x3f",
                  summary.data, 12);
    blob_free(&summary);
    PASS();
}

// Writes steps 0 to 9 into a temporary file and returns it.
static FILE* events_file(blob* all) {
    blob summary;
    memset(&summary, 0, sizeof summary);
    bool ok = event_version(all, 1e9);
    for (int64_t step = 0; ok && step < 10; step++) {
        summary.count = 0;
        ok = event_scalar(&summary, "train/loss", 1.0f) &&
             event_text(&summary, "samples/1", "text", 4) &&
             event_summary(all, 1e9, step * 100, &summary);
    }
    blob_free(&summary);
    FILE* file = ok ? tmpfile() : NULL;
    if (file != NULL && fwrite(all->data, 1, all->count, file) != all->count) {
        fclose(file);
        file = NULL;
    }
    if (file != NULL) {
        rewind(file);
    }
    return file;
}

TEST events_are_continued_after_the_last_step(void) {
    blob all;
    memset(&all, 0, sizeof all);
    FILE* file = events_file(&all);
    if (file == NULL) {
        SKIPm("no temporary file");
    }
    // Records of two lengths: those of steps 0 and 100 have one byte for the step, the others two.
    ASSERT_EQ_FMT((long)all.count, events_kept(file, 900), "%ld");
    rewind(file);
    ASSERT_EQ_FMT((long)all.count, events_kept(file, 5000), "%ld");
    long sizes[10];
    for (int i = 0; i < 10; i++) {
        rewind(file);
        sizes[i] = events_kept(file, i * 100 + 50);
        ASSERT(i == 0 || sizes[i] > sizes[i - 1]);
    }
    // A changed byte ends what is kept before its record, wherever it is; so does a cut.
    for (long at = sizes[3]; at < sizes[4]; at++) {
        fseek(file, at, SEEK_SET);
        int c = fgetc(file);
        fseek(file, at, SEEK_SET);
        fputc(c ^ 4, file);
        rewind(file);
        ASSERT_EQ_FMT(sizes[3], events_kept(file, 900), "%ld");
        fseek(file, at, SEEK_SET);
        fputc(c, file);
    }
    fclose(file);
    blob_free(&all);
    PASS();
}

// ---- the history of a run ----

static app* app_new(void) {
    app* a = (app*)calloc(1, sizeof *a);
    if (a != NULL) {
        history_clear(&a->history);
        a->o.demo = true;
        a->progress.first_eval = a->progress.last_eval = a->progress.last_loss = (double)NAN;
        a->prompts.step = -1;
    }
    return a;
}

static void app_steps(app* a, int64_t steps, int64_t eval_every) {
    a->progress.total_steps = steps;
    for (int64_t step = 0; step <= steps; step++) {
        point p = point_none(step);
        if (step > 0) {
            p.values[TRACE_LOSS] = 1.0 + 1.0 / (double)step;
            p.values[TRACE_LR] = 1e-4;
            p.values[TRACE_GRAD_NORM] = 0.5;
            p.values[TRACE_SPEED] = 1000.0;
            history_add(&a->history, &p);
        }
        if (step % eval_every == 0) {
            p = point_none(step);
            p.values[TRACE_EVAL_LOSS] = fabs((double)step - 0.75 * (double)steps);
            history_add(&a->history, &p);
        }
    }
    a->progress.step = steps;
}

// The number of points of the first polyline of a kind; 0 if there is none.
static size_t points_of(const blob* out, const char* kind) {
    char key[64];
    snprintf(key, sizeof key, "<polyline class=\"%s\" points=\"", kind);
    const char* at = strstr(out->data, key);
    size_t count = 0;
    for (at = at != NULL ? at + strlen(key) : "\""; *at != '"'; at++) {
        count += *at == ',' ? 1 : 0;
    }
    return count;
}

TEST short_runs_keep_every_step(void) {
    app* a = app_new();
    blob out;
    memset(&out, 0, sizeof out);
    ASSERT(a != NULL);
    app_steps(a, 599, 100);
    picture_make(a, &out);
    ASSERT(blob_add(&out, "", 1));
    ASSERT_WHOLE(1, a->history.width);
    ASSERT_EQ_FMT((size_t)599, points_of(&out, "r"), "%zu");
    ASSERT_EQ_FMT((size_t)599, points_of(&out, "s"), "%zu");
    ASSERT_EQ_FMT((size_t)6, points_of(&out, "e"), "%zu");
    ASSERT_EQ(NULL, strstr(out.data, "the mean of"));
    blob_free(&out);
    free(a);
    PASS();
}

TEST long_runs_do_not_grow(void) {
    app* a = app_new();
    blob out;
    memset(&out, 0, sizeof out);
    ASSERT(a != NULL);
    int64_t steps = test_brief() ? 100000 : 1000000;
    app_steps(a, steps, 10);
    picture_make(a, &out);
    ASSERT(blob_add(&out, "", 1));
    ASSERT(points_of(&out, "r") > TRACE_ROOM / 2 - 2 && points_of(&out, "r") <= TRACE_ROOM);
    ASSERT(points_of(&out, "e") <= TRACE_ROOM);
    ASSERT(out.count < 200000);
    ASSERT(strstr(out.data, "each point is the mean of ") != NULL);
    // No step is lost: the means of the places, weighted, make up the mean of all.
    const trace* t = &a->history.traces[TRACE_LR];
    double sum = 0.0;
    int64_t counted = 0;
    for (int i = 0; i < TRACE_ROOM; i++) {
        sum += t->sums[i];
        counted += t->counts[i];
        double at = t->counts[i] > 0 ? t->steps[i] / (double)t->counts[i] : 0.0;
        double from = (double)(a->history.width * i); // the place of these steps
        ASSERT(t->counts[i] == 0 || (at >= from && at < from + (double)a->history.width));
        ASSERT(t->counts[i] <= a->history.width);
    }
    ASSERT_WHOLE(steps, counted);
    ASSERT(fabs(sum / (double)counted - 1e-4) < 1e-12);
    // The best evaluation is found, whatever came after it.
    ASSERT_WHOLE(steps / 4 * 3, a->history.best_step);
    ASSERT_WHOLE(steps / 40, a->history.evals_since);
    ASSERT_WHOLE(steps, a->history.eval_step);
    blob_free(&out);
    free(a);
    PASS();
}

TEST means_are_of_the_first_and_last_steps(void) {
    app* a = app_new();
    ASSERT(a != NULL);
    app_steps(a, 1000, 50);
    ASSERT(fabs(history_mean(&a->history, TRACE_LOSS, 1, 2) - 1.75) < 1e-12);
    double last = 0.0;
    for (int64_t step = 951; step <= 1000; step++) {
        last += (1.0 + 1.0 / (double)step) / 50.0;
    }
    ASSERT(fabs(history_mean(&a->history, TRACE_LOSS, 951, 1000) - last) < 1e-12);
    ASSERT(isnan(history_mean(&a->history, TRACE_LOSS, 900, 901))); // no longer kept
    ASSERT(isnan(history_mean(&a->history, TRACE_CHOSEN, 1, 10)));
    free(a);
    PASS();
}

// ---- settings ----

TEST parts_of_steps_taken_again_are_cut(void) {
    static const char past[] = "until 3\nlr 1\nuntil 8\nlr 2\ncsv\n";
    app* a = app_new();
    ASSERT(a != NULL);
    ASSERT(blob_add(&a->parts.past, past, sizeof past) && blob_add(&a->parts.before, "lr 3\n", 5));
    static const struct {
        int64_t step;
        const char* text;
    } rows[] = {{9, "until 3\nlr 1\nuntil 8\nlr 2\ncsv\nuntil 9\nlr 3\n"},
                {8, "until 3\nlr 1\nuntil 8\nlr 2\ncsv\n"},
                {5, "until 3\nlr 1\nuntil 5\nlr 2\ncsv\n"},
                {3, "until 3\nlr 1\n"},
                {1, "until 1\nlr 1\n"},
                {0, ""}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        blob out;
        memset(&out, 0, sizeof out);
        a->progress.step = rows[i].step;
        ASSERT(parts_write(a, &out) && blob_add(&out, "", 1));
        ASSERT_STR_EQ(rows[i].text, out.data);
        blob_free(&out);
    }
    blob_free(&a->parts.past);
    blob_free(&a->parts.before);
    free(a);
    PASS();
}

TEST settings_keep_every_text(void) {
    static const char* const texts[] = {"a", " a ", "'a'", "a\nb", "\r", "\\ \"\n", "=", "a: b"};
    const option* row = NULL;
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        row = strcmp(option_table[i].name, "sample-prompt") == 0 ? &option_table[i] : row;
    }
    ASSERT(row != NULL);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        options o;
        char error[1024] = "";
        const option_set set = {option_table, OPTION_COUNT, &o};
        blob line;
        memset(&line, 0, sizeof line);
        options_clear(&o);
        ASSERT(setting_line(row, texts[i], &line) && blob_add(&line, "", 1));
        line.count--;
        ASSERT(config_read(&set, "settings.txt", &line, error));
        ASSERT_WHOLE(1, o.sampling.prompts.count);
        ASSERT_STR_EQ(texts[i], o.sampling.prompts.items[0]);
        blob_free(&line);
    }
    PASS();
}

// --mode auto is bf16 where products of bf16 have instructions of their own.
TEST tiers_decide_the_mode(void) {
    static const struct {
        const char* text;
        bool bf16;
    } rows[] = {{"CPU tier: amx\nthreads: 2\n", true},
                {"CPU tier: avx512_bf16 (not tested on hardware)\n", true},
                {"CPU tier: neon_bf16\n", true},
                {"CPU tier: avx512\nbf16\n", false},
                {"CPU tier: neon\n", false},
                {"CPU tier: portable", false},
                {"backend: CUDA (amx)\n", false}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ASSERT_EQ(rows[i].bf16, tier_has_bf16(rows[i].text));
    }
    PASS();
}

// Plans a model of this shape: the work of a step follows from the plan.
static bool estimate_plan(app* a, int64_t layers, int64_t hidden, int64_t intermediate,
                          int64_t vocab) {
    qlora_ctx_desc machine;
    qlora_ctx* ctx = NULL;
    qlora_model_desc desc;
    memset(&machine, 0, sizeof machine);
    memset(&desc, 0, sizeof desc);
    memset(&a->config, 0, sizeof a->config);
    machine.require_backend = QLORA_BACKEND_CPU;
    machine.threads = 1;
    a->config.layers = layers;
    a->config.hidden = hidden;
    a->config.heads = hidden / 64 > 1 ? hidden / 64 : 8;
    a->config.kv_heads = a->config.heads % 3 == 0 ? a->config.heads / 3 : a->config.heads / 2;
    a->config.head_dim = hidden / a->config.heads;
    a->config.intermediate = intermediate;
    a->config.vocab = vocab;
    a->config.rms_eps = 1e-5;
    a->config.rope.theta = 1e4;
    desc.config = &a->config;
    desc.rank = 1;
    desc.tokens = 48;
    bool ok = qlora_ctx_create(&machine, &ctx) == QLORA_OK &&
              qlora_plan_make(ctx, &desc, NULL, &a->plan) == QLORA_OK;
    return qlora_ctx_destroy(ctx) == QLORA_OK && ok;
}

// The time of a step besides its products, where a core has 84 GFLOP/s: three quarters of it with
// stories260K (49 microseconds per token were measured), and a part of it with wide models.
TEST estimates_have_the_rest(void) {
    static app a;
    sample all[3];
    uint32_t order[3] = {2, 0, 1};
    size_t starts[2] = {0, 3};
    samples data;
    packs p;
    estimate e;
    memset(&a, 0, sizeof a);
    memset(all, 0, sizeof all);
    memset(&data, 0, sizeof data);
    memset(&e, 0, sizeof e);
    p.order = order;
    p.starts = starts;
    p.count = 1;
    data.data = all;
    data.count = 3;
    for (int i = 0; i < 3; i++) {
        all[i].length = 16;
        all[i].trained = 4;
    }
    ASSERT(estimate_plan(&a, 5, 64, 172, 512));
    e.rates[0] = 84e9;
    e.rates[1] = 168e9;
    e.step = pack_work(&a, &data, &p, 0);
    double seconds = estimate_seconds(&e, false, 1, 0) / 48.0;
    ASSERT(seconds > 30e-6 && seconds < 80e-6);
    double half = estimate_seconds(&e, true, 1, 0) / 48.0; // the rest is in f32 as well
    ASSERT(half < seconds && half > 0.6 * seconds);
    ASSERT(estimate_plan(&a, 30, 576, 1536, 49152));
    e.step = pack_work(&a, &data, &p, 0);
    ASSERT(e.step.rest > 0.15 * e.step.flop && e.step.rest < 0.6 * e.step.flop);
    PASS();
}

// Without a terminal, a line comes after half a minute, also if a single micro-batch took it.
TEST slow_work_is_shown(void) {
    static app a;
    memset(&a, 0, sizeof a);
    a.screen.quiet = true;
    for (int evaluation = 0; evaluation < 2; evaluation++) {
        a.screen.drawn_at = 0.0;
        (void)load_progress(&a, "evaluating", 0, 4);
        (void)load_progress(&a, "evaluating", 1, 4); // soon
        ASSERT(a.screen.drawn_at <= 0.0);
        a.screen.slow_at -= 60.0;
        (void)load_progress(&a, "evaluating", 1, 4);
        ASSERT(a.screen.drawn_at > 0.0);
        a.screen.drawn_at = 0.0;
        (void)load_progress(&a, "evaluating", 4, 4);
        ASSERT(a.screen.drawn_at <= 0.0); // its result follows
    }
    (void)load_progress(&a, "loading", 1, 9); // begins
    a.screen.slow_at -= 60.0;
    (void)load_progress(&a, "loading", 2, 9);
    ASSERT(a.screen.drawn_at > 0.0);
    PASS();
}

// ---- curves ----

TEST smoothing_has_no_hook(void) {
    static series s;
    s.count = 200;
    for (int i = 0; i < s.count; i++) {
        s.x[i] = i;
        s.y[i] = 3.0 - 0.01 * i;
    }
    series_smooth(&s);
    for (int i = 0; i < s.count; i++) { // a line stays a line, also at its ends
        ASSERT(fabs(s.y[i] - (3.0 - 0.01 * i)) < 1e-9);
    }
    s.y[s.count - 1] += 1.0; // an odd last step
    series_smooth(&s);
    ASSERT(fabs(s.y[s.count - 1] - (3.0 - 0.01 * (s.count - 1))) < 0.3);
    s.count = 1;
    s.y[0] = 7.0;
    series_smooth(&s);
    ASSERT(fabs(s.y[0] - 7.0) < 1e-12);
    s.count = 3;
    s.x[1] = s.x[2] = s.x[0];
    s.y[1] = s.y[2] = 7.0;
    series_smooth(&s);
    ASSERT(fabs(s.y[1] - 7.0) < 1e-12);
    PASS();
}

TEST axes_of_odd_ranges_end(void) {
    static const double values[][2] = {{0.0, 0.0},     {1e300, -1e300}, {5.5, 5.500000000000001},
                                       {-1e-300, 0.0}, {1e15, 1e15},    {-3.0, -1.0}};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        app* a = app_new();
        blob out;
        memset(&out, 0, sizeof out);
        ASSERT(a != NULL);
        a->progress.total_steps = 2;
        for (int k = 0; k < 2; k++) {
            point p = point_none(k + 1);
            p.values[TRACE_LOSS] = values[i][k];
            history_add(&a->history, &p);
        }
        picture_make(a, &out);
        ASSERT(blob_add(&out, "", 1));
        ASSERT(out.count < 20000);
        ASSERT_EQ(NULL, strstr(out.data, "nan"));
        ASSERT_EQ(NULL, strstr(out.data, "inf"));
        blob_free(&out);
        free(a);
    }
    PASS();
}

// ---- text ----

TEST text_is_escaped(void) {
    static const struct {
        const char* in;
        const char* out;
    } rows[] = {
        {"a<b>&\"c'", "a&lt;b&gt;&amp;&quot;c'"},
        {"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80", "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"},
        {"x\x01\x1b\x7f\ty\n", "x\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\ty\n"},
        {"\xC3", "\xEF\xBF\xBD"},                      // cut
        {"\xC0\xAF<", "\xEF\xBF\xBD\xEF\xBF\xBD&lt;"}, // too long for its value
        {"\xE0\x80\xAF", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"}, // half of a pair
        {"\xEF\xBF\xBF", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"}, // not a character
        {"\xE2\x82<", "\xEF\xBF\xBD\xEF\xBF\xBD&lt;"},            // cut before markup
        {"\xF5\x80\x80\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        blob out;
        memset(&out, 0, sizeof out);
        put_text(&out, rows[i].in, strlen(rows[i].in));
        ASSERT(blob_add(&out, "", 1));
        ASSERT_STR_EQ(rows[i].out, out.data);
        blob_free(&out);
    }
    ASSERT_EQ_FMT((size_t)2, text_cut("ab\xE2\x82\xAC", 5, 4), "%zu");
    ASSERT_EQ_FMT((size_t)5, text_cut("ab\xE2\x82\xAC", 5, 5), "%zu");
    PASS();
}

// ---- samples in the log ----

static bool prompt_set(app* a, const char* text) {
    sample_prompt* p = prompt_new(a, "test");
    return p != NULL && blob_add(&p->text, text, strlen(text));
}

static bool line_read(app* a, const char* line, bool* keep) {
    return log_restore(a, line, line + strlen(line), keep);
}

TEST samples_are_restored(void) {
    app* a = app_new();
    bool keep = false;
    ASSERT(a != NULL && prompt_set(a, "a \"b\"\n") && prompt_set(a, "c"));
    a->progress.step = 50;
    ASSERT(line_read(a, "{\"step\":5,\"loss\":1.5}", &keep) && keep);
    ASSERT(line_read(a,
                     "{\"step\":5,\"samples\":[{\"prompt\":\"a "
                     "\\\"b\\\"\\u000a\",\"text\":\"\\\"loss\\\":9\"},"
                     "{\"prompt\":\"gone\",\"text\":\"x\"},{\"prompt\":\"c\",\"text\":\"\"}]}",
                     &keep) &&
           keep);
    ASSERT_EQ_FMT(1, a->prompts.data[0].answer_count, "%d");
    ASSERT_EQ_FMT((size_t)8, a->prompts.data[0].answers[0].text.count, "%zu");
    ASSERT_MEM_EQ("\"loss\":9", a->prompts.data[0].answers[0].text.data, 8);
    ASSERT_EQ_FMT(1, a->prompts.data[1].answer_count, "%d");
    ASSERT_WHOLE(5, a->prompts.step);
    ASSERT(fabs(a->progress.last_loss - 1.5) < 1e-12); // not what a sample says
    ASSERT_WHOLE(1, a->history.entries);
    static const char* const damaged[] = {
        "{\"step\":6,\"samples\":[{\"prompt\":\"c\",\"text\":}]}",
        "{\"step\":6,\"samples\":[{\"prompt\":\"c\"}]}",
        "{\"step\":6,\"samples\":[{\"text\":\"\",\"prompt\":\"c\"}]}", "{\"step\":6,\"samples\":}",
        "{\"step\":6,\"samples\":[}"};
    for (size_t i = 0; i < sizeof damaged / sizeof damaged[0]; i++) {
        ASSERT_FALSE(line_read(a, damaged[i], &keep));
    }
    for (int i = 10; i < 50; i++) { // the first and the latest ones are kept
        char line[80];
        snprintf(line, sizeof line,
                 "{\"step\":%d,\"samples\":[{\"prompt\":\"c\",\"text\":\"%d\"}]}", i, i);
        ASSERT(line_read(a, line, &keep));
    }
    ASSERT_EQ_FMT(ANSWERS, a->prompts.data[1].answer_count, "%d");
    ASSERT_WHOLE(5, a->prompts.data[1].answers[0].step);
    ASSERT_WHOLE(43, a->prompts.data[1].answers[1].step);
    ASSERT_WHOLE(49, a->prompts.data[1].answers[ANSWERS - 1].step);
    prompts_free(a);
    free(a);
    PASS();
}

TEST equal_prompts_keep_their_answers(void) {
    app* a = app_new();
    bool keep = false;
    ASSERT(a != NULL && prompt_set(a, "a") && prompt_set(a, "a"));
    a->progress.step = 50;
    ASSERT(line_read(a,
                     "{\"step\":5,\"samples\":[{\"prompt\":\"a\",\"text\":\"x\"},"
                     "{\"prompt\":\"a\",\"text\":\"y\"}]}",
                     &keep));
    ASSERT_EQ_FMT(1, a->prompts.data[0].answer_count, "%d");
    ASSERT_EQ_FMT(1, a->prompts.data[1].answer_count, "%d");
    ASSERT_MEM_EQ("y", a->prompts.data[1].answers[0].text.data, 1);
    prompts_free(a);
    free(a);
    PASS();
}

// A machine without a GPU is no fault; a driver that cannot be loaded is one, and is told in full.
TEST reasons_of_the_cpu(void) {
    static const char* const rows[][2] = {
        {"no CUDA driver: libcuda.so.1: cannot open shared object file: No such file or directory",
         "no NVIDIA driver"},
        {"no CUDA driver: Error loading shared library libcuda.so.1: No such file or directory",
         "no NVIDIA driver"},
        {"no CUDA driver: nvcuda.dll: error 126", "no NVIDIA driver"},
        {"no CUDA device found (CUDA_ERROR_NO_DEVICE)", "no NVIDIA GPU"},
        {"requested by desc.require_backend", "requested by --backend"},
        {"no CUDA driver: nvcuda.dll: error 193", NULL},
        {"no CUDA driver: libcuda.so.1: file too short", NULL},
        {"no CUDA driver: libnvidia-ptxjitcompiler.so.1: cannot open shared object file: "
         "No such file or directory",
         NULL},
        {"libcuda is the CUDA toolkit's stub, not a driver (34)", NULL}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const char* plain = NULL;
        bool is = backend_plain(rows[i][0], &plain);
        ASSERTm(rows[i][0], is == (rows[i][1] != NULL));
        ASSERT_STR_EQ(is ? rows[i][1] : "", is ? plain : "");
    }
    PASS();
}

#ifndef _WIN32 // whose shell has no single quotes
// Words of a printed command line, as a POSIX shell reads them.
TEST words_are_quoted(void) {
    static const char* const rows[][2] = {{"a/b-c.d", "a/b-c.d"},
                                          {"a b's", "\"a b's\""},
                                          {"$x `y` \"z\"", "'$x `y` \"z\"'"},
                                          {"it's $5", "'it'\\''s $5'"},
                                          {"", "\"\""}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        blob out;
        memset(&out, 0, sizeof out);
        put_word(&out, rows[i][0], strlen(rows[i][0]));
        ASSERT(blob_add(&out, "", 1));
        ASSERT_STR_EQ(rows[i][1], out.data);
        blob_free(&out);
    }
    PASS();
}
#endif

SUITE(page_suite) {
    RUN_TEST(reasons_of_the_cpu);
#ifndef _WIN32
    RUN_TEST(words_are_quoted);
#endif
    RUN_TEST(checksums_are_crc32c);
    RUN_TEST(records_have_their_frame);
    RUN_TEST(events_are_continued_after_the_last_step);
    RUN_TEST(short_runs_keep_every_step);
    RUN_TEST(long_runs_do_not_grow);
    RUN_TEST(means_are_of_the_first_and_last_steps);
    RUN_TEST(parts_of_steps_taken_again_are_cut);
    RUN_TEST(settings_keep_every_text);
    RUN_TEST(tiers_decide_the_mode);
    RUN_TEST(estimates_have_the_rest);
    RUN_TEST(slow_work_is_shown);
    RUN_TEST(smoothing_has_no_hook);
    RUN_TEST(axes_of_odd_ranges_end);
    RUN_TEST(text_is_escaped);
    RUN_TEST(samples_are_restored);
    RUN_TEST(equal_prompts_keep_their_answers);
}
