#!/usr/bin/env python3
"""Creates a golden folder small enough to be committed, with transformers, PEFT and bitsandbytes (a
CPU is enough):

    python3 tests/golden/make_tiny.py tests/golden/tiny
    python3 tests/golden/make_tiny.py tests/golden/granite4 granite4

The second argument names one of FAMILIES below; the first is the default.

The folder has the layout that build/golden reads: model/ in bf16, model-bnb4/ as written by
save_pretrained, adapter0/ and adapter20/ as written by PEFT, golden.safetensors, golden.json. The
trajectory is computed in float64 from the bf16 values that bitsandbytes dequantises to; a parallel
float32 run shows the effect of rounding alone, and the limit is ten times that, but at least a
fixed minimum.
"""
import copy
import json
import os
import sys

import bitsandbytes
import peft
import torch
import transformers
from safetensors.torch import save_file

BATCH, SEQ, STEPS, VOCAB = 2, 24, 20, 96
OPTIMIZER = dict(lr=2e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.02)


IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEXT_SEVEN = r".*language_model.*\.(" + "|".join(SEVEN) + ")"


def qwen3():
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=104, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=24, max_position_embeddings=256,
        rms_norm_eps=1e-6, tie_word_embeddings=False, rope_parameters=ROPE, **IDS)
    return transformers.Qwen3ForCausalLM, config, SEVEN


def granite4():
    """The dense form: all layers have attention, there are no experts."""
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, shared_intermediate_size=72,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["attention"] * 2, num_local_experts=0, num_experts_per_tok=0,
        position_embedding_type="rope", max_position_embeddings=256, rms_norm_eps=1e-5,
        tie_word_embeddings=True, rope_parameters=ROPE, embedding_multiplier=6.0,
        residual_multiplier=0.4, attention_multiplier=0.15, logits_scaling=3.0,
        mamba_n_heads=4, mamba_d_head=32, **IDS)
    config._attn_implementation = "eager"
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear"]
    return transformers.GraniteMoeHybridForCausalLM, config, targets


def mistral3():
    """A multimodal folder whose text part is Ministral 3."""
    text = transformers.Ministral3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=104, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=24, max_position_embeddings=256,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                         "original_max_position_embeddings": 16, "beta_fast": 32.0,
                         "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "llama_4_scaling_beta": 0.1}, **IDS)
    vision = dict(model_type="pixtral", hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                  num_attention_heads=2, head_dim=16, image_size=28, patch_size=14)
    config = transformers.Mistral3Config(text_config=text, vision_config=vision,
                                         tie_word_embeddings=False, image_token_index=5,
                                         spatial_merge_size=1)
    config._attn_implementation = "eager"
    return transformers.Mistral3ForConditionalGeneration, config, TEXT_SEVEN


def qwen3_vl():
    """A multimodal folder whose text part is Qwen3."""
    rope = dict(ROPE, mrope_section=[4, 4, 4], mrope_interleaved=True)
    text = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=104, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=24,
                max_position_embeddings=256, rms_norm_eps=1e-6, rope_parameters=rope, **IDS)
    vision = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64,
                  patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
                  num_position_embeddings=16, deepstack_visual_indexes=[0])
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision,
                                        tie_word_embeddings=True, image_token_id=90,
                                        video_token_id=91, vision_start_token_id=92,
                                        vision_end_token_id=93)
    config._attn_implementation = "eager"
    return transformers.Qwen3VLForConditionalGeneration, config, TEXT_SEVEN


FAMILIES = {"qwen3": qwen3, "granite4": granite4, "mistral3": mistral3, "qwen3_vl": qwen3_vl}
FAMILY = FAMILIES[sys.argv[2] if len(sys.argv) > 2 else "qwen3"]
LORA = dict(r=4, lora_alpha=8, use_rslora=True, target_modules=FAMILY()[2])


def make_model():
    kind, config, _ = FAMILY()
    config.dtype = torch.bfloat16
    model = kind(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(1.0 + 0.2 * torch.randn_like(p))
            else:
                scale = 1.0 if "embed" in name else 1.5 * p.shape[-1] ** -0.5
                p.copy_(torch.randn_like(p) * scale)
            p.copy_(p.to(torch.bfloat16))
    return model  # in float32: a cast would also round the frequencies of the rope


def scales_are_nearest(weight, state):
    """Unlike the CUDA build, the CPU build of bitsandbytes does not always choose the nearest 8-bit
    code for a scale; this checks that it does for the chosen seed, and that no scale is so close to
    the middle between two codes that rounding decides."""
    absmax = weight.reshape(-1, 64).abs().amax(1)
    y = absmax - absmax.mean()
    scaled = y / y.reshape(1, -1).abs().amax()  # fewer than 256 blocks: one second-level block
    code = state.state2.code
    middles = (code[1:] + code[:-1]) / 2
    gaps = (scaled[scaled.abs() > 0.01].unsqueeze(1) - middles).abs()
    nearest = torch.bucketize(scaled, middles).to(torch.uint8)
    return torch.equal(nearest, state.absmax) and gaps.min().item() > 1e-6


def dequantised(plain, path):
    """The same model with the dequantised 4-bit weights in every linear of the layers."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16)
    quantised = FAMILY()[0].from_pretrained(
        path + "/model", quantization_config=config, dtype=torch.bfloat16, device_map="cpu")
    quantised.save_pretrained(path + "/model-bnb4")
    result = copy.deepcopy(plain)
    for name, module in quantised.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            text = "layers" in name and "visual" not in name and "vision" not in name
            if text and not scales_are_nearest(plain.get_submodule(name).weight,
                                               module.weight.quant_state):
                return None
            weight = bitsandbytes.functional.dequantize_4bit(module.weight.data,
                                                             module.weight.quant_state)
            result.get_submodule(name).weight.data = weight.to(torch.bfloat16).float()
    return result


def loss_of(model, ids, labels):
    return model(input_ids=ids, labels=labels).loss


def with_adapters(model):
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **LORA))


def run(base, dtype, start, ids, labels, clip):
    """Runs STEPS steps from the adapter `start`; returns the results that the golden folder stores."""
    model = with_adapters(copy.deepcopy(base).to(dtype))
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    out = {"names": names, "losses": [], "norms": [], "grads": {}, "model": model}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for n in names:
            parameters[n].data = start[n].to(dtype)
    trained = [parameters[n] for n in names]
    optimizer = torch.optim.AdamW(trained, **OPTIMIZER)
    with torch.no_grad():
        out["logits"] = model(input_ids=ids[0]).logits
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, ids[step], labels[step])
        loss.backward()
        if step == 0:
            out["grads"] = {n: parameters[n].grad.clone() for n in names}
        out["losses"].append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(trained, clip if clip > 0 else float("inf"))
        out["norms"].append(norm.item())
        optimizer.step()
    out["final"] = {n: parameters[n].detach().clone() for n in names}
    return out


def worst(a, b):
    return max(((a[n].double() - b[n].double()).norm() / b[n].double().norm()).item() for n in a)


def farthest(a, b):
    return max(abs(x - y) / max(1, abs(y)) for x, y in zip(a, b))


def greedy(model, prompt):
    ids, margin = list(prompt), 1.0
    with torch.no_grad():
        for _ in range(SEQ - len(prompt)):
            row = model(input_ids=torch.tensor([ids])).logits[0, -1]
            top = row.topk(2).values
            margin = min(margin, ((top[0] - top[1]) / row.abs().max()).item())
            ids.append(int(row.argmax()))
    return ids[len(prompt):], margin


def save_adapter(model, path):
    model.save_pretrained(path)
    if os.path.exists(path + "/README.md"):
        os.remove(path + "/README.md")


def main(path):
    os.makedirs(path, exist_ok=True)
    nf4, seed = None, 0
    while nf4 is None:
        seed += 1
        torch.manual_seed(seed)
        plain = make_model()
        copy.deepcopy(plain).to(torch.bfloat16).save_pretrained(path + "/model")
        nf4 = dequantised(plain, path)
    lowest, highest = (6, 90) if FAMILY in (mistral3, qwen3_vl) else (3, VOCAB)  # no image tokens
    ids = torch.randint(lowest, highest, (STEPS, BATCH, SEQ))
    labels = ids.clone()
    labels[torch.rand(labels.shape) < 0.2] = -100
    model = with_adapters(copy.deepcopy(nf4).float())
    start = {}
    with torch.no_grad():
        for n, p in model.named_parameters():
            if p.requires_grad:
                p.copy_(torch.randn_like(p) * (0.05 if "lora_B" in n else p.shape[1] ** -0.5))
                start[n] = p.detach().clone()
    save_adapter(model, path + "/adapter0")
    norms = sorted(run(nf4, torch.float64, start, ids, labels, 0)["norms"])
    clip = round(norms[STEPS // 2], 2)  # half of the steps are clipped
    true = run(nf4, torch.float64, start, ids, labels, clip)
    rounded = run(nf4, torch.float32, start, ids, labels, clip)
    names = true["names"]
    file_name = {n: n.replace(".default", "") for n in names}
    text, margin = greedy(true["model"], ids[0, 0, :8].tolist())
    save_adapter(true["model"].float(), path + "/adapter20")
    with torch.no_grad():
        base, four = plain.double(), nf4.double()
        tensors = {
            "input_ids": ids.int(), "labels": labels.int(),
            "base_logits": base(input_ids=ids[0]).logits.float(),
            "nf4_logits": four(input_ids=ids[0]).logits.float(),
            "lora_logits": true["logits"].float()}
        base_loss = loss_of(base, ids[0], labels[0]).item()
        nf4_loss = loss_of(four, ids[0], labels[0]).item()
    for n in names:
        tensors["grad." + file_name[n]] = true["grads"][n].float()
    save_file(tensors, path + "/golden.safetensors")
    spread = {
        "loss": farthest(rounded["losses"], true["losses"]),
        "norm": farthest(rounded["norms"], true["norms"]),
        "grad": worst(rounded["grads"], true["grads"]),
        "adapter": worst(rounded["final"], true["final"])}
    golden = {
        "transformers": transformers.__version__, "peft": peft.__version__,
        "bitsandbytes": bitsandbytes.__version__, "torch": torch.__version__,
        "batch": BATCH, "seq": SEQ, "steps": STEPS, "lora": LORA,
        "optimizer": dict(name="adamw", clip=clip, **OPTIMIZER),
        "base_loss": base_loss, "nf4_loss": nf4_loss, "spread_of_float32": spread,
        "limits": {
            "f32": {"logits": 1e-5, "loss0": 2e-6, "grads": max(2e-5, 10 * spread["grad"]),
                    "loss_any": max(5e-6, 10 * spread["loss"]),
                    "grad_norm": max(1e-5, 10 * spread["norm"]),
                    "adapter20": max(1e-4, 10 * spread["adapter"])},
            "bf16": {"logits": 0.08, "loss0": 3e-3, "grads": 0.2, "loss_any": 0.02,
                     "grad_norm": 0.1, "greedy_margin": 0.05}},
        "losses": true["losses"], "grad_norms": true["norms"], "greedy_smallest_margin": margin,
        "greedy_prompt": ids[0, 0, :8].tolist(), "greedy_ids_after_20_steps": text}
    with open(path + "/golden.json", "w") as f:
        json.dump(golden, f, indent=1)
        f.write("\n")
    for folder in ("model", "model-bnb4"):
        extra = path + "/" + folder + "/generation_config.json"
        if os.path.exists(extra):
            os.remove(extra)


main(sys.argv[1])
