// wait.h - for tests on Windows, where fork starts nothing that could be waited for.
#ifndef WINDOWS_WAIT_H
#define WINDOWS_WAIT_H

#include <sys/types.h>

#define WIFEXITED(status) ((status) >= 0)
#define WEXITSTATUS(status) (status)
#define WIFSIGNALED(status) ((status) < 0)
#define WTERMSIG(status) (-(status))

static inline pid_t waitpid(pid_t child, int* status, int options) {
    (void)child;
    (void)options;
    *status = -1;
    return -1;
}

#endif
