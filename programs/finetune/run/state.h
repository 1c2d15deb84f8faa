// state.h - the state of a run.
#ifndef FINETUNE_STATE_H
#define FINETUNE_STATE_H

typedef struct sample {
    uint64_t key;     // a hash of the ids
    uint64_t opening; // of the record, up to the end of its first answer
    uint32_t input; // which file
    uint32_t index; // in the file
    uint32_t record; // samples of one record have the same number, and follow each other
    int32_t length; // as trained: truncated with --truncate
    int32_t trained;
    int32_t number; // index in the data
    int32_t first;  // --method dpo: length of the chosen text; the rejected one follows in the file
    int32_t prompt; // --method kto: tokens before the answer
    bool desirable;
} sample;

typedef struct samples {
    sample* data;
    size_t count;
} samples;

#define MAX_WEIGHT 1000

typedef struct input { // a data file
    char* path;
    double weight; // how often an epoch has each of its records
    qlora_text_data* data;
    size_t samples; // that are trained
    size_t records; // that they are made of
    uint64_t tokens;
} input;

typedef struct input_list {
    input* data;
    size_t count;
} input_list;

typedef struct counts { // statistics of the data, taken before training
    size_t all;
    size_t used;
    size_t records; // that all of them are made of
    size_t used_records;
    uint64_t opening; // of the last one
    size_t too_long;
    size_t no_room;       // pairs with more than --tokens
    size_t other_prompts; // pairs whose texts differ before the answers
    size_t longest;       // in tokens
    size_t empty;
    size_t masked; // samples without a trained token
    size_t no_end; // samples whose end is not trained
    size_t endless; // of these, conversations whose answers have no end marker
    size_t two_bos;
    size_t silent;   // samples with an empty answer
    uint64_t tokens; // in the samples used
    uint64_t trained;
} counts;

#define BAD_SHOWN 20

typedef struct bad_record { // a record that cannot be used
    const char* path;
    size_t line;
    char what[1024]; // as long as messages of the library can be
} bad_record;

typedef struct bad_records {
    bad_record shown[BAD_SHOWN]; // the first ones
    size_t count;
} bad_records;

// Pack p contains the samples order[starts[p]] to order[starts[p + 1] - 1].
typedef struct packs {
    uint32_t* order;
    size_t* starts;
    size_t count;
} packs;

typedef struct batches {
    qlora_batch* data;
    int32_t* numbers;   // what they point to
    double* references; // per sequence
    size_t room;        // capacities: batches, tokens, sequences
    size_t tokens;
    size_t sequences;
} batches;

// Log-probabilities by the base: of every text of `samples`, two per pair, and for KTO of the
// mismatched texts of evaluation.
typedef struct base_logps {
    double* train; // NULL = computed in each step
    double* eval;
    double* eval_mismatched;
} base_logps;

// What a step or an evaluation measures.
enum {
    TRACE_LOSS,
    TRACE_GRAD_NORM,
    TRACE_LR,
    TRACE_SPEED,
    TRACE_EPOCH,
    TRACE_MEMORY,
    TRACE_EVAL_LOSS,
    TRACE_CHOSEN, // from here on: --method dpo and kto
    TRACE_REJECTED,
    TRACE_MARGINS,
    TRACE_ACCURACY,
    TRACE_EVAL_ACCURACY,
    TRACE_ROUTER_AUX_LOSS, // --router-aux-loss
    TRACE_LOAD_LEAST,      // from here on: models with experts
    TRACE_LOAD_MOST,
    TRACE_LOAD_ENTROPY,
    TRACES
};

typedef struct point { // one entry of the log and the plot
    int64_t step;
    double values[TRACES]; // NAN: not measured
} point;

#define TRACE_ROOM 600 // places of a curve
#define SPAN 50        // the summary compares the means of at most so many steps

typedef struct trace { // a curve: one place has the sums of `width` steps
    double sums[TRACE_ROOM];
    double steps[TRACE_ROOM]; // the sum of the steps that were measured
    int64_t counts[TRACE_ROOM];
} trace;

// What is kept of the entries of the log; it does not grow with their number.
typedef struct history {
    trace traces[TRACES];
    int64_t width;   // steps per place: a power of two
    int64_t entries; // so far
    int64_t last;    // step of the last one
    point first[SPAN];
    point latest[SPAN];    // step n is at n % SPAN
    int64_t eval_step;     // of the last evaluation; -1 = none
    int64_t best_step;     // of the one with the lowest loss after the first step; 0 = none
    int64_t evals_since;   // after that one, and after --patience was given
    int64_t patience_from; // step at which it was
    double best_eval_loss; // its loss
    int64_t kept_step;     // the evaluation whose adapter is in best/; 0 = none
    double kept_loss;
} history;

typedef struct sample_answer { // what the model made of a prompt
    int64_t step;
    blob text;
} sample_answer;

#define MAX_PROMPTS 64
#define ANSWERS 8 // that are kept of a prompt: the first one and the latest ones

typedef struct sample_prompt { // of --sample-prompt and the like
    blob text;                 // as it is shown
    qlora_text_ids ids;
    sample_answer answers[ANSWERS];
    int answer_count;
} sample_prompt;

typedef struct sample_prompts {
    sample_prompt* data;
    size_t count;
    int64_t step; // of the last answers; -1 = none
} sample_prompts;

// A file that only grows. What could not be written yet is kept.
typedef struct growing {
    char path[FOLDER_PATH];
    FILE* file;
    blob rest;
    bool torn; // the file ends in part of an entry: nothing more is written
} growing;

typedef struct screen {
    bool live; // standard output is a terminal: the progress line is redrawn in place
    bool drawn;
    bool quiet;  // --json
    bool closed; // nobody reads standard output any more
    bool done;   // all steps are taken: nothing is left to stop
    int fault;   // errno of the first write that failed
    double drawn_at;
    double slow_at;     // when something long was last shown, if this is no terminal
    uint64_t slow_done; // how much of it was done
} screen;

enum {
    TOLD_LOG = 1,
    TOLD_PICTURE = 2,
    TOLD_CHECKPOINT = 4,
    TOLD_SNAPSHOT = 8,
    TOLD_PAGE = 16,
    TOLD_EVENTS = 32
};

#define POSITION_MAGIC "ftune 3"
typedef struct position { // our own data in a checkpoint
    char magic[8];
    uint64_t settings_hash;
    uint64_t data_hash;
    int64_t total_steps;
    double seconds;
    double first_eval;
    double first_loss;
    uint64_t tokens;
} position;

// The tokens of --add-tokens.
typedef struct new_tokens {
    blob* texts;
    blob* inits;
    qlora_text_ids* from; // the tokens of the text that a row starts from
    qlora_text_new_token* tokens;
    size_t count;
    qlora_new_token* rows; // of the tokens that are new
    size_t row_count;
} new_tokens;

// What is repeated from --config and the run that is resumed.
typedef struct app_parts {
    blob config_text;      // the file of --config
    blob part_text;        // the part of it that this session repeats
    int64_t until;         // and the step at which it ends; 0 = none
    bool next_part;        // earlier sessions of this process have repeated the parts before
    blob past;             // the parts of the run that is resumed, as they are in settings.txt
    blob before;           // and what its options were, if they have changed since
    bool mode_kept;        // --mode auto is what the run that is resumed has
    const char* replaced;  // the option of the command line that the parts of --config make way for
    int64_t patience_from; // settings.txt: the step at which --patience was given; -1 = this one
} app_parts;

// What is read, for training and for evaluation.
typedef struct app_data {
    input_list inputs;      // of --data, or what --eval-only evaluates
    input_list eval_inputs; // of --eval-data
    const char* reading;    // the file that is being read, as messages call it
    counts counted;
    samples train;
    samples eval;
    counts eval_counted; // of --eval-data
    bad_records bad;
    uint64_t data_hash;
    int64_t shared;        // held-out samples that also occur in the training data
    int64_t shared_start;  // others of conversations that start like one there
} app_data;

// The progress of the run.
typedef struct app_progress {
    int64_t step;
    int64_t total_steps;
    int64_t epoch;
    size_t next_pack;
    packs now; // packs of the current epoch
    packs eval_packs;
    double seconds; // training time, including earlier sessions
    double first_eval;
    double last_eval;
    double first_loss;
    double last_loss;
    double epochs_done; // so far; NAN = not known
    uint64_t tokens_seen;
    int64_t skipped_in_row;
    double pace; // seconds per step, smoothed
    double step_flop;
    double last_flop; // of the last step, and what it took
    double last_seconds;
    double peak_flop; // the device's peak FLOP/s; 0 = unknown
    double counting_since; // of epochs
    bool counting_told;
} app_progress;

// The output folder.
typedef struct app_folder {
    growing log;
    growing events; // of --tensorboard
    int lock;       // the lock file, if `locked`
    bool locked;
    bool out_made;    // this process created the folder
    size_t parents;   // and the folders above it, from this length of the path on; 0 = none
    bool out_empty;   // the folder was empty when the run started
    bool files_made;  // this process created settings.txt and the log
    bool events_made; // and the file of events
    size_t events_parents;
    bool events_folder_made;
    bool demo_made; // this process created the demo's model
    bool best_lost; // the adapter of the best evaluation could not be written
} app_folder;

// The processes that train together.
typedef struct app_ranks {
    int32_t rank;
    int32_t world; // 1 = this one alone
    int32_t local; // rank on this machine
    int32_t local_world;
    const char* launcher;
    bool mpi;           // it was started by MPI's launcher
    qlora_comm comm;    // how they reach each other: MPI, or the GPUs
    qlora_comm gpus;    // how their GPUs do
    char no_gpu[252];   // why this process has none
    int ranks_result;   // --ranks: exit status
    int32_t slowest;    // rank that took longest for the last step
    double exchange_ms; // of the last step, of the rank that waited least
    double waited_ms;   // how much longer it took the rank that waited most
    bool stop_agreed;   // one of them was asked to stop, and all know it
    bool agreed;        // all processes end with the error of one; rank 0 prints it
} app_ranks;

typedef struct app {
    options o;
    option_set set;        // the table and `o`
    char demo_dir[PATH_SIZE];
    char adapter[FOLDER_PATH]; // of --adapter
    const char* program;       // argv[0]
    const char* job;           // its name, if it is one of --jobs
    char error[1024];
    qlora_ctx* ctx;
    qlora_files files;
    qlora_model_config config;
    qlora_model_desc model_desc;
    int32_t token_rows[MAX_TOKEN_ROWS]; // of --train-tokens
    new_tokens new_tokens;
    qlora_train_desc train_desc;
    qlora_plan plan;
    qlora_model* model;
    qlora_trainer* trainer;
    qlora_text* text;
    qlora_text_tok* tok;
    qlora_text_chat* chat;
    uint64_t settings_hash;
    identity identity;
    bool norms_found;      // in the folder of --adapter, and not asked for
    bool steps_and_epochs; // both were given
    bool resuming;
    bool no_tokenizer;         // tokenizer.json cannot express that of the base
    bool no_gguf;              // the adapter has parts that a GGUF adapter cannot contain
    bool changed;              // --extend: some options differ from those of the run
    bool complete;             // the run that is resumed had taken all its steps
    batches batches;           // of the step or the evaluation that is running
    batches mismatched;        // --method kto: those that come before them
    qlora_batch* step_batches; // the batches of a step of KTO
    base_logps references;
    history history;
    sample_prompts prompts;
    bool eval_cut;  // Ctrl-C ended the last evaluation
    bool stopped;   // by Ctrl-C, during a long call
    bool failed;    // an error was reported on standard error
    bool muted;     // what is said was said before: saving is tried again
    bool watched;   // somebody sees the output, and can make room on a full disk
    int told;       // ongoing failures that have been reported: TOLD_ bits
    uint64_t memory;
    double memory_at;
    double svg_at;
    double svg_cost;
    screen screen;
    app_parts parts;
    app_data data;
    app_progress progress;
    app_folder folder;
    app_ranks ranks;
} app;

static volatile sig_atomic_t stop_asked;
static volatile sig_atomic_t stop_training; // a step or an evaluation may be running

// Values of stop_training: what is completed before the run stops.
enum { STOP_MICRO = 1, STOP_STEP };

// Ctrl-C is acknowledged at once: people who see nothing press it again, which ends the program.
static void stop_tell(void) {
    static const char* const texts[] = {
        "\nstopping; press Ctrl-C again to quit at once\n",
        "\nstopping after this micro-batch; press Ctrl-C again to quit at once\n",
        "\nstopping after this step; press Ctrl-C again to quit at once\n"};
    const char* text = texts[stop_training];
    size_t size = strlen(text); // POSIX allows it in a handler
    int code = errno;
#ifdef _WIN32
    (void)!_write(2, text, (unsigned)size);
#else
    (void)!write(STDERR_FILENO, text, size);
#endif
    errno = code;
}

// A second Ctrl-C ends the program at once. A terminal that closes may send SIGHUP twice.
static void stop_handler(int number) {
    if (number == SIGINT && stop_asked == 0) {
        stop_tell();
    }
    stop_asked = 1;
    if (number == SIGINT || number == SIGTERM) {
        signal(number, SIG_DFL);
    }
}

static bool lib(app* a, qlora_result result, const char* doing) {
    if (result == QLORA_OK) {
        return true;
    }
    a->stopped = a->stopped || result == QLORA_ERR_STOPPED;
    const char* text = qlora_last_error(a->ctx);
    error_set(a->error, "%s: %s", doing,
              text[0] != '\0' ? message_text(text) : qlora_result_text(result));
    return message_options(a->error);
}

// A machine without a GPU is no fault: the first line of a run must not read like one. False if the
// reason is something else, such as a driver that cannot be loaded.
static bool backend_plain(const char* reason, const char** plain) {
    static const char* const rows[][3] = {
        {"no CUDA driver: libcuda.so.1:", "No such file or directory", "no NVIDIA driver"},
        // musl, BSD, macOS, Windows
        {"no CUDA driver: Error loading shared library libcuda.so.1:", "No such file or directory",
         "no NVIDIA driver"},
        {"no CUDA driver: Shared object \"libcuda.so.1\" not found", "", "no NVIDIA driver"},
        {"no CUDA driver: dlopen" "(libcuda.so.1,", "(no such file)", "no NVIDIA driver"},
        {"no CUDA driver: nvcuda.dll:", "error 126", "no NVIDIA driver"},
        {"no CUDA device found", "", "no NVIDIA GPU"},
        {"requested by ", "", "requested by --backend"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (strncmp(reason, rows[i][0], strlen(rows[i][0])) == 0 && name_ends(reason, rows[i][1])) {
            *plain = rows[i][2];
            return true;
        }
    }
    return false;
}

// What computes and why, in the words of a user.
static const char* backend_reason(const app* a, char out[512]) {
    const char* reason = qlora_ctx_reason(a->ctx);
    qlora_ctx_info info;
    char cpu[64] = "CPU";
    if (qlora_ctx_backend(a->ctx) == QLORA_BACKEND_CUDA) {
        snprintf(out, 512, "GPU: %.500s", reason); // what fits
        return out;
    }
    if (qlora_ctx_query(a->ctx, &info) == QLORA_OK) {
        snprintf(cpu, sizeof cpu, "CPU, %d thread%s, %s", (int)info.desc->threads,
                 info.desc->threads == 1 ? "" : "s", qlora_cpu_tier_name(info.desc->cpu_tier));
    }
    if (backend_plain(reason, &reason)) {
        snprintf(out, 512, "%s (%s)", cpu, reason);
    } else {
        snprintf(out, 512, "%s; the GPU is not used: %.400s", cpu, reason);
        (void)message_options(out);
    }
    return out;
}

static void* take(app* a, size_t count, size_t size) {
    void* p = calloc(count > 0 ? count : 1, size);
    if (p == NULL) {
        error_set(a->error, "out of memory");
    }
    return p;
}

static bool known(double value) { // neither NaN nor infinite
    return value - value == 0.0;
}

static double seconds_now(void) {
#ifdef _WIN32
    int64_t count = 0; // GetTickCount64 advances by up to 16 ms at a time: too coarse for a step
    int64_t rate = 1;
    QueryPerformanceCounter((void*)&count);
    QueryPerformanceFrequency((void*)&rate);
    return (double)count / (double)rate;
#else
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
#endif
}

static uint64_t mix(uint64_t x) { // a bijection whose outputs look random
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static void out_path(const app* a, const char* name, char path[PATH_SIZE]) {
    snprintf(path, PATH_SIZE, "%s/%s", a->o.output.folder, name);
}

#endif
