#!/usr/bin/env python3
"""Reads what `finetune --tensorboard` writes with TensorBoard itself and compares it with the log.

Usage: tests/tensorboard_check.py [--finetune build/finetune]
Needs the packages tensorboard and, for a second opinion, tbparse. Trains the demo in five
sessions, three of which are killed, and checks that every step is there once, with its values.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
    "tokens_per_s": "train/tokens_per_second",
    "epoch": "train/epoch",
    "memory_bytes": "train/memory_bytes",
    "eval_loss": "eval/loss",
}


def train(finetune, folder, steps, kill_after=None):
    command = [
        finetune, "--demo", "--backend", "cpu", "--out", f"{folder}/out", "--resume", "auto",
        "--steps", str(steps), "--eval-every", "4", "--save-every", "3", "--schedule", "constant",
        "--tensorboard", f"{folder}/board", "--sample-prompt", "1 and 2 is", "--sample-tokens", "8",
    ]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while kill_after is not None and run.poll() is None:
        log = f"{folder}/out/log.jsonl"
        if os.path.exists(log) and sum('"loss"' in line for line in open(log)) >= kill_after:
            run.kill()
            run.wait()
            return
        time.sleep(0.01)
    if run.wait() != 0:
        sys.exit(f"finetune failed: {' '.join(command)}")


def expected(folder):
    values = {}
    samples = []
    for line in open(f"{folder}/out/log.jsonl", encoding="utf-8"):
        entry = json.loads(line)
        for name, tag in TAGS.items():
            if entry.get(name) is not None:
                values.setdefault(tag, []).append((entry["step"], entry[name]))
        if "samples" in entry:
            samples.append((entry["step"], entry["samples"][0]["text"]))
    return values, samples


def compare(what, tag, want, got):
    if [step for step, _ in want] != [step for step, _ in got]:
        sys.exit(f"{what}: {tag}: steps {[s for s, _ in got]}, expected {[s for s, _ in want]}")
    for (step, a), (_, b) in zip(want, got):
        if abs(a - b) > 1e-6 * abs(a) + 1e-7 + (0.06 if "second" in tag else 0.0):
            sys.exit(f"{what}: {tag}: {b} at step {step}, expected {a}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--finetune", default="build/finetune")
    finetune = os.path.abspath(parser.parse_args().finetune)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        train(finetune, folder, 12)
        for steps in (16, 29, 43):
            train(finetune, folder, 60, kill_after=steps)
        train(finetune, folder, 60)
        values, samples = expected(folder)
        board = f"{folder}/board"
        reader = EventAccumulator(board, size_guidance={"scalars": 0, "tensors": 0},
                                  purge_orphaned_data=False)
        reader.Reload()
        for tag, want in values.items():
            compare("tensorboard", tag, want,
                    [(event.step, event.value) for event in reader.Scalars(tag)])
        texts = [(event.step, event.tensor_proto.string_val[0].decode())
                 for event in reader.Tensors("samples/1")]
        if texts != samples:
            sys.exit(f"tensorboard: samples {texts}, expected {samples}")
        try:
            from tbparse import SummaryReader
        except ImportError:
            print("tbparse not found")
        else:
            hparams = SummaryReader(board).hparams
            settings = dict(zip(hparams["tag"], hparams["value"]))
            if (settings.get("rank"), settings.get("schedule")) != (64.0, "constant"):
                sys.exit(f"tbparse: the settings are {settings}")
            frame = SummaryReader(board).scalars
            for tag, want in values.items():
                rows = frame[frame["tag"] == tag]
                compare("tbparse", tag, want, list(zip(rows["step"], rows["value"])))
        print(f"ok: {sum(map(len, values.values()))} values of {len(values)} tags, "
              f"{len(samples)} samples")


if __name__ == "__main__":
    main()
