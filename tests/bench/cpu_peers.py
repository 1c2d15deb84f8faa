#!/usr/bin/env python3
"""Compares a training step on the CPU with transformers + PEFT, in the same minutes.

    tests/bench/cpu_peers.py [--threads 2] [--batch 4] [--seq 256] [--rounds 3]

Needs torch, transformers and peft, and bitsandbytes for the row with a 4-bit base; build/bench must
exist. Every round runs each side once, one step of warm-up and one that counts; the best of the
rounds is kept. The model has the shape of SmolLM2 135M and random weights; adapters of rank 16 are
on all seven projections, gradients are clipped to 1, and the optimizer is AdamW.
"""
import argparse
import json
import os
import subprocess
import sys
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bench", default="build/bench")
    parser.add_argument("--tier", help="our CPU tier, such as avx2; the best one without this")
    parser.add_argument("--no-bnb", action="store_true", help="leave out bitsandbytes")
    return parser.parse_args()


def own_step(args, base):
    """Seconds of wall clock and of CPU time for the best step of one run."""
    command = [args.bench, "step", "--backend", "cpu", "--shape", "smollm2-135m", "--batch",
               str(args.batch), "--seq", str(args.seq), "--threads", str(args.threads), "--base",
               base, "--steps", "1", "--json"] + (["--tier", args.tier] if args.tier else [])
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures = json.loads(out)
    return figures["step_ms_best"] / 1e3, figures["step_cpu_ms_best"] / 1e3


class Peer:
    """One model of transformers + PEFT; 4-bit weights by bitsandbytes if nf4."""

    def __init__(self, args, nf4):
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM
        self.torch = torch
        torch.set_num_threads(args.threads)
        torch.manual_seed(1)
        config = LlamaConfig(hidden_size=576, num_hidden_layers=30, num_attention_heads=9,
                             num_key_value_heads=3, intermediate_size=1536, vocab_size=49152,
                             tie_word_embeddings=True, rope_theta=1e5)
        model = LlamaForCausalLM(config)
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        if nf4:
            self.quantise(model, names)
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names))
        self.model = model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        self.trained = trained
        self.optimizer = torch.optim.AdamW(trained, lr=2e-4)
        self.ids = torch.randint(0, 49152, (args.batch, args.seq))

    def quantise(self, model, names):
        import bitsandbytes as bnb
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if name in names:
                    layer = bnb.nn.Linear4bit(child.in_features, child.out_features, bias=False,
                                              compute_dtype=self.torch.float32, quant_type="nf4",
                                              compress_statistics=True)
                    layer.weight = bnb.nn.Params4bit(child.weight.data, requires_grad=False,
                                                     quant_type="nf4", compress_statistics=True)
                    setattr(module, name, layer.to("cpu"))

    def step(self):
        wall, cpu = time.perf_counter(), time.process_time()
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - wall, time.process_time() - cpu


def main():
    args = arguments()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    peers = {"PEFT, f32 base": Peer(args, False)}
    if not args.no_bnb:
        try:
            peer = Peer(args, True)
            peer.step()
            peers["PEFT + bitsandbytes NF4"] = peer
        except Exception as error:  # an old version, or one without kernels for this processor
            print(f"bitsandbytes left out: {error}", file=sys.stderr)
    best = {}
    for _ in range(args.rounds):
        runs = [(f"qlora.h, {base} base", lambda base=base: own_step(args, base))
                for base in ("nf4", "32bit")]
        for name, peer in peers.items():
            runs.append((name, lambda peer=peer: min(peer.step(), peer.step())))
        for name, run in runs:
            times = run()
            old = best.get(name, (1e30, 1e30))
            best[name] = (min(old[0], times[0]), min(old[1], times[1]))
    tokens = args.batch * args.seq
    own = best["qlora.h, nf4 base"]
    print(f"{'':28} tokens/s  CPU s/step  our NF4 step is faster by (wall, CPU time)")
    for name, (wall, cpu) in best.items():
        print(f"{name:28} {tokens / wall:8.1f} {cpu:11.2f}  {wall / own[0]:8.2f} x "
              f"{cpu / own[1]:8.2f} x")


if __name__ == "__main__":
    main()
