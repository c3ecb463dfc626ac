"""Values, texts and files that commands do not expect."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

TEXTS = (
    "", " ", "~", "~nobody_here/x", "-", "--", "null", "true", "0", "-1", "1e300", "-1e300", "nan", "inf", "1e-300",
    "9" * 400, "9" * 5000, str(2**53), str(2**63), str(2**64), "10**9", "a" * 300, "a/" * 3000 + "a", "/proc/nowhere", "/dev/null",
    "/dev/full", ".", "..", "/proc", "pipe", "file", "file/inside", "folder", "nowhere", "no/where", "[/b]", "[red]x[/red]", "$5_vs_$10",
    "<script>alert(1)</script>", "a|b", "\x1b[2J\x1b[31m", "\x00", "\x07\x08", "\x9b2J", "\u202e", "\ud800", "é語👩‍🔬", "{", "}", "[]", "{}",
    "[1,2", "&a", "*a", "!!python/object/apply:os.system ['touch ran']", "%s%n", "{0}", "{task}", "a=b", "a,b,,c", "lookup:gamma=",
    "lookup:gamma=1e9", "block:gamma=99999", "drafter:nodes=-1", "debug", "debug_block", "wheel:", "x.gguf", "x.yaml", "x.jsonl",
)  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**200, 0.5, -0.0, 1e308, 1e-308, float("nan"), float("inf"), "", "x", "1", [], {}, [None],
    [[]], {"": None}, {"a": {"b": []}}, "\x1b[2J", "\x00", "é" * 1000, [1] * 1000, "../../etc/passwd", "[/b]", "$5_vs_$10", "<b>|",
)  # fmt: skip


_GGUF_HEADER = 12_000
"""Bytes: more than the keys and values of the corpus's file."""


def text(r: random.Random) -> str:
    """One of TEXTS, or some characters of any kind."""
    if r.random() < 0.8:
        return r.choice(TEXTS)
    return "".join(
        chr(r.choice((r.randrange(32), r.randrange(32, 127), r.randrange(0x3000))))
        for _ in range(r.randrange(12))
    )


def argument(r: random.Random) -> str:
    """A text that a command line can hold: no NUL, no half surrogate."""
    return text(r).replace("\x00", "").encode("utf-8", "replace").decode()


def changed_json(value: Any, r: random.Random) -> Any:
    """The value with one part of it replaced, removed, added or repeated."""
    if isinstance(value, dict) and value and r.random() < 0.9:
        key = r.choice(list(value))
        match r.randrange(6):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, text(r): r.choice(VALUES)}
            case _:
                return {**value, key: changed_json(value[key], r)}
    if isinstance(value, list) and value and r.random() < 0.7:
        i = r.randrange(len(value))
        match r.randrange(4):
            case 0:
                return value[:i]
            case 1:
                return value + value[i:]
            case _:
                return [*value[:i], changed_json(value[i], r), *value[i + 1 :]]
    return text(r) if isinstance(value, str) and r.random() < 0.5 else r.choice(VALUES)


def changed_bytes(raw: bytes, r: random.Random) -> bytes:
    """The bytes cut, flipped, doubled, blanked, or others."""
    i = r.randrange(len(raw) + 1)
    match r.randrange(7):
        case 0:
            return raw[:i]
        case 1 | 2 if raw:
            flipped = bytearray(raw)
            for _ in range(r.choice((1, 1, 8))):
                flipped[r.randrange(len(raw))] ^= 1 << r.randrange(8)
            return bytes(flipped)
        case 3:
            return raw[:i] + raw
        case 4:
            return raw[:i] + bytes(r.randrange(256) for _ in range(r.randrange(9))) + raw[i:]
        case 5:
            return text(r).encode("utf-8", "surrogatepass")
        case _:
            return b""


def deep(r: random.Random) -> bytes:
    """JSON that is nested without end, or holds a number of more digits than Python reads."""
    depth = r.choice((500, 5_000, 200_000))
    ways = (
        b"[" * depth,
        b'{"a":' * depth,
        b"[" * depth + b"]" * depth,
        b'{"a":' * depth + b"1" + b"}" * depth,
    )
    return r.choice((*ways, b"9" * 5000, b"[" + b"9" * 5000 + b"]", b'{"a":' + b"9" * 4000 + b"}"))


def changed_safetensors(raw: bytes, r: random.Random) -> tuple[bytes, str]:
    """A safetensors file with another header: its length, or an entry's type, shape or place. And what was changed."""
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    if r.random() < 0.15:
        length = r.choice(
            (0, 1, size - 1, size + 1, len(raw), 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
        )
        return length.to_bytes(8, "little") + raw[8:], f"a header of {length} bytes"
    name = r.choice([n for n in header if n != "__metadata__"])
    entry = header[name]
    match r.randrange(8):
        case 0:
            entry["dtype"] = r.choice(("F64", "BF16", "I64", "BOOL", "U8", "F8_E4M3", "F4", "C64", "X", ""))
        case 1:
            entry["shape"] = r.choice(
                ([], [0], [2**40], [2**63], [2**64], [-1], [1] * 70, entry["shape"][::-1], None, ["x"])
            )
        case 2:
            entry["data_offsets"] = r.choice(([0, 0], [0, 2**63], [2**64, 0], [5, 1], [-1, 4], [0], None))
        case 3:
            del header[name]
        case 4:
            header[text(r)] = header.pop(name)
        case 5:
            header["__metadata__"] = r.choice(({}, {"format": "tf"}, {"format": 1}, {"x": text(r)}, None, []))
        case 6:
            written = deep(r)
            return len(written).to_bytes(8, "little") + written + data, "a deep header"
        case _:
            return raw[: 8 + size] + b"\xff" * len(data), "all numbers NaN"
    written = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(written).to_bytes(8, "little") + written + data, f"{name}: {header.get(name)}"[:200]


def changed_gguf(raw: bytes, r: random.Random) -> tuple[bytes, str]:
    """A GGUF file with a number of its header replaced: a count, a type, a length, or a value; or with other bytes there. And what
    was changed."""
    keys = re.findall(rb"(?:general|llama|tokenizer)\.[a-z0-9_.]+", raw[:_GGUF_HEADER])
    if r.random() < 0.2:
        return changed_bytes(raw[:_GGUF_HEADER], r) + raw[_GGUF_HEADER:], "bytes of the header changed"
    key = b"GGUF" if r.random() < 0.15 else r.choice(keys)
    # behind a key: type, value; of arrays: type, the values' type, their number
    at = raw.index(key) + len(key) + r.choice((0, 4, 4, 4, 8, 12))
    size = r.choice((4, 4, 8))
    number = r.choice(
        (0, 1, 2, 9, 255, 1 << 20, 1 << 31, 4_000_000_000, (1 << 32) - 1, 1 << 40, (1 << 64) - 1)
    )
    number %= 1 << 8 * size
    changed = raw[:at] + number.to_bytes(size, "little") + raw[at + size :]
    return changed, f"{key.decode()}: {size} bytes at {at} are {number}"


def damage(path: Path, r: random.Random) -> str:
    """Do something to a file; what it was, in words."""
    if r.random() < 0.08:
        path.unlink()
        return "removed"
    if r.random() < 0.18:
        path.unlink()
        return "made " + put(path, r)
    if path.suffix == ".parquet" and r.random() < 0.6:
        raw, what = changed_parquet(r)
        path.write_bytes(raw)
        return what
    if path.suffix == ".gz" and r.random() < 0.6:
        path.write_bytes(gzip.compress(changed_bytes(gzip.decompress(path.read_bytes()), r)))
        return "changed bytes, packed"
    if path.suffix == ".safetensors" and r.random() < 0.6:
        raw, what = changed_safetensors(path.read_bytes(), r)
        path.write_bytes(raw)
        return what
    if path.suffix == ".json" and r.random() < 0.05:
        path.write_bytes(deep(r))
        return "nested without end"
    if path.suffix in (".json", ".jsonl") and r.random() < 0.75:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        i = r.randrange(len(lines)) if lines else 0
        if lines:
            lines[i] = json.dumps(changed_json(json.loads(lines[i]), r))
        path.write_text("\n".join(lines) + "\n")
        return f"changed line {i + 1}: {lines[i][:200] if lines else ''}"
    path.write_bytes(changed_bytes(path.read_bytes(), r))
    return "changed bytes"


def put(path: Path, r: random.Random) -> str:
    """Something else in the place of a file; what it is, in words."""
    match r.randrange(3):
        case 0:
            path.mkdir()
            return "a folder"
        case 1:
            os.mkfifo(path)
            return "a pipe"
        case _:
            to = (
                "/dev/null",
                "/dev/zero",
                "/dev/full",
                "/nowhere",
                path.name,
                "/proc/self/mem",
                "..",
                "/etc/passwd",
            )
            path.symlink_to(r.choice(to))
            return f"a link to {path.readlink()}"


def changed_parquet(r: random.Random) -> tuple[bytes, str]:
    """A table of other columns or types, and which."""
    types = {
        "text": pyarrow.array(["one two three", None, ""]),
        "a number": pyarrow.array([1, 2, 3]),
        "bytes": pyarrow.array([b"\xff\xfe", b"", b"x"]),
        "no UTF-8": pyarrow.array([b"\xff\xfe", b"a", b"x"]).view(pyarrow.string()),
        "messages": pyarrow.array([[{"role": "user", "content": "1 2"}], [], None]),
        "days beyond the calendar": pyarrow.array([2**31 - 1, -(2**31), 0], pyarrow.date32()),
        "nothing": pyarrow.nulls(3),
        "words": pyarrow.array(["a", "b", "a"]).dictionary_encode(),
        "no rows": pyarrow.array([], pyarrow.string()),
    }
    kind, name = (
        r.choice(list(types)),
        r.choice(("text", "prompt", "messages", text(r).replace("\ud800", "?"))),
    )
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({name: types[kind]}), buffer)
    return buffer.getvalue(), f"a column {name!r} of {kind}"


def copied(source: Path, to: Path) -> Path:
    """A fresh copy of a folder."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source, to)
    return to
