#!/usr/bin/env python3
"""Compares qlora.h with transformers and PEFT on random models and adapters.

    python tests/peft_diff.py [--seed N] [--count N] [--keep DIR] [--write-accepted N]

Each case is a small random model and a random LoRA adapter, created with transformers and PEFT and
saved as folders. Both sides compute the logits of a random text and the merged weights. A case that
qlora.h refuses counts as refused; at least 90 % must be compared. The cases in
tests/golden/peft_accepted.jsonl must not be refused; --write-accepted N replaces them by N compared
cases of this run.

Needs torch, transformers and peft (a virtual environment: python3 -m venv build/venv-peft, then
build/venv-peft/bin/pip install torch transformers peft) and build/peft_side; without them it
reports this and exits with status 0. Everything runs on the CPU in float32.
"""

import argparse
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ACCEPTED = os.path.join(ROOT, "tests", "golden", "peft_accepted.jsonl")
LOGITS = 2e-5  # largest difference of a logit, relative to the largest one
WEIGHTS = 2e-6  # largest difference of a merged weight, relative to the largest one of its tensor
PARTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def chance(r, probability):
    return r.random() < probability


def rope(r, limit):
    kind = r.choices(["default", "linear", "llama3"], [6, 1, 2])[0]
    out = {"rope_type": kind, "rope_theta": r.choice([1e4, 5e5, 1e6, 12345.0])}
    if kind != "default":
        out["factor"] = r.choice([2.0, 4.0, 8.0])
    if kind == "llama3":
        out["low_freq_factor"] = 1.0
        out["high_freq_factor"] = 4.0
        out["original_max_position_embeddings"] = limit // 2
    return out


def random_model(r):
    """The arguments of a transformers config, as JSON can hold them."""
    family = r.choice(["llama", "mistral", "qwen2", "qwen3"])
    kv = r.choice([1, 2, 3])
    heads = kv * r.choice([1, 2, 3])
    head_dim = r.choice([16, 32, 64])
    hidden = heads * head_dim
    limit = r.choice([64, 128, 500])
    c = {
        "family": family,
        "vocab_size": r.randint(40, 300),
        "intermediate_size": r.choice([32, 48, 96, 160]),
        "num_hidden_layers": r.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": limit,
        "rms_norm_eps": r.choice([1e-5, 1e-6, 3e-4]),
        "tie_word_embeddings": chance(r, 0.5),
        "rope_parameters": rope(r, limit),
        "dtype": r.choice(["float32", "bfloat16", "float16"]),
        "seed": r.randint(0, 10**9),
    }
    if family in ("llama", "mistral", "qwen3"):
        if chance(r, 0.3):
            hidden = heads * r.choice([16, 24, 32])
        c["head_dim"] = head_dim
    c["hidden_size"] = hidden
    if family == "mistral":
        c["sliding_window"] = r.choice([None, 3, 7, 4096])
    if family in ("qwen2", "qwen3") and chance(r, 0.3):
        c["use_sliding_window"] = True
        c["sliding_window"] = r.choice([3, 6])
        c["max_window_layers"] = r.randint(0, c["num_hidden_layers"])
    if chance(r, 0.015):
        c["hidden_act"] = r.choice(["gelu", "relu"])  # refused unless supported
    if family in ("llama", "qwen3") and chance(r, 0.04):
        c["attention_bias"] = True
    return c


def random_adapter(r, layers):
    """The arguments of PEFT's LoraConfig."""
    kind = r.choices(["list", "all-linear", "regex"], [6, 1, 2])[0]
    some = sorted(r.sample(PARTS, r.randint(1, len(PARTS))))
    c = {
        "r": r.choice([1, 2, 3, 4, 8, 16]),
        "lora_alpha": r.choice([1, 8, 16, 2.5]),
        "lora_dropout": r.choice([0.0, 0.0, 0.1]),
        "use_rslora": chance(r, 0.3),
        "seed": r.randint(0, 10**9),
    }
    if kind == "regex":
        c["target_modules"] = r".*layers\.[0-9]+\..*(" + "|".join(some) + ")"
    else:
        c["target_modules"] = some if kind == "list" else kind
    if chance(r, 0.3):
        c["rank_pattern"] = {r.choice(some): r.choice([1, 5, 7])}
    if chance(r, 0.3):
        c["alpha_pattern"] = {r.choice(some): r.choice([3, 11])}
    if chance(r, 0.2) and kind == "list":
        c["layers_to_transform"] = sorted(r.sample(range(layers), r.randint(1, layers)))
    if chance(r, 0.1):
        c["init_lora_weights"] = "gaussian"
    if chance(r, 0.01):
        c["use_dora"] = True  # these are refused unless supported
    if chance(r, 0.01):
        c["init_lora_weights"] = r.choice(["pissa", "olora"])
    if chance(r, 0.01):
        c["bias"] = "lora_only"
    return c


def case_make(seed, number):
    r = random.Random(f"{seed} {number}")
    model = random_model(r)
    adapter = None if chance(r, 0.05) else random_adapter(r, model["num_hidden_layers"])
    count = r.randint(1, min(40, model["max_position_embeddings"] - 1))
    ids = [r.randrange(model["vocab_size"]) for _ in range(count)]
    return {"model": model, "adapter": adapter, "ids": ids}


def base_save(model, path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    args = {k: v for k, v in model.items() if k not in ("family", "dtype", "seed")}
    # Weights that keep the size of the activations: larger ones would amplify rounding errors.
    spread = model["hidden_size"] ** -0.5
    config = AutoConfig.for_model(model["family"], initializer_range=spread, **args)
    torch.manual_seed(model["seed"])
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # norms and biases that differ from their initial values
        for name, value in made.named_parameters():
            if value.dim() == 1:
                value.add_(0.2 * torch.randn_like(value))
    made.to(getattr(torch, model["dtype"])).save_pretrained(path)


def base_open(path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def adapter_save(adapter, base, path):
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(adapter["seed"])
    args = {k: v for k, v in adapter.items() if k != "seed"}
    made = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **args))
    with torch.no_grad():  # B starts as zero, except where it changes the base
        for name, value in made.named_parameters():
            if "lora_B" in name and args.get("init_lora_weights") in (None, "gaussian"):
                value.normal_(std=0.2 / adapter["lora_alpha"])
    made.save_pretrained(path)


def reference(case, model, adapter):
    """The logits and, with an adapter, the merged weights."""
    import torch
    from peft import PeftModel

    base = base_open(model)
    if adapter is not None:
        base = PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        logits = base(torch.tensor([case["ids"]])).logits[0].float().numpy()
        if adapter is None:
            return logits, {}
        merged = base.merge_and_unload()
    return logits, {k: v.float().numpy() for k, v in merged.state_dict().items()}


def logits_read(path):
    import numpy

    with open(path, "rb") as f:
        tokens, vocab = struct.unpack("<qq", f.read(16))
        return numpy.frombuffer(f.read(), dtype="<f4").reshape(tokens, vocab)


def difference(ours, theirs):
    """The largest difference relative to the largest value; shapes must be equal, values finite."""
    import numpy

    if ours.shape != theirs.shape or not numpy.isfinite(ours).all():
        return float("inf")
    if ours.size == 0:
        return 0.0
    return float(numpy.abs(ours - theirs).max() / max(numpy.abs(theirs).max(), 1e-30))


def weights_difference(folder, theirs):
    """The largest difference of any merged tensor. Names may be missing only for a tied head."""
    from safetensors.numpy import load_file

    ours = load_file(os.path.join(folder, "model.safetensors"))
    worst = 0.0
    for name, value in ours.items():
        if name not in theirs:
            return float("inf")
        worst = max(worst, difference(value, theirs[name]))
    missing = set(theirs) - set(ours) - {"lm_head.weight"}
    return float("inf") if missing else worst


def case_run(case, program, root):
    """Returns (what happened, largest differences or the reason)."""
    model = os.path.join(root, "model")
    adapter = os.path.join(root, "adapter") if case["adapter"] is not None else None
    base_save(case["model"], model)
    if adapter is not None:
        adapter_save(case["adapter"], base_open(model), adapter)
    command = [program, model, adapter or "-", root] + [str(i) for i in case["ids"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode == 3:
        return "refused", done.stdout.strip()
    if done.returncode != 0:
        return "failed", f"status {done.returncode}: {done.stdout}{done.stderr}"
    logits, merged = reference(case, model, adapter)
    a = difference(logits_read(os.path.join(root, "logits.bin")), logits)
    b = weights_difference(os.path.join(root, "merged"), merged) if merged else 0.0
    return ("compared" if a <= LOGITS and b <= WEIGHTS else "different"), (a, b)


def case_in(case, program, keep):
    root = tempfile.mkdtemp(prefix="peft_diff-")
    try:
        outcome = case_run(case, program, root)
        if outcome[0] in ("failed", "different") and keep:
            shutil.copytree(root, os.path.join(keep, os.path.basename(root)))
        return outcome
    finally:
        shutil.rmtree(root)


def cases_run(named, program, keep):
    """Runs all cases; returns the outcomes, after printing everything that is not a match."""
    outcomes = []
    for name, case in named:
        what, detail = case_in(case, program, keep)
        outcomes.append((what, detail, case))
        if what != "compared":
            print(f"{name}: {what}: {detail}", flush=True)
        if what in ("failed", "different"):
            print("    " + json.dumps(case), flush=True)
    return outcomes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--keep", help="folder for the files of cases that differ")
    parser.add_argument("--write-accepted", type=int, default=0)
    o = parser.parse_args()
    program = os.path.join(ROOT, os.environ.get("B", "build"), "peft_side")
    try:
        import peft
        import torch
        import transformers
    except ImportError as error:
        print(f"peft_diff: skipped: {error}")
        return 0
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    accepted = []
    if os.path.exists(ACCEPTED) and not o.write_accepted:
        with open(ACCEPTED, encoding="utf-8") as f:
            accepted = [(f"accepted {i + 1}", json.loads(line)) for i, line in enumerate(f)]
    must = cases_run(accepted, program, o.keep)
    fresh = [(f"seed {o.seed} case {i}", case_make(o.seed, i)) for i in range(o.count)]
    outcomes = cases_run(fresh, program, o.keep)
    count = {k: sum(w == k for w, _, _ in outcomes) for k in
             ("compared", "refused", "different", "failed")}
    good = [d for w, d, _ in must + outcomes if w == "compared"]
    print(f"transformers {transformers.__version__}, PEFT {peft.__version__}, seed {o.seed}: "
          f"{count['compared']} compared, {count['refused']} refused, "
          f"{count['different']} different, {count['failed']} failed; "
          f"{sum(w == 'compared' for w, _, _ in must)} of {len(must)} accepted cases compared; "
          f"largest difference: logits {max((a for a, _ in good), default=0):.1e}, "
          f"weights {max((b for _, b in good), default=0):.1e}")
    if o.write_accepted:
        kept = [c for w, _, c in outcomes if w == "compared"][: o.write_accepted]
        with open(ACCEPTED, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(c) + "\n" for c in kept)
    ok = all(w == "compared" for w, _, _ in must) and not count["different"]
    return 0 if ok and not count["failed"] and 10 * count["compared"] >= 9 * o.count else 1


if __name__ == "__main__":
    sys.exit(main())
