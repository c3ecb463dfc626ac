"""Reads a model's config files: end-of-text tokens, quantisation, settings that change generated
text."""

from collections.abc import Mapping, Sequence

from specalign.common.errors import UserError, in_one_line
from specalign.common.text import say, short

_CHANGES = (
    "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens",
    "bad_words_ids", "sequence_bias", "min_length", "min_new_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "exponential_decay_length_penalty", "guidance_scale", "num_beams",
)  # fmt: skip
"""Keys of a generation_config.json that change even greedy text, unless they are None, 0 or 1."""


def end_ids(value: object, where: str) -> set[int]:
    """An `eos_token_id` as a set; None is empty. Raises UserError for anything but ids."""
    if value is None:
        return set()
    ids = value if isinstance(value, list | tuple) else [value]
    for i in ids:
        if type(i) is not int or i < 0:
            raise UserError(f"{where}: eos_token_id: {short(i, 40)} is not a token id")
    return set(ids)


def check_ends(config: Mapping[str, object], where: str) -> None:
    """Raises UserError if a config names an end of text that is not a token id."""
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            end_ids(part.get("eos_token_id"), where)


def check_quantised(config: Mapping[str, object], what: str, device: str | None = None) -> None:
    """Raises UserError for a quantisation that is unknown, or whose package or device is missing;
    `what` names the target, `device` the torch device type, None = not checked."""
    text_config = config.get("text_config")
    quantisation = config.get("quantization_config")
    if not quantisation and isinstance(text_config, dict):
        quantisation = text_config.get("quantization_config")
    if not quantisation:
        return
    if not isinstance(quantisation, dict):
        raise UserError(
            f"{what}: config.json: quantization_config={short(quantisation)} must be an object"
        )
    from transformers.quantizers.auto import AutoHfQuantizer  # slow to import

    method = quantisation.get("quant_method")
    with in_one_line(f"{what}: its weights are quantized (config.json: quant_method={method})"):
        quantizer = AutoHfQuantizer.from_config(dict(quantisation), pre_quantized=True)
        quantizer.validate_environment(device_map=None if device is None else {"": device})


def note_settings(
    spec: str, of_tokenizer: int | None, ends: Sequence[int], generation: Mapping[str, object]
) -> None:
    """Report where text continues after the tokenizer's end token, and settings of the generation
    config with which transformers' `generate` would write other text even greedily."""
    note = f"note: {spec}: its generation config"
    if ends and of_tokenizer is not None and of_tokenizer not in ends:
        listed = ", ".join(map(str, ends[:8])) + ", …" * (len(ends) > 8)
        say(f"{note} ends texts at {listed}, not at the tokenizer's {of_tokenizer}", error=True)
    values = {key: generation.get(key) for key in _CHANGES}
    found = [f"{k}={short(v, 40)}" for k, v in values.items() if v not in (None, 0, 1)]
    if found:
        say(f"{note} sets {', '.join(found)}, which is not applied", error=True)
