#ifndef QLORA__PART_POSIX
#define QLORA__PART_POSIX

// POSIX: shared libraries, clock, threads and files.

// A path that depends on the current folder would let whoever can write there run code here.
static QLORA__UNUSED void* qlora__library_open(const char* name, char* why, size_t size) {
    if (name[0] != '/' && strchr(name, '/') != NULL) {
        snprintf(why, size, "%s is a relative path; give an absolute one, or a name alone", name);
        return NULL;
    }
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char* text = dlerror();
        snprintf(why, size, "%s", text != NULL ? text : name);
    }
    return library;
}

static QLORA__UNUSED void* qlora__library_symbol(void* library, const char* name) {
    return dlsym(library, name);
}

static QLORA__UNUSED double qlora__clock_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static QLORA__UNUSED void qlora__sleep_us(int64_t us) {
    struct timespec t;
    t.tv_sec = (time_t)(us / 1000000);
    t.tv_nsec = (long)(us % 1000000 * 1000);
    nanosleep(&t, NULL);
}

// Whether the processor has ARM's BF16 instructions, as far as the system says so.
static QLORA__UNUSED bool qlora__os_has_arm_bf16(void) {
#if defined(__aarch64__) && defined(__linux__)
    return (getauxval(26) >> 14 & 1u) != 0; // AT_HWCAP2, HWCAP2_BF16: older headers lack the names
#elif defined(__aarch64__) && defined(__APPLE__)
    // By its name, because the header that declares it needs more than POSIX, and so does that of
    // RTLD_DEFAULT, which is -2 there.
    typedef int (*query_fn)(const char* name, void* value, size_t* size, void* set, size_t bytes);
    int has = 0;
    size_t size = sizeof has;
    query_fn query = NULL;
    void* address = dlsym((void*)-2, "sysctlbyname");
    memcpy(&query, &address, sizeof query);
    bool known = query != NULL && query("hw.optional.arm.FEAT_BF16", &has, &size, NULL, 0) == 0;
    return known && has == 1;
#else
    return false;
#endif
}

// Asks for the use of AMX's tiles, as every process must that uses them; false if they are refused.
static QLORA__UNUSED bool qlora__os_allows_amx(void) {
#if defined(__x86_64__) && defined(__linux__) && defined(__LP64__)
    long result = 158; // arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA): older headers lack the names
    __asm__ volatile("syscall" : "+a"(result) : "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
    return result == 0;
#else
    return false;
#endif
}

// The value of an environment variable; false if it is not set or empty.
static QLORA__UNUSED bool qlora__os_setting(const char* name, char* out, size_t size) {
    const char* value = getenv(name);
    snprintf(out, size, "%s", value != NULL ? value : "");
    return out[0] != '\0';
}

// Reads a small text file, such as those of /proc; "" if there is none.
static QLORA__UNUSED void qlora__os_text(const char* root, const char* folder, const char* name,
                                         char* out, size_t size) {
    char path[1200];
    size_t used = 0;
    int n = snprintf(path, sizeof path, "%s%s%s", root, folder, name);
    int fd = n > 0 && (size_t)n < sizeof path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    while (fd >= 0 && used < size - 1) {
        ssize_t got = read(fd, out + used, size - 1 - used);
        if (got <= 0) {
            break;
        }
        used += (size_t)got;
    }
    if (fd >= 0) {
        close(fd);
    }
    out[used] = '\0';
}

// The number after a key at the start of a line; UINT64_MAX if there is none ("max" in a cgroup).
static QLORA__UNUSED uint64_t qlora__os_number(const char* text, const char* key) {
    size_t length = strlen(key);
    while (text != NULL && strncmp(text, key, length) != 0) {
        text = strchr(text, '\n');
        text = text != NULL ? text + 1 : NULL;
    }
    text = text != NULL ? text + length : "";
    while (*text == ' ') {
        text++;
    }
    uint64_t value = *text >= '0' && *text <= '9' ? 0 : UINT64_MAX;
    for (; *text >= '0' && *text <= '9' && value < UINT64_MAX / 16; text++) {
        value = value * 10 + (uint64_t)(*text - '0');
    }
    return value;
}

// Cores on which this process may run, from the mask that `taskset` or a container sets; 0 = not
// known. Tests give another root than "".
static QLORA__UNUSED int32_t qlora__os_cores(const char* root) {
    char text[8192];
    qlora__os_text(root, "/proc/self/status", "", text, sizeof text);
    const char* mask = strstr(text, "\nCpus_allowed:");
    int32_t cores = 0;
    for (mask = mask != NULL ? mask + 14 : ""; *mask != '\0' && *mask != '\n'; mask++) {
        static const char digits[] = "0123456789abcdef";
        const char* digit = strchr(digits, *mask);
        for (int bits = digit != NULL ? (int)(digit - digits) : 0; bits != 0; bits /= 2) {
            cores += bits % 2;
        }
    }
    return cores;
}

static QLORA__UNUSED int32_t qlora__core_count(void) {
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    int32_t online = n > 0 && n < 4096 ? (int32_t)n : 1;
    int32_t allowed = qlora__os_cores("");
    return allowed > 0 && allowed < online ? allowed : online;
}

// What one cgroup leaves: its limit less what it uses, without the file cache that it can drop.
static QLORA__UNUSED uint64_t qlora__os_cgroup(const char* root, const char* folder, bool second) {
    char text[8192];
    qlora__os_text(root, folder, second ? "/memory.max" : "/memory.limit_in_bytes", text,
                   sizeof text);
    uint64_t limit = qlora__os_number(text, "");
    qlora__os_text(root, folder, second ? "/memory.current" : "/memory.usage_in_bytes", text,
                   sizeof text);
    uint64_t used = qlora__os_number(text, "");
    qlora__os_text(root, folder, "/memory.stat", text, sizeof text);
    uint64_t cache = qlora__os_number(text, second ? "inactive_file " : "total_inactive_file ");
    if (limit == UINT64_MAX || used == UINT64_MAX) {
        return UINT64_MAX;
    }
    used -= cache != UINT64_MAX && cache < used ? cache : 0;
    return limit > used ? limit - used : 0;
}

// Bytes of memory that this process can still take without swapping: what the system has available
// and what every cgroup that it is in allows; at least 1. 0 = not known. Tests give another root
// than "".
static QLORA__UNUSED uint64_t qlora__os_memory(const char* root) {
    char text[8192];
    qlora__os_text(root, "/proc/meminfo", "", text, sizeof text);
    uint64_t most = qlora__os_number(text, "MemAvailable:");
    most = most != UINT64_MAX ? most * 1024 : UINT64_MAX;
    qlora__os_text(root, "/proc/self/cgroup", "", text, sizeof text);
    for (char* line = text; *line != '\0';) { // number:controllers:folder
        char folder[1024];
        char* end = line + strcspn(line, "\n");
        char* next = *end != '\0' ? end + 1 : end;
        *end = '\0';
        bool second = strncmp(line, "0::", 3) == 0;
        char* first = strstr(line, ":memory:");
        const char* own = second ? line + 3 : first != NULL ? first + 8 : NULL;
        const char* base = second ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        int n = own != NULL ? snprintf(folder, sizeof folder, "%s%s", base, own) : -1;
        bool inside = n > 0 && (size_t)n < sizeof folder;
        while (inside) { // up to the root, which in a container is the container's own
            uint64_t left = qlora__os_cgroup(root, folder, second);
            most = left < most ? left : most;
            char* slash = strrchr(folder, '/');
            inside = slash != NULL && (size_t)(slash - folder) >= strlen(base);
            if (inside) {
                *slash = '\0';
            }
        }
        line = next;
    }
    return most == UINT64_MAX ? 0 : most > 0 ? most : 1;
}

typedef pthread_mutex_t qlora__mutex;
typedef pthread_cond_t qlora__cond;
typedef struct qlora__thread {
    pthread_t handle;
    qlora__thread_fn fn;
    void* user;
} qlora__thread;

static QLORA__UNUSED bool qlora__mutex_init(qlora__mutex* m) {
    return pthread_mutex_init(m, NULL) == 0;
}
static QLORA__UNUSED void qlora__mutex_free(qlora__mutex* m) {
    pthread_mutex_destroy(m);
}
static QLORA__UNUSED void qlora__mutex_lock(qlora__mutex* m) {
    pthread_mutex_lock(m);
}
static QLORA__UNUSED void qlora__mutex_unlock(qlora__mutex* m) {
    pthread_mutex_unlock(m);
}
static QLORA__UNUSED bool qlora__cond_init(qlora__cond* c) {
    return pthread_cond_init(c, NULL) == 0;
}
static QLORA__UNUSED void qlora__cond_free(qlora__cond* c) {
    pthread_cond_destroy(c);
}
static QLORA__UNUSED void qlora__cond_wait(qlora__cond* c, qlora__mutex* m) {
    pthread_cond_wait(c, m);
}
static QLORA__UNUSED void qlora__cond_wake(qlora__cond* c) {
    pthread_cond_broadcast(c);
}
static QLORA__UNUSED void* qlora__thread_entry(void* p) {
    qlora__thread* t = (qlora__thread*)p;
    t->fn(t->user);
    return NULL;
}
static QLORA__UNUSED bool qlora__thread_start(qlora__thread* t, qlora__thread_fn fn, void* user) {
    t->fn = fn;
    t->user = user;
    return pthread_create(&t->handle, NULL, qlora__thread_entry, t) == 0;
}
static QLORA__UNUSED void qlora__thread_join(qlora__thread* t) {
    pthread_join(t->handle, NULL);
}

// A file handle is its descriptor plus one, so that NULL can mean "no file".
static QLORA__UNUSED int qlora__os_fd(void* file) {
    return (int)((intptr_t)file - 1);
}

static QLORA__UNUSED int qlora__os_open(const char* path, qlora_file_mode mode, void** file,
                                        void* user) {
    (void)user;
    int flags = mode == QLORA_FILE_READ ? O_RDONLY : O_WRONLY | O_CREAT | O_EXCL;
    int fd = open(path, flags | O_CLOEXEC, 0666);
    if (fd < 0) {
        return errno;
    }
    *file = (void*)((intptr_t)fd + 1);
    return 0;
}

static QLORA__UNUSED int64_t qlora__os_read(void* file, void* buffer, size_t bytes, void* user) {
    (void)user;
    size_t most = bytes < ((size_t)1 << 30) ? bytes : (size_t)1 << 30; // Linux caps a call at 2 GiB
    ssize_t n;
    do {
        n = read(qlora__os_fd(file), buffer, most);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -(int64_t)errno : (int64_t)n;
}

static QLORA__UNUSED int64_t qlora__os_read_at(void* file, void* buffer, size_t bytes,
                                               uint64_t offset, void* user) {
    (void)user;
    size_t most = bytes < ((size_t)1 << 30) ? bytes : (size_t)1 << 30;
    ssize_t n;
    if (offset > (uint64_t)INT64_MAX - most) {
        return -(int64_t)EINVAL;
    }
    do {
        n = pread(qlora__os_fd(file), buffer, most, (off_t)offset);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -(int64_t)errno : (int64_t)n;
}

static QLORA__UNUSED int64_t qlora__os_write(void* file, const void* data, size_t bytes,
                                             void* user) {
    (void)user;
    size_t most = bytes < ((size_t)1 << 30) ? bytes : (size_t)1 << 30;
    ssize_t n;
    do {
        n = write(qlora__os_fd(file), data, most);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -(int64_t)errno : (int64_t)n;
}

static QLORA__UNUSED int qlora__os_sync(void* file, void* user) {
    (void)user;
    return fsync(qlora__os_fd(file)) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_close(void* file, void* user) {
    (void)user;
    return close(qlora__os_fd(file)) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_rename(const char* from, const char* to, void* user) {
    (void)user;
    return rename(from, to) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_remove(const char* path, void* user) {
    (void)user;
    return remove(path) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_make_dir(const char* path, void* user) {
    (void)user;
    return mkdir(path, 0777) == 0 || errno == EEXIST ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_sync_dir(const char* path, void* user) {
    (void)user;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    int code = fsync(fd) == 0 ? 0 : errno;
    close(fd);
    // Some file systems cannot sync a folder and return EINVAL; nothing more can be done about it.
    return code == EINVAL ? 0 : code;
}

static QLORA__UNUSED int qlora__os_map(const char* path, const void** data, uint64_t* bytes,
                                       void** handle, void* user) {
    (void)user;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    struct stat info;
    int code = fstat(fd, &info) == 0 ? 0 : errno;
    void* view = NULL;
    if (code == 0 && !S_ISREG(info.st_mode)) {
        code = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
    }
    if (code == 0 && info.st_size > 0) {
        view = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (view == MAP_FAILED) {
            code = errno;
        }
    }
    close(fd);
    if (code != 0) {
        return code;
    }
    *data = view;
    *bytes = (uint64_t)info.st_size;
    *handle = NULL;
    return 0;
}

static QLORA__UNUSED void qlora__os_unmap(const void* data, uint64_t bytes, void* handle,
                                          void* user) {
    (void)handle;
    (void)user;
    if (data != NULL) {
        munmap((void*)(uintptr_t)data, (size_t)bytes);
    }
}

#endif // QLORA__PART_POSIX
