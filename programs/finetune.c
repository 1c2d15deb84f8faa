// finetune: trains a LoRA adapter for a language model, on a GPU or on the CPU.
//
//   cc -O2 -I. -o finetune programs/finetune.c -ldl -lm -lpthread
//   ./finetune --model DIR --data FILE --out DIR
//   ./finetune --demo --out DIR          (needs neither a model nor data)
//
// The parts are in programs/finetune. They call only the public functions of qlora.h and
// qlora_text.h.
#define QLORA_IMPLEMENTATION
#include "qlora.h"
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"

#include "blob.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "adapter_files.h"
#include "folders.h"
#include "json_array.h"
#include "options.h"
#include "auto_mode.h"

#ifdef _WIN32
#include <direct.h>
#include <fcntl.h>
#include <io.h>
#include <process.h>
#include <share.h>
#include <sys/stat.h>
// Not <windows.h>: its declarations conflict with those in qlora.h's implementation.
__declspec(dllimport) int __stdcall QueryPerformanceCounter(void*); // LARGE_INTEGER*
__declspec(dllimport) int __stdcall QueryPerformanceFrequency(void*);
__declspec(dllimport) void __stdcall Sleep(unsigned long);
#else
#include <dirent.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#define PATH_SIZE 1024
#define OPEN_PACKS 32 // packs that can still take a sample

// Each part uses only those before it.
#include "finetune/options/method.h"
#include "finetune/options/table.h"
#include "finetune/options/options.h"
#include "finetune/options/settings.h"
#include "finetune/run/state.h"
#include "finetune/options/parts.h"
#include "finetune/run/model.h"
#include "finetune/reports/history.h"
#include "finetune/reports/screen.h"
#include "finetune/ranks/ranks.h"
#include "finetune/data/records.h"
#include "finetune/data/inputs.h"
#include "finetune/data/text.h"
#include "finetune/data/new_tokens.h"
#include "finetune/data/samples.h"
#include "finetune/data/packing.h"
#include "finetune/output/files.h"
#include "finetune/reports/log.h"
#include "finetune/reports/events.h"
#include "finetune/reports/tensorboard.h"
#include "finetune/run/prompts.h"
#include "finetune/output/lock.h"
#include "finetune/ranks/connect.h"
#include "finetune/output/folder.h"
#include "finetune/run/evaluate.h"
#include "finetune/run/preferences.h"
#include "finetune/reports/curves.h"
#include "finetune/reports/picture.h"
#include "finetune/reports/page.h"
#include "finetune/reports/card.h"
#include "finetune/output/rescue.h"
#include "finetune/run/train.h"
#include "finetune/run/estimate.h"
#include "finetune/reports/try.h"
#include "finetune/reports/reports.h"
#include "finetune/run/demo.h"
#include "finetune/run/start.h"

static void app_close(app* a) {
    growing_close(&a->folder.log);
    growing_close(&a->folder.events);
    lock_release(a);
    packs_free(&a->progress.now);
    packs_free(&a->progress.eval_packs);
    free(a->data.train.data);
    free(a->data.eval.data);
    batches_free(&a->batches);
    batches_free(&a->mismatched);
    free(a->step_batches);
    references_free(&a->references);
    blob_free(&a->parts.config_text);
    blob_free(&a->parts.part_text);
    blob_free(&a->parts.past);
    blob_free(&a->parts.before);
    if (a->trainer != NULL) {
        qlora_trainer_destroy(a->trainer);
    }
    if (a->model != NULL) {
        qlora_model_close(a->model);
    }
    if (a->failed && !a->ranks.agreed && a->ranks.gpus.abort != NULL) {
        a->ranks.gpus.abort(a->ranks.gpus.user);
    }
    qlora_comm_close(&a->ranks.gpus);
    if (a->ctx != NULL) {
        qlora_ctx_destroy(a->ctx);
    }
    ranks_close(a);
    inputs_free(&a->data.inputs);
    inputs_free(&a->data.eval_inputs);
    prompts_free(a);
    new_tokens_free(a);
    qlora_text_chat_close(a->chat);
    qlora_text_tok_close(a->tok);
    qlora_text_destroy(a->text);
}

#include "finetune/run/jobs.h"

// Reads, checks and completes the options.
static bool options_open(app* a, int argc, char** argv) {
    options* o = &a->o;
    a->set.rows = option_table;
    a->set.count = OPTION_COUNT;
    a->set.values = o;
    a->program = argc > 0 ? argv[0] : "";
    if (!ranks_find(a)) {
        return false;
    }
    if (!options_take(&a->set, argc, argv, &a->parts.config_text, a->error)) {
        return false;
    }
    if (o->help || o->version) {
        return true;
    }
    a->screen.quiet = o->json || a->ranks.rank > 0;
    a->watched = terminal_live() && !a->screen.quiet;
    if (o->jobs != NULL) { // each job has options of its own
        return o->parts == NULL ||
               error_set(a->error, "--config %s: --jobs cannot repeat the parts of a run (until N)",
                         o->config);
    }
    if (!parts_choose(a, argc, argv)) {
        return false;
    }
    bool norms = o->adapter.train_norms;
    if (!options_check(o, a->adapter, a->error)) {
        return false;
    }
    a->norms_found = o->adapter.train_norms && !norms;
    a->steps_and_epochs = o->training.steps > 0 && o->training.epochs > 0.0;
    if (o->demo) {
        demo_defaults(o);
    }
    options_resolve(o, a->ranks.world);
    a->screen.live = a->watched;
    return true;
}

static bool train_whole(app* a) {
#ifndef _WIN32
    signal(SIGPIPE, SIG_IGN); // writing fails instead, and the training is saved
#endif
    history_clear(&a->history);
    a->progress.first_eval = (double)NAN;
    a->progress.last_eval = (double)NAN;
    a->progress.last_loss = (double)NAN;
    a->progress.epochs_done = (double)NAN;
    bool ok = ranks_open(a) && prepare(a) && train(a);
    if (a->progress.step == 0 && a->ranks.rank == 0) { // nothing has been trained
        out_unmake(a);
    }
    if (!ok && a->stopped && a->progress.step == 0) {
        say(a, "stopped before training started\n");
    }
    return ok;
}

// --ranks: this process only starts the others.
static bool ranks_start(app* a, char** argv) {
#ifdef _WIN32
    (void)argv;
    return error_set(a->error, "--ranks is not available on Windows");
#else
    return ranks_run(a, argv, &a->ranks.ranks_result);
#endif
}

static bool run(app* a, int argc, char** argv) {
    if (!options_open(a, argc, argv)) {
        a->ranks.agreed = true; // every process has the same options
        return false;
    }
    if (a->ranks.rank > 0 && (a->o.help || a->o.version)) {
        return true;
    }
    if (a->o.help) {
        help_print(&a->set);
        return true;
    }
    if (a->o.version) {
        printf("finetune (qlora.h) " QLORA_VERSION_STRING "\n");
        return true;
    }
    if (a->o.jobs != NULL) {
        return jobs_run(a);
    }
    if (a->o.machine.ranks > 1 && a->ranks.launcher != NULL &&
        a->ranks.world != a->o.machine.ranks) {
        return error_set(a->error, "--ranks %lld, but the variables of %s say %d process%s",
                         (long long)a->o.machine.ranks, a->ranks.launcher, (int)a->ranks.world,
                         a->ranks.world == 1 ? "" : "es");
    }
    if (!a->o.doctor && !a->o.plan && !a->o.eval.only) {
        return a->o.machine.ranks > 1 && a->ranks.launcher == NULL ? ranks_start(a, argv)
                                                                   : train_whole(a);
    }
    if (a->ranks.rank > 0) { // rank 0 prints it
        return true;
    }
    a->ranks.world = 1;
    if (!prepare(a)) {
        return false;
    }
    if (a->o.doctor) {
        notes_print(a);
        return doctor_print(a);
    }
    if (a->o.eval.only) {
        return evaluate_only(a);
    }
    plan_show(a);
    estimate_print(a);
    return true;
}

static void signals_set(void) {
    signal(SIGINT, stop_handler);
    signal(SIGTERM, stop_handler);
#ifndef _WIN32
    struct sigaction old;
    if (sigaction(SIGHUP, NULL, &old) == 0 && old.sa_handler != SIG_IGN) { // not under nohup
        struct sigaction now;
        memset(&now, 0, sizeof now);
        now.sa_handler = stop_handler;
        now.sa_flags = SA_RESTART;
        sigaction(SIGHUP, &now, NULL);
    }
    signal(SIGXFSZ, SIG_IGN); // a file that must not grow makes its write fail instead
#endif
}

// The first files that a program opens take the numbers of closed standard streams, and would then
// receive what is printed.
static void streams_open(void) {
#ifndef _WIN32
    for (int number = 0; number < 3; number++) {
        if (fcntl(number, F_GETFD) == -1 && open("/dev/null", O_RDWR) != number) {
            _exit(1);
        }
    }
#endif
}

int main(int argc, char** argv) {
    static app a; // zeroed, and too large for some stacks
    streams_open();
    signals_set();
    utf8_arguments(&argc, &argv);
    bool ok = run(&a, argc, argv);
    while (ok && part_done(&a)) { // --config of a run whose options changed on the way
        app_close(&a);
        memset(&a, 0, sizeof a);
        a.parts.next_part = true;
        ok = run(&a, argc, argv);
    }
    screen_clear(&a.screen);
    char error[1024];
    if (!output_flush(error) && ok && !a.screen.closed) {
        memcpy(a.error, error, sizeof error);
        if (a.screen.fault != 0) { // the first fault says more than the last
            error_set(a.error, "cannot write to standard output: %s", strerror(a.screen.fault));
        }
        complain(&a);
    }
    if (!ok && !a.stopped && (a.error[0] != '\0' || !a.failed)) {
        complain(&a);
    }
    app_close(&a);
    return a.failed                    ? 1
           : a.ranks.ranks_result != 0 ? a.ranks.ranks_result
           : stop_asked != 0           ? 130
                                       : 0;
}
