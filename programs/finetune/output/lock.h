// lock.h - one writer per output folder.
//
// OUT/.finetune.lock contains the owner's process id and host, and is locked while the owner runs.
// The system releases the lock of a process that dies, so a lock that can be had, with a name of
// this host in it, belongs to nobody. Locks of other hosts may be invisible here, for example on a
// network disk: a name of another host is always respected.
#ifndef FINETUNE_LOCK_H
#define FINETUNE_LOCK_H

#define LOCK_NAME ".finetune.lock"
#define LOCK_MOVED (-1) // the file was removed while it was opened: try again

typedef struct lock_owner {
    long process; // 0 = not known
    char host[256];
} lock_owner;

static void lock_self(lock_owner* out) {
    memset(out, 0, sizeof *out);
#ifdef _WIN32
    const char* name = getenv("COMPUTERNAME");
    snprintf(out->host, sizeof out->host, "%s", name != NULL ? name : "");
    out->process = (long)_getpid();
#else
    if (gethostname(out->host, sizeof out->host - 1) != 0) {
        out->host[0] = '\0';
    }
    out->process = (long)getpid();
#endif
    for (char* c = out->host; *c != '\0'; c++) {
        *c = isgraph((unsigned char)*c) ? *c : '-';
    }
    if (out->host[0] == '\0') {
        snprintf(out->host, sizeof out->host, "localhost");
    }
}

static void lock_parse(const char* text, lock_owner* out) {
    memset(out, 0, sizeof *out);
    if (sscanf(text, "%ld %255s", &out->process, out->host) != 2) {
        memset(out, 0, sizeof *out);
    }
}

// Opens and locks the file without waiting. Returns 0, EAGAIN if another process has it,
// LOCK_MOVED, or another errno. *file is open after 0 only.
#ifdef _WIN32
static int lock_open(const char* path, int* file, lock_owner* owner) {
    char text[512] = "";
    *file = utf8_open(path, _O_RDWR | _O_CREAT | _O_BINARY | _O_NOINHERIT, _SH_DENYWR);
    int code = *file >= 0 ? 0 : errno == EACCES ? EAGAIN : errno;
    int got = 0;
    if (code == 0) {
        got = _read(*file, text, sizeof text - 1);
    } else if (code == EAGAIN) {
        FILE* other = fopen(path, "rb");
        got = other != NULL ? (int)fread(text, 1, sizeof text - 1, other) : 0;
        if (other != NULL) {
            fclose(other);
        }
    }
    text[got > 0 ? got : 0] = '\0';
    lock_parse(text, owner);
    return code;
}

static bool lock_fill(int file, const char* text) {
    int size = (int)strlen(text);
    return _lseek(file, 0, SEEK_SET) == 0 && _chsize(file, 0) == 0 &&
           _write(file, text, (unsigned)size) == size;
}

static void lock_close(int file, const char* path) {
    _close(file); // an open file cannot be removed
    if (path != NULL) {
        remove(path);
    }
}
#else
static bool lock_alive(const lock_owner* owner) {
    lock_owner self;
    lock_self(&self);
    return owner->process > 0 && owner->process != self.process &&
           strcmp(owner->host, self.host) == 0 &&
           (kill((pid_t)owner->process, 0) == 0 || errno == EPERM);
}

static int lock_open(const char* path, int* file, lock_owner* owner) {
    char text[512] = "";
    struct flock all;
    struct stat opened;
    struct stat named;
    memset(owner, 0, sizeof *owner);
    memset(&all, 0, sizeof all);
    all.l_type = F_WRLCK;
    all.l_whence = SEEK_SET;
    *file = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (*file < 0) {
        return errno;
    }
    int code = fcntl(*file, F_SETLK, &all) == 0 ? 0 : errno == EACCES ? EAGAIN : errno;
    ssize_t got = read(*file, text, sizeof text - 1);
    text[got > 0 ? got : 0] = '\0';
    lock_parse(text, owner);
    if (code == ENOLCK || code == ENOSYS || code == ENOTSUP) { // a disk without locks
        code = lock_alive(owner) ? EAGAIN : 0;
    }
    // The previous owner removes the file when it ends; a lock on a removed file protects nothing.
    if (code == 0 && (fstat(*file, &opened) != 0 || stat(path, &named) != 0 ||
                      opened.st_ino != named.st_ino || opened.st_dev != named.st_dev)) {
        code = LOCK_MOVED;
    }
    if (code != 0) {
        close(*file);
    }
    return code;
}

static bool lock_fill(int file, const char* text) {
    ssize_t size = (ssize_t)strlen(text);
    return ftruncate(file, 0) == 0 && pwrite(file, text, (size_t)size, 0) == size;
}

static void lock_close(int file, const char* path) {
    if (path != NULL) {
        (void)unlink(path);
    }
    close(file);
}
#endif

// Who holds the lock of a folder; false: nobody, or it cannot be told yet. On Windows it never can.
#ifdef _WIN32
static bool lock_held(const char* path, lock_owner* owner) {
    (void)path;
    memset(owner, 0, sizeof *owner);
    return true;
}
#else
static bool lock_held(const char* path, lock_owner* owner) {
    char text[512] = "";
    struct flock all;
    memset(owner, 0, sizeof *owner);
    memset(&all, 0, sizeof all);
    all.l_type = F_WRLCK;
    all.l_whence = SEEK_SET;
    int file = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0) {
        return false;
    }
    ssize_t got = read(file, text, sizeof text - 1);
    text[got > 0 ? got : 0] = '\0';
    lock_parse(text, owner);
    bool told = fcntl(file, F_GETLK, &all) == 0;
    close(file);
    if (!told) { // a disk without locks
        return lock_alive(owner);
    }
    // A process that has just taken the lock has not written its name yet.
    lock_owner self;
    lock_self(&self);
    if (strcmp(owner->host, self.host) != 0) { // its locks need not be visible here
        return owner->process > 0;
    }
    return all.l_type != F_UNLCK && owner->process > 0 &&
           (all.l_pid <= 0 || (long)all.l_pid == owner->process);
}
#endif

static bool lock_refuse(app* a, const lock_owner* owner, const char* self, const char* path) {
    if (owner->process == 0) {
        return error_set(
            a->error, "--out %s is in use by another process; wait for it, or choose another --out",
            a->o.output.folder);
    }
    return error_set(
        a->error,
        strcmp(owner->host, self) == 0
            ? "--out %s is in use by process %ld on %s; wait for it, or choose another --out"
            : "--out %s is in use by process %ld on %s; wait for it, or choose another --out; if "
              "that process has ended, remove %s",
        a->o.output.folder, owner->process, owner->host, path);
}

// Makes this process the only writer of the folder.
static bool lock_take(app* a) {
    char path[PATH_SIZE];
    char text[512];
    lock_owner self;
    lock_owner owner;
    out_path(a, LOCK_NAME, path);
    lock_self(&self);
    int code = LOCK_MOVED;
    for (int attempt = 0; attempt < 100 && code == LOCK_MOVED; attempt++) {
        code = lock_open(path, &a->folder.lock, &owner);
    }
    if (code == EAGAIN) {
        return lock_refuse(a, &owner, self.host, path);
    }
    if (code != 0) {
        return error_set(a->error, "cannot lock %s: %s", path,
                         strerror(code == LOCK_MOVED ? EBUSY : code));
    }
    if (owner.process != 0 && strcmp(owner.host, self.host) != 0) {
        lock_close(a->folder.lock, NULL);
        return lock_refuse(a, &owner, self.host, path);
    }
    a->folder.locked = true;
    snprintf(text, sizeof text, "%ld %s\n", self.process, self.host);
    return lock_fill(a->folder.lock, text) ||
           error_set(a->error, "cannot write %s: %s", path, strerror(errno));
}

static void lock_release(app* a) {
    char path[PATH_SIZE];
    if (a->folder.locked) {
        out_path(a, LOCK_NAME, path);
        lock_close(a->folder.lock, path);
        a->folder.locked = false;
    }
}

#endif
