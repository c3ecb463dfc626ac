"""Joins the parts of a split GGUF model into one file, which is what transformers reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGUFValueType


def join_parts(parts: Sequence[Path], path: Path) -> None:
    """Write the first part's metadata and the tensors of all parts into one file, as they are
    stored."""
    readers = [GGUFReader(part) for part in parts]
    fields = readers[0].fields
    writer = GGUFWriter(path, fields["general.architecture"].contents())
    for field in fields.values():
        if field.name.startswith(("GGUF.", "split.")) or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    for reader in readers:
        for tensor in reader.tensors:
            data = tensor.data
            kinds = (data.dtype, data.nbytes, tensor.tensor_type)
            writer.add_tensor_info(tensor.name, data.shape, *kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for reader in readers:
        for tensor in reader.tensors:
            writer.write_tensor_data(tensor.data)
    writer.close()
