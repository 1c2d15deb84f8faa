#ifndef QLORA__PART_WINDOWS
#define QLORA__PART_WINDOWS

// The system functions are declared here so that <windows.h> and its macros stay out of the user's
// file.
#ifdef _WINDOWS_
#ifdef __cplusplus
#error "qlora.h: include the implementation before <windows.h>"
#endif
#else
#ifdef __cplusplus
extern "C" {
#endif
__declspec(dllimport) void* __stdcall LoadLibraryExA(const char*, void*, unsigned long);
__declspec(dllimport) unsigned long __stdcall GetEnvironmentVariableA(const char*, char*,
                                                                      unsigned long);
__declspec(dllimport) int __stdcall GlobalMemoryStatusEx(void*); // MEMORYSTATUSEX*
__declspec(dllimport) void* __stdcall GetProcAddress(void*, const char*);
__declspec(dllimport) unsigned long __stdcall GetLastError(void);
__declspec(dllimport) int __stdcall QueryPerformanceCounter(void*); // LARGE_INTEGER*
__declspec(dllimport) int __stdcall QueryPerformanceFrequency(void*);
__declspec(dllimport) unsigned long __stdcall GetActiveProcessorCount(unsigned short);
__declspec(dllimport) void __stdcall AcquireSRWLockExclusive(void*);
__declspec(dllimport) void __stdcall ReleaseSRWLockExclusive(void*);
__declspec(dllimport) int __stdcall SleepConditionVariableSRW(void*, void*, unsigned long,
                                                              unsigned long);
__declspec(dllimport) void __stdcall WakeAllConditionVariable(void*);
__declspec(dllimport) unsigned long __stdcall WaitForSingleObject(void*, unsigned long);
__declspec(dllimport) int __stdcall CloseHandle(void*);
__declspec(dllimport) void __stdcall Sleep(unsigned long);
__declspec(dllimport) int __stdcall MultiByteToWideChar(unsigned, unsigned long, const char*, int,
                                                        wchar_t*, int);
__declspec(dllimport) unsigned long __stdcall GetFileAttributesW(const wchar_t*);
__declspec(dllimport) int __stdcall MoveFileExW(const wchar_t*, const wchar_t*, unsigned long);
__declspec(dllimport) void* __stdcall CreateFileW(const wchar_t*, unsigned long, unsigned long,
                                                  void*, unsigned long, unsigned long, void*);
__declspec(dllimport) int __stdcall GetFileSizeEx(void*, void*);
__declspec(dllimport) void* __stdcall CreateFileMappingW(void*, void*, unsigned long, unsigned long,
                                                         unsigned long, const wchar_t*);
__declspec(dllimport) void* __stdcall MapViewOfFile(void*, unsigned long, unsigned long,
                                                    unsigned long, size_t);
__declspec(dllimport) int __stdcall UnmapViewOfFile(const void*);
#ifdef __cplusplus
}
#endif
#endif

// Whether a path does not depend on the current folder or drive: "C:\\x" or "\\\\server\\x".
static QLORA__UNUSED bool qlora__path_is_whole(const char* path) {
    bool drive = path[0] != '\0' && path[1] == ':' && (path[2] == '\\' || path[2] == '/');
    return drive || (path[0] == '\\' && path[1] == '\\');
}

// Looks for a library in the folders of PATH, where CUDA's installer puts its own. Entries that
// depend on the current folder are left out.
static QLORA__UNUSED void* qlora__library_in_path(const char* name) {
    static const char variable[] = "PATH";
    char path[32768];
    char file[1200];
    void* library = NULL;
    unsigned long size = GetEnvironmentVariableA(variable, path, (unsigned long)sizeof path);
    if (size == 0 || size >= sizeof path) {
        return NULL;
    }
    for (char* at = path; *at != '\0' && library == NULL;) {
        char* end = at + strcspn(at, ";");
        char* next = *end != '\0' ? end + 1 : end;
        *end = '\0';
        int n = snprintf(file, sizeof file, "%s\\%s", at, name);
        if (qlora__path_is_whole(at) && n > 0 && (size_t)n < sizeof file) {
            library = (void*)LoadLibraryExA(file, NULL, 0x1100UL); // its folder, then the defaults
        }
        at = next;
    }
    return library;
}

// LoadLibraryA would also look in the current folder, where anybody may have put a file.
static QLORA__UNUSED void* qlora__library_open(const char* name, char* why, size_t size) {
    bool whole = qlora__path_is_whole(name);
    if (!whole && strpbrk(name, "/\\:") != NULL) {
        snprintf(why, size, "%s is a relative path; give an absolute one, or a name alone", name);
        return NULL;
    }
    // the program's folder and the system's; for a path, also the folder it names
    void* library = (void*)LoadLibraryExA(name, NULL, whole ? 0x1100UL : 0x1000UL);
    unsigned long code = library == NULL ? GetLastError() : 0;
    if (library == NULL && !whole) {
        library = qlora__library_in_path(name);
    }
    if (library == NULL) {
        snprintf(why, size, "%s: error %lu", name, code);
    }
    return library;
}

static QLORA__UNUSED void* qlora__library_symbol(void* library, const char* name) {
    return (void*)GetProcAddress(library, name);
}

static QLORA__UNUSED double qlora__clock_ms(void) {
    int64_t count = 0;
    int64_t rate = 1;
    QueryPerformanceCounter((void*)&count);
    QueryPerformanceFrequency((void*)&rate);
    return (double)count * 1e3 / (double)rate;
}

static QLORA__UNUSED void qlora__sleep_us(int64_t us) {
    Sleep((unsigned long)((us + 999) / 1000));
}

static QLORA__UNUSED int32_t qlora__core_count(void) {
    return (int32_t)GetActiveProcessorCount(0xffff);
}

// Windows has no call that tells.
static QLORA__UNUSED bool qlora__os_has_arm_bf16(void) {
    return false;
}

static QLORA__UNUSED bool qlora__os_allows_amx(void) {
    return false; // not offered there
}

// The value of an environment variable; false if it is not set or empty. Of one that is longer than
// `out`, only that it is too long, so that it is refused.
static QLORA__UNUSED bool qlora__os_setting(const char* name, char* out, size_t size) {
    unsigned long used = GetEnvironmentVariableA(name, out, (unsigned long)size);
    if (used >= size) {
        snprintf(out, size, "%lu bytes", used);
    }
    return used > 0;
}

// Bytes of physical memory that are available; 0 = not known.
static QLORA__UNUSED uint64_t qlora__os_memory(const char* root) {
    struct {
        uint32_t size;
        uint32_t load;
        uint64_t bytes[7]; // the second is the available physical memory
    } status;
    (void)root;
    memset(&status, 0, sizeof status);
    status.size = (uint32_t)sizeof status;
    return GlobalMemoryStatusEx((void*)&status) ? status.bytes[1] : 0;
}

typedef struct qlora__mutex {
    void* srw;
} qlora__mutex;
typedef struct qlora__cond {
    void* variable;
} qlora__cond;
typedef struct qlora__thread {
    uintptr_t handle;
    qlora__thread_fn fn;
    void* user;
} qlora__thread;

static QLORA__UNUSED bool qlora__mutex_init(qlora__mutex* m) {
    m->srw = NULL;
    return true;
}
static QLORA__UNUSED void qlora__mutex_free(qlora__mutex* m) {
    (void)m;
}
static QLORA__UNUSED void qlora__mutex_lock(qlora__mutex* m) {
    AcquireSRWLockExclusive((void*)m);
}
static QLORA__UNUSED void qlora__mutex_unlock(qlora__mutex* m) {
    ReleaseSRWLockExclusive((void*)m);
}
static QLORA__UNUSED bool qlora__cond_init(qlora__cond* c) {
    c->variable = NULL;
    return true;
}
static QLORA__UNUSED void qlora__cond_free(qlora__cond* c) {
    (void)c;
}
static QLORA__UNUSED void qlora__cond_wait(qlora__cond* c, qlora__mutex* m) {
    SleepConditionVariableSRW((void*)c, (void*)m, 0xffffffffUL, 0);
}
static QLORA__UNUSED void qlora__cond_wake(qlora__cond* c) {
    WakeAllConditionVariable((void*)c);
}
static unsigned __stdcall qlora__thread_entry(void* p) {
    qlora__thread* t = (qlora__thread*)p;
    t->fn(t->user);
    return 0;
}
static QLORA__UNUSED bool qlora__thread_start(qlora__thread* t, qlora__thread_fn fn, void* user) {
    t->fn = fn;
    t->user = user;
    t->handle = _beginthreadex(NULL, 0, qlora__thread_entry, t, 0, NULL);
    return t->handle != 0;
}
static QLORA__UNUSED void qlora__thread_join(qlora__thread* t) {
    WaitForSingleObject((void*)t->handle, 0xffffffffUL);
    CloseHandle((void*)t->handle);
}

// Paths are UTF-8: EILSEQ for those that are not, ENAMETOOLONG for those that do not fit.
#define QLORA__PATH_MAX 1024
static QLORA__UNUSED int qlora__wide(const char* path, wchar_t* out) {
    if (MultiByteToWideChar(65001, 8, path, -1, out, QLORA__PATH_MAX) > 0) {
        return 0;
    }
    return GetLastError() == 1113 ? EILSEQ : ENAMETOOLONG;
}

// The errno value of the last system call that failed.
static QLORA__UNUSED int qlora__os_error(void) {
    static const struct {
        unsigned long system;
        int code;
    } errors[] = {{2, ENOENT},  {3, ENOENT},  {5, EACCES},   {8, ENOMEM},   {14, ENOMEM},
                  {32, EACCES}, {33, EACCES}, {112, ENOSPC}, {123, EINVAL}, {206, ENAMETOOLONG}};
    unsigned long last = GetLastError();
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        if (errors[i].system == last) {
            return errors[i].code;
        }
    }
    return EIO;
}

static QLORA__UNUSED bool qlora__os_is_folder(const wchar_t* path) {
    unsigned long attributes = GetFileAttributesW(path);
    return attributes != 0xffffffffUL && (attributes & 0x10UL) != 0;
}

static QLORA__UNUSED int qlora__os_open(const char* path, qlora_file_mode mode, void** file,
                                        void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    int code = qlora__wide(path, wide);
    if (code != 0) {
        return code;
    }
    FILE* f = NULL;
    if (mode == QLORA_FILE_READ) {
        f = _wfopen(wide, L"rb");
    } else {
        int fd = _wopen(wide, _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY | _O_NOINHERIT,
                        _S_IREAD | _S_IWRITE);
        f = fd >= 0 ? _fdopen(fd, "wb") : NULL;
        if (fd >= 0 && f == NULL) {
            _close(fd);
        }
    }
    if (f == NULL && mode == QLORA_FILE_READ && errno == EACCES && qlora__os_is_folder(wide)) {
        return EISDIR;
    }
    if (f == NULL) {
        return errno != 0 ? errno : EIO;
    }
    *file = f;
    return 0;
}

static QLORA__UNUSED int64_t qlora__os_read(void* file, void* buffer, size_t bytes, void* user) {
    (void)user;
    size_t n = fread(buffer, 1, bytes, (FILE*)file);
    return n == 0 && ferror((FILE*)file) ? -(int64_t)EIO : (int64_t)n;
}

static QLORA__UNUSED int64_t qlora__os_read_at(void* file, void* buffer, size_t bytes,
                                               uint64_t offset, void* user) {
    (void)user;
    FILE* f = (FILE*)file;
    long long before = _ftelli64(f);
    if (before < 0 || offset > (uint64_t)INT64_MAX ||
        _fseeki64(f, (long long)offset, SEEK_SET) != 0) {
        return -(int64_t)ESPIPE;
    }
    size_t n = fread(buffer, 1, bytes, f);
    bool failed = n == 0 && ferror(f) != 0;
    failed = _fseeki64(f, before, SEEK_SET) != 0 || failed;
    return failed ? -(int64_t)EIO : (int64_t)n;
}

static QLORA__UNUSED int64_t qlora__os_write(void* file, const void* data, size_t bytes,
                                             void* user) {
    (void)user;
    size_t n = fwrite(data, 1, bytes, (FILE*)file);
    return n == 0 && bytes > 0 ? -(int64_t)(errno != 0 ? errno : EIO) : (int64_t)n;
}

static QLORA__UNUSED int qlora__os_sync(void* file, void* user) {
    (void)user;
    if (fflush((FILE*)file) != 0) {
        return errno != 0 ? errno : EIO;
    }
    return _commit(_fileno((FILE*)file)) == 0 ? 0 : EIO;
}

static QLORA__UNUSED int qlora__os_close(void* file, void* user) {
    (void)user;
    return fclose((FILE*)file) == 0 ? 0 : EIO;
}

static QLORA__UNUSED int qlora__os_rename(const char* from, const char* to, void* user) {
    (void)user;
    wchar_t wide_from[QLORA__PATH_MAX];
    wchar_t wide_to[QLORA__PATH_MAX];
    int code = qlora__wide(from, wide_from);
    code = code != 0 ? code : qlora__wide(to, wide_to);
    if (code != 0) {
        return code;
    }
    // replace the target, write through
    return MoveFileExW(wide_from, wide_to, 1 | 8) ? 0 : qlora__os_error();
}

static QLORA__UNUSED int qlora__os_remove(const char* path, void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    int code = qlora__wide(path, wide);
    if (code != 0) {
        return code;
    }
    // unlike elsewhere, folders have a function of their own
    return (qlora__os_is_folder(wide) ? _wrmdir(wide) : _wremove(wide)) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_make_dir(const char* path, void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    int code = qlora__wide(path, wide);
    if (code != 0) {
        return code;
    }
    return _wmkdir(wide) == 0 || errno == EEXIST ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_sync_dir(const char* path, void* user) {
    (void)path;
    (void)user;
    return 0; // MoveFileEx has already written through
}

static QLORA__UNUSED int qlora__os_map(const char* path, const void** data, uint64_t* bytes,
                                       void** handle, void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    int code = qlora__wide(path, wide);
    if (code != 0) {
        return code;
    }
    void* file = CreateFileW(wide, 0x80000000UL, 1, NULL, 3, 0, NULL);
    if (file == (void*)(intptr_t)-1) {
        return qlora__os_error();
    }
    int64_t size = 0;
    void* view = NULL;
    void* mapping = NULL;
    if (!GetFileSizeEx(file, (void*)&size)) {
        code = qlora__os_error();
    } else if (size > 0) {
        mapping = CreateFileMappingW(file, NULL, 2, 0, 0, NULL);
        view = mapping != NULL ? MapViewOfFile(mapping, 4, 0, 0, 0) : NULL;
        code = view == NULL ? qlora__os_error() : 0;
    }
    if (mapping != NULL) {
        CloseHandle(mapping); // the view keeps the mapping open
    }
    CloseHandle(file);
    if (code != 0) {
        return code;
    }
    *data = view;
    *bytes = (uint64_t)size;
    *handle = NULL;
    return 0;
}

static QLORA__UNUSED void qlora__os_unmap(const void* data, uint64_t bytes, void* handle,
                                          void* user) {
    (void)bytes;
    (void)handle;
    (void)user;
    if (data != NULL) {
        UnmapViewOfFile(data);
    }
}

#endif // QLORA__PART_WINDOWS
