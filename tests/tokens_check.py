#!/usr/bin/env python3
"""Compares new tokens (finetune --add-tokens) with transformers and PEFT.

    python tests/tokens_check.py

Needs torch, transformers, peft and tokenizers; without them it reports this and exits with status
0. Makes small random models, adds tokens to them with build/finetune, and checks that the tokenizer
of the adapter gives the same ids in transformers, that PEFT's logits are ours, that the merged model
is the same model, and that we read what PEFT saves. B names the build folder (default build).
"""

import json
import os
import subprocess
import sys
import tempfile

B = os.environ.get("B", "build")
LIMIT = 2e-5  # largest difference of log-probabilities
TEXTS = ["<|alpha|> the bat", "x[beta]y <|alpha|><|alpha|>", "plain text", "a [beta ] b", "é[beta]é"]
NEW = [
    {"token": "<|alpha|>", "special": True, "init": "the start"},
    {"token": "[beta]"},
    {"token": "the"},  # known
    "gamma ray",
]


def make_tokenizer(path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>"] + sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "t"), ("b", "at")]
    names += ["".join(m) for m in merges]
    vocab = {name: i for i, name in enumerate(names)}
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(["<pad>", "<s>", "</s>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=t, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(path)
    return len(fast)


def make_model(path, tied, padding):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    count = make_tokenizer(path)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=count + padding,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def run(*args, text=None):
    done = subprocess.run(args, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(" ".join(args) + "\n" + done.stdout + done.stderr)
    return done.stdout


def our_ids(folder, text):
    out = run(f"{B}/tokenize", os.path.join(folder, "tokenizer.json"), text=text)
    return json.loads(out)


def our_logprobs(model, ids, adapter=None):
    more = ["--adapter", adapter] if adapter else []
    out = run(f"{B}/logprobs", model, "--base", "32", *more, text=" ".join(map(str, ids)))
    return [float(x) for x in out.split()]


def torch_logprobs(model, ids):
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    chances = torch.log_softmax(logits, -1)
    return [chances[i, ids[i + 1]].item() for i in range(len(ids) - 1)]


def differ(a, b):
    if len(a) != len(b):
        return float("inf")
    worst = max(abs(x - y) / max(1.0, abs(y)) for x, y in zip(a, b))
    return worst if worst == worst else float("inf")


def open_peft(model, adapter, rows):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if rows > base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(rows)
    return PeftModel.from_pretrained(base, adapter).eval()


class Judge:
    def __init__(self):
        self.bad = 0

    def check(self, name, good, detail=""):
        print(f"{'ok  ' if good else 'FAIL'} {name} {detail}")
        self.bad += 0 if good else 1


def check_ours(j, work, tied, padding, modules):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = f"{'tied' if tied else 'untied'}, {padding} unused rows, modules {modules}"
    model = os.path.join(work, f"model{tied}{padding}")
    out = os.path.join(work, f"run{tied}{padding}{modules}")
    make_model(model, tied, padding)
    with open(os.path.join(work, "new.json"), "w", encoding="utf-8") as f:
        json.dump(NEW, f)
    with open(os.path.join(work, "data.jsonl"), "w", encoding="utf-8") as f:
        for i in range(40):
            text = TEXTS[i % len(TEXTS)] + " gamma ray " + str(i)
            f.write(json.dumps({"text": text}) + "\n")
    run(f"{B}/finetune", "--model", model, "--data", os.path.join(work, "data.jsonl"), "--out", out,
        "--add-tokens", os.path.join(work, "new.json"), "--save-modules", modules, "--steps", "6",
        "--lr", "0.01", "--rank", "4", "--base", "32bit", "--tokens", "256", "--length", "128",
        "--backend", "cpu", "--threads", "1")
    adapter = os.path.join(out, "adapter")
    tok = AutoTokenizer.from_pretrained(adapter)
    same = all(tok.encode(t, add_special_tokens=False) == our_ids(adapter, t) for t in TEXTS)
    j.check(f"{name}: ids", same and len(tok.encode("[beta]")) == 1)
    shown = tok.decode(tok.encode("a <|alpha|>[beta]"), skip_special_tokens=True)
    j.check(f"{name}: special tokens are skipped", shown == "a [beta]", repr(shown))
    ids = [1] + tok.encode(" ".join(TEXTS) + " gamma ray the")
    peft = open_peft(model, adapter, len(tok))
    theirs = torch_logprobs(peft, ids)
    far = differ(our_logprobs(model, ids, adapter), theirs)
    j.check(f"{name}: logits", far < LIMIT, f"{far:.2e}")
    merged = os.path.join(work, f"merged{tied}{padding}{modules}")
    run(f"{B}/merge", "--model", model, "--adapter", out, "--out", merged, "--dtype", "f32")
    again = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    far = differ(torch_logprobs(again, ids), theirs)
    j.check(f"{name}: merged, in transformers", far < LIMIT, f"{far:.2e}")
    far = differ(our_logprobs(merged, ids), theirs)
    j.check(f"{name}: merged, here", far < LIMIT, f"{far:.2e}")
    same = AutoTokenizer.from_pretrained(merged).encode(TEXTS[1]) == tok.encode(TEXTS[1])
    j.check(f"{name}: merged tokenizer", same)


def check_theirs(j, work, tied, auto, whole):
    """An adapter that PEFT has saved, with the whole embedding beside it (auto) or without; whole:
    modules_to_save instead of rows."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    name = f"PEFT's file, {'tied' if tied else 'untied'}{', embeddings saved' if auto else ''}"
    name += ", modules_to_save" if whole else ""
    model = os.path.join(work, f"model{tied}0")
    adapter = os.path.join(work, f"theirs{tied}{auto}{whole}")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    count = base.get_input_embeddings().weight.shape[0]
    base.resize_token_embeddings(count + 2)
    rows = [count, 9, count + 1]
    if whole:
        more = {"modules_to_save": ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]}
        more["ensure_weight_tying"] = tied
    else:
        more = {"trainable_token_indices": rows if tied else {"embed_tokens": rows, "lm_head": rows}}
    config = LoraConfig(
        r=3,
        target_modules=["q_proj", "down_proj"],
        **more,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    peft = get_peft_model(base, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for key, value in peft.named_parameters():
            if "trainable_tokens_delta" in key or "modules_to_save" in key:
                value.copy_(torch.randn_like(value) * 0.3)
    peft.save_pretrained(adapter, save_embedding_layers="auto" if auto else False)
    ids = [1, count, 40, 9, count + 1, 77, count + 1, count]
    far = differ(our_logprobs(model, ids, adapter), torch_logprobs(peft.eval(), ids))
    j.check(name, far < LIMIT, f"{far:.2e}")


def main():
    try:
        import peft  # noqa: F401
        import tokenizers  # noqa: F401
        import torch  # noqa: F401
        import transformers
    except ImportError as e:
        print(f"skipped: {e}")
        return 0
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    j = Judge()
    with tempfile.TemporaryDirectory() as work:
        for tied, padding, modules in [
            (True, 0, "none"),
            (False, 0, "none"),
            (True, 1, "none"),
            (False, 7, "none"),
            (True, 0, "embed"),
            (False, 0, "both"),
        ]:
            check_ours(j, work, tied, padding, modules)
        for tied in (True, False):
            for auto in (False, True):
                for whole in (False, True):
                    try:
                        check_theirs(j, work, tied, auto, whole)
                    except RuntimeError as e:
                        j.check(f"PEFT's file, {tied} {auto} {whole}", False, str(e)[-400:])
    print("all equal" if j.bad == 0 else f"{j.bad} differ")
    return 1 if j.bad else 0


if __name__ == "__main__":
    sys.exit(main())
