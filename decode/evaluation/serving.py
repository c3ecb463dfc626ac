"""Measures running servers (vLLM, SGLang, llama.cpp) with and without a drafter: throughput, time to
the first token, time per token and per burst, by the number of requests in flight."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from decode.evaluation.config import EvalConfig
from decode.evaluation.endpoint import Endpoint, as_messages
from decode.evaluation.records import append, check_same, read_appended
from decode.evaluation.serving_report import (
    DRAFTED,
    PLAIN,
    ServedRound,
    count_groups,
    serving_page,
    throughput,
)
from specalign.common.errors import UserError
from specalign.common.files import write_json, write_text
from specalign.common.provenance import load_average
from specalign.common.schema import read_json
from specalign.common.terminal import PlainConsole
from specalign.suites.prompt import Prompt
from specalign.suites.sources import Loaded

ROUNDS, PAGE, SETTINGS = "serving.jsonl", "serving.html", "serving.json"
WARMUP_TOKENS = 16


def measure_servers(
    config: EvalConfig, folder: Path, suites: Sequence[Loaded], console: PlainConsole
) -> list[ServedRound]:
    """Run the rounds, at least two of each prompt, that are missing in the folder and write the page. Each group of prompts is
    sent to both servers, in alternating order, before the next one: they share the state of the
    machine. Raises UserError for a server that does not answer, too few prompts, or a folder that
    holds another measurement."""
    prompts = [(s.name, prompt, config.limit_of(s.name)) for s in suites for prompt in s.prompts]
    few = [
        f"{n} requests in flight need {n} prompts, not {len(prompts)}; raise --limit"
        for n in config.concurrency
        if n > len(prompts)
    ]
    if len(few) == len(config.concurrency):
        raise UserError(f"--concurrency: {few[0]}")
    for line in few:
        console.say(f"skipped: {line}")
    addresses = {PLAIN: config.baseline_server, DRAFTED: config.server}
    servers = {name: Endpoint(url) for name, url in addresses.items() if url}
    shortest = sorted(prompts, key=lambda asked: len(str(asked[1].content)))  # fit any context
    done = _open_folder(config, folder, servers, prompts)
    known = {one.key for one in done}
    for concurrency in [n for n in config.concurrency if n <= len(prompts)]:
        parts = np.array_split(range(len(prompts)), count_groups(len(prompts), concurrency))
        missing = [
            (repeat, part)
            for repeat in range(max(config.repeats, 2))
            for part in range(len(parts))
            if not known.issuperset((name, concurrency, repeat, part) for name in servers)
        ]
        for server in servers.values() if missing else ():
            if not server.send(shortest[:concurrency], concurrency, 0.0, WARMUP_TOKENS):
                raise UserError(f"{server.url} refused the shortest prompts: nothing to measure")
        for repeat, part in missing:
            names = list(servers) if (repeat + part) % 2 == 0 else list(reversed(servers))
            group = [prompts[i] for i in parts[part]]
            found = [
                _run_round(servers[name], (name, concurrency, repeat, part), group, config)
                for name in names
            ]
            append(folder, found, ROUNDS)
            done += found
        for name in servers if missing else ():
            mine = [one for one in done if one.key[:2] == (name, concurrency)]
            console.say(f"{concurrency} in flight, {name}: {throughput(mine):.1f} tokens/s")
    done = list({one.key: one for one in done}.values())  # a killed run may leave half a pair
    write_text(folder / PAGE, serving_page(config, done))
    return done


def _open_folder(
    config: EvalConfig,
    folder: Path,
    servers: dict[str, Endpoint],
    prompts: Sequence[tuple[str, Prompt, int]],
) -> list[ServedRound]:
    """The folder's rounds, measured under the same settings."""
    asked = repr([(name, one.id, as_messages(one), limit) for name, one, limit in prompts])
    settings = {
        "servers": {name: [server.url, server.model] for name, server in servers.items()},
        "temperature": config.sampling.temperature,
        "order": "interleaved, larger groups",
        "prompts_hash": hashlib.sha256(asked.encode()).hexdigest(),
    }
    path = folder / SETTINGS
    if not config.resume:
        for name in (SETTINGS, ROUNDS):
            (folder / name).unlink(missing_ok=True)
    done = read_appended(folder / ROUNDS, ServedRound, mend=True)
    if done:
        check_same(folder, read_json(path) if path.is_file() else {}, settings)
    write_json(path, settings)
    return done


def _run_round(
    server: Endpoint,
    key: tuple[str, int, int, int],
    prompts: Sequence[tuple[str, Prompt, int]],
    config: EvalConfig,
) -> ServedRound:
    name, concurrency, repeat, part = key
    before = server.read_counters()
    begun = perf_counter()
    requests = server.send(prompts, concurrency, config.sampling.temperature)
    seconds = perf_counter() - begun
    after = server.read_counters()
    found = ServedRound(name, concurrency, repeat, seconds, requests, part=part)
    found.load = load_average()
    if after:
        found.drafts = after.get("drafts", 0.0) - before.get("drafts", 0.0)
        found.accepted = after.get("accepted_tokens", 0.0) - before.get("accepted_tokens", 0.0)
    return found
