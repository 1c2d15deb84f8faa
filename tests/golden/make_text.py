#!/usr/bin/env python3
"""Writes text_byte.json, text_spm.json, text_meta.json (small tokenizers trained here) and
text_golden.json (the reference library's results for difficult strings) to this folder.

usage: python3 make_text.py      needs `pip install tokenizers==0.23.3`; the seed is fixed
"""
import json
import os
import random

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


GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
UPPER = "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
LOWER = "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PREFIX = "[^\\r\\n\\p{L}\\p{N}]?"
TAIL = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
PATTERNS = [
    GPT2, LLAMA3, LLAMA3.replace("{1,3}", ""),
    LLAMA3.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)",
                   "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"),
    LLAMA3.replace("]?\\p{L}+", "]?[\\p{L}\\p{M}]+").replace("{1,3}", "").replace(
        "[^\\s\\p{L}\\p{N}]", "[^\\s\\p{L}\\p{M}\\p{N}]"),
    PREFIX + UPPER + "*" + LOWER + "+" + SHORT + "|" + PREFIX + UPPER + "+" + LOWER + "*" + SHORT +
    "|\\p{N}{1,3}" + TAIL,
    PREFIX + UPPER + "*" + LOWER + "+|" + PREFIX + UPPER + "+" + LOWER + "*|\\p{N}" + TAIL,
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?"
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", "\\p{N}{1,3}", "[0-9][0-9][0-9]"]
ALPHABET = ("abAB12 \t\n\r'sStlLvVeErRmMdD.,/!-$_\u00e9\u00c9\u01c5\u02b0\u4f60\u3042\u0301\u0323\u00bd"
            "\u0663\u00a0\u3000\u200d\U0001f600\u017f\uac00\u11a8\u1161\u1100\u0345\u0958")


def rows(seed, count):
    chance = random.Random(seed)
    return ["".join(chance.choice(ALPHABET) for _ in range(chance.randint(1, 24)))
            for _ in range(count)]


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
    whole["model"]["vocab"]["\u2581\u2581"] = len(whole["model"]["vocab"])
    whole["model"]["merges"].append(["\u2581", "\u2581"])
    tok = Tokenizer.from_str(json.dumps(whole))
    add_tokens(tok)
    return tok


def metaspace():
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Metaspace()])
    tok.decoder = decoders.Metaspace()
    tok.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], show_progress=False))
    add_tokens(tok)
    return tok


def main():
    golden = {"made with": "tokenizers " + tokenizers.__version__, "strings": STRINGS}
    for name, tok in (
            ("text_byte", byte_level()), ("text_spm", spm()), ("text_meta", metaspace())):
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
    texts = rows(1, 150)
    golden["splits"] = {"texts": texts, "patterns": [
        {"regex": regex, "ends": [[end for _, (_, end) in pre_tokenizers.Split(
            Regex(regex), "isolated").pre_tokenize_str(text)] for text in texts]}
        for regex in PATTERNS]}
    normal = rows(2, 150) + ["\uac01\u11a8", "a\u0323\u0323\u0301", "\u0915\u093c\u0301", "a\u0313\u0301"]
    golden["nfc"] = [normal, [normalizers.NFC().normalize_str(text) for text in normal]]
    with open(os.path.join(HERE, "text_golden.json"), "w", newline="\n") as file:
        json.dump(golden, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
