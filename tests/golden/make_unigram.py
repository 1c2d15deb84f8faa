#!/usr/bin/env python3
"""Writes text_unigram.json, a small Unigram tokenizer trained here with a map of its own, and
text_unigram_golden.json (the reference library's results for difficult strings) to this folder.

usage: python3 make_unigram.py   needs `pip install tokenizers==0.23.3 sentencepiece==0.2.2`
"""
import base64
import io
import json
import os
import sys
import tempfile

import sentencepiece
from tokenizers import AddedToken, Tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..")]
import make_text  # noqa: E402
import unigram_check  # noqa: E402

RULES = {"\ufb01": "fi", "e\u0301": "\u00e9", "\u2460": "1", "\r": " ", "\n": " ", "\t": " ", "\uff21": "A",
         "\u200d": " ", "\u0958": "\u0915\u093c", "\u00bd": "1\u20442", "\u0600": "x", "\u00a9": "(c)", "\u3000": " ",
         "\u1100\u1161": "\uac00", "\u00ad": "", "\U0001f600": ":)"}


def main():
    out = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        for a, b in RULES.items():
            rules.write("%s\t%s\n" % (" ".join("%X" % ord(c) for c in a),
                                      " ".join("%X" % ord(c) for c in b)))
        rules.flush()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=make_text.corpus(), model_writer=out, vocab_size=420,
            model_type="unigram", hard_vocab_limit=False, minloglevel=2, num_threads=1,
            byte_fallback=True, normalization_rule_tsv=rules.name)
    sp = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    vocab = [[sp.id_to_piece(i), round(sp.get_score(i), 4)] for i in range(sp.get_piece_size())]
    vocab = [row for row in vocab if row[0] != "<0xCC>"]  # without all bytes: unknown
    model = vocab, sp.unk_id(), None
    charsmap = base64.b64encode(unigram_check.charsmap(out.getvalue())).decode()
    space = dict(unigram_check.SPACE, prepend_scheme="first")
    whole = unigram_check.file_of(
        model, [{"type": "Precompiled", "precompiled_charsmap": charsmap},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}],
        [space], {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, space]}, True)
    tok = Tokenizer.from_str(json.dumps(whole))
    tok.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False),
                    AddedToken("[INST]", normalized=True)])
    with open(os.path.join(HERE, "text_unigram.json"), "w", newline="\n") as file:
        json.dump(json.loads(tok.to_str()), file, separators=(",", ":"))
        file.write("\n")
    strings = make_text.STRINGS + list(RULES) + list(unigram_check.hostile(4, 80)) + [
        "\ufb01\u0301", "a\ufb01\u0323", "\u00a9\u0301\u0301", "\u06001", "\u0600\u0601", "\u0958\u0301", "\u0915\u094d\u0958\u0301",
        "\u00a9\u200d\u00a9", "x<unk>y", "<unk><unk>", "\u0301\u0301", "the\u0301\u0301the", "\u1100\u1161\u11a8", "e\u0301\u0323"]
    plain = [tok.encode(s, add_special_tokens=False).ids for s in strings]
    golden = {"strings": strings, "text_unigram": {
        "plain": plain,
        "special": [tok.encode(s).ids for s in strings],
        "decoded": [tok.decode(ids, skip_special_tokens=False) for ids in plain],
        "skipped": [tok.decode(ids, skip_special_tokens=True) for ids in plain],
        "cut": [tok.decode(ids[1:-1], skip_special_tokens=False) for ids in plain]}}
    with open(os.path.join(HERE, "text_unigram_golden.json"), "w", newline="\n") as file:
        json.dump(golden, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
