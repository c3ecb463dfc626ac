"""All formats of block drafters by name, and which of them hold a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from decode.exporting.base import Format
from decode.exporting.custom_generate import make_custom_generate, restore_custom_generate
from decode.exporting.serving import (
    serve_assistant,
    serve_custom_generate,
    serve_dflash,
    serve_dspark,
    serve_gguf,
    serve_speculators,
)
from specalign.common.errors import UserError
from specalign.formats.dflash import make_dflash
from specalign.formats.dspark import make_dspark
from specalign.formats.gguf import make_gguf, read_gguf, restore_gguf
from specalign.formats.dflash import Exported
from specalign.formats.dflash import make_assistant, make_speculators
from specalign.models.block import BlockDrafter

_ALL = (
    Format("dflash", make_dflash, serve_dflash),
    Format("speculators", make_speculators, serve_speculators, library="speculators"),
    Format("dspark", make_dspark, serve_dspark),
    Format("transformers", make_assistant, serve_assistant, library="transformers"),
    Format(
        "gguf",
        make_gguf,
        serve_gguf,
        library="llama.cpp",
        tags=("gguf",),
        read=read_gguf,
        restore=restore_gguf,
    ),
    Format(
        "custom_generate",
        make_custom_generate,
        serve_custom_generate,
        library="transformers",
        tags=("custom_generate",),
        restore=restore_custom_generate,
    ),
)
FORMATS = {form.name: form for form in _ALL}
NOTHING_FITS = "no engine's format holds this drafter"


class UnfitFormat(UserError):
    """A format can't hold a drafter. fitting: the formats that can."""

    def __init__(self, reason: str, fitting: Sequence[str]) -> None:
        hint = f"this drafter fits --format {' or '.join(fitting)}" if fitting else NOTHING_FITS
        super().__init__(f"{reason}; {hint}")
        self.fitting = tuple(fitting)


def make_export(name: str, drafter: BlockDrafter) -> Exported:
    """What a format holds of a block drafter. Raises UnfitFormat if it can't hold it."""
    try:
        if name not in FORMATS:
            raise UserError(
                f"--format {name}: an autoregressive language model, and this is a block drafter "
                "(train with drafter.kind=autoregressive)"
            )
        return FORMATS[name].make(drafter)
    except UserError as error:
        raise UnfitFormat(str(error), find_fitting_formats(drafter)) from None


def find_fitting_formats(drafter: BlockDrafter) -> list[str]:
    """The formats that can hold a block drafter."""
    found = []
    for name, form in FORMATS.items():
        with suppress(UserError):
            form.make(drafter)
            found.append(name)
    return found
