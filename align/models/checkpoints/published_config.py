"""config.json and .hydra/config.yaml of the published DDiTs: what they say of network, graph, schedule and mask, and back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from align.common.errors import UserError, nearest
from align.common.schema import finite
from align.models.ddit_layers import DDiTConfig

FAMILIES = ("sedd", "mdlm", "radd", "bd3lm")
GRAPHS = {"absorb": "absorbing", "uniform": "uniform"}
OWN = "ddit"
"""The family of networks that no published layout holds."""
SCHEDULES = ("loglinear", "geometric", "cosine")
CLIPPED = ("sampling_eps_min", "sampling_eps_max")


@dataclass(frozen=True)
class ScheduleSpec:
    """The noise schedule a checkpoint was trained under: loglinear or cosine (ε = 1e-3), or geometric between two σ.

    `mask_rates`: the masking probabilities that BD3-LM's clipped schedule draws from; None = all of 0..1.
    """

    name: str = "loglinear"
    sigma_min: float = 1e-4
    sigma_max: float = 20.0
    mask_rates: tuple[float, float] | None = None


@dataclass
class Plan:
    """What a config says."""

    config: DDiTConfig
    graph: str
    schedule: ScheduleSpec
    mask_id: int | None


def _get(values: dict[str, Any], key: str, where: str) -> Any:
    found: Any = values
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            raise UserError(
                f"{where}: missing key {key!r}{nearest(part, found if isinstance(found, dict) else ())}"
            )
        found = found[part]
    return found


def _pick(values: dict[str, Any], key: str, where: str, choices: tuple[str, ...]) -> str:
    value = _get(values, key, where)
    if value not in choices:
        raise UserError(f"{where}: {key}={value!r:.60} is unknown{nearest(value, choices)}")
    return str(value)


def _switch(values: dict[str, Any], key: str, where: str) -> bool:
    value = _get(values, key, where)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {key} must be true or false, not {value!r:.60}")
    return value


def read_plan(values: dict[str, Any], family: str, where: str, embedding: Tensor) -> Plan:
    """Read a config of either shape. `embedding` says V where a training config does not."""
    nested = isinstance(values.get("model"), dict)
    if family == OWN:
        return _own_plan(values, where)
    if family in ("sedd", "radd"):
        return _score_plan(values, family, where)
    return _masked_plan(values, family, where, len(embedding) if nested else None)


def _ddit_config(where: str, **values: Any) -> DDiTConfig:
    try:
        return DDiTConfig(**values)
    except UserError as error:  # it knows no file
        raise UserError(f"{where}: {error}") from None


def _own_plan(values: dict[str, Any], where: str) -> Plan:
    """Ours: the fields of `DDiTConfig` under their names."""
    config = _ddit_config(where, **{f.name: _get(values, f.name, where) for f in fields(DDiTConfig)})
    graph = _pick(values, "graph", where, tuple(GRAPHS.values()))
    return Plan(config, graph, _schedule(values, where), _mask_id(values, graph, config, where))


def _score_plan(values: dict[str, Any], family: str, where: str) -> Plan:
    """SEDD's and RADD's: `tokens` without the mask, sizes under `model`."""
    absorbing = family == "radd" or _pick(values, "graph.type", where, tuple(GRAPHS)) == "absorb"
    tokens = _get(values, "tokens", where)
    if not isinstance(tokens, int) or isinstance(tokens, bool):
        raise UserError(f"{where}: tokens must be a whole number, not {tokens!r:.60}")
    scaled = family == "sedd" and _switch(values, "model.scale_by_sigma", where)
    if scaled and not absorbing:
        raise UserError(f"{where}: model.scale_by_sigma=true belongs to the absorbing graph, not to uniform")
    config = _ddit_config(
        where,
        vocab_size=tokens + absorbing,
        hidden_size=_get(values, "model.hidden_size", where),
        cond_dim=_get(values, "model.cond_dim", where),
        time_input="sigma" if family == "sedd" else "none",
        norm_bias=family == "radd",
        scale_by_sigma=scaled,
        **_common(values, "model.", "full", where),
    )
    graph = "absorbing" if absorbing else "uniform"
    return Plan(config, graph, _schedule(values, where), _mask_id(values, graph, config, where))


def _masked_plan(values: dict[str, Any], family: str, where: str, vocab_size: int | None) -> Plan:
    """MDLM's and BD3-LM's: flat on the hub, `model` and, in BD3-LM's repository, `algo` in training."""
    nested = vocab_size is not None
    inner = "model." if nested else ""
    algo = "algo." if isinstance(values.get("algo"), dict) else ""
    options = values["algo"] if algo else values
    if options.get("causal") is True or options.get("causal_attention") is True:
        raise UserError(f"{where}: {algo}causal is on: an autoregressive model, not a diffusion drafter")
    scored = False
    if nested or "parameterization" in values:
        scored = _pick(values, f"{algo}parameterization", where, ("subs", "sedd")) == "sedd"
    time_input = "sigma" if _switch(values, f"{algo}time_conditioning", where) else "zero"
    attention = "full"
    if family == "bd3lm":
        attention = "full" if options.get("cross_attn") is False else "block_causal"
        time_input = "none" if options.get("adaln") is False else time_input
    config = _ddit_config(
        where,
        vocab_size=vocab_size if vocab_size is not None else _get(values, "vocab_size", where),
        hidden_size=_get(values, "model.hidden_size" if nested else "hidden_dim", where),
        cond_dim=_get(values, f"{inner}cond_dim", where),
        time_input=time_input,
        scale_by_sigma=scored,  # MDLM's model.scale_by_sigma is read by nobody; its score is always scaled
        **_common(values, inner, attention, where),
    )
    tokenizer = values["data"].get("tokenizer_name_or_path") if isinstance(values.get("data"), dict) else None
    if tokenizer is not None and "gpt2" not in str(tokenizer) and "mask_token_id" not in values:
        raise UserError(
            f"{where}: tokenizer {str(tokenizer)!r} may have a mask token of its own: add mask_token_id: ID at the top"
        )
    schedule = _schedule(values, where) if nested else ScheduleSpec()
    return Plan(config, "absorbing", schedule, _mask_id(values, "absorbing", config, where))


def _common(values: dict[str, Any], inner: str, attention: str, where: str) -> dict[str, Any]:
    """What all four call by one name, and the attention that a drafter of ours may have instead of the published one."""
    attention = values.get("attention", attention)
    section = values["model"] if inner else values
    return {
        "n_blocks": _get(values, f"{inner}n_blocks", where),
        "n_heads": _get(values, f"{inner}n_heads", where),
        "dropout": section.get("dropout", DDiTConfig.dropout),
        "attention": attention,
        "block_size": _get(values, "block_size", where) if attention == "block_causal" else 0,
    }


def _schedule(values: dict[str, Any], where: str) -> ScheduleSpec:
    if (name := _pick(values, "noise.type", where, SCHEDULES)) != "geometric":
        return ScheduleSpec(name)
    low, high = (_get(values, f"noise.{key}", where) for key in ("sigma_min", "sigma_max"))
    number = all(finite(x) for x in (low, high))
    if not number or not 0 < low < high:
        raise UserError(
            f"{where}: noise.sigma_min={low!r:.30} and sigma_max={high!r:.30} must be numbers, 0 < min < max"
        )
    return ScheduleSpec("geometric", float(low), float(high))


def _mask_id(values: dict[str, Any], graph: str, config: DDiTConfig, where: str) -> int | None:
    if graph == "uniform":
        return None
    mask_id = values.get("mask_token_id", config.vocab_size - 1)
    if not isinstance(mask_id, int) or isinstance(mask_id, bool) or not 0 <= mask_id < config.vocab_size:
        raise UserError(
            f"{where}: mask_token_id={mask_id!r:.30} is not an id within 0..{config.vocab_size - 1}"
        )
    return mask_id


def hub_config(
    config: DDiTConfig, family: str, graph: str, schedule: ScheduleSpec, mask_id: int | None
) -> dict[str, Any]:
    """config.json as the family's own code reads it, and keys of ours where it has none."""
    c = config
    ours: dict[str, Any] = {}
    if c.attention != ("block_causal" if family == "bd3lm" else "full"):
        ours["attention"] = c.attention
    if c.attention == "block_causal":
        ours["block_size"] = c.block_size
    if mask_id is not None and mask_id != c.vocab_size - 1:
        ours["mask_token_id"] = mask_id
    noise = {"type": schedule.name, "sigma_min": schedule.sigma_min, "sigma_max": schedule.sigma_max}
    if family == OWN:
        return {"model_type": OWN, "graph": graph, "noise": noise, **asdict(c), **ours}
    sizes = {"cond_dim": c.cond_dim, "n_blocks": c.n_blocks, "n_heads": c.n_heads, "dropout": c.dropout}
    if family in ("sedd", "radd"):
        absorb = graph == "absorbing"
        own: dict[str, Any] = {"type": "ddit", "scale_by_sigma": c.scale_by_sigma}
        if family == "radd":
            own = {"type": "ddit_wot", "use_checkpoint": False, "dtype": "float32"}
        return {
            "tokens": c.vocab_size - absorb,
            "graph": {"type": "absorb" if absorb else "uniform"},
            "noise": noise,
            "model": {"hidden_size": c.hidden_size, **sizes, **own},
            **ours,
        }
    if c.scale_by_sigma:
        ours["parameterization"] = "sedd"
    if family == "bd3lm":
        ours |= {"cross_attn": c.attention == "block_causal", "adaln": c.time_input != "none"}
        ours["var_min"] = schedule.mask_rates is not None
        ours |= dict(zip(CLIPPED, schedule.mask_rates or (), strict=False))
    return {
        "architectures": [family.upper()],
        "model_type": family,
        "vocab_size": c.vocab_size,
        "hidden_dim": c.hidden_size,
        **sizes,
        "time_conditioning": c.time_input == "sigma",
        "torch_dtype": "float32",
        **ours,
    }
