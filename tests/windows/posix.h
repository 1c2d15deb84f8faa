// posix.h - what the tests use of POSIX and mingw-w64 lacks. The Makefile includes it at the top of
// every test file when it builds for Windows. There is no fake GPU there: dlopen finds nothing, and
// tests that need another process (fork) are not run.
#ifndef WINDOWS_POSIX_H
#define WINDOWS_POSIX_H

#include <direct.h>
#include <errno.h>
#include <io.h>
#include <process.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

// The C library's and the system's copies of the environment change together.
static inline int setenv(const char* name, const char* value, int replace) {
    return !replace && getenv(name) != NULL ? 0 : _putenv_s(name, value);
}

static inline int unsetenv(const char* name) {
    return _putenv_s(name, "");
}

// Creates a folder from a name that ends in XXXXXX.
static inline char* windows_mkdtemp(char* name) {
    size_t length = strlen(name);
    for (unsigned i = 0; length >= 6 && i < 1000; i++) {
        unsigned number = ((unsigned)_getpid() * 1000u + i) % 1000000u;
        (void)snprintf(name + length - 6, 7, "%06u", number);
        if (_mkdir(name) == 0) {
            return name;
        }
        if (errno != EEXIST) {
            break;
        }
    }
    return NULL;
}
#define mkdtemp windows_mkdtemp

static inline int windows_mkdir(const char* path) {
    return _mkdir(path);
}
#define mkdir(path, mode) windows_mkdir(path)

#define lstat stat // without links

static inline int symlink(const char* target, const char* path) {
    (void)target;
    (void)path;
    errno = ENOSYS;
    return -1;
}

static inline pid_t fork(void) {
    errno = ENOSYS;
    return -1;
}

static inline int pipe(int ends[2]) {
    return _pipe(ends, 65536, 0x8000); // binary
}

static inline unsigned alarm(unsigned seconds) {
    (void)seconds;
    return 0;
}

#endif
