#!/usr/bin/env python3
"""Compares a training step on the CPU with transformers + PEFT, in the same minutes.

    tests/bench/cpu_peers.py [--threads 2] [--batch 4] [--seq 256] [--rounds 3] [--bf16]
    tests/bench/cpu_peers.py --gguf FILE.gguf [--model PATH] [--threads 1] [--rounds 3]

The second form compares generation with llama.cpp instead (needs numpy and xllamacpp): llama.cpp
reads FILE.gguf; we read PATH, or the same file, and hold it in NF4. With one thread both sides are
measured in CPU time. Loading is not counted.

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
    parser.add_argument("--bf16", action="store_true", help="also measure both sides in bf16")
    parser.add_argument("--no-bnb", action="store_true", help="leave out bitsandbytes")
    parser.add_argument("--gguf", help="compare generation with llama.cpp, which reads this file")
    parser.add_argument("--model", help="what we read (default: the same file)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    return parser.parse_args()


def own_step(args, base, mode="auto"):
    """Seconds of wall clock and of CPU time for the best step of one run."""
    command = [args.bench, "step", "--backend", "cpu", "--shape", "smollm2-135m", "--batch",
               str(args.batch), "--seq", str(args.seq), "--threads", str(args.threads), "--base",
               base, "--mode", mode, "--steps", "1", "--json"]
    command += ["--tier", args.tier] if args.tier else []
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures = json.loads(out)
    return figures["step_ms_best"] / 1e3, figures["step_cpu_ms_best"] / 1e3


class Peer:
    """One model of transformers + PEFT; nf4: weights by bitsandbytes; bf16: all of it in bf16."""

    def __init__(self, args, nf4, bf16=False):
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
        self.model = (model.bfloat16() if bf16 else model).train()
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


def own_decode(args):
    """Tokens per second of decoding and of the prompt."""
    command = [args.bench, "decode", "--model", args.model or args.gguf, "--threads",
               str(args.threads), "--prompt", str(args.prompt), "--json"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures = json.loads(out)
    return figures["tokens_per_s"], figures["prompt_tokens_per_s"]


class LlamaDecode:
    """llama.cpp through the C functions of xllamacpp's library, as tests/llama_check.py calls it."""

    def __init__(self, args):
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
        import ctypes
        import llama_check
        self.prompt, self.threads = args.prompt, args.threads
        self.llama = llama_check.Llama(args.gguf)
        lib = self.lib = self.llama.lib
        lib.llama_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
        lib.llama_set_n_threads.restype = None
        self.batch = lib.llama_batch_init(args.prompt, 0, 1)

    def run(self, context, ids, first):
        """Seconds of one call of llama_decode with these tokens."""
        clock = time.process_time if self.threads == 1 else time.perf_counter
        for i, token in enumerate(ids):
            self.batch.token[i], self.batch.pos[i], self.batch.n_seq_id[i] = token, first + i, 1
            self.batch.seq_id[i][0], self.batch.logits[i] = 0, int(i == len(ids) - 1)
        self.batch.n_tokens = len(ids)
        start = clock()
        if self.lib.llama_decode(context, self.batch) != 0:
            sys.exit("llama.cpp cannot decode")
        self.lib.llama_get_logits_ith(context, len(ids) - 1)[0]
        return clock() - start

    def rates(self):
        params = self.lib.llama_context_default_params()
        params.words[0] = self.prompt + 64  # context
        params.words[1] = params.words[2] = self.prompt  # batch, ubatch
        context = self.lib.llama_init_from_model(self.llama.model, params)
        self.lib.llama_set_n_threads(context, self.threads, self.threads)
        ids = [i * 7919 % self.llama.size for i in range(self.prompt)]
        prompt = self.run(context, ids, 0)
        token = min(self.run(context, [ids[i]], self.prompt + i) for i in range(32))
        self.lib.llama_free(context)
        return 1 / token, self.prompt / prompt


def decoding(args):
    peer = LlamaDecode(args)
    best = {}
    for _ in range(args.rounds):
        for name, run in (("qlora.h, NF4", lambda: own_decode(args)), ("llama.cpp", peer.rates)):
            old, new = best.get(name, (0, 0)), run()
            best[name] = (max(old[0], new[0]), max(old[1], new[1]))
    own = best["qlora.h, NF4"]
    print(f"{'':16} decoding, tokens/s  prompt of {args.prompt}, tokens/s  ours / this")
    for name, (token, prompt) in best.items():
        print(f"{name:16} {token:18.1f} {prompt:24.1f}  {own[0] / token:6.2f} x "
              f"{own[1] / prompt:6.2f} x")


def main():
    args = arguments()
    if args.gguf:
        return decoding(args)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    peers = {"PEFT, f32 base": Peer(args, False)}
    if args.bf16:
        peers["PEFT, bf16"] = Peer(args, False, True)
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
        if args.bf16:
            runs += [(f"qlora.h, {base}, mode bf16", lambda base=base: own_step(args, base, "bf16"))
                     for base in ("nf4", "16bit")]
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
