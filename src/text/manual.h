/* qlora_text.h - v0.1.0 - tokenizers, chat formats and training data files - SPDX: MIT-0

   In ONE .c or .cpp file:
       #define TEXT_IMPLEMENTATION
       #include "qlora_text.h"
   Everywhere else only the include. C99 or C++11, the standard library, nothing else.

   CONTENTS (grep -n '^//@@')
       API        what a program calls
       BASE       errors, growing arrays, files
       UNICODE    UTF-8, character classes, normalisation; the tables are generated
       JSON       a strict reader
       MAPS       two hash tables: byte strings and pairs of numbers
       SPLIT      pre-tokenizers: the known regular expressions, coded by hand
       BPE        one word to ids
       LOAD       tokenizer.json and the .bin form of llama2.c
       ENCODE     text to ids
       DECODE     ids to text
       CHAT       chat formats
       DATA       training files to samples

   WHAT IT READS
     Tokenizers: the BPE kind of tokenizer.json, byte-level (GPT-2, Llama-3, Qwen, SmolLM, ...) and
     SentencePiece style with byte fallback (Llama-2, Mistral, TinyLlama, Gemma, ...), and the
     tokenizer.bin of llama2.c. The ids are those of the `tokenizers` library, for every valid text.
     Whatever the file asks for and this header cannot do is refused by its name when loading:
     another model than BPE, an unknown regular expression, a normaliser it does not have.
     "truncation" and "padding" of the file are not obeyed: every text is encoded whole.
     Bytes that are not UTF-8 are allowed in text_encode: each counts as one unknown character.

     Data: .jsonl (one object a line), .json (an array of objects, or as .jsonl), .txt.
       {"text"}                            all of it is trained
       {"prompt", "completion"}            two strings, put together as they are; completion trained
                                           (also two message lists: see messages)
       {"messages": [{"role", "content"}]} in the chat format; assistant turns are trained
       {"conversations": [{"from", "value"}], "system"}           the same (ShareGPT)
       {"instruction", "input", "output", "system", "history"}    the same (Alpaca)
       {"input_ids", "labels"}             taken as they are
       .txt: with lines that hold only <|endoftext|>, what lies between them are the documents; a
   file without such a line is one document. Documents longer than desc.chunk_tokens are cut into
       samples of that length; nothing is lost and each sample starts with BOS (if the model has
   one). A sample gets BOS exactly once, when the tokenizer's post-processor asks for it, and its
   end is always trained: the end-of-turn token of the chat format, otherwise EOS.

   ERRORS     Every fallible function returns false and writes what, where and why into *error (may
   be NULL). Nothing is printed, nothing exits. Outputs are untouched or partly appended. MEMORY
   malloc; define TEXT_REALLOC(p, n) and TEXT_FREE(p) before the implementation to replace it. Every
   allocation is checked. THREADS    A text_tok holds a cache: one thread at a time. Different
   objects are independent.
*/
