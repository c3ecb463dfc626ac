"""All formats of block drafters by name, and which of them hold a drafter."""

from __future__ import annotations

from collections.abc import Sequence
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
