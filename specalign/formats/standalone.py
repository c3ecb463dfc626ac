"""Saving and loading standalone diffusion drafters: a folder in the network's own published layout,
plus `drafter.json` with what that layout lacks."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from specalign.common.checksums import check_checksums
from specalign.common.errors import UserError
from specalign.common.files import write_json, write_text
from specalign.common.hub import local_path, model_folder
from specalign.common.schema import read_config, read_object
from specalign.formats.block import ARCHITECTURE, load_drafter
from specalign.formats.kinds import RECORD
from specalign.formats.layouts import is_block
from specalign.formats.masked_lm import load_masked_lm, save_masked_lm
from specalign.formats.published import family_for, load_published, save_published
from specalign.formats.published_config import FAMILIES, OWN, ScheduleSpec
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.ddit import DDiT
from specalign.models.masked_lm import MaskedLM, merge_lora
from specalign.models.standalone import DiffusionConfig, DiffusionDrafter


def architecture(network: DDiT | MaskedLM) -> dict[str, Any]:
    """What tells one network's checkpoints from another's."""
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
    """Write the folder: weights and config.json in the layout of the network's family,
    `drafter.json`, and README.md if a card is given. Low-rank updates are merged."""
    folder.mkdir(parents=True, exist_ok=True)
    network, config = drafter.network, drafter.config
    if isinstance(network, MaskedLM):
        merge_lora(network)
        save_masked_lm(network, folder)
    else:
        known = {
            k: v for k, v in config.schedule.items() if k in {f.name for f in fields(ScheduleSpec)}
        }
        mask_id = None if drafter.mask_id < 0 else drafter.mask_id
        schedule = ScheduleSpec(**known, mask_rates=config.mask_rates)
        family = family_for(network, config.prediction, config.graph, schedule, mask_id)
        save_published(
            network, folder, family, graph=config.graph, schedule=schedule, mask_id=mask_id
        )
    write_json(folder / RECORD, config.to_dict())
    if card is not None:
        write_text(folder / "README.md", card)


def load_standalone(
    spec: str | Path, target: Target, vocab_size: int | None = None
) -> DiffusionDrafter:
    """A saved drafter, or a published checkpoint of any known family, in fp32, for `target`.

    Args:
        vocab_size: of the drafter's own tokenizer, if it is not the target's. The network may have
            more rows.

    Raises:
        UserError: missing or unreadable files, or a vocabulary that is not the target's.
    """
    path = local_path(spec)
    check_checksums(path)
    record = read_object(path / RECORD) if (path / RECORD).is_file() else {}
    network, process = _load_network(str(spec), target)
    values = {
        "block_size": 8,
        "vocab_size": target.vocab_size,
        "target": target.spec,
        "target_sha256": target.hash,
        "network": architecture(network),
        **process,
        **record,
    }
    if vocab_size is not None:
        values["vocab_size"] = vocab_size
    try:
        config = DiffusionConfig(**values)
    except (TypeError, UserError) as error:
        raise UserError(f"{path / RECORD}: {error}") from None
    if vocab_size is None and config.vocab_size != target.vocab_size:
        raise UserError(
            f"drafter {spec}: made for a vocabulary of {config.vocab_size}, target {target.spec!r} "
            "has "
            f"{target.vocab_size}: it needs its own tokenizer (--drafter-tokenizer)"
        )
    try:
        return DiffusionDrafter(network, config, target, padded=vocab_size is not None).to(
            target.device
        )
    except UserError as error:
        raise UserError(f"drafter {spec}: {error}") from None


def _load_network(spec: str, target: Target) -> tuple[DDiT | MaskedLM, dict[str, Any]]:
    """The network, and the fields of `DiffusionConfig` that its layout has."""
    path = local_path(spec)
    if path.is_file() or (path / ".hydra").is_dir() or _is_ddit(spec):
        loaded = load_published(spec)
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
    return values.get("model_type") in (*FAMILIES, OWN) or (
        "model" in values and "tokens" in values
    )


def open_drafter(spec: str | Path, target: Target) -> BlockDrafter | DiffusionDrafter:
    """Any trained drafter by its folder or hub id: a block drafter or a standalone one.

    Raises:
        UserError: neither.
    """
    path = local_path(spec)
    if not path.is_file() and not (path / ".hydra").is_dir():
        values = read_config(model_folder(str(spec), "drafter", ["config.json"]))
        if values.get("architectures") == [ARCHITECTURE] or is_block(values):
            return load_drafter(spec, target)
    return load_standalone(spec, target)
