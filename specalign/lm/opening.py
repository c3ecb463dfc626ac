"""Opening a folder or hub id with transformers: its class, all of its weights, one-line errors."""

import os
from collections.abc import Mapping
from logging import LogRecord, getLogger
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.utils.tqdm import enable_progress_bars
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from specalign.common.errors import UserError
from specalign.common.hub import hub_reachable, is_hub_id, nearby
from specalign.common.schema import read_object
from specalign.common.text import quiet_libraries, say
from specalign.lm.masks import OWN

Opener = type[AutoModelForCausalLM] | type[AutoModelForMultimodalLM]


def empty_model(folder: Path | str, spec: str, options: Mapping[str, object]) -> PreTrainedModel:
    """The model on `meta`, where weights take no memory. Raises what transformers does."""
    config = AutoConfig.from_pretrained(str(folder), **options)
    make = _opener(config, spec).from_config
    with torch.device("meta"):
        return make(config, trust_remote_code=options["trust_remote_code"])


def _opener(config: PreTrainedConfig, spec: str) -> Opener:
    """The class of transformers that opens it: a causal language model, else one with towers for
    images or audio. Raises UserError for a model whose text follows another input."""
    own = getattr(config, "auto_map", None) or {}
    if type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own:
        return AutoModelForCausalLM
    what = f"target {spec!r}: architecture {config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{what} is an encoder-decoder model; only decoder-only models can be targets"
        )
    if type(config) not in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING:
        raise UserError(f"{what} is not a left-to-right language model")
    return AutoModelForMultimodalLM


def load_weights(
    folder: Path | str,
    spec: str,
    options: Mapping[str, object],
    dtype: torch.dtype,
    place: torch.device,
) -> PreTrainedModel:
    """The model with all its weights, on `place`. Raises UserError where some are missing."""
    config = AutoConfig.from_pretrained(str(folder), **options)
    opened: Any = _opener(config, spec).from_pretrained(
        str(folder), dtype=dtype, attn_implementation=OWN, output_loading_info=True,
        ignore_mismatched_sizes=True, use_safetensors=None, **options,
    )  # fmt: skip
    model, found = opened
    lacking = sorted({*found["missing_keys"], *(key[0] for key in found["mismatched_keys"])})
    if lacking:  # transformers would go on with random numbers in their place
        raise UserError(
            f"target {spec!r}: its checkpoint lacks {lacking[0]!r}, or has it in a different "
            f"shape{_count_more(lacking)}"
        )
    if surplus := sorted(found["unexpected_keys"]):
        say(
            f"note: {spec}: ignoring weights in its checkpoint that the network does not have: "
            f"{surplus[0]!r}{_count_more(surplus)}",
            error=True,
        )
    there = model.device.type == place.type and place.index in (None, model.device.index)
    return model if there else model.to(place)  # quantised ones may not be moved


def _count_more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def processors_template(folder: Path | str, revision: str | None) -> str | None:
    """The chat template of a model's image processor."""
    name = "chat_template.json"
    path = folder / name if isinstance(folder, Path) else of_hub(folder, name, revision)
    return read_object(path).get("chat_template") if path and path.is_file() else None


def of_hub(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a hub id; None = unavailable."""
    offline = not hub_reachable()
    try:
        return Path(hf_hub_download(name, file, revision=revision, local_files_only=offline))
    except Exception:  # of many kinds; transformers says what it is
        return None


def quiet_loading() -> None:
    """No progress bar and no table of keys while weights load: errors are one line."""
    quiet_libraries()
    getLogger("transformers.modeling_utils").addFilter(_is_no_table)
    logging.disable_progress_bar()
    if not os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
        enable_progress_bars()  # a download may take minutes


def _is_no_table(record: LogRecord) -> bool:
    return "LOAD REPORT" not in str(record.msg)


def check_asked(what: str, spec: str | Path, error: Exception) -> None:
    """Raises UserError where the error asks for trust_remote_code."""
    if "trust_remote_code" in str(error):
        raise UserError(
            f"{what} {str(spec)!r} needs custom Python code, which is not run by default: review "
            "it, then pass --trust-remote-code (in recipes: "
            "target.trust_remote_code=true)"
        ) from None


_LACKS = {
    "instantiate the backend tokenizer": "it has no tokenizer (tokenizer.json, or tokenizer.model)",
    "no file named model.safetensors": "it has no weights (model.safetensors)",
}
"""What is missing, by transformers' message."""


def cannot_load(what: str, spec: str | Path, error: Exception) -> UserError:
    """The error in one line, for the user."""
    check_asked(what, spec, error)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    is_unknown = is_hub_id(str(spec)) and "not a valid model identifier" in str(error)
    hint = nearby(Path(spec)) if is_unknown else ""
    why = " ".join(line.strip() for line in lines[: 1 + lines[0].rstrip().endswith(":")])
    why = next((ours for theirs, ours in _LACKS.items() if theirs in why), why)
    return UserError(f"{what} {str(spec)!r} can't be loaded{hint}: {why}")
