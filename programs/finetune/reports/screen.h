// screen.h - the terminal.
#ifndef FINETUNE_SCREEN_H
#define FINETUNE_SCREEN_H

static int screen_width(void) {
#ifndef _WIN32
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
        return size.ws_col < 200 ? size.ws_col : 200; // lines are built in 256 bytes
    }
#endif
    return 80;
}

static void screen_clear(screen* s) {
    if (s->drawn) {
        printf("\r\033[K");
        s->drawn = false;
    }
}

// A reader that has ended (`| head`) is like Ctrl-C: what was trained is saved.
static void screen_flush(screen* s) {
    if (fflush(stdout) == 0) {
        return;
    }
    s->fault = s->fault != 0 ? s->fault : errno;
    if (errno == EPIPE && !s->closed) {
        s->closed = true;
        s->live = false;
        if (s->done) {
            return;
        }
        if (stop_asked == 0) {
            fprintf(stderr, "finetune: nobody reads the output any more: saving and stopping\n");
        }
        stop_asked = 1;
    }
}

// Prints a permanent line; the progress line is later redrawn below it.
PRINTF(2, 3)
static void say(app* a, const char* format, ...) {
    va_list args;
    if (a->o.json || a->ranks.rank > 0 || a->muted) { // only the result is printed, and only once
        return;
    }
    screen_clear(&a->screen);
    if (a->job != NULL) {
        printf("%s: ", a->job);
    }
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    screen_flush(&a->screen);
}

// Prints the current error. The exit status will be 1.
static void complain(app* a) {
    if (a->muted) {
        a->error[0] = '\0';
        return;
    }
    screen_clear(&a->screen);
    fflush(stdout);
    if (a->ranks.world > 1 && !a->ranks.agreed) {
        fprintf(stderr, "finetune: rank %d: %s\n", (int)a->ranks.rank, a->error);
    } else if (a->ranks.rank == 0) { // the others have the same error
        fprintf(stderr, "finetune: %s%s%s\n", a->job != NULL ? a->job : "",
                a->job != NULL ? ": " : "", a->error);
    }
    a->error[0] = '\0';
    a->failed = true;
}

// A failure that does not stop training is reported when it first occurs, not at every step.
static void bear(app* a, int what, bool ok) {
    if (!ok && (a->told & what) == 0) {
        complain(a);
    }
    a->error[0] = '\0';
    a->told = ok ? a->told & ~what : a->told | what;
}

static void draw(screen* s, const char* line) {
    if (s->quiet) {
        return;
    }
    if (s->live) {
        printf("\r\033[K%s", line);
        s->drawn = true;
    } else {
        printf("%s\n", line);
    }
    screen_flush(s);
}

static const char* short_number(double value, char out[32]) {
    static const char units[] = " kMGT";
    size_t unit = 0;
    while (fabs(value) >= 999.5 && unit < 4) {
        value /= 1000.0;
        unit++;
    }
    int places = unit == 0 || value >= 99.95 ? 0 : 1;
    snprintf(out, 32, "%.*f%.*s", places, value, unit > 0 ? 1 : 0, &units[unit]);
    return out;
}

static const char* short_time(double seconds, char out[32]) {
    long long s = (long long)(seconds + 0.5);
    if (s >= 3600) {
        snprintf(out, 32, "%lldh%02lldm", s / 3600, s % 3600 / 60);
    } else if (s >= 60) {
        snprintf(out, 32, "%lldm%02llds", s / 60, s % 60);
    } else {
        snprintf(out, 32, "%llds", s);
    }
    return out;
}

static const char* short_bytes(uint64_t bytes, char out[32]) {
    double mib = (double)bytes / 1048576.0;
    snprintf(out, 32, mib >= 1024.0 ? "%.1f GiB" : "%.0f MiB", mib >= 1024.0 ? mib / 1024.0 : mib);
    return out;
}

// Querying the driver takes longer than a short step, and the memory in use hardly changes.
static uint64_t memory_used(app* a) {
    qlora_ctx_info info;
    double now = seconds_now();
    if ((a->memory_at == 0.0 || now - a->memory_at > 5.0) &&
        qlora_ctx_query(a->ctx, &info) == QLORA_OK) {
        const qlora_memory_info* m = &info.memory;
        a->memory = m->device_bytes > 0 ? m->device_bytes : m->host_bytes;
        a->memory_at = now;
    }
    return a->memory;
}

// What the system has given to this process; 0 = not known. Beside what the library plans, it has
// the pages of mapped files, the data, the tokenizer and the program.
static uint64_t memory_resident(void) {
    unsigned long long pages[2] = {0, 0};
#ifdef __linux__
    FILE* file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%llu %llu", &pages[0], &pages[1]) != 2) {
        pages[1] = 0;
    }
    if (file != NULL) {
        fclose(file);
    }
    pages[1] *= (unsigned long long)sysconf(_SC_PAGESIZE);
#endif
    return pages[1];
}

// The plan and what the process has, which differ.
static const char* memory_text(const app* a, char out[160]) {
    char planned[32];
    char mapped[48] = "";
    char resident[32];
    uint64_t bytes = memory_resident();
    int used = snprintf(out, 160, "memory: %s as planned",
                        short_bytes(a->plan.total + a->plan.context, planned));
    if (a->plan.mapped > 0) {
        snprintf(mapped, sizeof mapped, " up to %s of", short_bytes(a->plan.mapped, planned));
    }
    if (bytes > 0 && qlora_ctx_backend(a->ctx) == QLORA_BACKEND_CPU && used > 0) {
        snprintf(out + used, 160 - (size_t)used,
                 "; the process has %s, with%s mapped files, the data and the tokenizer",
                 short_bytes(bytes, resident), mapped);
    }
    return out;
}

// Joins the fields that fit into the width, dropping the least important ones; rank 0 is the most
// important.
static void line_fit(char fields[][40], const int* ranks, int count, int width, char out[256]) {
    bool chosen[16] = {false};
    int used = 0;
    for (int rank = 0; rank < count; rank++) {
        for (int i = 0; i < count; i++) {
            int length = (int)strlen(fields[i]);
            if (ranks[i] == rank && length > 0 && used + length + (used > 0 ? 2 : 0) < width) {
                chosen[i] = true;
                used += length + (used > 0 ? 2 : 0);
            }
        }
    }
    out[0] = '\0';
    for (int i = 0; i < count; i++) {
        if (chosen[i]) {
            strcat(out, out[0] != '\0' ? "  " : "");
            strcat(out, fields[i]);
        }
    }
}

static void progress_draw(app* a, const point* p) {
    double now = seconds_now();
    int64_t every = a->progress.total_steps / 50 > 1 ? a->progress.total_steps / 50 : 1;
    bool due =
        a->screen.live ? now - a->screen.drawn_at > 0.1 : p->step == 1 || p->step % every == 0;
    if (!due && p->step != a->progress.total_steps) {
        return;
    }
    a->screen.drawn_at = now;
    char text[32];
    char fields[11][40];
    const int ranks[11] = {0, 1, 5, 4, 3, 6, 7, 2, 8, 9, 10};
    snprintf(fields[0], 40, "step %lld/%lld", (long long)p->step,
             (long long)a->progress.total_steps);
    snprintf(fields[1], 40, "loss %.4f", p->values[TRACE_LOSS]);
    snprintf(fields[2], 40, "grad %.3g", p->values[TRACE_GRAD_NORM]);
    snprintf(fields[3], 40, "lr %.2g", p->values[TRACE_LR]);
    snprintf(fields[4], 40, "%s tok/s", short_number(p->values[TRACE_SPEED], text));
    fields[5][0] = '\0';
    if (a->progress.peak_flop > 0.0 && a->progress.pace > 0.0) {
        snprintf(fields[5], 40, "%.0f%% peak",
                 100.0 * a->progress.step_flop / a->progress.pace / a->progress.peak_flop);
    }
    snprintf(fields[6], 40, "%s", short_bytes(memory_used(a), text));
    double left = a->progress.pace * (double)(a->progress.total_steps - p->step);
    snprintf(fields[7], 40, "%s left", short_time(left, text));
    fields[8][0] = '\0';
    fields[9][0] = '\0';
    fields[10][0] = '\0';
    if (known(a->progress.epochs_done)) {
        char epochs[40];
        snprintf(fields[10], 40, "epoch %.30s", epoch_text(a, epochs));
    }
    if (a->ranks.world > 1) {
        snprintf(fields[8], 40, "%d ranks, slowest %d", (int)a->ranks.world, (int)a->ranks.slowest);
        snprintf(fields[9], 40, "exchange %.3g ms", a->ranks.exchange_ms);
    }
    char line[256];
    line_fit(fields, ranks, 11, a->screen.live ? screen_width() : 200, line);
    if (a->job != NULL && !a->screen.quiet) {
        printf("%s: ", a->job);
    }
    draw(&a->screen, line);
}

#define PROGRESS_SECONDS 30.0 // between lines that are not on a terminal

// What takes long begins with nothing done, or with less than what was shown before it.
static bool load_progress(void* user, const char* what, uint64_t done, uint64_t total) {
    app* a = (app*)user;
    double now = seconds_now();
    bool due = now - a->screen.drawn_at > 0.1 || done == total;
    if (!a->screen.live) {
        bool began = done == 0 || done < a->screen.slow_done || a->screen.slow_at == 0.0;
        due = !began && done < total && now - a->screen.slow_at > PROGRESS_SECONDS;
        a->screen.slow_at = began || due ? now : a->screen.slow_at;
        a->screen.slow_done = done;
    }
    if (due && total > 0) {
        char line[80];
        snprintf(line, sizeof line, "%s %3.0f%%", what, 100.0 * (double)done / (double)total);
        a->screen.drawn_at = now;
        draw(&a->screen, line);
    }
    return stop_asked == 0;
}

#endif
