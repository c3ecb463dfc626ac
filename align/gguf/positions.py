"""What a GGUF file says of rotary positions and transformers' reader passes over: base, scale and width of what is turned.

The reader knows a few keys of each architecture and leaves the others out without a word: Gemma 3's scale (8 from 4B on), StarCoder 2's base,
Phi-4-mini's partial width. The model would run, with other positions. The meanings are llama.cpp's (`rope.*` of its GGUF keys).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

from align.common.errors import UserError
from align.common.text import short
from align.gguf.header import OWN, TAKE_FOLDER, Header

FREQUENCIES = "rope_freqs.weight"
"""Factors of the frequencies, as Llama 3.1 has them."""
_SCALES = ("rope.scaling.factor", "rope.scale_linear")
_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight", FREQUENCIES)


def check_positions(path: Path, header: Header) -> None:
    """Raises UserError for positions that can't be taken over, from the header alone."""
    name = header.architecture
    for key in _SCALES:
        value = header.get(key)
        if value is not None and not (type(value) in (int, float) and 0 <= value < math.inf):
            _refuse(path, header, key, "must be a number that positions are divided by")
    if scale(header) != 1 and (kind := header.get("rope.scaling.type")) not in (
        None,
        "linear",
    ):
        _refuse(path, header, "rope.scaling.type", f"{short(kind, 40)} positions are not read from this file")
    for tensor in _FACTORS:
        if tensor in header.shapes and not (name in OWN and tensor == FREQUENCIES):
            raise UserError(
                f"{path}: tensor {tensor!r}: factors of rotary positions are not read from GGUF files of {name!r}: {TAKE_FOLDER}"
            )


def take_positions(path: Path, header: Header, config: Any) -> None:
    """Write what the file says into the config that the reader made.

    Raises:
        UserError: a width for which this architecture's config has no key.
    """
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    by_kind = any(isinstance(group, dict) for group in rope.values())
    main = rope.get("full_attention", {}) if by_kind else rope
    if base := header.get("rope.freq_base"):
        main["rope_theta"] = float(base)
    if by_kind and (base := header.get("rope.freq_base_swa")):
        rope.get("sliding_attention", {})["rope_theta"] = float(base)
    if (factor := scale(header)) != 1:
        main |= {"rope_type": "linear", "factor": factor}
    if not by_kind:
        _take_width(path, header, rope)


def _take_width(path: Path, header: Header, rope: dict[str, Any]) -> None:
    turned, heads, width = (
        header.get(n) for n in ("rope.dimension_count", "attention.head_count", "embedding_length")
    )
    size = header.get("attention.key_length") or (width // heads if width and heads else None)
    if not turned or not size:
        return
    if "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = turned / size
    elif turned != size:
        _refuse(path, header, "rope.dimension_count", f"heads are {size} wide, and are turned whole here")


def scale(header: Header) -> float:
    """What positions are divided by; a scale without a type is a linear one, and has another key in files of 2023."""
    found = next((value for key in _SCALES if (value := header.get(key)) is not None), None)
    return 1.0 if header.get("rope.scaling.type") == "none" or not found else float(found)


def _refuse(path: Path, header: Header, name: str, why: str) -> NoReturn:
    value = short(header.get(name), 40)
    raise UserError(f"{path}: {header.architecture}.{name}={value}: {why}: {TAKE_FOLDER}")
