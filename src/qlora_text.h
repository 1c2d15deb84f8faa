#include "text/manual.h"

#ifndef TEXT_H
#define TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "text/api.h"

#ifdef __cplusplus
}
#endif
#endif // TEXT_H

#if defined(TEXT_IMPLEMENTATION) && !defined(TEXT_IMPLEMENTATION_DONE)
#define TEXT_IMPLEMENTATION_DONE

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef TEXT_REALLOC
#define TEXT_REALLOC(p, n) realloc(p, n)
#define TEXT_FREE(p) free(p)
#endif

#ifdef __clang__
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wreserved-identifier"
#endif

#include "text/base.h"
#include "text/classes.h"
#include "text/unicode_tables.h"
#include "text/unicode.h"
#include "text/json.h"
#include "text/maps.h"
#include "text/split.h"
#include "text/bpe.h"
#include "text/normalize.h"
#include "text/load.h"
#include "text/load_bin.h"
#include "text/encode.h"
#include "text/decode.h"
#include "text/chat.h"
#include "text/data.h"

#ifdef __clang__
#pragma clang diagnostic pop
#endif
#endif // TEXT_IMPLEMENTATION

/* Licence: MIT-0. Permission is granted, free of charge, to any person to deal with this file
   without restriction, including the rights to use, copy, modify, merge, publish, distribute,
   sublicense and sell copies. It is provided "as is", without warranty of any kind. The Unicode
   tables are under the Unicode License V3, see where they start. */
