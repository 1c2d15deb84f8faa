#!/usr/bin/env python3
"""Compares scaled rotations (rope_scale) with transformers.

    python tests/rope_check.py

Needs torch, transformers and peft (tried with transformers 5.22); without them it reports this and
exits with status 0. Small random models and adapters are made here. transformers computes them in
float32 with rope_parameters or rope_scaling of its config set, our side with the plain folder and
TYPE:F, both on a text longer than the positions of the plain model: logits (build/peft_side), loss
and gradients of one step (build/dpo_side), and the logits of our merged folder in transformers.
"""

import json
import os
import random
import struct
import subprocess
import sys
import tempfile

LIMIT = 1e-5  # relative L2, float32 on both sides
POSITIONS = 48
TOKENS = 150
VOCAB = 96
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SCALES = [("yarn", 4.0), ("linear", 3.5)]


def families():
    import transformers as t

    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=104,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    theta = {"rope_type": "default", "rope_theta": 5e5}
    half = dict(theta, partial_rotary_factor=0.5)
    window = dict(use_sliding_window=True, sliding_window=20, max_window_layers=1)
    glm = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]
    return [
        ("llama", t.LlamaConfig(rope_parameters=theta, **sizes), SEVEN, False),
        ("llama, older file", t.LlamaConfig(rope_parameters=theta, **sizes), SEVEN, True),
        ("qwen2, window", t.Qwen2Config(rope_parameters=theta, **window, **sizes), SEVEN, False),
        ("qwen3", t.Qwen3Config(rope_parameters=theta, **sizes), SEVEN, False),
        ("gemma2", t.Gemma2Config(rope_parameters=theta, **sizes), SEVEN, False),
        ("glm, half rotated", t.GlmConfig(rope_parameters=half, **sizes), glm, False),
    ]


def save_base(model, folder, older):
    model.save_pretrained(folder)
    if older:  # as files were written before rope_parameters
        path = os.path.join(folder, "config.json")
        config = json.load(open(path))
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        json.dump(config, open(path, "w"))


def scaled_config(folder, kind, factor, older):
    """What a user of transformers would write into config.json."""
    import transformers

    config = json.load(open(os.path.join(folder, "config.json")))
    rope = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": POSITIONS}
    config["max_position_embeddings"] = int(POSITIONS * factor)
    if older:
        config["rope_scaling"] = rope
    else:
        config["rope_parameters"].update(rope)
    return transformers.AutoConfig.for_model(config.pop("model_type"), **config)


def distance(a, b):
    import torch

    a, b = a.double(), b.double()
    return float(torch.linalg.norm(a - b) / torch.linalg.norm(a))


def gradients_read(path):
    import torch

    data = open(path, "rb").read()
    (loss,) = struct.unpack_from("<d", data)
    at, out = 8, {}
    while at < len(data):
        name = data[at : at + 192].split(b"\0")[0].decode()
        rows, cols = struct.unpack_from("<qq", data, at + 192)
        at += 208
        values = torch.frombuffer(bytearray(data[at : at + 4 * rows * cols]), dtype=torch.float32)
        out[name] = values.reshape(rows, cols)
        at += 4 * rows * cols
    return loss, out


def logits_read(path):
    import torch

    data = open(path, "rb").read()
    tokens, vocab = struct.unpack_from("<qq", data)
    return torch.frombuffer(bytearray(data[16:]), dtype=torch.float32).reshape(tokens, vocab)


def compare(name, work, config, targets, older, kind, factor):
    import peft
    import torch
    import transformers

    scale = f"{kind}:{factor:g}"
    base, adapter = os.path.join(work, "base"), os.path.join(work, "adapter")
    torch.manual_seed(5)
    plain = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    save_base(plain, base, older)
    wide = scaled_config(base, kind, factor, older)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, config=wide, attn_implementation="eager", dtype=torch.float32
    )
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    for key, p in model.named_parameters():
        if "lora_B" in key:
            p.data.normal_(0.0, 0.1)
    model.save_pretrained(adapter)
    pick = random.Random(9)
    ids = [pick.randrange(3, VOCAB) for _ in range(TOKENS)]
    text = torch.tensor([ids])
    model.train()
    result = model(input_ids=text, labels=text)
    result.loss.backward()
    expected = result.logits[0].detach()

    words = [str(i) for i in ids]
    refused = subprocess.run(
        ["build/peft_side", base, adapter, work] + words, capture_output=True, text=True
    )
    run = ["build/peft_side", "--rope-scale", scale, base, adapter, work]
    subprocess.run(run + words, check=True)
    source, target = os.path.join(work, "in"), os.path.join(work, "out")
    with open(source, "wb") as f:
        f.write(struct.pack("<ddqqi", 0.0, 0.0, 1, TOKENS, TOKENS))
        f.write(struct.pack(f"<{2 * TOKENS}i", *(ids + ids)))
    subprocess.run(["build/dpo_side", base, adapter, source, target, scale], check=True)
    loss, gradients = gradients_read(target)
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        os.path.join(work, "merged"), attn_implementation="eager", dtype=torch.float32
    )
    figures = {
        "logits": distance(expected, logits_read(os.path.join(work, "logits.bin"))),
        "loss": abs(loss - float(result.loss)) / float(result.loss),
        "merged": distance(expected, merged(input_ids=text).logits[0].detach()),
        "gradients": max(
            distance(p.grad, gradients[key.replace(".default", "")])
            for key, p in model.named_parameters()
            if p.requires_grad
        ),
        # the check itself must see a scaling that is missing
        "unscaled": distance(expected, plain.float()(input_ids=text).logits[0].detach()),
    }
    good = all(v <= LIMIT for k, v in figures.items() if k != "unscaled")
    good = good and figures["unscaled"] > 100 * LIMIT
    good = good and refused.returncode == 3 and "rope_scale" in refused.stdout
    good = good and merged.config.max_position_embeddings == int(POSITIONS * factor)
    numbers = ", ".join(f"{k} {v:.2g}" for k, v in figures.items())
    print(f"{'ok' if good else 'FAILED'}: {name}, {scale}: {numbers}")
    return good


def main():
    try:
        import peft  # noqa: F401
        import torch
        import transformers
    except ImportError as error:
        print(f"skipped: {error}")
        return 0
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    good = True
    for name, config, targets, older in families():
        for kind, factor in SCALES:
            with tempfile.TemporaryDirectory() as work:
                good = compare(name, work, config, targets, older, kind, factor) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
