"""All formats of block drafters by name, and which of them hold a drafter."""

from __future__ import annotations

from contextlib import suppress

from decode.exporting.assistant import TRANSFORMERS
from decode.exporting.custom_generate import CUSTOM_GENERATE
from decode.exporting.dflash import DFLASH
from decode.exporting.dspark import DSPARK
from decode.exporting.folder import Exported
from decode.exporting.gguf import GGUF
from decode.exporting.speculators import SPECULATORS
from specalign.common.errors import UserError
from specalign.models.block import BlockDrafter

FORMATS = {
    form.name: form for form in (DFLASH, SPECULATORS, DSPARK, TRANSFORMERS, GGUF, CUSTOM_GENERATE)
}
NOTHING_FITS = "no engine's format holds this drafter"


def make_export(name: str, drafter: BlockDrafter) -> Exported:
    """What a format holds of a block drafter. Raises UserError, naming the formats that fit, if it
    can't hold it."""
    try:
        if name not in FORMATS:
            raise UserError(
                f"--format {name}: an autoregressive language model, and this is a block drafter "
                "(train with drafter.kind=autoregressive)"
            )
        return FORMATS[name].make(drafter)
    except UserError as error:
        fitting = find_fitting_formats(drafter)
        hint = f"this drafter fits --format {' or '.join(fitting)}" if fitting else NOTHING_FITS
        raise UserError(f"{error}; {hint}") from None


def find_fitting_formats(drafter: BlockDrafter) -> list[str]:
    """The formats that can hold a block drafter."""
    found = []
    for name, form in FORMATS.items():
        with suppress(UserError):
            form.make(drafter)
            found.append(name)
    return found
