// folders.h - paths that the programs take and create: parent folders, the adapter of a run.
#ifndef FOLDERS_H
#define FOLDERS_H

#include "messages.h"

#include <sys/stat.h>
#include <sys/types.h>

#ifdef _WIN32
#define FOLDER_SEPARATORS "/\\"
#define FOLDER_MAKE(path) utf8_mkdir(path)
#else
#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>
#define FOLDER_SEPARATORS "/"
#define FOLDER_MAKE(path) mkdir(path, 0777)
#endif

#define FOLDER_PATH 4096

// Creates the folders above a path. Faults show up when the path itself is created. Returns the
// length of the first one that was created, 0 if there was none.
static inline size_t folder_parents(const char* path) {
    char part[FOLDER_PATH];
    size_t length = strlen(path);
    size_t first = 0;
    for (size_t i = 1; i < length && i < sizeof part; i++) {
        if (strchr(FOLDER_SEPARATORS, path[i]) != NULL) {
            memcpy(part, path, i);
            part[i] = '\0';
            bool made = FOLDER_MAKE(part) == 0;
            first = first == 0 && made ? i : first;
        }
    }
    return first;
}

// Called with each name in a folder; return false to stop.
typedef bool (*folder_fn)(void* user, const char* name);

// Calls `fn` with each name except "." and "..". Returns 0, or an errno value if the folder cannot
// be read.
static inline int folder_each(const char* path, folder_fn fn, void* user) {
    bool more = true;
#ifdef _WIN32
    intptr_t folder = -1;
    char name[UTF8_PATH];
    while (more && utf8_next(path, &folder, name)) {
        bool real = strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
        more = !real || fn(user, name);
    }
    if (folder == -1 && errno != 0) {
        return errno;
    }
    if (folder != -1) {
        _findclose(folder);
    }
#else
    DIR* folder = opendir(path);
    if (folder == NULL) {
        return errno;
    }
    for (struct dirent* entry = readdir(folder); more && entry != NULL; entry = readdir(folder)) {
        bool real = strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
        more = !real || fn(user, entry->d_name);
    }
    closedir(folder);
#endif
    return 0;
}

#ifdef _WIN32
typedef struct _stat64 path_stat;
#ifndef S_ISREG
#define S_ISREG(mode) (((mode)&_S_IFMT) == _S_IFREG)
#define S_ISDIR(mode) (((mode)&_S_IFMT) == _S_IFDIR)
#endif
#else
typedef struct stat path_stat;
#endif

static inline bool path_info(const char* path, path_stat* info) {
#ifdef _WIN32
    return utf8_stat(path, info) == 0;
#else
    return stat(path, info) == 0;
#endif
}

static inline bool path_is_file(const char* path) {
    path_stat info;
    return path_info(path, &info) && S_ISREG(info.st_mode);
}

static inline bool path_is_folder(const char* path) {
    path_stat info;
    return path_info(path, &info) && S_ISDIR(info.st_mode);
}

static inline double path_size(const char* path) { // 0 if there is no such file
    path_stat info;
    return path_info(path, &info) ? (double)info.st_size : 0.0;
}

static inline bool name_ends(const char* name, const char* ending) {
    size_t length = strlen(name);
    size_t size = strlen(ending);
    return length >= size && strcmp(name + length - size, ending) == 0;
}

static inline bool path_exists(const char* path) {
    path_stat info;
    return path_info(path, &info);
}

static inline bool path_is_link(const char* path) {
#ifdef _WIN32
    (void)path;
    return false;
#else
    struct stat info;
    return lstat(path, &info) == 0 && S_ISLNK(info.st_mode);
#endif
}

// Creates a file. What has the name is removed first, so that nothing is written through a link,
// symbolic or hard, into a file elsewhere. NULL with errno.
static inline FILE* file_create_new(const char* path) {
    if (remove(path) != 0 && errno != ENOENT) {
        return NULL;
    }
#ifdef _WIN32
    int number = utf8_open(path, _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY, _SH_DENYNO);
    return number >= 0 ? _fdopen(number, "wb") : NULL;
#else
    int number = open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    return number >= 0 ? fdopen(number, "wb") : NULL;
#endif
}

// Shortens a file; not 0 if that fails.
static inline int file_cut(const char* path, long size) {
#ifdef _WIN32
    FILE* file = fopen(path, "r+b");
    int result = file != NULL ? _chsize(_fileno(file), size) : -1;
    if (file != NULL) {
        fclose(file);
    }
    return result;
#else
    return truncate(path, size);
#endif
}

// Copies a file; false with a message.
static inline bool file_copy(const char* from, const char* to, char error[1024]) {
    char block[65536];
    FILE* in = fopen(from, "rb");
    if (in == NULL) {
        return error_set(error, "cannot read %s: %s", from, strerror(errno));
    }
    FILE* out = file_create_new(to);
    if (out == NULL) {
        int code = errno;
        fclose(in);
        return error_set(error, "cannot create %s: %s", to, strerror(code));
    }
    size_t n = 0;
    bool ok = true;
    errno = 0;
    while (ok && (n = fread(block, 1, sizeof block, in)) > 0) {
        ok = fwrite(block, 1, n, out) == n;
    }
    bool read = ferror(in) == 0;
    int code = errno;
    fclose(in);
    ok = fclose(out) == 0 && ok;
    code = code != 0 ? code : errno;
    return (ok && read) || error_set(error, "cannot %s %s: %s", read ? "write" : "read",
                                     read ? to : from, strerror(code));
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

// What to do about a folder without an adapter, which is added to the message that it has none.
static inline const char* adapter_advice(const char* given, char out[HUB_ADVICE]) {
    return file_missing(given, "settings.txt")
               ? hub_advice(given, "--adapter", out)
               : "; the run there has not ended, and the same finetune command goes on with it";
}

#endif
