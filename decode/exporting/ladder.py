"""Does an exported folder draft what was trained? Quantity by quantity, the first that differs named with its likely cause.

The training graph is on one side, a reader of the files (`decode.exporting.reader`) on the other, the same text in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from align.common.batch import Anchors, Batch
from align.models.block import BlockDrafter
from align.models.target_features import target_features
from decode.exporting.folder import Exported
from decode.exporting.reader import Reader

TOLERANCE = 2e-3
"""Of a quantity's root mean square, in fp32: other sums of the same numbers stay a hundred times below it."""


@dataclass(frozen=True)
class Rung:
    """One comparison. apart: the largest difference over the root mean square; cause: what it comes of, where they differ."""

    name: str
    reader: str
    apart: float
    same: bool
    cause: str = ""

    @property
    def line(self) -> str:
        """For people."""
        if self.same:
            return f"{self.name}: the same ({self.apart:.1e})"
        size = "" if math.isinf(self.apart) else f" by {self.apart:.2g} of its size"
        return f"{self.name}: DIFFERENT{size}: {self.cause}"


@torch.no_grad()
def climb(drafter: BlockDrafter, made: Exported, reader: Reader, tokens: Sequence[int]) -> list[Rung]:
    """Compare one draft after `tokens`, the last of them the anchor; ends at the first rung that differs. `made`: what was exported."""
    states, wanted = reader.states(list(tokens[:-1])), trained(drafter, tokens)
    rungs, found = list[Rung](), dict[str, Tensor]()
    for name, found[name] in reader.quantities(states, tokens[-1]):
        apart = distance(found[name], wanted[name])
        exact = name in ("block", "mask")
        same = apart == 0 if exact else apart < TOLERANCE
        if name == "draft tokens":
            same = not _worse(found, wanted)
        cause = "" if same else _cause(name, drafter, made, reader, found, wanted)
        rungs.append(Rung(name, reader.name, apart, same, cause))
        if not same:
            return rungs
    return [*rungs, rest(made, reader.said(made.config), reader.stored(), reader.name)]


def rest(made: Exported, config: dict[str, Any], held: dict[str, Tensor], reader: str) -> Rung:
    """All settings and tensors, those too that one draft does not show: an engine may read what a reader does not."""
    cause = _other_setting(made, config) or _other_tensor(made, held)
    return Rung("settings and tensors", reader, float("inf") if cause else 0.0, not cause, cause)


def _other_setting(made: Exported, config: dict[str, Any]) -> str:
    """The first setting that an export of the drafter would have otherwise, in words; empty = none."""
    skipped = {"dtype", "transformers_version"}
    held, wanted = ({k: v for k, v in c.items() if k not in skipped} for c in (config, made.config))
    return _other_value(held, wanted)


def _other_value(held: dict[str, Any], wanted: dict[str, Any], within: str = "") -> str:
    for name in sorted(held.keys() | wanted.keys()):
        place = f"{within}{name}"
        if name not in held:
            return f"config.json: {place} is missing, an export of this drafter has {wanted[name]}"
        if name not in wanted:
            return f"config.json: {place} is {held[name]}, an export of this drafter has no such key"
        a, b = held[name], wanted[name]
        if isinstance(a, dict) and isinstance(b, dict):
            if said := _other_value(a, b, f"{place}."):
                return said
        elif a != b:
            return f"config.json: {place} is {a}, an export of this drafter has {b}"
    return ""


@torch.no_grad()
def trained(drafter: BlockDrafter, tokens: Sequence[int]) -> dict[str, Tensor]:
    """The quantities of `RUNGS` by the graph that is trained, for a block after `tokens`."""
    config, device, count = drafter.config, drafter.norm.weight.device, len(tokens) - 1
    ids = torch.tensor([list(tokens)], device=device)
    places = torch.arange(len(tokens), device=device)[None]
    batch = Batch(ids, places, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    features = target_features(drafter.target, batch, config)
    taps_FD = features.taps_BLFD
    assert taps_FD is not None
    flat = taps_FD[0, :count].flatten(1).float()
    positions = torch.arange(count + config.rows, device=device)[None]
    cos, sin = drafter.rotary_tables(flat.new_zeros(1, 1, config.hidden_size), positions)
    block = drafter.masked(ids.new_zeros(config.rows).index_fill(0, ids.new_zeros(1), tokens[-1]))
    anchors = Anchors(
        torch.tensor([[count]], device=device),
        torch.ones(1, 1, config.block_size, dtype=torch.bool, device=device),
    )
    hidden = drafter(batch, features, anchors)[0, 0]
    width = config.head_dim
    return {
        "tapped features": flat,
        "fused context": drafter.hidden_norm(drafter.fc(flat)),
        "rotary tables": torch.cat((cos[0, :, :width], sin[0, :, :width]), dim=-1),
        "block": torch.cat((block, block.new_tensor([int(config.fill_in)]))).cpu(),
        "mask": torch.ones(config.rows, count + config.rows, dtype=torch.bool),
        "hidden states": hidden,
        **_drafted(drafter, hidden, tokens[-1]),
    }


def _drafted(drafter: BlockDrafter, hidden: Tensor, anchor: int) -> dict[str, Tensor]:
    """Logits of the rows, each after the draft before it, and the greedy draft tokens."""
    previous, rows, tokens = torch.tensor(anchor, device=hidden.device), list[Tensor](), list[int]()
    for k in range(len(hidden)):
        logits = drafter.head_weight_VdD.float() @ hidden[k].float()
        if drafter.markov is not None:
            logits = (
                logits
                + drafter.markov(hidden[k], previous, drafter.target.embed).float()
                @ drafter.markov.basis.float()
            )
        best = logits.argmax()
        previous = best if drafter.draft_vocab is None else drafter.draft_vocab[best]
        rows.append(logits)
        tokens.append(int(previous))
    return {"draft logits": torch.stack(rows), "draft tokens": torch.tensor(tokens)}


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the root mean square of what is wanted; infinite where shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    found, wanted = found.double().cpu(), wanted.double().cpu()
    size = float(wanted.pow(2).mean().sqrt()) or 1.0
    return float((found - wanted).abs().max()) / size


def _worse(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Whether draft tokens differ otherwise than where two logits are as good as equal."""
    for k, (a, b) in enumerate(
        zip(found["draft tokens"].tolist(), wanted["draft tokens"].tolist(), strict=True)
    ):
        if a != b:
            best = wanted["draft logits"][k].topk(2).values
            return float(best[0] - best[1]) > 1e-3 * float(wanted["draft logits"][k].std())
    return False


# ---- causes ----


def _cause(
    name: str,
    drafter: BlockDrafter,
    made: Exported,
    reader: Reader,
    found: dict[str, Tensor],
    wanted: dict[str, Tensor],
) -> str:
    """The likely one, in words that name the key."""
    causes: dict[str, Callable[[], str]] = {
        "tapped features": lambda: _layers_cause(drafter, reader),
        "fused context": lambda: _tensor_cause(made, reader, ("fc", "hidden_norm")),
        "rotary tables": lambda: _rotary_cause(found["rotary tables"], wanted["rotary tables"], drafter),
        "block": lambda: _block_cause(found["block"].tolist(), wanted["block"].tolist()),
        "mask": lambda: (
            "rows of a block do not see the rows after them; the causal flag (is_causal, dflash_config.causal, "
            "sliding_window_non_causal) must say that they do"
        ),
        "hidden states": lambda: _tensor_cause(made, reader, ("layers", "norm")),
        "draft logits": lambda: _tensor_cause(made, reader, ("lm_head", "markov_head")),
        "draft tokens": lambda: (
            "the logits are the same and the tokens are not: d2t must hold token − row for each row of lm_head.weight"
        ),
    }
    return causes[name]()


def _layers_cause(drafter: BlockDrafter, reader: Reader) -> str:
    ours, theirs = list(drafter.config.target_layer_ids), reader.layers
    if ours == theirs:
        return "the same layers are read, and the target gives other states: another target, dtype or prompt"
    shift = {b - a for a, b in zip(ours, theirs, strict=False)}
    key = "aux_hidden_state_layer_ids" if "speculators_model_type" in reader.config else "target_layer_ids"
    why = f"{key} are off by {shift.pop()}" if len(shift) == 1 and len(ours) == len(theirs) else key
    return f"{why}: layers {theirs} are read, {ours} were trained (layer i writes transformers' hidden_states[i + 1])"


def _rotary_cause(found: Tensor, wanted: Tensor, drafter: BlockDrafter) -> str:
    if found.shape != wanted.shape:
        return f"head_dim: tables of width {found.shape[-1] // 2}, {wanted.shape[-1] // 2} were trained"
    theirs, trained = _turns(found), _turns(wanted)
    if (still := int((theirs == 0).sum())) > int((trained == 0).sum()):
        return f"partial_rotary_factor: {still} of {len(trained)} pairs are not turned, all were trained"
    ratio = theirs / trained
    bases = [
        float(turns[1]) ** -len(turns) for turns in (theirs, trained)
    ]  # turns of pair j: base^(−j / pairs)
    other_base = (bases[0] / bases[1]) ** -(torch.arange(len(ratio)) / len(ratio))
    if torch.allclose(ratio, other_base.to(ratio), rtol=1e-2):
        return f"rope_theta: {bases[0]:.4g} is read, {bases[1]:.4g} was trained"
    return (
        f"rope_parameters (rope_type, factor, …): the fastest pair turns {float(ratio[0]):.3g} and the slowest {float(ratio[-1]):.3g} times "
        f"as far as trained; rope_theta {drafter.config.rope_theta:g} with the target's own scaling was trained"
    )


def _turns(tables: Tensor) -> Tensor:
    """How far each pair turns from one position to the next, in radians; 0 = not at all. tables (L, 4 × pairs): cosines, sines, each twice."""
    pairs = tables.shape[-1] // 4
    return torch.atan2(tables[1, 2 * pairs : 3 * pairs], tables[1, :pairs]).double()


def _block_cause(found: list[int], wanted: list[int]) -> str:
    if len(found) != len(wanted) or found[-1] != wanted[-1]:
        return (
            f"block layout: {len(found) - 1} rows are read and row {found[-1]} drafts first, {len(wanted) - 1} and {wanted[-1]} were "
            "trained; block_size and sample_from_anchor say it (fill_in: K + 1 rows, false)"
        )
    return f"mask_token_id: token {found[1]} stands for a draft, {wanted[1]} was trained"


def _tensor_cause(made: Exported, reader: Reader, parts: Sequence[str]) -> str:
    """The first tensor of these parts that is not what the drafter's own would be in this format, else the first setting."""
    same = "all tensors and settings are the same: how the engine runs them, or its dtype"
    return (
        _other_tensor(made, reader.stored(), parts)
        or rest(made, reader.said(made.config), reader.stored(), reader.name).cause
        or same
    )


def _other_tensor(made: Exported, held: dict[str, Tensor], parts: Sequence[str] | None = None) -> str:
    """The first tensor of these parts (default: of all) that an export of the drafter would hold otherwise; empty = none."""
    chosen = (made.tensors, held)
    if parts is not None:
        names = (*parts, "output_norm_enc")
        wanted, found = (
            {n: t for n, t in each.items() if n.removeprefix("encoder.").split(".")[0] in names}
            for each in chosen
        )
        return other_tensor(wanted, found)
    return other_tensor(*chosen)


def other_tensor(wanted: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> str:
    """The first tensor that is missing, superfluous or differs, and how; empty = none."""
    for name in sorted(wanted.keys() | held.keys()):
        if name not in held or name not in wanted:
            return f"tensor {name} is {'missing' if name not in held else 'not of this drafter'}"
        apart = distance(held[name], wanted[name].to(held[name].dtype))
        if held[name].is_floating_point() != wanted[name].is_floating_point() or not apart <= 1e-6:
            return f"tensor {name} differs by {apart:.2g} of its size"
    return ""


def replay(reader: Reader, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """How many of a reader's drafts are accepted in each call on the way to the target's greedy `output`.

    The target's states over prompt and output come from one forward, so each call costs one draft.
    """
    text = [*prompt, *output]
    states, accepted, at = reader.states(text), list[int](), len(prompt)
    while at < len(text) - 1:
        drafts = reader.drafts(tuple(h[:at] for h in states), text[at])[: len(text) - at - 2]
        right = 0
        while right < len(drafts) and drafts[right] == text[at + 1 + right]:
            right += 1
        accepted.append(right)
        at += right + 1
    return accepted
