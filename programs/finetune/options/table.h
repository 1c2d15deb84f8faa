// table.h - the options: the table, the defaults, --help.
#ifndef FINETUNE_TABLE_H
#define FINETUNE_TABLE_H

// The base model, and how its frozen weights are held.
typedef struct model_options {
    const char* path;
    const char* base_name;
    const char* rope_scale;
    int64_t mode;
    int64_t base;
    int64_t head;
    bool keep_quantised;
    const char* quantised_dir;
} model_options;

// What is trained on, and what of each record.
typedef struct data_options {
    option_texts files;
    option_texts eval_files;
    const char* format;
    const char* columns;
    const char* template_name;
    const char* chat_template;
    int64_t max_samples;
    int64_t stream;
    int64_t length;
    bool truncate;
    bool train_prompt;
    bool last_turn;
} data_options;

// What is trained.
typedef struct adapter_options {
    const char* from; // a folder: of an adapter, or of a run
    int64_t expert_layout;
    int64_t rank;
    double alpha;
    int64_t targets;
    bool experts; // not an option: the model has some, which names of projections leave out
    bool rslora;
    double dropout;
    bool dora;
    int64_t save_modules;
    const char* train_tokens;
    const char* add_tokens;
    bool train_norms;
} adapter_options;

// The method of training, and what only some methods read.
typedef struct method_options {
    int64_t kind;
    double beta;
    double label_smoothing;
    double sft_alpha;
    double desirable_weight;
    double undesirable_weight;
    int64_t reference;
} method_options;

// AdamW and its learning rate.
typedef struct optimizer_options {
    int64_t kind;
    double lr;
    int64_t schedule;
    int64_t warmup;
    double beta2;
    double weight_decay;
    double max_norm;
    double loraplus_ratio;
    const char* lr_factors;
} optimizer_options;

// How long, and in what steps.
typedef struct training_options {
    double epochs;
    int64_t steps;
    int64_t tokens;
    int64_t accumulate;
    int64_t seed;
    double neftune;
    double router_aux_loss;
} training_options;

// The loss of held-out samples.
typedef struct eval_options {
    double share; // of the records, or their number
    int64_t every;
    bool keep_best;
    int64_t patience;
    bool only; // nothing is trained
} eval_options;

// Texts that show what has been learned.
typedef struct sampling_options {
    const char* prompt; // before and after training
    option_texts prompts; // at every evaluation, as the others
    option_texts messages;
    const char* file;
    int64_t tokens;
    double temperature;
} sampling_options;

// The output folder, and how a run goes on from it.
typedef struct output_options {
    const char* folder;
    bool csv;
    const char* tensorboard;
    const char* rescue;
    int64_t save_every;
    int64_t snapshot_every;
    int64_t resume;
    bool extend;
} output_options;

// Where it is computed, and within what memory.
typedef struct machine_options {
    int64_t backend;
    int64_t device;
    int64_t threads;
    int64_t ranks;
    int64_t rank_limit;
    int64_t recompute;
    int64_t cache;
    int64_t offload;
    int64_t tile;
    int64_t memory;
    int64_t host_budget;
} machine_options;

typedef struct options {
    model_options model;
    data_options data;
    adapter_options adapter;
    method_options method;
    optimizer_options optimizer;
    training_options training;
    eval_options eval;
    sampling_options sampling;
    output_options output;
    machine_options machine;
    const char* config;
    const char* jobs;
    bool plan;
    bool doctor;
    int64_t doctor_samples;
    bool json;
    bool demo;
    bool verbose;
    bool help;
    bool version;
    const char* parts; // of a file of options: its text from the first line "until N" on
} options;

#define MAX_TOKEN_ROWS 1024
#define MAX_NEW_TOKENS 4096

enum { RESUME_AUTO = 0, RESUME_NEVER, RESUME_MUST };
enum { STREAM_AUTO = 0, STREAM_ON, STREAM_OFF };
enum { REFERENCE_PRECOMPUTE = 0, REFERENCE_BESIDE };

#define AT(field) offsetof(options, field)
// clang-format off
static const option option_table[] = {
    {"Model and data", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"model", OPT_TEXT, AT(model.path), true, 0, 0, "DIR",
        "model folder (Hugging Face) or GGUF file (required)"},
    {"data", OPT_TEXTS, AT(data.files), true, 0, 0, "FILE[:W]",
        "training data: a file (see below), a folder of such files, or - for standard input; W is "
        "its weight (see below); may be repeated (required)"},
    {"out", OPT_TEXT, AT(output.folder), false, 0, 0, "DIR",
        "output folder for the adapter, checkpoint, log, plot and page (required)"},
    {"template", OPT_TEXT, AT(data.template_name), true, 0, 0, "NAME",
        "built-in chat format, see below (default: the adapter's or the model's own template)"},
    {"chat-template", OPT_TEXT, AT(data.chat_template), true, 0, 0, "FILE",
        "Jinja template of the chat (default: the adapter's or the model's own)"},
    {"adapter", OPT_TEXT, AT(adapter.from), true, 0, 0, "DIR",
        "start from this PEFT adapter or finetune run; sets rank, alpha, targets and rslora"},
    {"expert-layout", OPT_CHOICE, AT(adapter.expert_layout), true, 0, 0,
        "auto|peft|peft-0.18|unsloth",
        "order of the matrices of experts in --adapter, for folders that may have several "
        "(default auto: what the folder says, or its shapes)"},
    {"base-name", OPT_TEXT, AT(model.base_name), false, 0, 0, "NAME",
        "name of the base in the adapter's config and README.md, by which others find it, as in "
        "OWNER/NAME (default: that of a folder in the hub's cache, otherwise --model)"},
    {"format", OPT_TEXT, AT(data.format), true, 0, 0, "NAME",
        "data format, see below (default: from the file's ending and the names in each record)"},
    {"columns", OPT_TEXT, AT(data.columns), true, 0, 0, "LIST",
        "names that the data uses instead of those below, e.g. prompt=question,completion=answer"},
    {"max-samples", OPT_WHOLE, AT(data.max_samples), true, 1, 1e9, "N",
        "use only the first N records of the data (default: all)"},
    {"stream", OPT_CHOICE, AT(data.stream), false, 0, 0, "auto|on|off",
        "keep an index of the data in memory instead of its tokens; auto does so for files above "
        "1 GiB (default auto)"},
    {"config", OPT_TEXT, AT(config), false, 0, 0, "FILE",
        "read options from this file, one per line; those of the command line take precedence"},
    {"jobs", OPT_TEXT, AT(jobs), false, 0, 0, "FILE",
     "train several adapters at once: a JSON list of jobs, each with a name and options"},
    {"Adapter", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"rank", OPT_WHOLE, AT(adapter.rank), true, 1, 1024, "N",
        "LoRA rank (default 16)"},
    {"alpha", OPT_REAL, AT(adapter.alpha), true, 1e-6, 1e6, "X",
        "LoRA alpha (default: twice the rank)"},
    {"targets", OPT_TARGETS, AT(adapter.targets), true, 0, 0, "LIST",
        "modules to adapt: all, or some of q,k,v,o,gate,up,down (default all); Phi and GLM "
        "have qkv and gate_up; attention and experts stand for all of theirs"},
    {"rslora", OPT_FLAG, AT(adapter.rslora), true, 0, 0, "",
        "scale by alpha / sqrt(rank) instead of alpha / rank"},
    {"dropout", OPT_REAL, AT(adapter.dropout), true, 0, 0.99, "X",
        "LoRA dropout probability (default 0)"},
    {"dora", OPT_FLAG, AT(adapter.dora), true, 0, 0, "",
        "DoRA: also train the magnitude of every row of the adapted weights"},
    {"save-modules", OPT_CHOICE, AT(adapter.save_modules), true, 0, 0, "none|embed|head|both",
        "also train the whole embedding, the output head, or both; a tied head is trained with "
        "embed (default none)"},
    {"train-tokens", OPT_TEXT, AT(adapter.train_tokens), true, 0, 0, "LIST",
        "also train these rows of the embedding: token ids, as in 5,17,130"},
    {"add-tokens", OPT_TEXT, AT(adapter.add_tokens), true, 0, 0, "FILE",
        "new tokens, one per line, or as JSON (see below): their rows of the embedding and the "
        "head are trained, and the tokenizer is saved with the adapter"},
    {"train-norms", OPT_FLAG, AT(adapter.train_norms), true, 0, 0, "",
        "also train the RMSNorm weights"},
    {"Training", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"method", OPT_CHOICE, AT(method.kind), true, 0, 0, "sft|dpo|kto",
        "sft learns answers, dpo and kto learn preferences; see below and docs/methods.md "
        "(default sft)"},
    {"beta", OPT_REAL, AT(method.beta), true, 1e-6, 1e3, "X",
        "dpo, kto: weight of the distance from the base model (default 0.1)"},
    {"label-smoothing", OPT_REAL, AT(method.label_smoothing), true, 0, 0.499, "X",
        "dpo: probability that a pair is the wrong way round (default 0)"},
    {"sft-alpha", OPT_REAL, AT(method.sft_alpha), true, 0, 1e3, "X",
        "dpo: weight of an additional loss on the chosen answers (default 0)"},
    {"desirable-weight", OPT_REAL, AT(method.desirable_weight), true, 1e-6, 1e3, "X",
        "kto: weight of the desirable answers (default 1)"},
    {"undesirable-weight", OPT_REAL, AT(method.undesirable_weight), true, 1e-6, 1e3, "X",
        "kto: weight of the undesirable answers (default 1)"},
    {"reference", OPT_CHOICE, AT(method.reference), false, 0, 0, "precompute|beside",
        "dpo, kto: precompute the base model's log-probabilities and keep them in a file, or "
        "compute them in every step (default precompute)"},
    {"loraplus-ratio", OPT_REAL, AT(optimizer.loraplus_ratio), true, 1e-3, 1e3, "X",
        "LoRA+: learning rate of the B matrices and of vectors, as a multiple of --lr (default 1)"},
    {"lr-factors", OPT_TEXT, AT(optimizer.lr_factors), true, 0, 0, "LIST",
        "factors for the learning rate of modules, as in q=0.5,embed=0.1: the names of --targets, "
        "norms, and embed for embedding, head and their rows (default 1)"},
    {"neftune", OPT_REAL, AT(training.neftune), true, 0, 1e3, "X",
        "NEFTune: add noise to the embeddings while training, X / sqrt(length * hidden size) times "
        "a uniform number in [-1, 1); usual values are 5 to 15 (default 0)"},
    {"router-aux-loss", OPT_REAL, AT(training.router_aux_loss), true, -1, 1e3, "C",
        "mixtures of experts: add C times the load-balancing loss of the routers; -1 = none, even "
        "if config.json has output_router_logits (default 0)"},
    {"epochs", OPT_REAL, AT(training.epochs), true, 1e-6, 1e6, "X",
        "passes over the data (default 3)"},
    {"steps", OPT_WHOLE, AT(training.steps), true, 1, 1e9, "N",
        "number of steps; overrides --epochs"},
    {"lr", OPT_REAL, AT(optimizer.lr), true, 0, 10, "X",
        "peak learning rate (default 2e-4)"},
    {"schedule", OPT_CHOICE, AT(optimizer.schedule), true, 0, 0, "cosine|linear|constant",
        "learning rate after the warm-up (default cosine)"},
    {"warmup", OPT_WHOLE, AT(optimizer.warmup), true, 0, 1e9, "N",
        "warm-up steps (default 3% of the total)"},
    {"optimizer", OPT_CHOICE, AT(optimizer.kind), true, 0, 0, "adamw|adamw8bit",
        "adamw8bit keeps the moments in 8 bits, as bitsandbytes does (default adamw)"},
    {"beta2", OPT_REAL, AT(optimizer.beta2), true, 0, 0.999999, "X",
        "AdamW beta2 (default 0.999)"},
    {"weight-decay", OPT_REAL, AT(optimizer.weight_decay), true, 0, 10, "X",
        "AdamW weight decay (default 0)"},
    {"max-norm", OPT_REAL, AT(optimizer.max_norm), true, -1, 1e9, "X",
        "clip gradients to this norm; 0 or -1 = no clipping (default 1)"},
    {"length", OPT_WHOLE, AT(data.length), true, 2, 16e6, "N|max",
        "maximum sample length in tokens; max: the longest that fits the memory (default 1024, or "
        "the model's limit if lower)"},
    {"rope-scale", OPT_TEXT, AT(model.rope_scale), true, 0, 0, "TYPE:F",
        "scale the rotary positions for texts longer than the model's limit: yarn:F or linear:F "
        "with a factor, as in yarn:4 (default: none, and longer texts are refused)"},
    {"tokens", OPT_WHOLE, AT(training.tokens), true, 2, 16e6, "N",
        "maximum tokens per micro-batch (default 4096, or --length if higher)"},
    {"accumulate", OPT_WHOLE, AT(training.accumulate), true, 1, 65536, "N",
        "micro-batches per step, of all processes together (default 2, or their number if higher)"},
    {"seed", OPT_WHOLE, AT(training.seed), true, 0, 9e15, "N",
        "random seed (default 1)"},
    {"truncate", OPT_FLAG, AT(data.truncate), true, 0, 0, "",
        "truncate samples that are too long (default: skip them)"},
    {"train-prompt", OPT_FLAG, AT(data.train_prompt), true, 0, 0, "",
        "also train on the prompts"},
    {"last-turn", OPT_FLAG, AT(data.last_turn), true, 0, 0, "",
        "train only on the last answer of each conversation"},
    {"Evaluation and checkpoints", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"eval", OPT_REAL, AT(eval.share), true, 0, 1e6, "X",
        "held-out records: a count, or a fraction below 1, capped at 200 records (default 0.05)"},
    {"eval-data", OPT_TEXTS, AT(data.eval_files), true, 0, 0, "FILE",
        "evaluate on this file instead of held-out samples; may be repeated"},
    {"eval-every", OPT_WHOLE, AT(eval.every), false, 1, 1e9, "N",
        "steps between evaluations (default: ten per run)"},
    {"keep-best", OPT_FLAG, AT(eval.keep_best), false, 0, 0, "",
        "also keep the adapter with the lowest held-out loss so far, in OUT/best"},
    {"patience", OPT_WHOLE, AT(eval.patience), false, 1, 1e9, "N",
        "stop after N evaluations in a row without a lower held-out loss (default: never)"},
    {"csv", OPT_FLAG, AT(output.csv), false, 0, 0, "",
        "also write the log as OUT/log.csv when the run ends"},
    {"tensorboard", OPT_TEXT, AT(output.tensorboard), false, 0, 0, "DIR",
        "also write the log as TensorBoard events into this folder; use one folder per run"},
    {"sample-prompt", OPT_TEXTS, AT(sampling.prompts), false, 0, 0, "TEXT",
        "text to continue at every evaluation, for OUT/log.jsonl and OUT/training.html; may be "
        "repeated"},
    {"sample-message", OPT_TEXTS, AT(sampling.messages), false, 0, 0, "TEXT",
        "message to answer at every evaluation, in the chat format; may be repeated"},
    {"sample-file", OPT_TEXT, AT(sampling.file), false, 0, 0, "FILE",
        "more of both: prompts, questions or conversations in a file like --data; the answers in "
        "it are left out"},
    {"sample-tokens", OPT_WHOLE, AT(sampling.tokens), false, 1, 4096, "N",
        "maximum new tokens per sample (default 64)"},
    {"sample-temperature", OPT_REAL, AT(sampling.temperature), false, 0, 100, "X",
        "sampling temperature of the samples; 0 = greedy (default 0)"},
    {"save-every", OPT_WHOLE, AT(output.save_every), false, 1, 1e9, "N",
        "steps between checkpoints (default: ten per run)"},
    {"snapshot-every", OPT_WHOLE, AT(output.snapshot_every), false, 1, 1e9, "N",
        "steps between adapter snapshots, which are kept in OUT/snapshots (default: none)"},
    {"rescue", OPT_TEXT, AT(output.rescue), false, 0, 0, "DIR",
        "if the results cannot be written to --out, for lack of room or otherwise: save the run "
        "into a new folder in DIR, on a terminal after waiting for room (default: the system's "
        "folder for temporary files)"},
    {"resume", OPT_CHOICE, AT(output.resume), false, 0, 0, "auto|never|must",
        "auto resumes if --out has a checkpoint, never starts over, must fails without a "
        "checkpoint (default auto)"},
    {"extend", OPT_FLAG, AT(output.extend), false, 0, 0, "",
        "resume even if --lr, --schedule, --warmup, --beta2, --weight-decay or --max-norm has "
        "changed, or --steps or --epochs is lower; higher ones need no --extend"},
    {"prompt", OPT_TEXT, AT(sampling.prompt), false, 0, 0, "TEXT",
        "prompt to complete before and after training"},
    {"Machine", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"backend", OPT_CHOICE, AT(machine.backend), false, 0, 0, "auto|cpu|cuda",
        "auto uses a GPU if available (default auto)"},
    {"device", OPT_WHOLE, AT(machine.device), false, 0, 1023, "N",
        "GPU number; fails if there is no such GPU (default: 0 if there is a GPU)"},
    {"threads", OPT_WHOLE, AT(machine.threads), false, 1, 64, "N",
        "CPU threads (default: one per core)"},
    {"ranks", OPT_WHOLE, AT(machine.ranks), false, 1, 64, "N",
        "start N processes on this machine that train together, one GPU each; mpirun, torchrun "
        "and srun need no option"},
    {"rank-limit", OPT_WHOLE, AT(machine.rank_limit), false, 1, 1e6, "S",
        "several processes: end the run if one of them has not answered for S seconds; the others "
        "wait two hours longer for rank 0 while it saves or answers prompts (default 600)"},
    {"mode", OPT_CHOICE, AT(model.mode), true, 0, 0, "auto|f32|tf32|bf16|fp8",
        "arithmetic precision; auto uses bf16 if the GPU supports it or the CPU has instructions "
        "for it (AMX, AVX512_BF16, BF16 of ARM), otherwise f32, which it also is on CPUs for "
        "--demo, --eval-only and several processes; a resumed run keeps its mode; on the CPU, bf16 "
        "rounds the operands of products with weights; fp8 is bf16 with faster, approximate "
        "products of 4-bit and FP8 weights, on compute capability 9.0 (default auto)"},
    {"base", OPT_CHOICE, AT(model.base), true, 0, 0, "nf4|16bit|32bit|fp8",
        "storage format of the frozen weights; fp8 has less than a third of the error of nf4 and "
        "twice its size (default nf4)"},
    {"head", OPT_CHOICE, AT(model.head), true, 0, 0, "full|nf4",
        "nf4 stores the output head in 4 bits if it is neither trained nor tied to the embedding, "
        "which changes the logits a little (default full)"},
    {"recompute", OPT_CHOICE, AT(machine.recompute), false, 0, 0, "auto|on|off",
        "recompute activations in the backward pass to save memory; auto recomputes as few "
        "layers as possible, but from 4,096 tokens on first keeps what attention computed "
        "(default auto)"},
    {"cache", OPT_CHOICE, AT(machine.cache), false, 0, 0, "auto|on|off",
        "keep 16-bit copies of 4-bit or FP8 weights; auto copies as many as fit (default auto)"},
    {"offload", OPT_CHOICE, AT(machine.offload), false, 0, 0, "auto|on|off",
        "keep the inputs of recomputed layers, what they keep of attention, and an embedding that "
        "is not the head, in host memory; needs a GPU; auto does it only if the memory requires "
        "it, and with --memory also if more copies of weights fit then (default auto)"},
    {"tile", OPT_WHOLE, AT(machine.tile), false, 1, 16e6, "N",
        "compute everything but attention for N tokens at a time, which needs less memory "
        "(default: only if the memory requires it)"},
    {"keep-quantised", OPT_FLAG, AT(model.keep_quantised), false, 0, 0, "",
        "keep the 4-bit or FP8 weights in a file next to the model, which the next start reads"},
    {"quantised-dir", OPT_TEXT, AT(model.quantised_dir), false, 0, 0, "DIR",
        "keep them in this folder instead, e.g. if the model's folder is read-only"},
    {"memory", OPT_SIZE, AT(machine.memory), false, 1048576.0, 1125899906842624.0, "SIZE",
        "memory limit; 8G and 8GiB are binary, 8GB is decimal (default: all free memory)"},
    {"host-budget", OPT_SIZE, AT(machine.host_budget), false, 1048576.0, 1125899906842624.0, "SIZE",
        "limit of the host memory of each process for offloading; less of it means more to compute "
        "(default: three quarters of the free memory, divided by the processes on this machine)"},
    {"Other", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"plan", OPT_FLAG, AT(plan), false, 0, 0, "",
        "print the memory plan and exit"},
    {"eval-only", OPT_FLAG, AT(eval.only), false, 0, 0, "",
        "print the loss of --adapter, or of the model itself, on --eval-data or --data and exit"},
    {"doctor", OPT_FLAG, AT(doctor), false, 0, 0, "",
        "print the first samples and any problems in the data, then exit"},
    {"samples", OPT_WHOLE, AT(doctor_samples), false, 0, 1e9, "N",
        "number of samples that --doctor prints (default 3)"},
    {"json", OPT_FLAG, AT(json), false, 0, 0, "",
        "with --doctor or --eval-only: print JSON"},
    {"demo", OPT_FLAG, AT(demo), true, 0, 0, "",
        "train a small generated model on generated text"},
    {"verbose", OPT_FLAG, AT(verbose), false, 0, 0, "",
        "print the library's log messages"},
    {"help", OPT_FLAG, AT(help), false, 0, 0, "",
        "show this help"},
    {"version", OPT_FLAG, AT(version), false, 0, 0, "",
        "print the version"},
};
// clang-format on
#define OPTION_COUNT (sizeof option_table / sizeof option_table[0])

// Values that tell options_resolve that an option was not given: 0, except where 0 is a value.
static void options_clear(options* o) {
    memset(o, 0, sizeof *o);
    o->optimizer.lr = -1.0;
    o->optimizer.warmup = -1;
    o->training.seed = -1;
    o->optimizer.beta2 = -1.0;
    o->optimizer.max_norm = -2.0;
    o->eval.share = -1.0;
    o->doctor_samples = -1;
    o->machine.device = -1;
    o->output.resume = -1;
}

static void whole_default(int64_t* value, int64_t unset, int64_t otherwise) {
    *value = *value == unset ? otherwise : *value;
}

static void real_default(double* value, double unset, double otherwise) {
    *value = *value == unset ? otherwise : *value;
}

// world: number of processes that train together.
static void options_resolve(options* o, int32_t world) {
    whole_default(&o->adapter.rank, 0, 16);
    const method_row* method = method_of(o->method.kind);
    if ((method->options & METHOD_BETA) != 0) {
        real_default(&o->method.beta, 0.0, 0.1);
    }
    if ((method->options & METHOD_WEIGHTS) != 0) {
        real_default(&o->method.desirable_weight, 0.0, 1.0);
        real_default(&o->method.undesirable_weight, 0.0, 1.0);
    }
    whole_default(&o->adapter.targets, 0, QLORA_TARGET_ALL);
    real_default(&o->training.epochs, 0.0, 3.0);
    real_default(&o->optimizer.lr, -1.0, 2e-4);
    whole_default(&o->training.accumulate, 0, world > 1 ? world : 2);
    whole_default(&o->machine.rank_limit, 0, 600);
    whole_default(&o->training.seed, -1, 1);
    real_default(&o->optimizer.beta2, -1.0, 0.999);
    real_default(&o->optimizer.max_norm, -2.0, 1.0);
    real_default(&o->eval.share, -1.0, 0.05);
    whole_default(&o->doctor_samples, -1, 3);
    whole_default(&o->sampling.tokens, 0, 64);
    whole_default(&o->output.resume, -1, RESUME_AUTO);
}

static void help_print(const option_set* set) {
    static const char* const first[] = {"model", "data",   "out",    "epochs",    "lr",
                                        "rank",  "length", "tokens", "eval-data", "memory",
                                        "plan",  "doctor", NULL};
    printf("usage: finetune --model DIR --data FILE --out DIR [options]\n"
           "       finetune --demo [--out DIR]\n"
           "       finetune --model DIR --adapter DIR --data FILE --eval-only\n"
           "       finetune --model DIR --jobs FILE --out DIR\n\n"
           "Trains a LoRA adapter on the samples in FILE. Ctrl-C saves and stops; run the\n"
           "same command again to resume with bit-identical results. These options matter\n"
           "most; the others follow by topic, and then what the data looks like:\n\n");
    options_print(set, first, 37);
    printf("\nChat formats:");
    for (size_t i = 0; qlora_text_chat_names(i) != NULL; i++) {
        printf(" %s", qlora_text_chat_names(i));
    }
    printf("\n");
    char forms[256] = "";
    for (size_t i = 0; qlora_text_data_formats(i) != NULL; i++) {
        size_t used = strlen(forms);
        snprintf(forms + used, sizeof forms - used, "%s%s", used > 0 ? " " : "",
                 qlora_text_data_formats(i));
    }
    printf("Data formats:\n");
    help_row("", 2, forms);
    printf(
        "Data: one JSON object per sample (.jsonl: one per line; .json: an array):\n"
        "  {\"text\"}  {\"prompt\", \"completion\"}  {\"messages\": [{\"role\", \"content\"}]}\n"
        "  {\"conversations\": [{\"from\", \"value\"}]}  {\"instruction\", \"input\", \"output\"}\n"
        "  {\"question\", \"answer\"}  {\"input_ids\", \"labels\"}\n"
        "  \"role\" is passed to the template as it is, and \"assistant\" is trained;\n"
        "  \"from\" may also be human, gpt, ... (user, assistant), observation, ... (tool)\n"
        "  --method dpo: {\"prompt\", \"chosen\", \"rejected\"}, or both as lists of messages\n"
        "  --method kto: {\"prompt\", \"completion\", \"label\"} or {\"messages\", \"label\"}\n"
        "  .csv, .tsv: with a header that has these names; .parquet: rows with them\n"
        "  .txt: plain text, split into samples of --length tokens\n"
        "  .gz may follow every ending but .parquet\n"
        "New tokens: a .jsonl file has a string or {\"token\", \"special\", \"init\"} on each\n"
        "line, a .json file a list of them. A row starts as the mean of all rows, or of\n"
        "the tokens of the text in \"init\"; special tokens are not part of ordinary text.\n"
        "Weights: --data a.jsonl:0.3 --data b.jsonl uses 30%% of the records of a.jsonl\n"
        "in each epoch, different ones until all have been used, and all of b.jsonl; 2.5\n"
        "uses each record twice and half of them a third time (default 1). A path that\n"
        "exists as it is given has no weight.\n"
        "Exit status: 0 on success, 1 on error (reported on standard error), 130 after\n"
        "Ctrl-C.\n");
}

#endif
