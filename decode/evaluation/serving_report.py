"""The report of a measurement of servers, from its rounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from decode.evaluation import charts
from decode.evaluation.config import EvalConfig
from decode.evaluation.endpoint import ServedRequest
from decode.evaluation.page import fill_page
from decode.evaluation.statistics import (
    FEWEST,
    Estimate,
    format_estimate,
    format_number,
    paired_ratio,
)
from decode.evaluation.verdict import find_busy
from specalign.common.provenance import machine

PLAIN, DRAFTED = "plain", "drafted"
HEADER = (
    "in flight", "server", "tokens/s", "speed-up [95%]", "TTFT, ms", "TPOT, ms",
    "ITL, ms", "τ", "τ macro", "requests", "mean in flight",
)  # fmt: skip
_PROMPTS = 4  # prompts of a group for each request in flight, where there are enough
_FULL = 0.8  # share of the requests in flight below which a row's speed is that of fewer
_AGREES = 0.1  # relative difference up to which a stream's bursts add up to the server's counters


@dataclass
class ServedRound:
    """A group of prompts, sent once to one server with `concurrency` requests in flight.

    seconds: on the clock. drafts, accepted: of the server's counters; None = it has none.
    part: number of the group. load: of this machine.
    """

    server: str
    concurrency: int
    repeat: int
    seconds: float
    requests: list[ServedRequest] = field(default_factory=list)
    drafts: float | None = None
    accepted: float | None = None
    part: int = 0
    load: float | None = None

    @property
    def key(self) -> tuple[str, int, int, int]:
        return self.server, self.concurrency, self.repeat, self.part


def count_groups(prompts: int, concurrency: int) -> int:
    """Groups to send the prompts in. Fewer requests are in flight while a group's last ones end, so
    it has several prompts for each: more prompts make larger groups."""
    if concurrency == 1:
        return prompts
    return max(1, min(2 * FEWEST, prompts // (_PROMPTS * concurrency)))


def mean_in_flight(rounds: Sequence[ServedRound]) -> float:
    """Requests in flight, averaged over time (Little's law)."""
    return sum(r.seconds for one in rounds for r in one.requests) / sum(r.seconds for r in rounds)


def speed_up(rounds: Sequence[ServedRound], concurrency: int) -> Estimate | None:
    """Plain decoding's time per token over the drafted one's, in pairs of the same prompt. The
    interval is over the groups, whose requests share the state of the machine; it has no bounds
    below `FEWEST` of them."""
    times: dict[str, dict[tuple[int, int, str, str], float]] = {PLAIN: {}, DRAFTED: {}}
    for one in rounds:
        for r in one.requests if one.concurrency == concurrency else ():
            if r.per_token is not None:
                times[one.server][one.part, one.repeat, r.suite, r.prompt] = r.per_token
    sums: dict[str, dict[tuple[str, str], float]] = {PLAIN: {}, DRAFTED: {}}
    for key in sorted(times[PLAIN].keys() & times[DRAFTED].keys()):
        group = ("", str(key[0]))
        for name in times:
            sums[name][group] = sums[name].get(group, 0.0) + times[name][key]
    gain = paired_ratio(sums[PLAIN], sums[DRAFTED])
    return replace(gain, lo=None, hi=None) if gain and gain.prompts < FEWEST else gain


def tau_of(rounds: Sequence[ServedRound]) -> float | None:
    """τ by the server's counters; None = it counts no drafts."""
    drafts = sum(one.drafts or 0.0 for one in rounds)
    return 1 + sum(one.accepted or 0.0 for one in rounds) / drafts if drafts else None


def request_taus(rounds: Sequence[ServedRound]) -> list[float]:
    """τ of each request by its stream: tokens after the first, which the prefill gives, per burst.
    Empty where the bursts are not the server's rounds: their pooled τ is not that of its
    counters."""
    pooled = tau_of(rounds)
    made = [(r.tokens - 1, len(r.gaps)) for one in rounds for r in one.requests if r.gaps]
    if pooled is None or not made:
        return []
    by_bursts = sum(tokens for tokens, _ in made) / sum(bursts for _, bursts in made)
    agrees = abs(by_bursts / pooled - 1) <= _AGREES
    return [tokens / bursts for tokens, bursts in made] if agrees else []


def doubts(rounds: Sequence[ServedRound]) -> list[str]:
    """A line for each speed-up that drafting alone can't give, that has no interval, or that was
    measured on a busy machine or with too few requests in flight."""
    lines = []
    for concurrency in dict.fromkeys(one.concurrency for one in rounds):
        if reasons := _find_busy([one for one in rounds if one.concurrency == concurrency]):
            lines.append(
                f"NOTE: {concurrency} in flight: the machine was not idle ({' and '.join(reasons)}): "
                "do not quote the speed; repeat the measurement on an idle machine."
            )
        tau = tau_of([one for one in rounds if one.key[:2] == (DRAFTED, concurrency)])
        gain = speed_up(rounds, concurrency)
        if gain and gain.lo is None:
            lines.append(
                f"NOTE: {concurrency} in flight: too few prompts for an interval; it needs "
                f"{FEWEST * (concurrency if concurrency == 1 else _PROMPTS * concurrency)}."
            )
        lines += _find_few(rounds, concurrency)
        if tau and gain and (gain.lo or gain.value) > tau:
            lines.append(
                f"NOTE: {concurrency} in flight: a speed-up of {format_estimate(gain)} above τ "
                f"({tau:.2f}) can't come from drafting alone: the machine was busy, or the servers "
                "differ in more than the drafter."
            )
    return lines


def _find_few(rounds: Sequence[ServedRound], concurrency: int) -> list[str]:
    means = {
        name: mean_in_flight([one for one in rounds if one.key[:2] == (name, concurrency)])
        for name in dict.fromkeys(one.server for one in rounds if one.concurrency == concurrency)
    }
    if min(means.values()) >= _FULL * concurrency:
        return []
    found = ", ".join(f"{name} {mean:.1f}" for name, mean in means.items())
    return [
        f"NOTE: {concurrency} in flight: on average fewer were ({found}), so tokens/s is that of "
        "fewer; give more prompts."
    ]


def _find_busy(rounds: Sequence[ServedRound]) -> list[str]:
    """Signs that the machine was busy during rounds of one concurrency."""
    plain = [
        [r.per_token for r in one.requests if r.per_token] for one in rounds if one.server == PLAIN
    ]
    times = [float(np.mean(found)) for found in plain if found]
    spread = max(times) / min(times) if len(times) >= FEWEST else None
    loads = [one.load for one in rounds if one.load is not None]
    cores = int(machine()["cores"] or 1)
    return find_busy(spread, float(np.median(loads)) if loads else 0.0, cores, cores)


def throughput(rounds: Sequence[ServedRound]) -> float:
    """Tokens per second of all requests."""
    tokens = sum(request.tokens for one in rounds for request in one.requests)
    return tokens / sum(one.seconds for one in rounds)


def serving_rows(rounds: Sequence[ServedRound]) -> list[list[str]]:
    """Rows of `HEADER`; times as median and 99th percentile."""
    rows = []
    for concurrency in dict.fromkeys(one.concurrency for one in rounds):
        for name in (PLAIN, DRAFTED):
            mine = [one for one in rounds if one.key[:2] == (name, concurrency)]
            if not mine:
                continue
            requests = [request for one in mine for request in one.requests]
            tau, taus = tau_of(mine), request_taus(mine)
            gain = speed_up(rounds, concurrency) if name == DRAFTED else None
            rows.append([
                str(concurrency),
                name,
                f"{throughput(mine):.1f}",
                "1" if name == PLAIN else format_estimate(gain),
                _percentiles([r.first_seconds for r in requests]),
                _percentiles([r.per_token for r in requests if r.per_token is not None]),
                _percentiles([gap for r in requests for gap in r.gaps]),
                format_number(tau) if tau else "",
                format_number(float(np.mean(taus))) if taus else "",
                str(len(requests)),
                f"{mean_in_flight(mine):.1f}",
            ])  # fmt: skip
    return rows


def _percentiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    median, late = np.quantile(np.array(seconds) * 1000, [0.5, 0.99])
    return f"{median:.1f} (p99 {late:.1f})"


def serving_page(config: EvalConfig, rounds: Sequence[ServedRound]) -> str:
    rows = serving_rows(rounds)
    sizes = list(dict.fromkeys(one.concurrency for one in rounds))
    speeds = {
        name: [next((float(r[2]) for r in rows if r[:2] == [str(n), name]), None) for n in sizes]
        for name in (PLAIN, DRAFTED)
    }
    taus = {
        f"{n} in flight": request_taus([one for one in rounds if one.key[:2] == (DRAFTED, n)])
        for n in sizes
    }
    drawn = [charts.chart_throughput(sizes, speeds), charts.chart_taus("request", taus)]
    drawn = [chart for chart in drawn if chart.traces]
    return fill_page(
        "servers.html",
        drawn,
        servers=" against ".join(filter(None, (config.server, config.baseline_server))),
        figures=(HEADER, rows),
        doubts=doubts(rounds),
        only_pooled=tau_of(rounds) and not any(taus.values()),
    )
