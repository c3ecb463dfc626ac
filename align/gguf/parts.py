"""GGUF files on disk: telling one by its first bytes, finding the one in a folder, and the parts of a split one."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from align.common.errors import UserError
from align.gguf.header import Header, read_header

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.IGNORECASE)
"""The names that llama.cpp gives to parts."""
_WEIGHTS = re.compile(r".+\.safetensors|.+\.index\.json|pytorch_model.*\.bin")
_SHOWN = 6


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF: by its first four bytes (Ollama's blobs have no ending), or by its ending if it can't be read."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF" or _named_gguf(path)
    except OSError:
        return _named_gguf(path)


def _named_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def gguf_of_folder(folder: Path) -> Path | None:
    """The GGUF file that a folder holds, of a split one the first part; None if it holds none. Projectors for images (`mmproj` in
    their names) do not count.

    Raises:
        UserError: it holds several models.
    """
    files = sorted(p for p in folder.glob("*") if _named_gguf(p) and "mmproj" not in p.name.lower())
    first = {_model_of(p): p for p in reversed(files)}
    if len(first) > 1:
        names = [p.name for p in sorted(first.values())]
        more = f", … ({len(names)} in all)" if len(names) > _SHOWN else ""
        raise UserError(
            f"{folder}: holds several GGUF models: name one of them: {', '.join(names[:_SHOWN])}{more}"
        )
    return next(iter(first.values()), None)


def is_hub_layout(folder: Path) -> bool:
    """Whether a folder is in hub layout: a config.json, with weights beside it or without a GGUF file."""
    return names_hub_layout([path.name for path in folder.glob("*") if path.is_file()])


def names_hub_layout(files: Collection[str]) -> bool:
    """Whether files of these names are a model in hub layout, as `is_hub_layout` tells it of a folder."""
    has_weights = any(map(_WEIGHTS.fullmatch, files))
    has_gguf = any(name.lower().endswith(".gguf") and "mmproj" not in name.lower() for name in files)
    return "config.json" in files and (has_weights or not has_gguf)


def _model_of(path: Path) -> str:
    """The name that the parts of one model share. A file that is named as a part and is whole is a model by itself."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return path.name
    with suppress(UserError):  # loading says what is wrong with it
        if read_header(path).parts == 1:
            return path.name
    return match["stem"]


def part_paths(path: Path) -> list[Path]:
    """The files of the model of which `path` is any part, in order; [path] for a whole model.

    Raises:
        UserError: a part is missing, or `path` is not a readable GGUF file.
    """
    match = _PART.fullmatch(path.name)
    if match is None or read_header(path).parts == 1:
        return [path]
    count = int(match["count"])
    numbers = range(1, count + 1)
    paths = [path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}{match['ending']}") for n in numbers]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{path}: a GGUF file split into {count} parts: {missing[0]} is missing{more}")
    return paths


def whole_header(paths: Sequence[Path]) -> Header:
    """The header of a model: metadata of the first part, tensors of all. `places` is empty for several parts, whose tensors lie in several
    files.

    Raises:
        UserError: the parts do not belong together.
    """
    headers = [read_header(path) for path in paths]
    first = headers[0]
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        if header.parts != len(paths):
            raise UserError(
                f"{path}: one of {header.parts} parts of a split GGUF file: all have to be in its folder, under the names that "
                f"llama-gguf-split gives them (NAME-00001-of-{header.parts:05d}.gguf)"
            )
        if header.values.get("split.no", 0) != number:
            raise UserError(f"{path}: is part {header.values.get('split.no', 0) + 1}, not {number + 1}")
    if len(headers) == 1:
        return first
    shapes: dict[str, tuple[int, ...]] = {}
    types: dict[int, int] = {}
    for header in headers:
        shapes |= header.shapes
        for kind, count in header.types.items():
            types[kind] = types.get(kind, 0) + count
    expected = first.values.get("split.tensors.count", len(shapes))
    if expected != len(shapes):
        raise UserError(f"{paths[0]}: its parts hold {len(shapes)} tensors, not {expected}")
    return first._replace(shapes=shapes, types=types, places={})


def join_parts(paths: Sequence[Path], whole: Path) -> None:
    """Write the parts of a split file as one file."""
    import gguf

    readers = [gguf.GGUFReader(str(path)) for path in paths]
    fields: dict[str, Any] = dict(readers[0].fields)
    architecture = fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(whole), architecture, endianess=readers[0].endianess)
    for name, field in fields.items():
        if not name.startswith(("GGUF.", "split.")) and name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for reader in readers:
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, tensor.data.shape, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
