"""config.json of the published DDiTs (SEDD, MDLM, RADD, BD3-LM): network, graph, schedule, mask."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from specalign.common.errors import UserError, nearest
from specalign.common.schema import JsonObject, finite
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
    mask_id: int | None


@dataclass(frozen=True)
class _Values:
    """A config's values; errors name the file and the dotted key."""

    values: JsonObject
    where: str

    def get(self, key: str) -> Any:
        found: Any = self.values
        for part in key.split("."):
            known = found if isinstance(found, dict) else {}
            if part not in known:
                raise UserError(f"{self.where}: missing key {key!r}{nearest(part, known)}")
            found = known[part]
        return found

    def pick(self, key: str, choices: tuple[Any, ...]) -> Any:
        value = self.get(key)
        if value not in choices or type(value) is not type(choices[0]):
            raise UserError(f"{self.where}: {key}={value!r:.60}: must be one of {choices}")
        return value

    def check_graph(self, key: str, masks: str) -> None:
        graph = self.get(key)
        if graph != masks:
            why = f"a drafter trained with {graph!r:.30} noise cannot draft; it needs {masks!r}"
            raise UserError(f"{self.where}: {key}: {why}")

    def plan(self, schedule: ScheduleSpec, **sizes: Any) -> NetworkPlan:
        try:
            config = DDiTConfig(**sizes)
        except UserError as error:  # which knows no file
            raise UserError(f"{self.where}: {error}") from None
        mask_id = self.values.get("mask_token_id", config.vocab_size - 1)
        if type(mask_id) is not int or not 0 <= mask_id < config.vocab_size:
            raise UserError(
                f"{self.where}: mask_token_id={mask_id!r:.30} is not an id within "
                f"0..{config.vocab_size - 1}"
            )
        return NetworkPlan(config, schedule, mask_id)

    def schedule(self) -> ScheduleSpec:
        name = self.pick("noise.type", SCHEDULES)
        if name != "geometric":
            return ScheduleSpec(name)
        low, high = self.get("noise.sigma_min"), self.get("noise.sigma_max")
        if not (finite(low) and finite(high) and 0 < low < high):
            raise UserError(
                f"{self.where}: noise.sigma_min={low!r:.30} and sigma_max={high!r:.30}: must be "
                "numbers, 0 < min < max"
            )
        return ScheduleSpec("geometric", float(low), float(high))

    def common_sizes(self, section: str, attention: str) -> JsonObject:
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


def read_plan(values: JsonObject, family: str, where: str) -> NetworkPlan:
    """Read a config.json.

    Raises:
        UserError: a key that is missing or does not fit.
    """
    config = _Values(values, where)
    if family == OWN:
        sizes = {f.name: config.get(f.name) for f in fields(DDiTConfig)}
        config.check_graph("graph", "absorbing")
        return config.plan(config.schedule(), **sizes)
    if family in ("sedd", "radd"):
        return _read_sedd(config, family)
    return _read_mdlm(config, family)


def _read_sedd(config: _Values, family: str) -> NetworkPlan:
    """SEDD's and RADD's: `tokens` without the mask, sizes under `model`."""
    if family == "sedd":
        config.check_graph("graph.type", "absorb")
    tokens = config.get("tokens")
    if type(tokens) is not int:
        raise UserError(f"{config.where}: tokens must be a whole number, not {tokens!r:.60}")
    scaled = family == "sedd" and config.pick("model.scale_by_sigma", (True, False))
    return config.plan(
        config.schedule(),
        vocab_size=tokens + 1,
        hidden_size=config.get("model.hidden_size"),
        time_input="sigma" if family == "sedd" else "none",
        norm_bias=family == "radd",
        scale_by_sigma=scaled,
        **config.common_sizes("model.", "full"),
    )


def _read_mdlm(config: _Values, family: str) -> NetworkPlan:
    """MDLM's and BD3-LM's: flat."""
    values = config.values
    if values.get("causal") is True or values.get("causal_attention") is True:
        raise UserError(f"{config.where}: causal is on: an autoregressive model, not a diffusion")
    scored = False
    if "parameterization" in values:
        scored = config.pick("parameterization", ("subs", "sedd")) == "sedd"
    time_input = "sigma" if config.pick("time_conditioning", (True, False)) else "zero"
    attention = "full"
    if family == "bd3lm":
        attention = "full" if values.get("cross_attn") is False else "block_causal"
        time_input = "none" if values.get("adaln") is False else time_input
    return config.plan(
        ScheduleSpec(),
        vocab_size=config.get("vocab_size"),
        hidden_size=config.get("hidden_dim"),
        time_input=time_input,
        scale_by_sigma=scored,
        **config.common_sizes("", attention),
    )


def write_plan(plan: NetworkPlan) -> JsonObject:
    """config.json of our own layout."""
    schedule = plan.schedule
    sigmas = {"sigma_min": schedule.sigma_min, "sigma_max": schedule.sigma_max}
    noise = {"type": schedule.name, **sigmas}
    values = {"model_type": OWN, "graph": "absorbing", "noise": noise, **asdict(plan.config)}
    return values if plan.mask_id is None else {**values, "mask_token_id": plan.mask_id}
