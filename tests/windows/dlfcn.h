// dlfcn.h - for tests on Windows: there is no fake GPU to find.
#ifndef WINDOWS_DLFCN_H
#define WINDOWS_DLFCN_H

#include <stddef.h>

#define RTLD_NOW 2
#define RTLD_LOCAL 0

static inline void* dlopen(const char* name, int flags) {
    (void)name;
    (void)flags;
    return NULL;
}

static inline void* dlsym(void* library, const char* name) {
    (void)library;
    (void)name;
    return NULL;
}

static inline int dlclose(void* library) {
    (void)library;
    return 0;
}

#endif
