#!/usr/bin/env python3
"""Loads adapters saved by qlora.h into PEFT, on the fixtures' base models, and compares logits.

    python tests/peft_check.py [FIXTURE...]

Needs torch, transformers and peft (a virtual environment: python3 -m venv build/venv-peft, then
build/venv-peft/bin/pip install torch transformers peft); without them it reports this and exits
with status 0. Fixtures: QLORA_SHARED/fixtures, or ../shared/fixtures if that is not set. Everything
runs on the CPU in float32.
"""

import os
import struct
import subprocess
import sys
import tempfile

LIMIT = 2e-5  # largest difference, relative to the largest logit


def read_logits(path):
    import numpy

    with open(path, "rb") as f:
        tokens, vocab = struct.unpack("<qq", f.read(16))
        ids = numpy.frombuffer(f.read(4 * tokens), dtype="<i4").astype("int64")
        logits = numpy.frombuffer(f.read(), dtype="<f4").reshape(tokens, vocab)
    return ids, logits


def open_base(fixture):
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    path = os.path.join(fixture, "model")
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    try:
        return AutoModelForCausalLM.from_pretrained(path, **options)
    except ValueError:  # a vision-language model
        return AutoModelForImageTextToText.from_pretrained(path, **options)


def make_pattern(fixture, out):
    """Creates a PEFT adapter with ranks and scales that vary by layer, and layers without one."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=r".*layers\.(0\.self_attn\.(q|k|o|qkv)_proj|1\.(self_attn\.(q|qkv)_proj|"
        r"mlp\.down_proj|shared_mlp\.output_linear))",
        exclude_modules=r".*(vision_tower|visual)\..*",
        rank_pattern={"1.mlp.down_proj": 2},
        alpha_pattern={"k_proj": 5, "down_proj": 9},
        use_rslora=True,
        init_lora_weights=False,
    )
    get_peft_model(open_base(fixture), config).save_pretrained(out)


def check(program, fixture, kind, root):
    import torch
    from peft import PeftModel

    out = os.path.join(root, os.path.basename(fixture) + "-" + kind)
    os.mkdir(out)
    source = kind
    if kind == "pattern":
        source = out + "-given"
        make_pattern(fixture, source)
    command = [program, fixture, out, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 3 and kind == "dora":
        print(f"  {os.path.basename(fixture):16} {kind:7} refused: {done.stdout.strip()}")
        return True
    if done.returncode != 0:
        print(f"  {kind}: {done.stdout}{done.stderr} FAILED")
        return False
    ids, ours = read_logits(os.path.join(out, "logits.bin"))
    base = open_base(fixture)
    base.eval()
    with torch.no_grad():
        batch = torch.tensor(ids).unsqueeze(0)
        bare = base(batch).logits[0].float().numpy()
        peft = PeftModel.from_pretrained(base, out)
        peft.eval()
        loaded = {n for n, _ in peft.named_parameters() if "lora_" in n}
        theirs = peft(batch).logits[0].float().numpy()
    scale = abs(theirs).max()
    error = abs(ours - theirs).max() / scale
    effect = abs(bare - theirs).max() / scale  # the adapter must have an effect
    good = error <= LIMIT and effect > 100 * LIMIT and len(loaded) > 0
    print(
        f"  {os.path.basename(fixture):16} {kind:7} {len(loaded):4} tensors  "
        f"error {error:.3g} (limit {LIMIT:g}), effect {effect:.3g}  {'ok' if good else 'FAILED'}"
    )
    return good


def main():
    if "--help" in sys.argv[1:] or "-h" in sys.argv[1:]:
        print(__doc__.strip())
        return 0
    try:
        import peft
        import torch
        import transformers
        transformers.utils.logging.disable_progress_bar()
    except ImportError as error:
        print(f"peft_check: skipped: {error}")
        return 0
    for module in (torch, transformers, peft):
        print(f"{module.__name__} {module.__version__}")
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    build = os.environ.get("B", "build")
    program = os.path.join(here, build, "adapter_dump")
    subprocess.run(["make", "-s", "-C", here, f"{build}/adapter_dump"], check=True)
    shared = os.environ.get("QLORA_SHARED", os.path.join(here, "..", "shared"))
    fixtures = sys.argv[1:]
    if not fixtures and os.path.isdir(os.path.join(shared, "fixtures")):
        names = sorted(os.listdir(os.path.join(shared, "fixtures")))
        fixtures = [os.path.join(shared, "fixtures", name) for name in names]
        fixtures = [f for f in fixtures if os.path.exists(os.path.join(f, "model", "config.json"))]
    if not fixtures:
        print("peft_check: skipped: no fixtures found")
        return 0
    good = True
    with tempfile.TemporaryDirectory() as root:
        for fixture in fixtures:
            for kind in ("plain", "rslora", "pattern", "dora", "embed", "both", "rows",
                         "norms"):
                good = check(program, fixture.rstrip("/"), kind, root) and good
    print("all passed" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
