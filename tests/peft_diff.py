#!/usr/bin/env python3
"""Compares qlora.h with transformers and PEFT on random models and adapters.

    python tests/peft_diff.py [--seed N] [--count N] [--family NAME] [--spread X] [--keep DIR]
                              [--write-accepted N]

Each case (peft_cases.py) is a small random model and a random LoRA adapter, created with
transformers and PEFT and saved as folders. Both sides compute the logits of a random text and the
merged weights. A case that qlora.h refuses counts as refused; at least 90 % of those that
transformers reads must be compared. The cases in tests/golden/peft_accepted.jsonl must not be
refused, and there must be one of every family; --write-accepted N adds cases that were compared in
this run until every family has N of them.

Where the logits differ by more than LOGITS, both sides are compared with transformers in float64.
Single errors vary by an order of magnitude in both directions (rounding that a saturated softmax
amplifies), so that their mean counts: over all such cases, our errors may be at most MEAN_RATIO
times those of transformers in float32, and in none more than LARGEST_RATIO times. --spread
multiplies the random weights, which makes such cases frequent.

Needs torch, transformers and peft (a virtual environment: python3 -m venv build/venv-peft, then
build/venv-peft/bin/pip install torch transformers peft) and build/peft_side; without them it
reports this and exits with status 0. Everything runs on the CPU in float32.
"""

import argparse
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import warnings

from peft_cases import FAMILIES, case_make, config_edit

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ACCEPTED = os.path.join(ROOT, "tests", "golden", "peft_accepted.jsonl")
LOGITS = 2e-5  # largest difference of a logit, relative to the largest one
WEIGHTS = 2e-6  # largest difference of a merged weight, relative to the largest one of its tensor
MEAN_RATIO = 2.0  # our error relative to that of transformers, both against float64
LARGEST_RATIO = 30.0
RATIOS = []  # of this run
OUTCOMES = ("compared", "refused", "unreadable", "different", "failed")


class Unreadable(Exception):
    """transformers or PEFT does not read the case either."""


def base_save(case, path, spread):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = case["model"]
    args = {k: v for k, v in model.items() if k not in ("family", "dtype", "seed")}
    # Weights that keep the size of the activations: larger ones amplify rounding errors.
    spread = spread * model["hidden_size"] ** -0.5
    config = AutoConfig.for_model(model["family"], initializer_range=spread, **args)
    torch.manual_seed(model["seed"])
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # norms and biases that differ from their initial values
        for _, value in made.named_parameters():
            if value.dim() == 1:
                value.add_(0.2 * torch.randn_like(value))
    made.to(getattr(torch, model["dtype"])).save_pretrained(path)
    if case.get("edits"):
        name = os.path.join(path, "config.json")
        with open(name, encoding="utf-8") as f:
            c = config_edit(json.load(f), case["edits"])
        with open(name, "w", encoding="utf-8") as f:
            json.dump(c, f)


def base_open(path):
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    except Exception as error:  # whatever its classes raise
        raise Unreadable(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}") from error
    if info["missing_keys"]:  # it would fill them with random numbers
        raise Unreadable(f"{sorted(info['missing_keys'])[0]} is missing")
    return model.eval()


def adapter_save(adapter, base, path):
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(adapter["seed"])
    args = {k: v for k, v in adapter.items() if k != "seed"}
    try:
        made = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **args))
    except ValueError as error:  # such as: the exclusions leave no module
        raise Unreadable(str(error).splitlines()[0][:200]) from error
    with torch.no_grad():  # B starts as zero, except where it changes the base
        for name, value in made.named_parameters():
            if "lora_B" in name and args.get("init_lora_weights") in (None, "gaussian"):
                value.normal_(std=0.2 / adapter["lora_alpha"])
            elif "magnitude" in name:
                value.mul_(1 + 0.2 * torch.rand_like(value))
            elif "norm.modules_to_save" in name:  # Gemma's are 0 before training
                value.add_(0.2 * torch.randn_like(value))
            elif "modules_to_save" in name or "trainable_tokens" in name:
                value.mul_(1 + 0.2 * torch.randn_like(value))
    made.save_pretrained(path)


def reference_open(model, adapter):
    from peft import PeftModel

    base = base_open(model)
    try:
        return base if adapter is None else PeftModel.from_pretrained(base, adapter).eval()
    except RuntimeError as error:  # such as: two patterns of which another one matches first
        raise Unreadable(str(error).splitlines()[0][:200]) from error


def reference(case, model, adapter):
    """The logits and, with an adapter, the merged weights."""
    import torch

    base = reference_open(model, adapter)
    with torch.no_grad():
        try:
            logits = base(torch.tensor([case["ids"]])).logits[0].float().numpy()
        except Exception as error:
            raise Unreadable(f"{type(error).__name__}: {str(error)[:200]}") from error
        if adapter is None:
            return logits, {}
        merged = base.merge_and_unload()
    return logits, {k: v.float().numpy() for k, v in merged.state_dict().items()}


def reference_exact(case, model, adapter):
    """The logits in float64. Its code asks for float32 in places, which get float64 as well."""
    import torch

    base = reference_open(model, adapter).double()
    single, cast = torch.float32, torch.Tensor.float
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    try:
        for module in base.modules():  # the frequencies, which were computed in float32
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.__init__(module.config)
        with torch.no_grad():
            logits = base(torch.tensor([case["ids"]])).logits[0]
    finally:
        torch.float32, torch.Tensor.float = single, cast
    if logits.dtype != torch.float64:
        raise TypeError(f"the logits are {logits.dtype}")
    return logits.numpy()


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


def weights_difference(folder, model, theirs):
    """The largest difference of any merged tensor. Names may be missing only for a tied head; what
    transformers does not read, such as biases that the config denies, is copied unchanged."""
    from safetensors.torch import load_file

    ours = load_file(os.path.join(folder, "model.safetensors"))
    source = load_file(os.path.join(model, "model.safetensors"))
    worst = 0.0
    for name, value in ours.items():
        if name not in theirs:
            if name not in source or not value.equal(source[name]):
                return float("inf")
            continue
        worst = max(worst, difference(value.float().numpy(), theirs[name]))
    missing = set(theirs) - set(ours) - {"lm_head.weight"}
    return float("inf") if missing else worst


def case_judge(case, model, adapter, root, logits, merged):
    """Compares the files of our program; returns the outcome and its details."""
    ours = logits_read(os.path.join(root, "logits.bin"))
    a = difference(ours, logits)
    b = weights_difference(os.path.join(root, "merged"), model, merged) if merged else 0.0
    if b > WEIGHTS or a == float("inf"):
        return "different", (a, b)
    if a > LOGITS:
        exact = reference_exact(case, model, adapter)
        mine, theirs = difference(ours, exact), difference(logits, exact)
        print(f"    logits differ by {a:.1e}; against float64: ours {mine:.1e}, "
              f"transformers {theirs:.1e}", flush=True)
        RATIOS.append(mine / theirs)
        return ("compared" if mine <= LARGEST_RATIO * theirs else "different"), (a, b)
    return "compared", (a, b)


def case_run(case, program, root, spread):
    """Returns (what happened, largest differences or the reason)."""
    model = os.path.join(root, "model")
    adapter = os.path.join(root, "adapter") if case["adapter"] is not None else None
    base_save(case, model, spread)
    unreadable = None
    try:
        if adapter is not None:
            adapter_save(case["adapter"], base_open(model), adapter)
        logits, merged = reference(case, model, adapter)
    except Unreadable as error:
        unreadable = str(error)
        if adapter is not None and not os.path.exists(adapter):
            adapter = None
    command = [program, model, adapter or "-", root] + [str(i) for i in case["ids"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode not in (0, 3):
        return "failed", f"status {done.returncode}: {done.stdout}{done.stderr}"
    if unreadable is not None:
        return "unreadable", f"{unreadable}; ours: {done.stdout.strip() or 'accepted'}"
    if done.returncode == 3:
        return "refused", done.stdout.strip()
    return case_judge(case, model, adapter, root, logits, merged)


def case_in(case, program, o):
    root = tempfile.mkdtemp(prefix="peft_diff-")
    try:
        outcome = case_run(case, program, root, o.spread)
        if outcome[0] in ("failed", "different") and o.keep:
            shutil.copytree(root, os.path.join(o.keep, os.path.basename(root)))
        return outcome
    finally:
        shutil.rmtree(root)


def cases_run(named, program, o):
    """Runs all cases; returns the outcomes, after printing everything that is not a match."""
    outcomes = []
    for name, case in named:
        what, detail = case_in(case, program, o)
        outcomes.append((what, detail, case))
        if what != "compared":
            print(f"{name} ({case['model']['family']}): {what}: {detail}", flush=True)
        if what in ("failed", "different"):
            print("    " + json.dumps(case), flush=True)
    return outcomes


def accepted_read():
    if not os.path.exists(ACCEPTED):
        return []
    with open(ACCEPTED, encoding="utf-8") as f:
        return [(f"accepted {i + 1}", json.loads(line)) for i, line in enumerate(f)]


def accepted_write(outcomes, wanted):
    """Adds compared cases to the list until every family has as many as wanted."""
    have = [case["model"]["family"] for _, case in accepted_read()]
    with open(ACCEPTED, "a", encoding="utf-8") as f:
        for what, _, case in outcomes:
            if what == "compared" and have.count(case["model"]["family"]) < wanted:
                have.append(case["model"]["family"])
                f.write(json.dumps(case) + "\n")


def families_missing():
    """The families without a case that must be accepted."""
    have = {case["model"]["family"] for _, case in accepted_read()}
    return [family for family in FAMILIES if family not in have]


def families_print(outcomes):
    """One line per family: how many cases were compared, and the largest difference."""
    for family in FAMILIES:
        mine = [(w, d) for w, d, c in outcomes if c["model"]["family"] == family]
        good = [d for w, d in mine if w == "compared"]
        if mine:
            print(f"  {family:17s} {len(good):3d} of {len(mine):3d} compared, "
                  f"logits {max((a for a, _ in good), default=0):.1e}, "
                  f"weights {max((b for _, b in good), default=0):.1e}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--spread", type=float, default=1.0)
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
    warnings.filterwarnings("ignore")
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    must = [] if o.write_accepted else cases_run(accepted_read(), program, o)
    fresh = [(f"seed {o.seed} case {i}", case_make(o.seed, i, o.family)) for i in range(o.count)]
    outcomes = cases_run(fresh, program, o)
    count = {k: sum(w == k for w, _, _ in outcomes) for k in OUTCOMES}
    good = [d for w, d, _ in must + outcomes if w == "compared"]
    families_print(outcomes)
    print(f"transformers {transformers.__version__}, PEFT {peft.__version__}, seed {o.seed}: "
          + ", ".join(f"{count[k]} {k}" for k in OUTCOMES) + "; "
          f"{sum(w == 'compared' for w, _, _ in must)} of {len(must)} accepted cases compared; "
          f"largest difference: logits {max((a for a, _ in good), default=0):.1e}, "
          f"weights {max((b for _, b in good), default=0):.1e}")
    if o.write_accepted:
        accepted_write(outcomes, o.write_accepted)
    mean = math.exp(sum(map(math.log, RATIOS)) / len(RATIOS)) if RATIOS else 0.0
    if RATIOS:
        print(f"{len(RATIOS)} cases beyond {LOGITS}: our error against float64 is {mean:.2f} times "
              "that of transformers in float32 (geometric mean)")
    for family in families_missing():
        print(f"{os.path.relpath(ACCEPTED, ROOT)} has no case of the family {family}")
    readable = o.count - count["unreadable"]
    ok = all(w == "compared" for w, _, _ in must) and not count["different"]
    ok = ok and not families_missing() and (len(RATIOS) < 4 or mean <= MEAN_RATIO)
    return 0 if ok and not count["failed"] and 10 * count["compared"] >= 9 * readable else 1


if __name__ == "__main__":
    sys.exit(main())
