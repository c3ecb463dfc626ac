"""Making, saving and loading standalone diffusion drafters: a folder in the network's own published layout, and beside it
`drafter.json` with what that layout does not say."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from align.common.errors import UserError
from align.common.files import write_atomically
from align.common.hub import local_path, model_folder
from align.models import block_checkpoint as checkpoint
from align.models.block import BlockDrafter
from align.models.block_checkpoint import first_layers, load_drafter, mask_token
from align.models.ddit import DDiT, DDiTConfig
from align.models.masked_checkpoint import adapt, load_masked_lm, save_masked_lm
from align.models.masked_lm import MaskedLM, merge_lora, with_lora
from align.models.published import family_for, load_published, save_published
from align.models.published_config import FAMILIES, OWN, ScheduleSpec
from align.models.standalone import DiffusionConfig, DiffusionDrafter
from align.target.loading import read_config
from align.target.model import Target

if TYPE_CHECKING:
    from align.config.recipe import DrafterConfig

RECORD = "drafter.json"


def make(target: Target, options: DrafterConfig, seed: int = 0) -> DiffusionDrafter:
    """A standalone drafter after the recipe's drafter group: `init` as it was saved or published, else a fresh one.

    Raises:
        UserError: an option that does not fit the target.
    """
    if options.init is not None:
        try:
            drafter = load_standalone(options.init, target, attention_backend=options.attention_backend)
        except UserError as error:
            raise UserError(f"drafter.init: {error}") from None
        if type(drafter.network) is not {"ddit": DDiT, "masked_lm": MaskedLM}[options.kind]:
            raise UserError(f"drafter.init={options.init!r} is not of drafter.kind={options.kind}")
        config = replace(drafter.config, block_size=options.block_size, window=options.window)
        drafter = DiffusionDrafter(drafter.network, config, target)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = _network(target, options)
        config = DiffusionConfig(
            block_size=options.block_size,
            vocab_size=target.vocab_size,
            graph=options.graph,
            schedule={"name": options.schedule},
            # a language model's logits are no log-scores: their sum is far from 1
            prediction="logits" if options.kind == "masked_lm" else options.prediction,
            window=options.window,
            target=target.spec,
            target_sha256=target.hash,
            network=_architecture(network),
        )
        drafter = DiffusionDrafter(network, config, target)
    if options.lora_rank:
        if not isinstance(drafter.network, MaskedLM):
            raise UserError("drafter.lora_rank needs drafter.kind=masked_lm")
        alpha = 2.0 * options.lora_rank if options.lora_alpha is None else options.lora_alpha
        with_lora(drafter.network, options.lora_rank, alpha, options.lora_targets, seed)
    return drafter.to(target.device)


def _network(target: Target, options: DrafterConfig) -> DDiT | MaskedLM:
    if options.kind == "masked_lm":
        layers = first_layers(target, options)
        mask = mask_token(target) if options.mask_token_id is None else options.mask_token_id
        return adapt(
            target, layers, mask, attention=options.attention, share_embedding=options.share_embedding
        )
    absorbing = options.graph == "absorbing"
    return DDiT(
        DDiTConfig(
            vocab_size=target.vocab_size + absorbing,
            hidden_size=options.hidden_size,
            n_blocks=options.layers,
            n_heads=options.heads,
            cond_dim=options.cond_dim,
            dropout=options.dropout,
            time_input=options.time_input,
            norm_bias=options.time_input == "none",
            scale_by_sigma=absorbing and options.prediction == "log_score" and options.time_input != "none",
            attention=options.attention,
        ),
        options.attention_backend,
    )


def _architecture(network: DDiT | MaskedLM) -> dict[str, Any]:
    if isinstance(network, MaskedLM):
        c = network.model.config
        return {
            "family": network.family.name,
            "hidden_size": c.hidden_size,
            "layers": c.num_hidden_layers,
            "vocab_size": c.vocab_size,
            "attention": network.family.attention,
        }
    return asdict(network.config)


def save_standalone(drafter: DiffusionDrafter, folder: Path, card: str | None = None) -> None:
    """Write the folder: weights and config.json as the network's family has them, `drafter.json`, and README.md when a card
    is given. Low-rank updates are merged in."""
    folder.mkdir(parents=True, exist_ok=True)
    network, config = drafter.network, drafter.config
    if isinstance(network, MaskedLM):
        merge_lora(network)
        save_masked_lm(network, folder)
    else:
        known = {k: v for k, v in config.schedule.items() if k in {f.name for f in fields(ScheduleSpec)}}
        mask_id = None if drafter.mask_id < 0 else drafter.mask_id
        schedule = ScheduleSpec(**known, mask_rates=config.mask_rates)
        family = family_for(network, config.prediction, config.graph, schedule, mask_id)
        save_published(network, folder, family, graph=config.graph, schedule=schedule, mask_id=mask_id)
    text = json.dumps(config.to_dict(), indent=2) + "\n"
    write_atomically(folder / RECORD, lambda part: part.write_text(text))
    if card is not None:
        write_atomically(folder / "README.md", lambda part: part.write_text(card))


def load_standalone(
    spec: str | Path, target: Target, vocab_size: int | None = None, attention_backend: str = "sdpa"
) -> DiffusionDrafter:
    """A saved drafter, or a published checkpoint of any family that is known, in fp32, beside `target`.

    Args:
        vocab_size: of the drafter's own tokenizer, where it is not the target's. The network may have more rows.
        attention_backend: of a DDiT, a name of `align.target.attention.BACKENDS`.

    Raises:
        UserError: what can't be found or read, or a vocabulary that is not the target's.
    """
    path = local_path(spec)
    record: dict[str, Any] = {}
    if (path / RECORD).is_file():
        record = read_record(path / RECORD)
    network, found = _load_network(str(spec), target, attention_backend)
    base = {
        "block_size": 8,
        "vocab_size": target.vocab_size if vocab_size is None else vocab_size,
        "target": target.spec,
        "target_sha256": target.hash,
        "network": _architecture(network),
        **found,
    }
    try:
        config = DiffusionConfig(**{**base, **record})
        if vocab_size is not None:
            config = replace(config, vocab_size=vocab_size)
    except (TypeError, UserError) as error:
        raise UserError(f"{path / RECORD}: {error}") from None
    if vocab_size is None and config.vocab_size != target.vocab_size:
        raise UserError(
            f"drafter {spec}: made for a vocabulary of {config.vocab_size}, target {target.spec!r} has {target.vocab_size}: "
            "it needs its own tokenizer (--drafter-tokenizer)"
        )
    try:
        return DiffusionDrafter(network, config, target, padded=vocab_size is not None).to(target.device)
    except UserError as error:
        raise UserError(f"drafter {spec}: {error}") from None


def read_record(path: Path) -> dict[str, Any]:
    """The object in a drafter.json. Raises UserError: it holds none."""
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not an object")
    return values


def _load_network(
    spec: str, target: Target, attention_backend: str
) -> tuple[DDiT | MaskedLM, dict[str, Any]]:
    """The network and what its layout says of the process: DDiT families by their tensors' names, others by config.json."""
    path = local_path(spec)
    if path.is_file() or (path / ".hydra").is_dir() or _is_ddit(spec):
        loaded = load_published(spec, attention_backend=attention_backend)
        name = loaded.schedule.name
        options = {"sigma_min": loaded.schedule.sigma_min, "sigma_max": loaded.schedule.sigma_max}
        return loaded.network, {
            "graph": loaded.graph,
            "schedule": {"name": name, **(options if name == "geometric" else {})},
            "prediction": loaded.prediction,
            "mask_id": loaded.mask_id,
            "mask_rates": loaded.schedule.mask_rates,
        }
    return load_masked_lm(spec, target=target), {"prediction": "logits"}


def _is_ddit(spec: str) -> bool:
    values = read_config(model_folder(spec, "drafter", ["config.json"]))
    # SEDD's and RADD's configs have no model_type, RADD's own not even a graph
    return values.get("model_type") in (*FAMILIES, OWN) or ("model" in values and "tokens" in values)


def open_drafter(spec: str | Path, target: Target) -> BlockDrafter | DiffusionDrafter:
    """Any trained drafter by its folder or hub id: a block drafter or a standalone one.

    Raises:
        UserError: neither.
    """
    path = local_path(spec)
    if not path.is_file() and not (path / ".hydra").is_dir():
        values = read_config(model_folder(str(spec), "drafter", ["config.json"]))
        if (
            values.get("architectures") == [checkpoint.ARCHITECTURE]
            or values.get("model_type") == "block_drafter"
        ):
            return load_drafter(spec, target)
    return load_standalone(spec, target)


@torch.no_grad()
def with_weights(drafter: DiffusionDrafter, weights: dict[str, Tensor]) -> DiffusionDrafter:
    """`drafter` with these weights in place of its own."""
    for name, parameter in drafter.named_parameters():
        parameter.copy_(weights[name])
    return drafter
