// folders.h - paths that the programs take and create: parent folders, the adapter of a run.
#ifndef FOLDERS_H
#define FOLDERS_H

#include "messages.h"

#ifdef _WIN32
#include <direct.h>
#define FOLDER_SEPARATORS "/\\"
#define FOLDER_MAKE(path) _mkdir(path)
#else
#include <sys/stat.h>
#include <sys/types.h>
#define FOLDER_SEPARATORS "/"
#define FOLDER_MAKE(path) mkdir(path, 0777)
#endif

#define FOLDER_PATH 4096

// Creates the folders above a path. Faults show up when the path itself is created.
static inline void folder_parents(const char* path) {
    char part[FOLDER_PATH];
    size_t length = strlen(path);
    for (size_t i = 1; i < length && i < sizeof part; i++) {
        if (strchr(FOLDER_SEPARATORS, path[i]) != NULL) {
            memcpy(part, path, i);
            part[i] = '\0';
            (void)FOLDER_MAKE(part);
        }
    }
}

// The folder of the adapter that a user means: DIR itself, or DIR/adapter if DIR is the folder of a
// finetune run. False if neither has an adapter.
static inline bool folder_adapter(const char* given, char out[FOLDER_PATH]) {
    snprintf(out, FOLDER_PATH, "%s", given);
    if (strlen(given) + 32 > FOLDER_PATH || !file_missing(given, "adapter_config.json")) {
        return strlen(given) + 32 <= FOLDER_PATH;
    }
    snprintf(out, FOLDER_PATH, "%s/adapter", given);
    return !file_missing(out, "adapter_config.json");
}

#endif
