// tool.h - what generate, merge, plan and tokenize have in common: messages, --help, --version and
// the exit status.
//
// Define PROGRAM, the program's name, and include qlora.h or qlora_text.h before including this.
#ifndef TOOL_H
#define TOOL_H

#include "options.h"

// Prints an error message; returns false, so that a function can end with it.
PRINTF(1, 2)
static bool fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fprintf(stderr, PROGRAM ": ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    return false;
}

// Prints an error of the library in the words of a program's options. Returns false.
static inline bool fail_library(const char* error) {
    char text[1024];
    snprintf(text, sizeof text, "%s", message_text(error));
    message_options(text);
    return fail("%s", text);
}

// The exit status of the program. Output that could not be written is an error: a full disk often
// shows only when the last bytes are flushed.
static int tool_end(bool ok) {
    char error[1024];
    if (!output_flush(error)) {
        ok = ok ? fail("%s", error) : false;
    }
    return ok ? 0 : 1;
}

// What to do after reading the command line: run, or end with *status.
static bool tool_start(const option_set* set, int argc, char** argv, const bool* version,
                       int* status) {
    char error[1024];
    *status = 1;
    utf8_arguments(&argc, &argv);
    if (!options_read(set, 1, argc, argv, error)) {
        return fail("%s", error);
    }
    if (*version) {
        printf(PROGRAM " (qlora.h) " QLORA_VERSION_STRING "\n");
        *status = tool_end(true);
        return false;
    }
    return true;
}

#endif
