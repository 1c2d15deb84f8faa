// crt.h - just enough declarations of a Windows C library to let clang parse qlora.h in MSVC mode:
// see gate_msvc in check.sh. Nothing is linked. When qlora.h starts to use another function, add a
// line for it here.
#ifndef MSVC_CRT_H
#define MSVC_CRT_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

extern int* _errno(void);
#define errno (*_errno())
#define EPERM 1
#define ENOENT 2
#define EINTR 4
#define EIO 5
#define ENOMEM 12
#define EACCES 13
#define EEXIST 17
#define ENOTDIR 20
#define EISDIR 21
#define EINVAL 22
#define EMFILE 24
#define EFBIG 27
#define ENOSPC 28
#define ESPIPE 29
#define EROFS 30
#define ENAMETOOLONG 38
#define EILSEQ 42
#define ERANGE 34

#define INFINITY ((float)(1e300 * 1e300))
#define NAN ((float)(INFINITY * 0.0f))
double fabs(double), floor(double), ceil(double), sqrt(double), exp(double), log(double);
double sin(double), cos(double), tanh(double), pow(double, double), fmod(double, double);
double erf(double), exp2(double), expm1(double), log1p(double), rint(double), nearbyint(double);
double ldexp(double, int), frexp(double, int*), fmax(double, double), fmin(double, double);
double fma(double, double, double), trunc(double), log2(double), round(double);
float fabsf(float), floorf(float), ceilf(float), sqrtf(float), expf(float), logf(float);
float sinf(float), cosf(float), tanhf(float), powf(float, float), fmodf(float, float);
float erff(float), exp2f(float), expm1f(float), log1pf(float), rintf(float), nearbyintf(float);
float ldexpf(float, int), frexpf(float, int*), fmaxf(float, float), fminf(float, float);
float fmaf(float, float, float), truncf(float), log2f(float), roundf(float);

typedef struct FILE FILE;
#define SEEK_SET 0
extern FILE* msvc_stream(int);
#define stderr (msvc_stream(2))
int snprintf(char*, size_t, const char*, ...), vsnprintf(char*, size_t, const char*, va_list);
int fprintf(FILE*, const char*, ...), vfprintf(FILE*, const char*, va_list);
int fflush(FILE*), fclose(FILE*), ferror(FILE*), fputs(const char*, FILE*), _fileno(FILE*);
size_t fread(void*, size_t, size_t, FILE*), fwrite(const void*, size_t, size_t, FILE*);
FILE* _wfopen(const wchar_t*, const wchar_t*);
int64_t _ftelli64(FILE*);
int _fseeki64(FILE*, int64_t, int);

void *malloc(size_t), *realloc(void*, size_t), *_aligned_malloc(size_t, size_t);
void free(void*), _aligned_free(void*);
void qsort(void*, size_t, size_t, int (*)(const void*, const void*));
double strtod(const char*, char**);
long strtol(const char*, char**, int);
long long strtoll(const char*, char**, int);
unsigned long long strtoull(const char*, char**, int);
int abs(int), atoi(const char*);

void *memcpy(void*, const void*, size_t), *memmove(void*, const void*, size_t);
void* memset(void*, int, size_t);
#ifdef __cplusplus
extern "C++" { // two overloads of each, as in the C++ standard
const void* memchr(const void*, int, size_t);
const char *strchr(const char*, int), *strrchr(const char*, int), *strstr(const char*, const char*);
const char* strpbrk(const char*, const char*);
void* memchr(void*, int, size_t);
char *strchr(char*, int), *strrchr(char*, int), *strstr(char*, const char*);
char* strpbrk(char*, const char*);
}
#else
void* memchr(const void*, int, size_t);
char *strchr(const char*, int), *strrchr(const char*, int), *strstr(const char*, const char*);
char* strpbrk(const char*, const char*);
#endif
int memcmp(const void*, const void*, size_t), strcmp(const char*, const char*);
int strncmp(const char*, const char*, size_t);
size_t strlen(const char*), strspn(const char*, const char*), strcspn(const char*, const char*);

typedef int64_t time_t;
time_t time(time_t*);

#define _O_WRONLY 1
#define _O_CREAT 0x100
#define _O_EXCL 0x400
#define _O_BINARY 0x8000
#define _O_NOINHERIT 0x80
#define _S_IREAD 0x100
#define _S_IWRITE 0x80
int _wopen(const wchar_t*, int, ...), _close(int);
FILE* _fdopen(int, const char*);
int _wmkdir(const wchar_t*), _wrmdir(const wchar_t*), _wremove(const wchar_t*), _commit(int);
int _wunlink(const wchar_t*);
uintptr_t _beginthreadex(void*, unsigned, unsigned(__stdcall*)(void*), void*, unsigned, unsigned*);

#ifdef __cplusplus
}
#endif

#endif
