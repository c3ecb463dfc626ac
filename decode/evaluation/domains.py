"""τ on held-out rows of a drafter's training data (in-domain) next to τ on each suite (held-out)."""

from collections.abc import Mapping
from dataclasses import dataclass

from decode.evaluation.records import DrafterTraining
from decode.evaluation.statistics import Estimate, format_estimate
from specalign.common.schema import JsonObject
from specalign.common.text import plural

HEADER = ("text", "τ [95%]", "measured on", "overlap with the training data")
DEVIATIONS = 1.96  # standard errors on each side of a 95% interval
_KINDS = {0.0: "greedy", 1.0: "sampling"}


@dataclass(frozen=True)
class DomainTau:
    """τ on one kind of text. count: prompts of a suite; positions of training's held-out rows."""

    text: str
    in_domain: bool
    tau: Estimate | None
    count: int
    contamination: str

    def cells(self, titles: Mapping[str, str]) -> list[str]:
        """A row of `HEADER`. `titles`: of the suites."""
        missing = "not recorded" if self.in_domain else "n/a"
        tau = missing if self.tau is None else format_estimate(self.tau, "")
        unit = f"{self.count:,} positions" if self.in_domain else plural(self.count, "prompt")
        title = titles.get(self.text, self.text)
        return [title, tau, unit if self.count else "", self.contamination]


def compare_domains(
    training: DrafterTraining, settings: JsonObject, suites: Mapping[str, Estimate | None]
) -> list[DomainTau]:
    """Training's own estimate, then each suite. `suites`: name → τ of `training.method`."""
    expected = _expected_tau(training, settings)
    count = 0 if expected is None else expected.prompts
    drafts = "" if training.record is None else f", {training.record.draft_tokens} draft tokens"
    own = f"in-domain: training's held-out rows{drafts}"
    rows = [DomainTau(own, True, expected, count, "same source")]
    for name, tau in suites.items():
        prompts = 0 if tau is None else tau.prompts
        rows.append(DomainTau(name, False, tau, prompts, _describe_overlap(training, name)))
    return rows


def _expected_tau(training: DrafterTraining, settings: JsonObject) -> Estimate | None:
    """Of the run's sampling; None where training has not measured it."""
    kind = _KINDS.get(settings["temperature"], "")
    truncated = settings.get("top_p", 1.0) != 1.0 or settings.get("top_k")
    if training.record is None or (kind == "sampling" and truncated):
        return None
    found = training.record.expected_tau.get(kind)
    if found is None:
        return None
    margin = DEVIATIONS * found.standard_error
    return Estimate(found.tau, found.tau - margin, found.tau + margin, found.positions)


def _describe_overlap(training: DrafterTraining, suite: str) -> str:
    overlap, record = training.overlaps.get(suite), training.record
    if overlap is not None:
        return f"{len(overlap.found)} of {plural(overlap.checked, 'prompt')}"
    if record is None:
        return "not checked: the drafter's folder records no training data"
    unchecked = "not checked (--training-data PATH)"
    if suite in record.removed:
        removed = plural(record.removed[suite], "document")
        return f"other text: {removed} removed; generated text: {unchecked}"
    return unchecked
