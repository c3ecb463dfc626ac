"""config.json and .hydra/config.yaml of the published DDiTs: network, graph, schedule and mask."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from specalign.common.errors import UserError, nearest
from specalign.common.schema import finite
from specalign.models.ddit_layers import DDiTConfig

FAMILIES = ("sedd", "mdlm", "radd", "bd3lm")
OWN = "ddit"
"""The family of networks that no published layout holds."""
SCHEDULES = ("loglinear", "geometric", "cosine")
CLIPPED = ("sampling_eps_min", "sampling_eps_max")


@dataclass(frozen=True)
class ScheduleSpec:
    """A checkpoint's noise schedule: loglinear or cosine (ε = 1e-3), or geometric between two σ.

    `mask_rates`: the masking probabilities that BD3-LM's clipped schedule draws from; None = all of
    0..1.
    """

    name: str = "loglinear"
    sigma_min: float = 1e-4
    sigma_max: float = 20.0
    mask_rates: tuple[float, float] | None = None


@dataclass
class NetworkPlan:
    """What a config says."""

    config: DDiTConfig
    schedule: ScheduleSpec
    mask_id: int


@dataclass(frozen=True)
class _Values:
    """A config's values; errors name the file and the dotted key."""

    values: dict[str, Any]
    where: str

    def get(self, key: str) -> Any:
        found: Any = self.values
        for part in key.split("."):
            known = found if isinstance(found, dict) else {}
            if part not in known:
                raise UserError(f"{self.where}: missing key {key!r}{nearest(part, known)}")
            found = known[part]
        return found

    def pick(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.get(key)
        if value not in choices:
            raise UserError(
                f"{self.where}: {key}={value!r:.60} is unknown{nearest(value, choices)}"
            )
        return str(value)

    def switch(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: {key} must be true or false, not {value!r:.60}")
        return value

    def check_graph(self, key: str, masks: str) -> None:
        graph = self.get(key)
        if graph != masks:
            why = f"a drafter trained with {graph!r:.30} noise cannot draft; it needs {masks!r}"
            raise UserError(f"{self.where}: {key}: {why}")

    def plan(self, schedule: ScheduleSpec | None = None, **sizes: Any) -> NetworkPlan:
        try:
            config = DDiTConfig(**sizes)
        except UserError as error:  # which knows no file
            raise UserError(f"{self.where}: {error}") from None
        return NetworkPlan(config, schedule or self.schedule(), self._mask_id(config.vocab_size))

    def schedule(self) -> ScheduleSpec:
        name = self.pick("noise.type", SCHEDULES)
        if name != "geometric":
            return ScheduleSpec(name)
        low, high = self.get("noise.sigma_min"), self.get("noise.sigma_max")
        if not (finite(low) and finite(high) and 0 < low < high):
            raise UserError(
                f"{self.where}: noise.sigma_min={low!r:.30} and sigma_max={high!r:.30} must be "
                "numbers, "
                "0 < min < max"
            )
        return ScheduleSpec("geometric", float(low), float(high))

    def _mask_id(self, vocab_size: int) -> int:
        mask_id = self.values.get("mask_token_id", vocab_size - 1)
        if type(mask_id) is not int or not 0 <= mask_id < vocab_size:
            raise UserError(
                f"{self.where}: mask_token_id={mask_id!r:.30} is not an id within "
                f"0..{vocab_size - 1}"
            )
        return mask_id

    def common_sizes(self, section: str, attention: str) -> dict[str, Any]:
        """What all four families call by one name; the key `attention` is ours."""
        attention = self.values.get("attention", attention)
        options = self.values["model"] if section else self.values
        return {
            "n_blocks": self.get(f"{section}n_blocks"),
            "n_heads": self.get(f"{section}n_heads"),
            "cond_dim": self.get(f"{section}cond_dim"),
            "dropout": options.get("dropout", DDiTConfig.dropout),
            "attention": attention,
            "block_size": self.get("block_size") if attention == "block_causal" else 0,
        }


def read_plan(values: dict[str, Any], family: str, where: str, embedding: Tensor) -> NetworkPlan:
    """Read a hub or training config. `embedding` gives V where a training config does not.

    Raises:
        UserError: a key that is missing or does not fit.
    """
    config = _Values(values, where)
    if family == OWN:
        sizes = {f.name: config.get(f.name) for f in fields(DDiTConfig)}
        config.check_graph("graph", "absorbing")
        return config.plan(**sizes)
    if family in ("sedd", "radd"):
        return _score_plan(config, family)
    return _masked_plan(config, family, len(embedding))


def _score_plan(config: _Values, family: str) -> NetworkPlan:
    """SEDD's and RADD's: `tokens` without the mask, sizes under `model`."""
    if family == "sedd":
        config.check_graph("graph.type", "absorb")
    tokens = config.get("tokens")
    if type(tokens) is not int:
        raise UserError(f"{config.where}: tokens must be a whole number, not {tokens!r:.60}")
    return config.plan(
        vocab_size=tokens + 1,
        hidden_size=config.get("model.hidden_size"),
        time_input="sigma" if family == "sedd" else "none",
        norm_bias=family == "radd",
        scale_by_sigma=family == "sedd" and config.switch("model.scale_by_sigma"),
        **config.common_sizes("model.", "full"),
    )


def _masked_plan(config: _Values, family: str, rows: int) -> NetworkPlan:
    """MDLM's and BD3-LM's: flat on the hub; in training `model` and, in BD3-LM's repository,
    `algo`."""
    values, where = config.values, config.where
    training = isinstance(values.get("model"), dict)
    algo = "algo." if isinstance(values.get("algo"), dict) else ""
    options = values["algo"] if algo else values
    if options.get("causal") is True or options.get("causal_attention") is True:
        raise UserError(
            f"{where}: {algo}causal is on: an autoregressive model, not a diffusion drafter"
        )
    scored = False
    if training or "parameterization" in values:
        scored = config.pick(f"{algo}parameterization", ("subs", "sedd")) == "sedd"
    time_input = "sigma" if config.switch(f"{algo}time_conditioning") else "zero"
    attention = "full"
    if family == "bd3lm":
        attention = "full" if options.get("cross_attn") is False else "block_causal"
        time_input = "none" if options.get("adaln") is False else time_input
    data = values.get("data")
    tokenizer = data.get("tokenizer_name_or_path") if isinstance(data, dict) else None
    if tokenizer is not None and "gpt2" not in str(tokenizer) and "mask_token_id" not in values:
        raise UserError(
            f"{where}: tokenizer {str(tokenizer)!r} may have its own mask token: add "
            "mask_token_id: "
            "ID at the top"
        )
    return config.plan(
        None if training else ScheduleSpec(),
        vocab_size=rows if training else config.get("vocab_size"),
        hidden_size=config.get("model.hidden_size" if training else "hidden_dim"),
        time_input=time_input,
        scale_by_sigma=scored,  # MDLM's own model.scale_by_sigma is not used; its score is always scaled
        **config.common_sizes("model." if training else "", attention),
    )


def hub_config(
    config: DDiTConfig, family: str, schedule: ScheduleSpec, mask_id: int | None
) -> dict[str, Any]:
    """config.json as the family's own code reads it, plus keys of ours for what it lacks."""
    c = config
    ours: dict[str, Any] = {}
    if c.attention != ("block_causal" if family == "bd3lm" else "full"):
        ours["attention"] = c.attention
    if c.attention == "block_causal":
        ours["block_size"] = c.block_size
    if mask_id is not None and mask_id != c.vocab_size - 1:
        ours["mask_token_id"] = mask_id
    noise = {
        "type": schedule.name,
        "sigma_min": schedule.sigma_min,
        "sigma_max": schedule.sigma_max,
    }
    if family == OWN:
        return {"model_type": OWN, "graph": "absorbing", "noise": noise, **asdict(c), **ours}
    sizes = {
        "cond_dim": c.cond_dim,
        "n_blocks": c.n_blocks,
        "n_heads": c.n_heads,
        "dropout": c.dropout,
    }
    if family in ("sedd", "radd"):
        own: dict[str, Any] = {"type": "ddit", "scale_by_sigma": c.scale_by_sigma}
        if family == "radd":
            own = {"type": "ddit_wot", "use_checkpoint": False, "dtype": "float32"}
        return {
            "tokens": c.vocab_size - 1,
            "graph": {"type": "absorb"},
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
