// The implementations need POSIX names that -std=c99 hides; harmless when the user set them
// already.
#if (defined(QLORA_IMPLEMENTATION) || defined(QLORA_TEXT_IMPLEMENTATION)) && !defined(_WIN32)
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#ifndef _DARWIN_C_SOURCE
#define _DARWIN_C_SOURCE 1
#endif
#ifndef _FILE_OFFSET_BITS
#define _FILE_OFFSET_BITS 64
#endif
#endif

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// qlora.h and qlora_text.h each carry this part; whichever comes second compares.
#ifndef QLORA_VERSION_MAJOR
#define QLORA_VERSION_MAJOR 0
#define QLORA_VERSION_MINOR 3
#define QLORA_VERSION_PATCH 0
#define QLORA_VERSION                                                                              \
    (QLORA_VERSION_MAJOR * 10000 + QLORA_VERSION_MINOR * 100 + QLORA_VERSION_PATCH)
#define QLORA_VERSION_STRING "0.3.0-dev"
#elif QLORA_VERSION_MAJOR != 0 || QLORA_VERSION_MINOR != 3 || QLORA_VERSION_PATCH != 0
#error "qlora.h and qlora_text.h are of different versions; take both from one release"
#endif

#ifndef QLORA_API
#if defined(QLORA_STATIC)
#if defined(__GNUC__)
#define QLORA_STATIC_API static __attribute__((unused))
#else
#define QLORA_STATIC_API static
#endif
#define QLORA_API QLORA_STATIC_API
#elif defined(QLORA_DLL) && defined(_WIN32)
#if defined(QLORA_IMPLEMENTATION) || defined(QLORA_TEXT_IMPLEMENTATION)
#define QLORA_API __declspec(dllexport) extern
#else
#define QLORA_API __declspec(dllimport) extern
#endif
#elif defined(QLORA_DLL) && defined(__GNUC__)
#define QLORA_API __attribute__((visibility("default"))) extern
#else
#define QLORA_API extern
#endif
#endif // QLORA_API
