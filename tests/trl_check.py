#!/usr/bin/env python3
"""Compares the loss and the gradients of one DPO step with those of TRL's DPOTrainer.

    python tests/trl_check.py

Needs torch, transformers, peft and trl (tried with TRL 1.16); without them it reports this and
exits with status 0. A small random Llama, an adapter of PEFT and random pairs are made here; TRL
tokenizes and batches them, and build/dpo_side computes the same step from the same tokens. The
reference is the model without its adapter. Everything runs on the CPU in float32.
"""

import os
import random
import struct
import subprocess
import sys
import tempfile

LOSS_LIMIT = 1e-6
GRADIENT_LIMIT = 1e-5  # relative L2 per tensor
WORDS = 120


def make_model(folder, tied):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS + 8,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(folder)


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>"] + [f"w{i}" for i in range(WORDS)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def make_pairs(count):
    pick = random.Random(3)

    def text(least, most):
        return "".join(f" w{pick.randrange(WORDS)}" for _ in range(pick.randint(least, most)))

    return [
        {"prompt": text(2, 9).strip(), "chosen": text(1, 12), "rejected": text(1, 12)}
        for _ in range(count)
    ]


def make_trainer(folder, out, alpha):
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    losses = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, alpha]} if alpha > 0 else {}
    config = DPOConfig(
        output_dir=out,
        beta=0.25,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        **losses,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
    trainer = DPOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(make_pairs(4)),
        processing_class=make_tokenizer(),
        peft_config=lora,
    )
    torch.manual_seed(11)
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:
            p.data = p.data.float()
            if "lora_B" in name:
                p.data.normal_(0.0, 0.2)
    return trainer


def write_step(path, batch, alpha):
    """The batch has all chosen texts first; ours has them in pairs."""
    ids, mask, completion = (
        batch[k].tolist() for k in ("input_ids", "attention_mask", "completion_mask")
    )
    count = len(ids) // 2
    lengths, tokens, labels = [], [], []
    for i in range(count):
        for row in (i, i + count):
            kept = [k for k, used in enumerate(mask[row]) if used]
            lengths.append(len(kept))
            tokens += [ids[row][k] for k in kept]
            labels += [ids[row][k] if completion[row][k] else -100 for k in kept]
    with open(path, "wb") as f:
        f.write(struct.pack("<ddqq", 0.25, alpha, len(lengths), len(tokens)))
        f.write(struct.pack(f"<{len(lengths)}i", *lengths))
        f.write(struct.pack(f"<{len(tokens)}i", *tokens))
        f.write(struct.pack(f"<{len(labels)}i", *labels))


def read_result(path):
    import numpy

    with open(path, "rb") as f:
        data = f.read()
    loss = struct.unpack_from("<d", data)[0]
    gradients = {}
    at = 8
    while at < len(data):
        name = data[at : at + 192].split(b"\0")[0].decode()
        rows, cols = struct.unpack_from("<qq", data, at + 192)
        gradients[name] = numpy.frombuffer(data, "<f4", rows * cols, at + 208).reshape(rows, cols)
        at += 208 + 4 * rows * cols
    return loss, gradients


def compare(tied, alpha):
    import torch

    with tempfile.TemporaryDirectory() as folder:
        base = os.path.join(folder, "base")
        make_model(base, tied)
        trainer = make_trainer(base, os.path.join(folder, "out"), alpha)
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        adapter = os.path.join(folder, "adapter")
        trainer.model.save_pretrained(adapter)
        source = os.path.join(folder, "in")
        target = os.path.join(folder, "result")
        write_step(source, batch, alpha)
        subprocess.run(["build/dpo_side", base, adapter, source, target], check=True)
        ours, gradients = read_result(target)
        worst = 0.0
        seen = 0
        for name, p in trainer.model.named_parameters():
            key = name.replace(".default", "")
            if p.grad is None:
                continue
            own = torch.from_numpy(gradients[key].copy())
            worst = max(worst, float((own - p.grad).norm() / p.grad.norm()))
            seen += 1
    off = abs(ours - float(loss)) / max(1.0, abs(float(loss)))
    good = off < LOSS_LIMIT and worst < GRADIENT_LIMIT and seen == len(gradients) and seen > 0
    print(
        f"{'tied' if tied else 'untied'}, sft_alpha {alpha}: loss {ours:.7f} and {float(loss):.7f}, "
        f"{seen} gradients within {worst:.1e}{'' if good else '  FAILED'}"
    )
    return good


def main():
    try:
        import datasets  # noqa: F401
        import peft  # noqa: F401
        import torch  # noqa: F401
        import trl
    except ImportError as e:
        print(f"skipped: {e}")
        return 0
    print(f"TRL {trl.__version__}")
    results = [compare(tied, alpha) for tied, alpha in ((False, 0.0), (True, 0.7))]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
