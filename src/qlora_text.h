#include "text/manual.h"

#ifndef QLORA_TEXT_H
#define QLORA_TEXT_H

#include "api/linkage.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "api/base.h"
#include "text/api.h"
// Data needs chats, and chats are templates.
#if defined(QLORA_TEXT_NO_TEMPLATES) && !defined(QLORA_TEXT_NO_DATA)
#define QLORA_TEXT_NO_DATA
#endif
// What is left out is declared and never defined, which only extern functions may be.
#if defined(QLORA_STATIC) && defined(QLORA_TEXT_NO_TEMPLATES)
#undef QLORA_API
#define QLORA_API extern
#endif

#include "text/api_chat.h"
#if defined(QLORA_STATIC) && defined(QLORA_TEXT_NO_DATA)
#undef QLORA_API
#define QLORA_API extern
#endif

#include "text/api_data.h"
#if defined(QLORA_STATIC) && defined(QLORA_TEXT_NO_DATA)
#undef QLORA_API
#define QLORA_API QLORA_STATIC_API
#endif

#ifdef __cplusplus
}
#endif

#endif // QLORA_TEXT_H

#ifdef QLORA_TEXT_IMPLEMENTATION
#ifndef QLORA_TEXT_IMPLEMENTATION_DONE
#define QLORA_TEXT_IMPLEMENTATION_DONE

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wunknown-warning-option"
#pragma clang diagnostic ignored "-Wreserved-identifier"
#endif

#include "platform/base.h"
#ifdef _WIN32
#include "platform/windows.h"
#else // POSIX
#include "platform/posix.h"
#endif // _WIN32

#include "platform/system.h"
QLORA__ONCE_PER_FILE
#include "core/env.h"
#include "core/files.h"
#include "core/tools.h"
QLORA__ONCE_END
#include "formats/decimal.h"
#include "formats/json_read.h"
#include "formats/json_write.h"
QLORA__ONCE_PER_FILE
#include "formats/regex.h"
#include "formats/stop_ids.h"
#include "formats/splits.h"
#include "formats/gguf_path.h"
#ifndef QLORA_TEXT_NO_GGUF
#include "formats/gguf_read.h"
#include "formats/gguf_vocab.h"
#endif // QLORA_TEXT_NO_GGUF

QLORA__ONCE_END
#ifndef QLORA_TEXT_NO_DATA
#include "formats/inflate.h"
#include "formats/gzip.h"
#endif // QLORA_TEXT_NO_DATA

#if !defined(QLORA_TEXT_NO_PARQUET) && !defined(QLORA_TEXT_NO_DATA)
#include "formats/snappy.h"
#include "formats/zstd.h"
QLORA__ONCE_PER_FILE
#include "formats/thrift.h"
#include "formats/parquet_schema.h"
QLORA__ONCE_END
#include "formats/parquet_values.h"
#include "formats/parquet_pages.h"
#include "formats/parquet_open.h"
#include "formats/parquet_rows.h"
#endif // QLORA_TEXT_NO_PARQUET or QLORA_TEXT_NO_DATA

#include "text/base.h"
#ifndef QLORA_TEXT_NO_GGUF
#include "text/gguf_folder.h"
#else // QLORA_TEXT_NO_GGUF
#include "text/no_gguf.h"
#endif // QLORA_TEXT_NO_GGUF

#include "text/folder.h"
#include "text/unicode/classes.h"
#include "text/unicode/tables.h"
#include "text/unicode/characters.h"
#include "text/unicode/case_tables.h"
#include "text/unicode/case.h"
#include "text/values.h"
#include "text/maps.h"
#include "text/pattern/view.h"
#include "text/pattern/compile.h"
#include "text/pattern/match.h"
#include "text/tokens/split.h"
#include "text/tokens/tokenizer.h"
#include "text/tokens/unigram.h"
#include "text/tokens/bpe.h"
#include "text/unicode/grapheme_tables.h"
#include "text/unicode/graphemes.h"
#include "text/tokens/charsmap.h"
#include "text/tokens/normalize.h"
QLORA__ONCE_PER_FILE
#include "text/tokens/load_model.h"
#include "text/tokens/load.h"
#include "text/pattern/api.h"
#include "text/tokens/load_scored.h"
#ifndef QLORA_TEXT_NO_GGUF
#include "text/tokens/load_gguf.h"
#endif // QLORA_TEXT_NO_GGUF

#include "text/tokens/load_bin.h"
#include "text/tokens/new_tokens.h"
QLORA__ONCE_END
#include "text/tokens/encode.h"
#ifndef QLORA_TEXT_NO_DATA
#include "text/tokens/lines.h"
#endif // QLORA_TEXT_NO_DATA

#include "text/tokens/decode.h"
QLORA__ONCE_PER_CALL
#ifndef QLORA_TEXT_NO_TEMPLATES
#include "text/template/base.h"
#include "text/template/lex.h"
#include "text/template/parse.h"
#include "text/template/parse_tags.h"
#include "text/template/scope.h"
#include "text/template/value.h"
#include "text/template/number.h"
#include "text/template/json.h"
#include "text/template/format.h"
#include "text/template/strings.h"
#include "text/template/methods.h"
#include "text/template/iterate.h"
#include "text/template/filters.h"
#include "text/template/filters_number.h"
#include "text/template/layout.h"
#include "text/template/html.h"
#include "text/template/tables.h"
#include "text/template/eval.h"
#include "text/template/run.h"
#include "text/template/api.h"
#include "text/chat/formats.h"
#include "text/chat/template.h"
#include "text/chat/chat.h"
#include "text/chat/output.h"
#include "text/chat/turns.h"
#include "text/chat/trained.h"
#include "text/chat/encode.h"
#include "text/chat/save.h"
#endif // QLORA_TEXT_NO_TEMPLATES

#ifndef QLORA_TEXT_NO_DATA
#include "text/data/samples.h"
#include "text/data/input.h"
#include "text/data/input_gzip.h"
#include "text/data/messages.h"
#include "text/data/records.h"
#include "text/data/source.h"
#include "text/data/json.h"
#include "text/data/csv.h"
#include "text/data/text.h"
#ifndef QLORA_TEXT_NO_PARQUET
#include "text/data/parquet.h"
#else // QLORA_TEXT_NO_PARQUET
#include "text/data/no_parquet.h"
#endif // QLORA_TEXT_NO_PARQUET

#include "text/data/files.h"
#endif // QLORA_TEXT_NO_DATA

QLORA__ONCE_END

#if defined(__clang__)
#pragma clang diagnostic pop
#endif

#endif // QLORA_TEXT_IMPLEMENTATION_DONE
#endif // QLORA_TEXT_IMPLEMENTATION

/*
    Licence: MIT No Attribution, or the Unlicense, at your choice. See LICENSE for the texts. The
    Unicode tables are under the Unicode License V3, which is quoted where they start.
*/
