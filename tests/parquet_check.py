#!/usr/bin/env python3
"""Compares our Parquet reader with pyarrow on random files.

    make build/parquet_rows
    python3 tests/parquet_check.py [--seed N] [--count N] [--keep FOLDER]

Needs pyarrow. Every file has a random schema (strings, numbers, lists, structs, nested, nullable or
not) and is written with random codecs, encodings, page versions and sizes, row groups, checksums and
list layouts; build/parquet_rows must print exactly the rows that were written (pyarrow 26 itself
reads some of its files with rows missing: lists, one row per row group).

Damaged copies of every file must give a message or rows, and never crash. Rows that we read from one
are those of the undamaged file (the damage is in a part that no value depends on, such as statistics)
or those that pyarrow reads from it; everything else is a difference, unless pyarrow cannot read the
undamaged file either.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq

WORDS = ["", "a", "the", "user", "assistant", "caf\u00e9", "\u6771\u4eac", "\U0001f600", "quote\"",
         "back\\slash", "line\nbreak", "tab\t", "nul\0byte", "\x7f", "long " * 40]
INTS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(),
        pa.uint64()]


def random_type(rng, depth):
    """A type, and whether its values may be null is decided where it is used."""
    kinds = ["string"] * 5 + ["int"] * 3 + ["float", "bool", "large_string", "null", "dictionary"]
    if depth < 4:
        kinds += ["list"] * 3 + ["struct"] * 3 + ["large_list", "fixed_list", "messages"]
    kind = rng.choice(kinds)
    if kind == "string":
        return pa.string()
    if kind == "large_string":
        return pa.large_string()
    if kind == "dictionary":
        return pa.dictionary(pa.int32(), pa.string())
    if kind == "int":
        return rng.choice(INTS)
    if kind == "float":
        return rng.choice([pa.float16(), pa.float32(), pa.float64()])
    if kind == "bool":
        return pa.bool_()
    if kind == "null":
        return pa.null()
    if kind == "messages":
        return pa.list_(pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())]))
    if kind == "struct":
        count = rng.randint(1, 4)
        return pa.struct([random_field(rng, f"f{i}", depth + 1) for i in range(count)])
    item = random_field(rng, "element", depth + 1)
    if kind == "large_list":
        return pa.large_list(item)
    if kind == "fixed_list":
        return pa.list_(item, rng.randint(1, 3))
    return pa.list_(item)


def random_field(rng, name, depth):
    kind = random_type(rng, depth)
    nullable = rng.random() < 0.7 or pa.types.is_null(kind)
    return pa.field(name, kind, nullable=nullable)


def random_string(rng, shared):
    text = rng.choice(shared) if rng.random() < 0.5 else ""
    return text + " ".join(rng.choice(WORDS) for _ in range(rng.choice([0, 1, 2, 5, 20])))


def random_value(rng, field, nulls, shared):
    kind = field.type
    if pa.types.is_null(kind) or (field.nullable and rng.random() < nulls):
        return None
    if pa.types.is_dictionary(kind):
        return rng.choice(shared)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return random_string(rng, shared)
    if pa.types.is_boolean(kind):
        return rng.random() < 0.5
    if pa.types.is_integer(kind):
        bits = kind.bit_width
        low = -(1 << (bits - 1)) if pa.types.is_signed_integer(kind) else 0
        high = low + (1 << bits) - 1
        return rng.choice([low, high, 0, rng.randint(low, high),
                           min(high, max(low, rng.randint(-100, 100)))])
    if pa.types.is_floating(kind):
        import struct
        value = rng.choice([0.0, -0.0, 1.0, 0.1, -2.5, rng.gauss(0, 1), rng.uniform(-6e4, 6e4)])
        code = {16: "<e", 32: "<f", 64: "<d"}[kind.bit_width]
        value = struct.unpack(code, struct.pack(code, value))[0]
        if kind.bit_width == 16:
            import numpy
            return numpy.float16(value)
        return value
    if pa.types.is_struct(kind):
        return {f.name: random_value(rng, f, nulls, shared) for f in kind}
    if pa.types.is_fixed_size_list(kind):
        return [random_value(rng, kind.value_field, nulls, shared) for _ in range(kind.list_size)]
    count = rng.choice([0, 0, 1, 2, 3, 9])
    return [random_value(rng, kind.value_field, nulls, shared) for _ in range(count)]


def leaf_paths(schema, table, folder):
    """The names of the columns as pyarrow's writer wants them, and their physical types."""
    path = os.path.join(folder, "shape.parquet")
    pq.write_table(table.slice(0, 0), path)
    parquet = pq.ParquetFile(path).schema
    return [(parquet.column(i).path, parquet.column(i).physical_type) for i in range(len(parquet))]


def random_encodings(rng, leaves):
    choices = {
        "INT32": ["PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"],
        "INT64": ["PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"],
        "FLOAT": ["PLAIN", "BYTE_STREAM_SPLIT"],
        "DOUBLE": ["PLAIN", "BYTE_STREAM_SPLIT"],
        "BYTE_ARRAY": ["PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"],
        "FIXED_LEN_BYTE_ARRAY": ["PLAIN", "DELTA_BYTE_ARRAY", "BYTE_STREAM_SPLIT"],
        "BOOLEAN": ["PLAIN", "RLE"],
    }
    return {path: rng.choice(choices[kind]) for path, kind in leaves}


def write_random(rng, path, folder):
    """Writes a random file and returns how it was written."""
    while True:
        fields = [random_field(rng, f"c{i}", 0) for i in range(rng.randint(1, 6))]
        schema = pa.schema(fields)
        rows = rng.choice([0, 1, 7, 100, 300])
        nulls = rng.choice([0.0, 0.1, 0.5, 1.0])
        shared = [random_string(rng, [""]) for _ in range(rng.choice([1, 3, 50]))]
        data = [{f.name: random_value(rng, f, nulls, shared) for f in fields} for _ in range(rows)]
        try:
            table = pa.Table.from_pylist(data, schema=schema)
            leaves = leaf_paths(schema, table, folder)
            break
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError):
            continue  # a type that pyarrow itself cannot make or write
    codecs = ["NONE", "SNAPPY", "GZIP", "ZSTD"]
    each = rng.random() < 0.3
    options = {
        "compression": {p: rng.choice(codecs) for p, _ in leaves} if each else rng.choice(codecs),
        "row_group_size": rng.choice([1, 10, 64, 1000]),
        "data_page_size": rng.choice([1, 64, 1024, 1 << 20]),
        "write_batch_size": rng.choice([1, 16, 1024]),
        "data_page_version": rng.choice(["1.0", "2.0"]),
        "version": rng.choice(["1.0", "2.4", "2.6"]),
        "write_page_checksum": rng.random() < 0.5,
        "write_page_index": rng.random() < 0.3,
        "store_schema": rng.random() < 0.5,
        "use_compliant_nested_type": rng.random() < 0.5,
        "dictionary_pagesize_limit": rng.choice([16, 1 << 20]),
    }
    if options["version"] == "1.0" and any(k in str(schema) for k in ("uint32", "halffloat")):
        options["version"] = "2.6"  # version 1.0 would store another type
    if rng.random() < 0.5:
        options["use_dictionary"] = True
    else:
        if not options["use_compliant_nested_type"]:
            leaves = [(p.replace(".element", ".item"), k) for p, k in leaves]
        options["use_compliant_nested_type"] = True
        leaves = leaf_paths(schema, table, folder)
        options["use_dictionary"] = False
        options["column_encoding"] = random_encodings(rng, leaves)
    if each and not options["use_compliant_nested_type"]:
        options["compression"] = rng.choice(codecs)
    if options["compression"] == "ZSTD":
        options["compression_level"] = rng.choice([1, 3, 9, 19, -5])
    try:
        pq.write_table(table, path, **options)
        return schema, options, table
    except (pa.ArrowException, IndexError, OSError):
        return None  # pyarrow cannot write it


def write_large(rng, path):
    """Pages of megabytes: many blocks, long matches, text that does and does not compress."""
    texts = []
    words = ["".join(rng.choice("abcdefghij") for _ in range(rng.randint(1, 9)))
             for _ in range(rng.choice([5, 300, 5000]))]
    for _ in range(rng.randint(1, 12)):
        kind = rng.randrange(5)
        size = rng.choice([10, 1000, 60000, 300000])
        if kind == 0:
            texts.append("x" * size)
        elif kind == 1:
            texts.append("".join(chr(rng.randrange(32, 127)) for _ in range(size)))
        elif kind == 2 and texts:
            texts.append(texts[-1][size // 3:] + "changed" + texts[0][:size])
        elif kind == 3:
            texts.append("".join(rng.choice("ab") for _ in range(size)))
        else:
            texts.append(" ".join(rng.choice(words) for _ in range(size // 6)))
    table = pa.table({"text": texts})
    codec = rng.choice(["SNAPPY", "GZIP", "ZSTD", "ZSTD", "ZSTD"])
    level = {"SNAPPY": None, "GZIP": rng.choice([1, 6, 9]),
             "ZSTD": rng.choice([-20, 1, 2, 3, 6, 9, 13, 19, 22])}[codec]
    options = {"compression": codec, "compression_level": level,
               "use_dictionary": rng.random() < 0.3,
               "data_page_version": rng.choice(["1.0", "2.0"]), "data_page_size": 1 << 24}
    pq.write_table(table, path, **options)
    return table.schema, options, table


def plain(value):
    """What pyarrow returns, with numbers as JSON has them."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    return float(value)


def run_rows(path):
    return subprocess.run(["build/parquet_rows", path], capture_output=True, timeout=60)


def damage(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 10])):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2 and len(data) > 20:
            del data[at:at + rng.randint(1, 8)]
        else:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 4)))
    return bytes(data)


def answer(pipe):
    """Reads files with pyarrow in a process of its own, which damaged files may crash."""
    while True:
        path = pipe.recv()
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                rows = file.read(use_threads=False).to_pylist()
            pipe.send([json.dumps(plain(row)) for row in rows])
        except Exception as error:  # whatever it is, pyarrow does not read the file
            pipe.send(f"{type(error).__name__}: {error}")


class Reader:
    """pyarrow in another process."""

    def __init__(self):
        self.process = None

    def read(self, path):
        """The rows as JSON, or a string that says why there are none."""
        if self.process is None or not self.process.is_alive():
            self.pipe, other = multiprocessing.Pipe()
            self.process = multiprocessing.Process(target=answer, args=(other,), daemon=True)
            self.process.start()
            other.close()
        self.pipe.send(path)
        try:
            if self.pipe.poll(20):
                return self.pipe.recv()
            why = "no answer in 20 s"
        except (EOFError, ConnectionResetError):
            why = "pyarrow crashed"
        self.process.kill()
        self.process.join()
        return why


def keep(args, path, name):
    if args.keep:
        os.makedirs(args.keep, exist_ok=True)
        shutil.copy(path, os.path.join(args.keep, f"{args.seed}-{name}.parquet"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--damaged", type=int, default=2, help="damaged copies of each file")
    parser.add_argument("--keep", help="folder for files that differ")
    args = parser.parse_args()
    rows = failed = refused = whole = alike = unjudged = 0
    reader = Reader()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.parquet")
        for number in range(args.count):
            rng = random.Random(f"{args.seed}/{number}")
            made = None
            while made is None:
                large = number % 10 == 9
                made = write_large(rng, path) if large else write_random(rng, path, folder)
            schema, options, table = made
            want = [json.dumps(plain(row)) for row in table.to_pylist()]
            result = run_rows(path)
            got = [json.dumps(json.loads(line)) for line in
                   result.stdout.decode().split("\n")[:-1]]
            rows += len(want)
            if result.returncode != 0 or got != want:
                failed += 1
                print(f"file {number} (seed {args.seed}) differs: {result.stderr.decode().strip()}")
                print(schema, options)
                for i, (a, b) in enumerate(zip(want, got)):
                    if a != b:
                        print(f"row {i + 1}\n  pyarrow {a[:600]}\n  ours    {b[:600]}")
                        break
                keep(args, path, number)
                continue
            readable = reader.read(path) == want
            with open(path, "rb") as file:
                data = file.read()
            for _ in range(args.damaged):
                with open(path, "wb") as file:
                    file.write(damage(rng, data))
                result = run_rows(path)
                refused += result.returncode
                if result.returncode not in (0, 1) or (result.returncode and not result.stderr):
                    failed += 1
                    print(f"file {number}: a damaged copy gave status {result.returncode}")
                if result.returncode != 0:
                    continue
                got = [json.dumps(json.loads(line)) for line in
                       result.stdout.decode().split("\n")[:-1]]
                if got == want:
                    whole += 1
                    continue
                if not readable:
                    unjudged += 1
                    continue
                other = reader.read(path)
                if isinstance(other, str) and ("flatbuffers" in other or "base64" in other):
                    unjudged += 1  # the Arrow schema beside the data is damaged, too
                    continue
                alike += got == other
                if got != other:
                    failed += 1
                    why = other if isinstance(other, str) else "other rows"
                    print(f"file {number}: a damaged copy was accepted; pyarrow: {why[:300]}")
                    keep(args, path, f"{number}-{failed}")
    print(f"{args.count} files, {rows} rows, {failed} differences; of "
          f"{args.count * args.damaged} damaged copies {refused} refused, {whole} read "
          f"as if undamaged, {alike} as by pyarrow, {unjudged} not judged")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
