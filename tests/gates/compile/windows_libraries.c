// windows_libraries.c - how the Windows code looks for libraries, tried with stand-ins for the
// system's functions. The gate `libraries` cuts PART out of src/platform/windows.h.
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define QLORA__UNUSED

// The flags of LoadLibraryEx that leave out the current folder.
#define SEARCH_FOLDER_OF_FILE 0x0100ul // for a whole path only
#define SEARCH_DEFAULT_FOLDERS 0x1000ul

static const char* path_variable;
static char tried[16][256]; // names that were given to the system, in order
static int count;
static int bad;

static unsigned long GetLastError(void) {
    return 126;
}

static unsigned long GetEnvironmentVariableA(const char* name, char* out, unsigned long size) {
    if (strcmp(name, "PATH") != 0 || strlen(path_variable) >= size) {
        return 0;
    }
    strcpy(out, path_variable);
    return (unsigned long)strlen(path_variable);
}

static bool whole(const char* name) {
    return (name[0] != '\0' && name[1] == ':' && (name[2] == '\\' || name[2] == '/')) ||
           strncmp(name, "\\\\", 2) == 0;
}

static void* LoadLibraryExA(const char* name, void* file, unsigned long flags) {
    unsigned long allowed = SEARCH_DEFAULT_FOLDERS | (whole(name) ? SEARCH_FOLDER_OF_FILE : 0ul);
    if (file != NULL || (flags & SEARCH_DEFAULT_FOLDERS) == 0 || (flags & ~allowed) != 0) {
        printf("LoadLibraryExA(%s) with the flags 0x%lx also searches other folders\n", name,
               flags);
        bad = 1;
    }
    if (!whole(name) && strpbrk(name, "/\\:") != NULL) {
        printf("LoadLibraryExA(%s): a path that depends on the current folder\n", name);
        bad = 1;
    }
    snprintf(tried[count++ % 16], sizeof tried[0], "%s", name);
    return NULL;
}

#include PART

// Opens a name that is never found, and compares what was tried.
static void expect(const char* path, const char* name, int n, const char* const* names) {
    char why[256] = "";
    path_variable = path;
    count = 0;
    void* library = qlora__library_open(name, why, sizeof why);
    bool same = library == NULL && why[0] != '\0' && count == n;
    for (int i = 0; same && i < n; i++) {
        same = strcmp(tried[i], names[i]) == 0;
    }
    if (!same) {
        printf("%s, PATH %s: %d tried, the last is %s; error: %s\n", name, path, count,
               count > 0 ? tried[(count - 1) % 16] : "none", why);
        bad = 1;
    }
}

int main(void) {
    static const char* const plain[] = {"x.dll"};
    static const char* const two[] = {"x.dll", "C:\\CUDA\\bin\\x.dll", "\\\\host\\bin\\x.dll"};
    static const char* const given[] = {"D:\\own\\x.dll"};
    static const char* const relative[] = {"own\\x.dll", "own/x.dll", ".\\x.dll", "..\\x.dll",
                                           "\\x.dll",    "/x.dll",    "C:x.dll",  "./x.dll"};
    expect("", "x.dll", 1, plain);
    expect(".;;bin;C:;C:bin;\\bin;/bin;..\\bin", "x.dll", 1, plain);
    expect("C:\\CUDA\\bin;.;\\\\host\\bin", "x.dll", 3, two);
    expect("C:\\CUDA\\bin", "D:\\own\\x.dll", 1, given);
    for (size_t i = 0; i < sizeof relative / sizeof relative[0]; i++) {
        expect("C:\\CUDA\\bin", relative[i], 0, NULL);
    }
    return bad;
}
