"""Checks that a quantised checkpoint can be opened here, before its weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specalign.common.errors import UserError, in_one_line
from specalign.common.text import short

_KEY = "quantization_config"
_OLD_KEY = "compression_config"
"""Of the first compressed-tensors checkpoints; transformers ignores it and reads integers as
weights."""


def check_quantised(config: Mapping[str, Any], what: str, device: str | None = None) -> None:
    """Raises UserError for a quantisation that is unknown, or whose package or device is missing.

    Args:
        config: config.json.
        what: the target, for the message.
        device: the torch device type it is to run on; None = not checked.
    """
    text_config = config.get("text_config")
    for values in (config, text_config if isinstance(text_config, Mapping) else {}):
        if values.get(_KEY):
            _check(values[_KEY], what, device)
            return
        if values.get(_OLD_KEY):
            raise UserError(
                f"{what}: config.json: transformers does not read {_OLD_KEY}: rename it to {_KEY}"
            )


def _check(quantisation: Any, what: str, device: str | None) -> None:
    if not isinstance(quantisation, Mapping):
        raise UserError(f"{what}: config.json: {_KEY}={short(quantisation)} must be an object")
    from transformers.quantizers.auto import AutoHfQuantizer  # slow to import

    method = quantisation.get("quant_method")
    with in_one_line(f"{what}: its weights are quantised (config.json: quant_method={method})"):
        quantizer = AutoHfQuantizer.from_config(dict(quantisation), pre_quantized=True)
        quantizer.validate_environment(device_map=None if device is None else {"": device})
