#ifndef QLORA__PART_PLATFORM
#define QLORA__PART_PLATFORM

// System headers, the targets that are supported, and compiler attributes.

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef _WIN32
#include <direct.h>
#include <fcntl.h>
#include <float.h>
#include <io.h>
#include <process.h>
#include <sys/stat.h>
#include <wchar.h>
#else
#include <dlfcn.h>
#include <fcntl.h>
#include <fenv.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif
#ifndef CLOCK_MONOTONIC
#error "qlora.h: include the implementation before system headers, or use -D_POSIX_C_SOURCE=200809L"
#endif
#endif

#if !defined(__LP64__) && !defined(_WIN64)
#error "qlora.h needs a 64-bit target"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "qlora.h needs a little-endian target"
#endif

// Marks private functions that a configuration may leave without a caller.
#if defined(__MINGW32__)
#define QLORA__UNUSED __attribute__((unused))
#define QLORA__PRINTF(fmt, first) __attribute__((format(gnu_printf, fmt, first)))
#elif defined(__GNUC__)
#define QLORA__UNUSED __attribute__((unused))
#define QLORA__PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))
#else
#define QLORA__UNUSED
#define QLORA__PRINTF(fmt, first)
#endif

// Around code that runs once per file or model, and around code that runs once per call: there, gcc
// -O2 and -O3 spend most of their time and gain nothing. What runs once per number is outside. With
// QLORA__ONE_LEVEL, the compiler sees through all of it, for its warnings.
#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__) &&                           \
    !defined(__OPTIMIZE_SIZE__) && !defined(QLORA__ONE_LEVEL)
#define QLORA__ONCE_PER_FILE _Pragma("GCC push_options") _Pragma("GCC optimize(\"Og\")")
#define QLORA__ONCE_PER_CALL _Pragma("GCC push_options") _Pragma("GCC optimize(\"O1\")")
#define QLORA__ONCE_END _Pragma("GCC pop_options")
#else
#define QLORA__ONCE_PER_FILE
#define QLORA__ONCE_PER_CALL
#define QLORA__ONCE_END
#endif

#ifndef QLORA_ASSERT
#define QLORA_ASSERT(condition) ((void)(condition))
#endif

typedef void (*qlora__thread_fn)(void* user);

#endif // QLORA__PART_PLATFORM
