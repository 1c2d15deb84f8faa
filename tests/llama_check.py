#!/usr/bin/env python3
"""Compares us with llama.cpp on the same GGUF file: tokens, log-probabilities, an adapter.

usage: python3 tests/llama_check.py --model FILE.gguf [--text FILE] [--tokens 2000]
           [--adapter DIR --gguf FILE] [--base 16|32|nf4] [--strings 500] [--reference FILE]
       python3 tests/llama_check.py --families DIR...

Needs the Python packages numpy and xllamacpp, whose library contains llama.cpp, and
build/tokenize, build/logprobs and build/merge. Prints, and checks against limits: how many of the
hostile strings have llama.cpp's ids; the mean absolute difference of the log-probabilities of the
text's tokens (limit 0.02), without and with an adapter (a folder of ours, and its adapter.gguf).

On a quantised file, llama.cpp also rounds the activations to 8 bits, which alone changes the
log-probabilities by more than that limit. With --adapter, this is shown: `merge` writes the same
weights, with a copy of the adapter that is zero, as F32 and F16 files, which llama.cpp does not
round like that; printed are ours against llama.cpp on those files (these have the limit) and
llama.cpp on the quantised file against itself on the F32 file (stated). The same with the adapter
merged. On the quantised file itself, the limit then is what llama.cpp differs from itself by and
0.02 more. --reference names such a file instead; with --adapter, it has the adapter merged. Exit
status 0: all within their limits. This is not part of `make test`.

--families takes golden folders (model, adapter20). `merge` writes each model and its adapter as
GGUF files, F32, and llama.cpp must give our log-probabilities of random tokens without and with the
adapter. A config that a GGUF file cannot express is changed into one that it can; what is changed
is printed. Families that llama.cpp or `merge` refuse are listed with the reason.
"""
import argparse
import ctypes
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile

import numpy
import xllamacpp

LIMIT = 0.02
LENGTH = 256  # tokens of a sequence
HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.path.join(HERE, "..", os.environ.get("B", "build"))


class Params(ctypes.Structure):
    """Parameters by value; only the first fields, which are stable, are set."""
    _fields_ = [("words", ctypes.c_int32 * 128)]


class Batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)),
                ("embd", ctypes.c_void_p), ("pos", ctypes.POINTER(ctypes.c_int32)),
                ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
                ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
                ("logits", ctypes.POINTER(ctypes.c_int8))]


class Llama:
    def __init__(self, path):
        folder = os.path.dirname(xllamacpp.__file__)
        name = next(f for f in os.listdir(folder) if f.endswith(".so"))
        lib = self.lib = ctypes.CDLL(os.path.join(folder, name))
        self.said = ""
        self.quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            self.hear)
        lib.llama_log_set(self.quiet, None)
        lib.llama_backend_init()
        for function, result, arguments in [
                ("llama_model_default_params", Params, []),
                ("llama_context_default_params", Params, []),
                ("llama_model_load_from_file", ctypes.c_void_p, [ctypes.c_char_p, Params]),
                ("llama_init_from_model", ctypes.c_void_p, [ctypes.c_void_p, Params]),
                ("llama_free", None, [ctypes.c_void_p]),
                ("llama_model_get_vocab", ctypes.c_void_p, [ctypes.c_void_p]),
                ("llama_vocab_n_tokens", ctypes.c_int32, [ctypes.c_void_p]),
                ("llama_batch_init", Batch, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
                ("llama_decode", ctypes.c_int32, [ctypes.c_void_p, Batch]),
                ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float),
                 [ctypes.c_void_p, ctypes.c_int32]),
                ("llama_adapter_lora_init", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
                ("llama_set_adapters_lora", ctypes.c_int32,
                 [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t,
                  ctypes.POINTER(ctypes.c_float)]),
                ("llama_tokenize", ctypes.c_int32,
                 [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32),
                  ctypes.c_int32, ctypes.c_bool, ctypes.c_bool])]:
            getattr(lib, function).restype = result
            getattr(lib, function).argtypes = arguments
        self.model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self.model:
            sys.exit("llama.cpp cannot load %s: %s" % (path, self.said))
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.size = lib.llama_vocab_n_tokens(self.vocab)

    def hear(self, level, text, user):
        """Keeps the first error that llama.cpp reports."""
        text = text.decode("utf-8", "replace").strip()
        if level == 4 and not self.said:
            self.said = text

    def tokenize(self, data):
        out = (ctypes.c_int32 * (len(data) + 16))()
        n = self.lib.llama_tokenize(self.vocab, data, len(data), out, len(out), False, True)
        return list(out[:n])

    def adapter(self, path):
        adapter = self.lib.llama_adapter_lora_init(self.model, path.encode())
        if not adapter:
            sys.exit("llama.cpp cannot load " + path)
        return adapter

    def logprobs(self, ids, adapter=None):
        out = []
        for at in range(0, len(ids), LENGTH):
            out += self.sequence(ids[at:at + LENGTH], adapter)
        return out

    def sequence(self, ids, adapter):
        params = self.lib.llama_context_default_params()
        params.words[0] = params.words[1] = params.words[2] = LENGTH  # context, batch, ubatch
        context = self.lib.llama_init_from_model(self.model, params)
        if adapter:
            one = (ctypes.c_void_p * 1)(adapter)
            if self.lib.llama_set_adapters_lora(context, one, 1, (ctypes.c_float * 1)(1.0)) != 0:
                sys.exit("llama.cpp refuses the adapter")
        batch = self.lib.llama_batch_init(LENGTH, 0, 1)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        batch.n_tokens = len(ids)
        if self.lib.llama_decode(context, batch) != 0:
            sys.exit("llama.cpp cannot decode")
        out = []
        for i in range(len(ids) - 1):
            row = numpy.ctypeslib.as_array(self.lib.llama_get_logits_ith(context, i), (self.size,))
            row = row.astype(numpy.float64)
            most = row.max()
            out.append(float(row[ids[i + 1]] - most - numpy.log(numpy.exp(row - most).sum())))
        self.lib.llama_free(context)
        return out


def our_logprobs(model, ids, base, adapter=None):
    command = [os.path.join(BUILD, "logprobs"), model, "--base", base, "--length", str(LENGTH)]
    command += ["--adapter", adapter] if adapter else []
    run = subprocess.run(command, input=" ".join(map(str, ids)), capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(run.stderr)
    return [float(line) for line in run.stdout.split()]


def our_tokens(model, data):
    run = subprocess.run([os.path.join(BUILD, "tokenize"), model], input=data, capture_output=True)
    if run.returncode != 0:
        sys.exit(run.stderr.decode())
    return json.loads(run.stdout)


def hostile_strings(count):
    """Strings of pieces that tokenizers treat differently; the same ones in every run."""
    pieces = [" ", "  ", "\t", "\n", "\r\n", "\n\n", "a", "Z", "the", "World", "QX", "0", "12",
              "3456", "'s", "'S", "'re", "n't", "'", "!", "?!", "...", "-", "_", "/", "//", "$",
              "<", ">", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "</s>", "#", "(",
              "\u00e4", "\u00c4", "e\u0301", "\u4e2d\u6587", "\u3042", "\uac00", "\u05d0", "\u0633",
              "\u0915\u093f", "\u2163", "\u00b2", "\u0663", "\u00a0", "\u3000", "\u2028", "\u200d",
              "\U0001f600", "\U0001f468\u200d\U0001f469", "\u20ac", "\u2014", "\ufeff", "\x7f",
              "\x01", "http://x.y/z?a=b&c", "foo_bar", "CamelCase", "x=1;", "{\"a\": [1,2]}"]
    random.seed(11)
    return ["".join(random.choice(pieces) for _ in range(random.randrange(1, 12))).encode()
            for _ in range(count)]


def compare(what, ours, theirs):
    if len(ours) != len(theirs):
        sys.exit("%s: %d log-probabilities, llama.cpp has %d" % (what, len(ours), len(theirs)))
    difference = sum(abs(a - b) for a, b in zip(ours, theirs)) / len(ours)
    print("%s: %d tokens, loss %.4f, llama.cpp %.4f, mean absolute difference %.5f"
          % (what, len(ours), -sum(ours) / len(ours), -sum(theirs) / len(theirs), difference),
          flush=True)
    return difference


def zero_adapter(folder, out):
    """A copy of a PEFT adapter that changes nothing: its B matrices are zero."""
    shutil.copytree(folder, out)
    path = os.path.join(out, "adapter_model.safetensors")
    with open(path, "rb") as file:
        data = bytearray(file.read())
    size = struct.unpack("<Q", data[:8])[0]
    for name, tensor in json.loads(data[8:8 + size]).items():
        if "lora_B" in name:
            begin, end = tensor["data_offsets"]
            data[8 + size + begin:8 + size + end] = bytes(end - begin)
    with open(path, "wb") as file:
        file.write(data)


def merged(model, adapter, dtype, out):
    run = subprocess.run([os.path.join(BUILD, "merge"), "--model", model, "--adapter", adapter,
                          "--out", out, "--dtype", dtype], capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(run.stderr)
    return out


def exact(options, ids, ours, tuned, theirs, with_adapter):
    """The same weights in files on which llama.cpp does not round activations to 8 bits. Returns
    whether ours agrees there, and what llama.cpp differs from itself by without and with the
    adapter."""
    good, itself = True, []
    with tempfile.TemporaryDirectory() as folder:
        zero = os.path.join(folder, "zero")
        zero_adapter(options.adapter, zero)
        for what, adapter, us, them in [("base", zero, ours, theirs),
                                        ("adapter", options.adapter, tuned, with_adapter)]:
            for dtype in ["f32", "f16"]:
                out = os.path.join(folder, "%s-%s.gguf" % (what, dtype))
                reference = Llama(merged(options.model, adapter, dtype, out)).logprobs(ids)
                good = compare("%s, %s file" % (what, dtype), us, reference) <= LIMIT and good
                if dtype == "f32":
                    print("  next line: llama.cpp on --model against llama.cpp on that file")
                    itself.append(compare("  llama.cpp itself, " + what, them, reference))
                os.remove(out)
    return good, itself


# What the configs of golden folders have that llama.cpp's form of the family cannot have.
CHANGES = {
    "gemma2": {"query_pre_attn_scalar": 128},
    "gemma3": {"query_pre_attn_scalar": 192, "layer_types": ["sliding_attention"] * 3},
    "exaone4": {"layer_types": ["full_attention"] * 5, "sliding_window": None},
    "olmo3": {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 500000.0}
                                  for kind in ("full_attention", "sliding_attention")},
              "layer_types": ["sliding_attention"] * 3},
    # llama.cpp has no window for these: beyond it, it computes something else
    "mistral": {"sliding_window": None}, "phi3": {"sliding_window": None},
    # every layer has experts: the one that has none gets those of the layer before it
    "qwen3moe": {"mlp_only_layers": []}}


def fill_experts(path, layer):
    """Gives a layer without experts those of the layer before it, in a model or an adapter."""
    with open(path, "rb") as file:
        data = file.read()
    size = struct.unpack("<Q", data[:8])[0]
    tensors = json.loads(data[8:8 + size])
    body = data[8 + size:]
    old, new = ".layers.%d.mlp." % (layer - 1), ".layers.%d.mlp." % layer
    tensors = {name: tensor for name, tensor in tensors.items() if new not in name}
    for name in [name for name in tensors if old in name]:
        begin, end = tensors[name]["data_offsets"]
        tensors[name.replace(old, new)] = {**tensors[name],
                                           "data_offsets": [len(body), len(body) + end - begin]}
        body += body[begin:end]
    out, at = b"", 0
    for name in [name for name in tensors if name != "__metadata__"]:
        begin, end = tensors[name]["data_offsets"]
        tensors[name]["data_offsets"] = [at, at + end - begin]
        out, at = out + body[begin:end], at + end - begin
    head = json.dumps(tensors).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + out)


def family(folder, work):
    """One golden folder: a line that says how it went, and whether that is good."""
    name = os.path.basename(os.path.normpath(folder))
    model, adapter = os.path.join(work, "model"), os.path.join(folder, "adapter20")
    shutil.copytree(os.path.join(folder, "model"), model)
    changes = CHANGES.get(name, {})
    with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    with open(os.path.join(model, "config.json"), "w", encoding="utf-8") as file:
        json.dump({**config, **changes}, file)
    if name == "qwen3moe":
        adapter = shutil.copytree(adapter, os.path.join(work, "adapter"))
        fill_experts(os.path.join(model, "model.safetensors"), 1)
        fill_experts(os.path.join(adapter, "adapter_model.safetensors"), 1)
    zero, base, lora = [os.path.join(work, n) for n in ("zero", "base.gguf", "lora.gguf")]
    zero_adapter(adapter, zero)
    merged(model, zero, "f32", base)
    run = subprocess.run([os.path.join(BUILD, "merge"), "--model", model, "--adapter", adapter,
                          "--gguf", lora], capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(run.stderr)
    # llama.cpp takes at least 256 positions, and so the factors for long texts: so must we
    global LENGTH
    LENGTH = 96 if name == "phi3" else 48
    llama = Llama(base)
    chance = random.Random(7)
    ids = [chance.randrange(llama.size) for _ in range(4 * LENGTH)]
    print("%s%s:" % (name, " (changed: %s)" % ", ".join(changes) if changes else ""))
    plain = llama.logprobs(ids)
    good = compare("  base", our_logprobs(model, ids, "32"), plain) <= LIMIT
    tuned = llama.logprobs(ids, llama.adapter(lora))
    good = compare("  adapter", our_logprobs(model, ids, "32", adapter), tuned) <= LIMIT and good
    changed = sum(abs(a - b) for a, b in zip(plain, tuned)) / len(plain)
    print("  the adapter changes %.5f: %s" % (changed, "agrees" if good else "FAILED"), flush=True)
    return good


def families(folders):
    """Each in a process of its own: llama.cpp may end it."""
    failed = 0
    for folder in folders:
        child = os.fork()
        if child == 0:
            status = 1
            with tempfile.TemporaryDirectory() as work:
                try:
                    status = 0 if family(folder, work) else 1
                except SystemExit as reason:
                    print("%s: not compared: %s" % (os.path.basename(os.path.normpath(folder)),
                                                    str(reason).strip().replace(work, "")), flush=True)
                    status = 2
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        failed += status not in (0, 2)
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", nargs="+")
    parser.add_argument("--model")
    parser.add_argument("--text", default=os.path.join(HERE, "..", "README.md"))
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--strings", type=int, default=500)
    parser.add_argument("--base", default="16")
    parser.add_argument("--adapter")
    parser.add_argument("--gguf")
    parser.add_argument("--reference")
    options = parser.parse_args()
    if options.families:
        return families(options.families)
    if not options.model:
        parser.error("--model or --families is needed")
    llama = Llama(options.model)
    good = True
    if options.strings:
        same = 0
        for text in hostile_strings(options.strings):
            ours, theirs = our_tokens(options.model, text), llama.tokenize(text)
            same += ours == theirs
            if ours != theirs:
                print("differs: %r\n  ours %s\n  llama.cpp %s" % (text.decode(), ours, theirs))
        print("tokens: %d of %d strings have the ids of llama.cpp" % (same, options.strings))
        good = good and same == options.strings
    if options.tokens:
        with open(options.text, "rb") as file:
            ids = llama.tokenize(file.read())[:options.tokens]
        if options.reference and options.adapter:
            ours = our_logprobs(options.model, ids, options.base, options.adapter)
            theirs = Llama(options.reference).logprobs(ids)
            return 0 if compare("adapter, merged", ours, theirs) <= LIMIT else 1
        theirs = (Llama(options.reference) if options.reference else llama).logprobs(ids)
        ours = our_logprobs(options.model, ids, options.base)
        limits = [LIMIT, LIMIT]
        if options.adapter:
            tuned = our_logprobs(options.model, ids, options.base, options.adapter)
            with_adapter = llama.logprobs(ids, llama.adapter(options.gguf))
            agrees, itself = exact(options, ids, ours, tuned, theirs, with_adapter)
            good = good and agrees
            limits = [LIMIT + value for value in itself]
        good = compare("base", ours, theirs) <= limits[0] and good
        compare("NF4 (stated, no limit)", our_logprobs(options.model, ids, "nf4"), theirs)
        if options.adapter:
            good = compare("adapter", tuned, with_adapter) <= limits[1] and good
    print("all within their limits" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
