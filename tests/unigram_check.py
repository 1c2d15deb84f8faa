#!/usr/bin/env python3
"""Compares Unigram tokenizers with the `tokenizers` library: ids and decoded texts.

usage: python3 tests/unigram_check.py [--strings 600] [--seed 1] [FILE.json ...]

Needs the Python packages tokenizers 0.23.3 and sentencepiece, and build/tokenize. Without files, it
trains small models and writes them in the forms that T5, XLM-R, ALBERT and Japanese Llama models
have: with the maps of SentencePiece (nmt_nfkc, nfkc_cf), with and without byte fallback, with the
steps Nmt, Lowercase, Strip and Replace. Exit status 0: no difference. It is not part of `make test`.
"""
import argparse
import base64
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import unicodedata

import sentencepiece
from tokenizers import Tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.path.join(HERE, "..", os.environ.get("B", "build"))
SPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}


def corpus(seed):
    chance = random.Random(seed)
    with open(os.path.join(HERE, "..", "README.md"), encoding="utf-8") as file:
        words = file.read().split()
    more = ["caf\u00e9", "na\u00efve", "\u4e2d\u6587", "\u65e5\u672c\u8a9e", "\ud55c\uad6d\uc5b4", "\u0440\u0443\u0441",
            "\u0939\u093f\u0928\u094d\u0926\u0940", "\ufb01n", "\u2460", "\u00bd", "\u3000x", "\U0001f600"]
    for _ in range(4000):
        yield " ".join(chance.choice(words if chance.random() < 0.9 else more)
                       for _ in range(chance.randrange(3, 20)))


def train(seed, **options):
    """Trains a SentencePiece model: its pieces with scores, the id of the unknown one, its map."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=corpus(seed), model_writer=out, vocab_size=900, model_type="unigram",
        hard_vocab_limit=False, minloglevel=2, num_threads=1, **options)
    sp = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    vocab = [[sp.id_to_piece(i), sp.get_score(i)] for i in range(sp.get_piece_size())]
    return vocab, sp.unk_id(), charsmap(out.getvalue())


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def fields(data):
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 2:
            size, at = varint(data, at)
            yield key >> 3, data[at:at + size]
            at += size
        elif key & 7 == 0:
            value, at = varint(data, at)
            yield key >> 3, value
        else:
            size = 4 if key & 7 == 5 else 8
            yield key >> 3, data[at:at + size]
            at += size


def charsmap(model):
    """precompiled_charsmap of the normalizer_spec of a SentencePiece model."""
    spec = next(value for key, value in fields(model) if key == 3)
    return next((value for key, value in fields(spec) if key == 2), b"")


def file_of(model, normalizers, splitters, decoder=SPACE, fallback=False):
    vocab, unknown, _ = model
    added = [{"id": i, "content": vocab[i][0], "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False, "special": True} for i in (1, 2)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitters} if splitters else None,
        "post_processor": {"type": "TemplateProcessing",
                           "single": [{"Sequence": {"id": "A", "type_id": 0}},
                                      {"SpecialToken": {"id": vocab[2][0], "type_id": 0}}],
                           "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                                    {"Sequence": {"id": "B", "type_id": 0}}],
                           "special_tokens": {vocab[2][0]: {"id": vocab[2][0], "ids": [2],
                                                            "tokens": [vocab[2][0]]}}},
        "decoder": decoder,
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": fallback}}


def files(seed):
    nmt = train(seed, normalization_rule_name="nmt_nfkc")
    lower = train(seed + 1, normalization_rule_name="nmt_nfkc_cf", byte_fallback=True)
    plain = train(seed + 2, normalization_rule_name="identity", byte_fallback=True)
    maps = [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(m[2]).decode()}
            for m in (nmt, lower)]
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    bytes_too = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, SPACE]}
    yield "T5", file_of(nmt, [maps[0]], [SPACE])
    yield "XLM-R", file_of(nmt, [maps[0]], [{"type": "WhitespaceSplit"}, SPACE])
    yield "newer", file_of(nmt, [maps[0], strip, dict(SPACES, content="\u2581")], [SPACE])
    yield "ALBERT", file_of(lower, [{"type": "Replace", "pattern": {"String": "``"}, "content": "\""},
                                    {"type": "Lowercase"}, maps[1], SPACES], [SPACE])
    yield "fallback", file_of(lower, [maps[1]], [dict(SPACE, prepend_scheme="first")], bytes_too, True)
    yield "Llama", file_of(plain, [{"type": "Prepend", "prepend": "\u2581"},
                                   {"type": "Replace", "pattern": {"String": " "},
                                    "content": "\u2581"}], [], bytes_too, True)
    yield "Nmt", file_of(plain, [{"type": "Nmt"}, SPACES],
                         [dict(SPACE, split=False), {"type": "Digits", "individual_digits": True}])


def assigned(chance):
    """Any character, but not one that is new: versions of Unicode differ about those."""
    while True:
        code = chance.choice([chance.randrange(0x20, 0xd800), chance.randrange(0xe000, 0x20000)])
        if unicodedata.category(chr(code)) != "Cn":
            return chr(code)


def hostile(seed, count):
    chance = random.Random(seed)
    pieces = [" ", "  ", "   ", "\t", "\n", "\r\n", "\r", "a", "the", "The", "QLoRA", "model", "0", "12",
              "'s", ".", "...", "``", "''", "\"", "-", "_", "<s>", "</s>", "<unk>", "<pad>", "<0x41>",
              "\u00e9", "e\u0301", "\u0301", "a\u0323\u0307", "\u212b", "\ufb01", "\ufb01\u0301", "\u2460",
              "\u00bd", "\u0130", "\u00df", "\u03a3\u03c2", "\u4e2d\u6587", "\u65e5", "\uff21\uff22", "\uff76\uff9e", "\u3099",
              "\uac00", "\u1100\u1161\u11a8", "\uac00\u0301", "\u0915\u094d\u0915", "\u0958", "\u0958\u0301",
              "\u0e33", "\u0600", "\u06001", "\u00a9", "\u00a9\u200d\u00a9", "\u200d", "\u200b", "\u200f", "\u00ad",
              "\u2028", "\u3000", "\u00a0", "\u2581", "\u2581\u2581", "\ufeff", "\ufffd", "\x01", "\x7f", "\x00",
              "\u0085", "\u1680", "\U0001f600", "\U0001f1e9\U0001f1ea", "a\U0001f3fb", "a\U0001d165", "a\U000e0100",
              "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\ufdfa", "\u1e9b\u0323", "\u017f", "\u0344", "\u0149"]
    marks = [chr(c) for c in range(0x300, 0x370)] + [
        chr(c) for c in range(0x590, 0x660) if unicodedata.category(chr(c)) != "Cn"]
    for _ in range(count):
        parts = []
        for _ in range(chance.randrange(1, 14)):
            kind = chance.random()
            parts.append(chance.choice(pieces) if kind < 0.8 else chance.choice(marks)
                         if kind < 0.9 else assigned(chance))
        yield "".join(parts)


def ours(path, rows, *options):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(rows, file)
        file.flush()
        run = subprocess.run([os.path.join(BUILD, "tokenize"), path, "--json", file.name, *options],
                             capture_output=True)
    if run.returncode != 0:
        sys.exit("%s: %s" % (path, run.stderr.decode()))
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(name, path, strings):
    reference = Tokenizer.from_file(path)
    differ = 0
    plain = [reference.encode(s, add_special_tokens=False).ids for s in strings]
    special = [reference.encode(s).ids for s in strings]
    decoded = [reference.decode(ids, skip_special_tokens=False) for ids in plain]
    for what, want, got in [("ids", plain, ours(path, strings)),
                            ("with special tokens", special, ours(path, strings, "--special")),
                            ("decoded", decoded, ours(path, plain, "--decode"))]:
        for text, a, b in zip(strings, want, got):
            if a != b:
                differ += 1
                if differ < 6:
                    print("%s, %s: %r\n  library %s\n  ours    %s" % (name, what, text, a, b))
    print("%s: %d strings, %d differ" % (name, len(strings), differ), flush=True)
    return differ


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strings", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("files", nargs="*")
    options = parser.parse_args()
    strings = [""] + list(hostile(options.seed, options.strings))
    differ = sum(check(path, path, strings) for path in options.files)
    if not options.files:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files(options.seed):
                path = os.path.join(folder, name + ".json")
                with open(path, "w", encoding="utf-8") as file:
                    json.dump(content, file, ensure_ascii=False)
                differ += check(name, path, strings)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
