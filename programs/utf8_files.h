// utf8_files.h - paths in UTF-8 on Windows, as the library and files of settings have them.
//
// There, the C library takes names in the code page of the system, which lacks most letters: a user
// whose folder has an accent could open nothing. After this file, fopen and remove take UTF-8, and
// so do the utf8_ functions; utf8_arguments replaces the arguments of main. Elsewhere, names are
// bytes, and nothing is replaced.
#ifndef UTF8_FILES_H
#define UTF8_FILES_H

#ifdef _WIN32
#include <direct.h>
#include <errno.h>
#include <fcntl.h>
#include <io.h>
#include <share.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <wchar.h>

// Not <windows.h>: its declarations conflict with those in qlora.h's implementation.
__declspec(dllimport) int __stdcall MultiByteToWideChar(unsigned, unsigned long, const char*, int,
                                                        wchar_t*, int);
__declspec(dllimport) int __stdcall WideCharToMultiByte(unsigned, unsigned long, const wchar_t*,
                                                        int, char*, int, const char*, int*);
__declspec(dllimport) wchar_t* __stdcall GetCommandLineW(void);
__declspec(dllimport) int __stdcall SetConsoleOutputCP(unsigned);

enum { UTF8_PATH = 4096, UTF8_PAGE = 65001 };

static inline bool utf8_wide(const char* path, wchar_t out[UTF8_PATH]) {
    if (MultiByteToWideChar(UTF8_PAGE, 8, path, -1, out, UTF8_PATH) > 0) {
        return true;
    }
    errno = strlen(path) >= UTF8_PATH ? ENAMETOOLONG : EILSEQ;
    return false;
}

static inline FILE* utf8_fopen(const char* path, const char* mode) {
    wchar_t wide[UTF8_PATH];
    wchar_t how[UTF8_PATH];
    return utf8_wide(path, wide) && utf8_wide(mode, how) ? _wfopen(wide, how) : NULL;
}

static inline int utf8_remove(const char* path) {
    wchar_t wide[UTF8_PATH];
    struct _stat64 info;
    if (!utf8_wide(path, wide)) {
        return -1;
    }
    bool folder = _wstat64(wide, &info) == 0 && (info.st_mode & _S_IFMT) == _S_IFDIR;
    return folder ? _wrmdir(wide) : _wremove(wide);
}

// With a share mode, _SH_DENYNO or _SH_DENYWR.
static inline int utf8_open(const char* path, int flags, int share) {
    wchar_t wide[UTF8_PATH];
    return utf8_wide(path, wide) ? _wsopen(wide, flags, share, _S_IREAD | _S_IWRITE) : -1;
}

static inline int utf8_mkdir(const char* path) {
    wchar_t wide[UTF8_PATH];
    return utf8_wide(path, wide) ? _wmkdir(wide) : -1;
}

static inline int utf8_rmdir(const char* path) {
    wchar_t wide[UTF8_PATH];
    return utf8_wide(path, wide) ? _wrmdir(wide) : -1;
}

// In 64 bits: a model may be larger than the 2 GiB of a plain stat. Not every C library accepts a
// separator at the end; only that of a drive belongs to the name.
static inline int utf8_stat(const char* path, struct _stat64* info) {
    wchar_t wide[UTF8_PATH];
    if (!utf8_wide(path, wide)) {
        return -1;
    }
    size_t length = wcslen(wide);
    while (length > 1 && (wide[length - 1] == L'/' || wide[length - 1] == L'\\') &&
           wide[length - 2] != L':') {
        wide[--length] = L'\0';
    }
    return _wstat64(wide, info);
}

// The names in a folder, one after the other: *folder is -1 before the first and after the last. A
// name that is not Unicode is left out. Returns false at the end, with errno 0 or what is wrong.
static inline bool utf8_next(const char* path, intptr_t* folder, char name[UTF8_PATH]) {
    struct _wfinddata64_t entry;
    wchar_t all[UTF8_PATH + 2];
    for (;;) {
        if (*folder == -1) {
            if (!utf8_wide(path, all)) {
                return false;
            }
            wcscat(all, L"/*");
            *folder = _wfindfirst64(all, &entry);
            if (*folder == -1) {
                return false;
            }
        } else if (_wfindnext64(*folder, &entry) != 0) {
            _findclose(*folder);
            *folder = -1;
            errno = 0;
            return false;
        }
        if (WideCharToMultiByte(UTF8_PAGE, 0x80, entry.name, -1, name, UTF8_PATH, NULL, NULL) > 0) {
            return true;
        }
    }
}

// The next argument of a command line as Windows splits it: 2n backslashes and a quote are n
// backslashes and a quote that opens or closes; one backslash more makes the quote a letter, and
// two quotes inside quotes are one letter. In the program's name, backslashes are letters.
static inline const wchar_t* utf8_argument(const wchar_t* at, bool first, wchar_t* out) {
    bool quoted = false;
    while (*at != L'\0' && (quoted || (*at != L' ' && *at != L'\t'))) {
        size_t slashes = first ? 0 : wcsspn(at, L"\\");
        at += slashes;
        bool quote = *at == L'"';
        for (size_t i = 0; i < (quote ? slashes / 2 : slashes); i++) {
            *out++ = L'\\';
        }
        if (quote && slashes % 2 == 1) {
            *out++ = *at++;
        } else if (quote && quoted && at[1] == L'"' && !first) {
            *out++ = L'"';
            at += 2;
        } else if (quote) {
            quoted = !quoted;
            at++;
        } else if (slashes == 0) {
            *out++ = *at++;
        }
    }
    *out = L'\0';
    return at + wcsspn(at, L" \t");
}

// Replaces the arguments by those of the command line in UTF-8, and prints in UTF-8. They are kept
// until the program ends. Without memory, the arguments stay as they were.
static inline void utf8_arguments(int* argc, char*** argv) {
    const wchar_t* line = GetCommandLineW();
    size_t length = wcslen(line);
    wchar_t* wide = (wchar_t*)malloc((length + 1) * sizeof *wide);
    char** list = (char**)calloc(length + 2, sizeof *list);
    char* text = (char*)malloc(4 * length + length + 2);
    int count = 0;
    SetConsoleOutputCP(UTF8_PAGE);
    if (wide == NULL || list == NULL || text == NULL) {
        free(wide);
        free(list);
        free(text);
        return;
    }
    do {
        line = utf8_argument(line, count == 0, wide);
        int room = (int)(4 * wcslen(wide) + 1);
        int used = WideCharToMultiByte(UTF8_PAGE, 0, wide, -1, text, room, NULL, NULL);
        list[count++] = text;
        text[used > 0 ? used - 1 : 0] = '\0';
        text += used > 0 ? used : 1;
    } while (*line != L'\0');
    free(wide);
    *argc = count;
    *argv = list;
}

#define fopen(path, mode) utf8_fopen(path, mode)
#define remove(path) utf8_remove(path)
#else
#define utf8_arguments(argc, argv) ((void)(argc), (void)(argv))
#endif

#endif
