#!/usr/bin/env python3
"""Compares FP8 folders (e4m3, a scale per 128 x 128 block) with transformers' own reading of them.

    python tests/fp8_check.py

Needs torch, transformers, accelerate and safetensors (tried with transformers 5.22); without them it
reports this and exits with status 0. Small random models are quantised here and written as published
FP8 folders are. transformers dequantises them to bfloat16 and computes in float32, and so do we
(build/peft_side): logits, and our merged folder, whose weights must be those values exactly. Also
printed: how far FP8 is from the 16-bit weights.
"""

import json
import os
import subprocess
import sys
import tempfile

LIMIT = 1e-5  # relative L2, float32 on both sides
TOKENS = 40
VOCAB = 96


def families():
    import transformers as t

    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    return [("llama", t.LlamaConfig(**sizes)), ("qwen3", t.Qwen3Config(**sizes))]


def blocks(w):
    """w [rows, cols] as [rows / 128, 128, cols / 128, 128]."""
    return w.reshape(w.shape[0] // 128, 128, w.shape[1] // 128, 128)


def quantise(w):
    import torch

    scales = blocks(w.float()).abs().amax(dim=(1, 3)) / 448.0
    codes = (blocks(w.float()) / scales[:, None, :, None]).reshape(w.shape).to(torch.float8_e4m3fn)
    return codes, scales


def folder_write(config, folder, scale_dtype):
    """Writes a published folder; returns the dequantised weights and those before, by name."""
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    tensors, values, before = {}, {}, {}
    for name, w in model.state_dict().items():
        if "_proj.weight" not in name:
            tensors[name] = w.contiguous()
            continue
        codes, scales = quantise(w)
        scales = scales.to(scale_dtype)
        tensors[name] = codes
        tensors[name + "_scale_inv"] = scales.contiguous()
        wide = blocks(codes.float()) * scales.float()[:, None, :, None]
        values[name] = wide.reshape(w.shape).to(torch.bfloat16)
        before[name] = w
    os.makedirs(folder)
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    path = os.path.join(folder, "config.json")
    with open(path) as f:
        text = json.load(f)
    text["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    with open(path, "w") as f:
        json.dump(text, f)
    return values, before


def adapter_write(config, folder):
    """An adapter that changes nothing: B is zero."""
    import torch
    from safetensors.torch import save_file

    rows = config.num_attention_heads * config.head_dim
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {
        name + "A.weight": torch.ones(1, config.hidden_size),
        name + "B.weight": torch.zeros(rows, 1),
    }
    text = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    text.update({"layers_to_transform": [0], "task_type": "CAUSAL_LM"})
    os.makedirs(folder)
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump(text, f)


def logits_read(path):
    import torch

    with open(path, "rb") as f:
        data = bytearray(f.read())
    tokens, vocab = torch.frombuffer(data, dtype=torch.int64, count=2).tolist()
    return torch.frombuffer(data, dtype=torch.float32, offset=16).reshape(tokens, vocab)


def distance(expected, got):
    return float((expected - got).norm() / expected.norm())


def compare(name, config, scale_dtype, work):
    import torch
    import transformers
    from safetensors.torch import load_file

    base = os.path.join(work, "base")
    values, before = folder_write(config, base, scale_dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, attn_implementation="eager", dtype=torch.bfloat16
    )
    for key, w in values.items():  # transformers reads what we wrote
        if not torch.equal(model.state_dict()[key], w):
            print(f"{name}: transformers has other values in {key}")
            return False
    model = model.float()
    ids = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(TOKENS)]
    expected = model(input_ids=torch.tensor([ids])).logits[0].detach()
    adapter = os.path.join(work, "adapter")
    adapter_write(config, adapter)
    subprocess.run(["build/peft_side", base, adapter, work] + [str(i) for i in ids], check=True)
    off = distance(expected, logits_read(os.path.join(work, "logits.bin")))
    merged = load_file(os.path.join(work, "merged", "model.safetensors"))
    same = all(torch.equal(merged[key], w.float()) for key, w in values.items())
    left = [key for key in merged if key.endswith("_scale_inv")]
    error = sum(float((values[k].float() - w.float()).norm() ** 2) for k, w in before.items())
    error = (error / sum(float(w.float().norm() ** 2) for w in before.values())) ** 0.5
    good = off <= LIMIT and same and not left
    print(
        f"{name}, scales in {scale_dtype}: logits {off:.1e}, merged weights "
        f"{'equal' if same and not left else 'DIFFERENT'}, {error:.4f} from 16 bits"
        f"{'' if good else ': WRONG'}"
    )
    return good


def main():
    try:
        import accelerate  # noqa: F401
        import safetensors  # noqa: F401
        import torch
        import transformers
    except ImportError as e:
        print(f"fp8_check: skipped: {e}")
        return 0
    transformers.logging.set_verbosity_error()
    good = True
    for name, config in families():
        for dtype in (torch.float32, torch.bfloat16):
            with tempfile.TemporaryDirectory() as work:
                good = compare(name, config, dtype, work) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
