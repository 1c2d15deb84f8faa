#include "text/manual.h"

#ifndef QLORA_TEXT_H
#define QLORA_TEXT_H

#include "api/linkage.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "api/base.h"
#include "text/api.h"

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
#include "formats/gguf_read.h"
#include "formats/gguf_vocab.h"
QLORA__ONCE_END
#include "formats/inflate.h"
#include "formats/gzip.h"
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
#include "text/base.h"
#include "text/folder.h"
#include "text/classes.h"
#include "text/unicode_tables.h"
#include "text/unicode.h"
#include "text/unicode_case.h"
#include "text/case.h"
#include "text/values.h"
#include "text/maps.h"
#include "text/view.h"
#include "text/pattern.h"
#include "text/pattern_match.h"
#include "text/split.h"
#include "text/tok.h"
#include "text/unigram.h"
#include "text/bpe.h"
#include "text/unicode_graphemes.h"
#include "text/graphemes.h"
#include "text/charsmap.h"
#include "text/normalize.h"
QLORA__ONCE_PER_FILE
#include "text/load_model.h"
#include "text/load.h"
#include "text/pattern_api.h"
#include "text/load_scored.h"
#include "text/load_gguf.h"
#include "text/load_bin.h"
#include "text/new_tokens.h"
QLORA__ONCE_END
#include "text/encode.h"
#include "text/lines.h"
#include "text/decode.h"
QLORA__ONCE_PER_CALL
#include "text/jinja_base.h"
#include "text/jinja_lex.h"
#include "text/jinja_parse.h"
#include "text/jinja_parse_tags.h"
#include "text/jinja_scope.h"
#include "text/jinja_value.h"
#include "text/jinja_number.h"
#include "text/jinja_json.h"
#include "text/jinja_format.h"
#include "text/jinja_strings.h"
#include "text/jinja_methods.h"
#include "text/jinja_iterate.h"
#include "text/jinja_filters.h"
#include "text/jinja_filters_number.h"
#include "text/jinja_layout.h"
#include "text/jinja_html.h"
#include "text/jinja_tables.h"
#include "text/jinja_eval.h"
#include "text/jinja_run.h"
#include "text/jinja_api.h"
#include "text/chat_formats.h"
#include "text/chat_template.h"
#include "text/chat.h"
#include "text/chat_output.h"
#include "text/chat_turns.h"
#include "text/chat_trained.h"
#include "text/chat_encode.h"
#include "text/chat_save.h"
#include "text/samples.h"
#include "text/input.h"
#include "text/input_gzip.h"
#include "text/data.h"
#include "text/records.h"
#include "text/source.h"
#include "text/data_json.h"
#include "text/data_csv.h"
#include "text/data_text.h"
#include "text/data_parquet.h"
#include "text/data_files.h"
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
