"""Checks that a quantised checkpoint can be opened here, before its weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specalign.common.errors import UserError, in_one_line
from specalign.common.text import short


def check_quantised(config: Mapping[str, Any], what: str, device: str | None = None) -> None:
    """Raises UserError for a quantisation that is unknown, or whose package or device is missing.

    Args:
        config: config.json.
        what: the target, for the message.
        device: the torch device type it is to run on; None = not checked.
    """
    text_config = config.get("text_config") or {}
    quantisation = config.get("quantization_config") or text_config.get("quantization_config")
    if not quantisation:
        return
    if not isinstance(quantisation, Mapping):
        raise UserError(
            f"{what}: config.json: quantization_config={short(quantisation)} must be an object"
        )
    from transformers.quantizers.auto import AutoHfQuantizer  # slow to import

    method = quantisation.get("quant_method")
    with in_one_line(f"{what}: its weights are quantised (config.json: quant_method={method})"):
        quantizer = AutoHfQuantizer.from_config(dict(quantisation), pre_quantized=True)
        quantizer.validate_environment(device_map=None if device is None else {"": device})
