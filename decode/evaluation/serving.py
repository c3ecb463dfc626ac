"""Measures running servers (vLLM, SGLang, llama.cpp) with and without a drafter: throughput, time to
the first token, time per token and per burst, by the number of requests in flight."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

from decode.evaluation import charts
from decode.evaluation.config import ServerConfig
from decode.evaluation.endpoint import Endpoint, ServedRequest, as_messages
from decode.evaluation.page import fill_page, render_charts, render_table
from decode.evaluation.records import append, check_same, read_appended
from decode.evaluation.statistics import Estimate, format_estimate, format_number, paired_ratio
from specalign.common.errors import UserError
from specalign.common.files import write_json, write_text
from specalign.common.schema import read_json
from specalign.common.terminal import PlainConsole
from specalign.suites.prompt import Prompt
from specalign.suites.sources import Loaded

ROUNDS, PAGE, SETTINGS = "serving.jsonl", "serving.html", "serving.json"
PLAIN, DRAFTED = "plain", "drafted"
WARMUP_TOKENS = 16
HEADER = (
    "in flight", "server", "tokens/s", "speed-up [95%]", "TTFT, ms", "TPOT, ms",
    "ITL, ms", "τ", "τ macro", "requests",
)  # fmt: skip
_NOTES = (
    "Times: median and 99th percentile. ITL: time between two bursts of a stream. Speed-up: time per "
    "token after the first, in pairs of the same prompt.",
    "τ: pooled over all rounds by the server's counters (acceptance length, mean accepted length). τ "
    "macro: the mean of the requests' own τ (per-request mean), tokens per burst of their streams.",
)
_AGREES = 0.1
"""Relative difference up to which a stream's bursts add up to the server's counters."""


@dataclass
class ServedRound:
    """All prompts, sent once to one server with `concurrency` requests in flight.

    seconds: on the clock. drafts, accepted: of the server's counters; None = it has none.
    """

    server: str
    concurrency: int
    repeat: int
    seconds: float
    requests: list[ServedRequest] = field(default_factory=list)
    drafts: float | None = None
    accepted: float | None = None

    @property
    def key(self) -> tuple[str, int, int]:
        return self.server, self.concurrency, self.repeat


def measure_servers(
    config: ServerConfig,
    suites: Sequence[Loaded],
    limits: dict[str, int],
    console: PlainConsole,
) -> tuple[list[ServedRound], Path]:
    """Run the rounds that are missing in `config.out`, servers in turn, and write the page. Raises
    UserError for a server that does not answer, or a folder that holds another measurement."""
    addresses = {PLAIN: config.baseline, DRAFTED: config.url}
    servers = {name: Endpoint(url) for name, url in addresses.items() if url}
    prompts = [(s.name, prompt, limits[s.name]) for s in suites for prompt in s.prompts]
    shortest = sorted(prompts, key=lambda asked: len(str(asked[1].content)))  # fit any context
    done = _open_folder(config, servers, prompts)
    known = {one.key for one in done}
    for concurrency in config.concurrency:
        if concurrency > len(prompts):
            what = f"skipped: {concurrency} requests in flight need {concurrency} prompts"
            console.say(f"{what}, not {len(prompts)}; raise --limit")
            continue
        warm = False
        for repeat in range(config.repeats):
            names = list(servers) if repeat % 2 == 0 else list(reversed(servers))
            for name in names:
                if (name, concurrency, repeat) in known:
                    continue
                if not warm:
                    for server in servers.values():
                        server.send(shortest[:concurrency], concurrency, 0.0, WARMUP_TOKENS)
                    warm = True
                found = _run_round(servers[name], name, concurrency, repeat, prompts, config)
                append(config.out, [found], ROUNDS)
                done.append(found)
                speed = sum(one.tokens for one in found.requests) / found.seconds
                console.say(f"{concurrency} in flight, {name}: {speed:.1f} tokens/s")
    write_text(config.out / PAGE, serving_page(config, done))
    return done, config.out


def _open_folder(
    config: ServerConfig,
    servers: dict[str, Endpoint],
    prompts: Sequence[tuple[str, Prompt, int]],
) -> list[ServedRound]:
    """The rounds of `config.out`, measured under the same settings."""
    asked = repr([(name, one.id, as_messages(one), limit) for name, one, limit in prompts])
    settings = {
        "servers": {name: [server.url, server.model] for name, server in servers.items()},
        "temperature": config.temperature,
        "prompts_hash": hashlib.sha256(asked.encode()).hexdigest(),
    }
    path = config.out / SETTINGS
    if not config.resume:
        for name in (SETTINGS, ROUNDS):
            (config.out / name).unlink(missing_ok=True)
    done = read_appended(config.out / ROUNDS, ServedRound, mend=True)
    if done:
        check_same(config.out, read_json(path) if path.is_file() else {}, settings)
    write_json(path, settings)
    return done


def _run_round(
    server: Endpoint,
    name: str,
    concurrency: int,
    repeat: int,
    prompts: Sequence[tuple[str, Prompt, int]],
    config: ServerConfig,
) -> ServedRound:
    before = _count_drafts(server)
    begun = perf_counter()
    requests = server.send(prompts, concurrency, config.temperature)
    seconds = perf_counter() - begun
    after = _count_drafts(server)
    found = ServedRound(name, concurrency, repeat, seconds, requests)
    if after:
        found.drafts = after.get("drafts", 0.0) - before.get("drafts", 0.0)
        found.accepted = after.get("accepted_tokens", 0.0) - before.get("accepted_tokens", 0.0)
    return found


def _count_drafts(server: Endpoint) -> dict[str, float]:
    """The server's counters of drafts; empty if it has none, or no page of metrics."""
    try:
        return server.read_counters()
    except UserError:
        return {}


def speed_up(rounds: Sequence[ServedRound], concurrency: int) -> Estimate | None:
    """Plain decoding's time per token over the drafted one's, in pairs of the same prompt."""

    def times(name: str) -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], list[float]] = {}
        for one in rounds:
            for request in one.requests if one.key[:2] == (name, concurrency) else ():
                if request.per_token is not None:
                    found.setdefault((request.suite, request.prompt), []).append(request.per_token)
        return {key: float(np.mean(values)) for key, values in found.items()}

    return paired_ratio(times(PLAIN), times(DRAFTED))


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
    """A line for each speed-up that drafting alone can't give."""
    lines = []
    for concurrency in dict.fromkeys(one.concurrency for one in rounds):
        tau = tau_of([one for one in rounds if one.key[:2] == (DRAFTED, concurrency)])
        gain = speed_up(rounds, concurrency)
        if tau and gain and (gain.lo or gain.value) > tau:
            lines.append(
                f"NOTE: {concurrency} in flight: a speed-up of {format_estimate(gain)} above τ "
                f"({tau:.2f}) can't come from drafting alone: the machine was busy, or the servers "
                "differ in more than the drafter."
            )
    return lines


def serving_rows(rounds: Sequence[ServedRound]) -> list[list[str]]:
    """Rows of `HEADER`; times as median and 99th percentile."""
    rows = []
    for concurrency in dict.fromkeys(one.concurrency for one in rounds):
        for name in (PLAIN, DRAFTED):
            mine = [one for one in rounds if one.key[:2] == (name, concurrency)]
            if not mine:
                continue
            requests = [request for one in mine for request in one.requests]
            speed = sum(r.tokens for r in requests) / sum(one.seconds for one in mine)
            tau, taus = tau_of(mine), request_taus(mine)
            gain = speed_up(rounds, concurrency) if name == DRAFTED else None
            rows.append([
                str(concurrency),
                name,
                f"{speed:.1f}",
                "1" if name == PLAIN else format_estimate(gain),
                _percentiles([r.first_seconds for r in requests]),
                _percentiles([r.per_token for r in requests if r.per_token is not None]),
                _percentiles([gap for r in requests for gap in r.gaps]),
                format_number(tau) if tau else "",
                format_number(float(np.mean(taus))) if taus else "",
                str(len(requests)),
            ])  # fmt: skip
    return rows


def _percentiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    median, late = np.quantile(np.array(seconds) * 1000, [0.5, 0.99])
    return f"{median:.1f} (p99 {late:.1f})"


def serving_page(config: ServerConfig, rounds: Sequence[ServedRound]) -> str:
    """The report of a measurement of servers."""
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
    where = f"{config.url} against {config.baseline}" if config.baseline else config.url
    lines = [*_NOTES, *doubts(rounds)]
    if tau_of(rounds) and not any(taus.values()):
        lines.append(
            "τ is pooled alone: the bursts of this server's stream are not its rounds (they do not "
            "add up to its counters), so single requests have no τ."
        )
    body = (
        f"<h1>Speed of servers</h1><p class='soft'>{where}</p>"
        + render_charts(drawn)
        + render_table(HEADER, rows)
        + "".join(f"<p class='note'>{line}</p>" for line in lines)
    )
    data = {"charts": [asdict(chart) for chart in drawn], "replays": []}
    return fill_page("Speed of servers", body, data)
