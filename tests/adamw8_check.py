#!/usr/bin/env python3
"""Compares AdamW with 8-bit moments (build/adamw8_side) with bitsandbytes over 20 steps.

    python tests/adamw8_check.py

Needs torch, numpy and bitsandbytes; without them it reports this and exits with status 0. Three
comparisons, all on the CPU:

- The maps must be those of bitsandbytes, bit for bit.
- The rule of bitsandbytes' CUDA kernel, written here as plain tensor operations: the nearest value
  of the map, and a negative first moment that never becomes 0. Codes may differ where a quotient is
  within rounding of the middle between two values.
- bitsandbytes' own optimizer on the CPU, which finds codes through a coarse table, so that small
  moments differ; the parameters must stay near if the gradients of a block are of similar size. A
  tensor below 4096 elements has f32 moments there and here and must agree closely.
"""

import os
import struct
import subprocess
import sys
import tempfile

STEPS = 20
NUMBERS = (1e-2, 0.9, 0.999, 1e-8, 0.1)  # lr, beta1, beta2, eps, decay


def ours(parameters, gradients):
    import numpy

    n = parameters.numel()
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "in")
        target = os.path.join(folder, "out")
        with open(source, "wb") as f:
            f.write(struct.pack("<qq5d", n, len(gradients), *NUMBERS))
            f.write(parameters.numpy().tobytes())
            for g in gradients:
                f.write(g.numpy().tobytes())
        subprocess.run(["build/adamw8_side", source, target], check=True)
        with open(target, "rb") as f:
            data = f.read()
    maps = numpy.frombuffer(data, "<f4", 512).reshape(2, 256)
    values = numpy.frombuffer(data, "<f4", n, 2048)
    rest = data[2048 + 4 * n :]
    codes = []
    if n >= 4096:
        blocks = -(-n // 256)
        for k in range(2):
            at = k * (n + 4 * blocks)
            codes.append(numpy.frombuffer(rest, "u1", n, at))
    return maps, values, codes


def nearest(values, code_map, signed):
    """Codes and scales of one moment, as the CUDA kernel stores it."""
    import torch

    n = values.numel()
    padded = torch.nn.functional.pad(values, (0, -n % 256)).reshape(-1, 256)
    scales = padded.abs().amax(1, keepdim=True)
    x = torch.where(scales > 0, padded / scales, torch.zeros_like(padded)).flatten()[:n]
    middles = (code_map[1:] + code_map[:-1]) * 0.5
    codes = torch.searchsorted(middles, x)
    if signed:
        codes = codes - ((values < 0) & (code_map[codes] >= 0)).long()
    return codes, code_map[codes] * scales.repeat_interleave(256)[:n]


def rule(parameters, gradients, maps):
    import torch

    lr, beta1, beta2, eps, decay = NUMBERS
    p = parameters.clone()
    m = torch.zeros_like(p)
    v = torch.zeros_like(p)
    codes = []
    for t, g in enumerate(gradients, 1):
        p = p - lr * decay * p
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        p = p - lr / (1 - beta1**t) * (m / (v.sqrt() / (1 - beta2**t) ** 0.5 + eps))
        code_m, m = nearest(m, maps[0], True)
        code_v, v = nearest(v, maps[1], False)
        codes = [code_m, code_v]
    return p, codes


def theirs(parameters, gradients):
    import bitsandbytes
    import torch

    lr, beta1, beta2, eps, decay = NUMBERS
    p = torch.nn.Parameter(parameters.clone())
    optimizer = bitsandbytes.optim.AdamW8bit(
        [p], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay
    )
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
    return p.detach()


def main():
    try:
        import bitsandbytes.functional as functional
        import numpy
        import torch
    except ImportError as e:
        print(f"skipped: {e}")
        return 0
    failed = 0
    for n, decades in ((3000, 1), (4096, 1), (10001, 1), (10001, 5)):
        torch.manual_seed(n)
        start = torch.randn(n)
        sizes = 10 ** (-decades * torch.rand(n))
        gradients = [torch.randn(n) * sizes for _ in range(STEPS)]
        maps, values, codes = ours(start, gradients)
        expected = [functional.create_dynamic_map(signed=s) for s in (True, False)]
        equal = all(numpy.array_equal(maps[k], expected[k].numpy()) for k in range(2))
        moved = (torch.from_numpy(values.copy()) - start).norm()
        peer = (torch.from_numpy(values.copy()) - theirs(start, gradients)).norm() / moved
        line = f"n {n}, {decades} decades: maps {'equal' if equal else 'DIFFER'}, bitsandbytes {float(peer):.2e}"
        near = 1e-5 if n < 4096 else 2e-2 if decades == 1 else float("inf")
        good = equal and peer < near
        if n >= 4096:
            p, wanted = rule(start, gradients, expected)
            own = (torch.from_numpy(values.copy()) - p).norm() / moved
            off = [(torch.from_numpy(c.copy()).long() != w).float().mean().item()
                   for c, w in zip(codes, wanted)]
            line += f", rule {float(own):.2e}, other codes {off[0]:.1e} and {off[1]:.1e}"
            good = good and own < 1e-3 and max(off) < 5e-3
        print(line + ("" if good else "  FAILED"))
        failed += 0 if good else 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
