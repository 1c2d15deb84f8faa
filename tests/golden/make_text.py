#!/usr/bin/env python3
"""Makes text_byte.json, text_spm.json (two small tokenizers of our own) and text_golden.json (what
the reference library says about hard strings) in this folder.

usage: python3 make_text.py      needs `pip install tokenizers==0.23.3`; it has no randomness
"""
import json
import os

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors, trainers
import tokenizers

HERE = os.path.dirname(os.path.abspath(__file__))
WORDS = ("the and to of a in that it is was he for on are with as his they be at one have this from"
         " or had by hot word but what some we can out other were all there when up use your how"
         " said an each she which do their time if will way about many then them write would like"
         " so these her long make thing see him two has look more day could go come did number"
         " sound no most people my over know water than call first who may down side been now find"
         " any new work part take get place made live where after back little only round man year"
         " came show every good me give our under name very through just form sentence great think"
         " say help low line differ turn cause much mean before move right boy old too same tell"
         " does set three want air well also play small end put home read hand port large spell add"
         " even land here must big high such follow act why ask men change went light kind off need"
         " house picture try us again animal point mother world near build self earth father").split()
LLAMA3 = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
          "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
STRINGS = [
    "", " ", "  ", "\n", "Hello world", " the  and ", "don't WE'LL o'clock 'S", "3.14159 1234567890",
    "a\n\nb\r\n c", "   leading", "trailing   ", "caf\u00e9 cafe\u0301 \u212b \ufb01",
    "\u4f60\u597d,\u4e16\u754c\u3002", "\uc548\ub155 \u1100\u1161\u11a8", "\u041f\u0440\u0438\u0432\u0435\u0442",
    "\U0001f9d1\u200d\U0001f680", "\u00a0nbsp\u2003em\u3000", "<s>hi</s>", "x <|im_start|>user\nhi<|im_end|>\n",
    "one  <mask>  two", "one <pad> \n two", "a<mask>b", "where here there", "\u2581the \u2581 \u2581", "\u0000\u0001\u007f",
    "the world" * 20, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "'\u017f 'll\u017f", "\u00bd \u00b2 \u2460 \u2177",
    "q\u0323\u0307 q\u0307\u0323 \u0344", "word\u2019s \u201cquote\u201d \u2014", "<0x0A>\n", "[INST] [INST]",
    "\ud55c\uad6d\uc5b4 \u1112\u1161\u11ab", "e\u0301\u0301\u0323", "  \n  \n   x", "fooing ing singing ing"]


def corpus():
    for i, word in enumerate(WORDS):
        yield "%s %s's %s, %s! %d" % (word, WORDS[i - 7], WORDS[i * 5 % 200], word.title(), i)


def add_tokens(tok):
    tok.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False),
                            AddedToken("<|im_start|>", normalized=False),
                            AddedToken("<|im_end|>", normalized=False),
                            AddedToken("<pad>", normalized=False, rstrip=True)])
    tok.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False),
                    AddedToken("here", single_word=True, normalized=False),
                    AddedToken("[INST]", normalized=True), AddedToken("<s>h", normalized=False)])
    ids = [(name, tok.token_to_id(name)) for name in ("<s>", "</s>")]
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B", special_tokens=ids)


def byte_level():
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    add_tokens(tok)
    return tok


def spm():
    names = ["<unk>"] + ["<0x%02X>" % b for b in range(256)]
    tok = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"),
                                           normalizers.Replace(" ", "\u2581")])
    tok.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                     decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    tok.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=520, special_tokens=names, show_progress=False))
    whole = json.loads(tok.to_str())
    whole["pre_tokenizer"] = None
    whole["added_tokens"] = [t for t in whole["added_tokens"] if t["content"] == "<unk>"]
    whole["model"]["merges"] = [" ".join(m) for m in whole["model"]["merges"]]
    tok = Tokenizer.from_str(json.dumps(whole))
    add_tokens(tok)
    return tok


def main():
    golden = {"made with": "tokenizers " + tokenizers.__version__, "strings": STRINGS}
    for name, tok in (("text_byte", byte_level()), ("text_spm", spm())):
        whole = json.loads(tok.to_str())
        if name == "text_spm":  # the older spelling of merges
            whole["model"]["merges"] = [m if isinstance(m, str) else " ".join(m)
                                        for m in whole["model"]["merges"]]
        with open(os.path.join(HERE, name + ".json"), "w", newline="\n") as file:
            json.dump(whole, file, separators=(",", ":"))
            file.write("\n")
        tok = Tokenizer.from_str(json.dumps(whole))
        plain = [tok.encode(s, add_special_tokens=False).ids for s in STRINGS]
        golden[name] = {
            "plain": plain,
            "special": [tok.encode(s).ids for s in STRINGS],
            "decoded": [tok.decode(ids, skip_special_tokens=False) for ids in plain],
            "skipped": [tok.decode(ids, skip_special_tokens=True) for ids in plain],
            "cut": [tok.decode(ids[1:-1], skip_special_tokens=False) for ids in plain]}
    with open(os.path.join(HERE, "text_golden.json"), "w", newline="\n") as file:
        json.dump(golden, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
