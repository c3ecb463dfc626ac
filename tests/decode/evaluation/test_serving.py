"""Servers with and without a drafter: a stand-in on the loopback interface that streams."""

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode import eval
from decode.evaluation.config import EvalConfig
from decode.evaluation.endpoint import Endpoint, ServedRequest
from decode.evaluation.records import read_appended
from decode.evaluation.serving import ROUNDS
from decode.evaluation.serving_report import (
    DRAFTED,
    HEADER,
    PLAIN,
    ServedRound,
    count_groups,
    doubts,
    mean_in_flight,
    request_taus,
    serving_page,
    serving_rows,
    speed_up,
    tau_of,
)
from specalign.common.errors import UserError
from specalign.suites.prompt import Prompt
from tests.measurements import page_data


class StreamingServer(ThreadingHTTPServer):
    """Streams ten tokens, the first alone and then `burst` at a time, with a pause before each
    piece."""

    daemon_threads = True

    def __init__(self, burst: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.burst, self.drafts, self.accepted = burst, 0, 0
        self.kind, self.end_seconds, self.broken = "content", 0.0, ""
        self.counts = True
        self.asked: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: StreamingServer

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "model"}]})
        if self.path == "/metrics":
            drafts = f"vllm:spec_decode_num_drafts_total {self.server.drafts}\n"
            body = f"{drafts}vllm:spec_decode_num_accepted_tokens_total {self.server.accepted}\n"
        known = self.path != "/metrics" or self.server.burst > 1  # plain servers may have none
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        if "long" in asked["messages"][0]["content"]:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "longer than the context"}}')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        count = min(10, asked["max_tokens"])
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        sizes = [1, *[self.server.burst] * ((count - 1) // self.server.burst)]
        sizes += [count - sum(sizes)] * (sum(sizes) < count)
        if self.server.broken:
            self.wfile.write(f"data: {self.server.broken}\n\n".encode())
        for place, size in enumerate(sizes):
            time.sleep(0.01)
            self.server.drafts += self.server.burst > 1 and place > 0
            self.server.accepted += size - 1
            self._event({"choices": [{"index": 0, "delta": {self.server.kind: "x" * size}}]})
        time.sleep(self.server.end_seconds)
        end = {"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}
        self._event({"choices": [end]})
        usage = {"completion_tokens": count, "prompt_tokens": 1, "total_tokens": 1}
        self._event({"choices": [], "usage": usage if self.server.counts else None})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, values: dict[str, Any]) -> None:
        whole = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "model"}
        self.wfile.write(f"data: {json.dumps(whole | values)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[tuple[StreamingServer, StreamingServer]]:
    pair = StreamingServer(1), StreamingServer(5)
    for server in pair:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield pair
    for server in pair:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_servers_are_measured_in_turn_and_resumed(
    servers: tuple[StreamingServer, StreamingServer], prompts: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plain, drafted = servers
    words = ["--server", drafted.url, "--baseline-server", f"{plain.url}/v1"]
    words += ["--concurrency", "1,2", "--prompts", str(prompts), "--out", str(tmp_path / "o")]
    eval.main(words)
    rounds = read_rounds(tmp_path)
    pairs = [
        (PLAIN, 1, 0, 0), (DRAFTED, 1, 0, 0), (DRAFTED, 1, 0, 1), (PLAIN, 1, 0, 1),
        (PLAIN, 1, 0, 2), (DRAFTED, 1, 0, 2), (DRAFTED, 1, 1, 0), (PLAIN, 1, 1, 0),
        (PLAIN, 1, 1, 1), (DRAFTED, 1, 1, 1), (DRAFTED, 1, 1, 2), (PLAIN, 1, 1, 2),
        (PLAIN, 2, 0, 0), (DRAFTED, 2, 0, 0), (DRAFTED, 2, 1, 0), (PLAIN, 2, 1, 0),
    ]  # fmt: skip
    assert [one.key for one in rounds] == pairs
    assert [len(one.requests) for one in rounds] == [1] * 12 + [3] * 4
    assert all(one.requests[0].tokens == 10 and one.load is not None for one in rounds)
    gain = speed_up(rounds, 1)
    assert gain is not None and gain.prompts == 3 and gain.value > 2
    rows = serving_rows(rounds)
    assert [row[:2] for row in rows] == [["1", PLAIN], ["1", DRAFTED], ["2", PLAIN], ["2", DRAFTED]]
    assert rows[1][7:10] == ["4.50", "4.50", "6"] and rows[0][7:10] == ["", "", "6"]
    trace_page((tmp_path / "o/serving.html").read_text(), rounds)
    assert plain.asked[0]["max_tokens"] == 16  # the warm-up
    before = len(plain.asked)
    with (tmp_path / "o" / ROUNDS).open("a") as file:
        file.write('{"server": "plain", "conc')  # of a run that was killed
    eval.main(words)
    assert (tmp_path / "o" / ROUNDS).read_bytes().endswith(b"\n")
    assert len(plain.asked) == before and read_rounds(tmp_path) == rounds
    with pytest.raises(SystemExit):
        eval.main([*words, "--max-new-tokens", "5"])
    assert "prompts_hash" in capsys.readouterr().err
    eval.main([*words, "--max-new-tokens", "5", "--no-resume"])
    again = read_rounds(tmp_path)
    assert len(again) == len(rounds) and again[0].requests[0].tokens == 5


def read_rounds(folder: Path) -> list[ServedRound]:
    return read_appended(folder / "o" / ROUNDS, ServedRound, mend=False)


def trace_page(page: str, rounds: list[ServedRound]) -> None:
    """Charts and table from the rounds alone."""
    charts = {chart["name"]: chart for chart in page_data(page)["charts"]}
    lines = {trace["name"]: trace for trace in charts["batches"]["traces"]}
    cells = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", page)[1:]]
    place = 0
    for n in (1, 2):
        for name in (PLAIN, DRAFTED):
            mine = [one for one in rounds if one.key[:2] == (name, n)]
            requests = [request for one in mine for request in one.requests]
            speed = sum(r.tokens for r in requests) / sum(one.seconds for one in mine)
            shown = dict(zip(HEADER, cells[place], strict=True))
            place += 1
            assert shown["tokens/s"] == f"{speed:.1f}"
            assert lines[name]["x"] == [1, 2]
            assert lines[name]["y"][n - 1] == pytest.approx(speed, abs=0.05)
            assert shown["requests"] == str(len(requests)) == "6"
            measured = {
                "TTFT": [r.first_seconds for r in requests],
                "TPOT": [(r.seconds - r.first_seconds) / (r.tokens - 1) for r in requests],
                "ITL": [gap for r in requests for gap in r.gaps],
            }
            for title, found in measured.items():
                median, late = np.quantile(np.array(found) * 1000, [0.5, 0.99])
                assert shown[f"{title}, ms"] == f"{median:.1f} (p99 {late:.1f})"
    for trace in charts["tau"]["traces"]:
        assert trace["y"] == [4.5] * 6
    assert {trace["name"] for trace in charts["tau"]["traces"]} == {"1 in flight", "2 in flight"}


def test_single_requests_have_no_tau_where_bursts_are_no_rounds() -> None:
    """A server that streams its tokens one by one, although it drafts."""
    requests = [ServedRequest("s", str(i), 0.0, 1.0, 10, [0.1] * 9) for i in range(3)]
    rounds = [ServedRound(DRAFTED, 1, 0, 3.0, requests, drafts=6.0, accepted=21.0)]
    assert tau_of(rounds) == 4.5 and request_taus(rounds) == []
    (row,) = serving_rows(rounds)
    assert row[7:] == ["4.50", "", "3", "1.0"]
    page = serving_page(EvalConfig(server="http://x"), rounds)
    assert "τ is pooled alone" in page
    assert [chart["name"] for chart in page_data(page)["charts"]] == ["batches"]


@pytest.mark.parametrize("kind", ["content", "reasoning", "reasoning_content"])
def test_times_run_from_the_first_text_to_the_end_of_sequence(
    servers: tuple[StreamingServer, StreamingServer], kind: str
) -> None:
    plain, _ = servers
    plain.kind, plain.end_seconds = kind, 0.3
    (request,) = Endpoint(plain.url).send([("s", Prompt("p", "Hi"), 10)], 1, 0.0)
    assert len(request.gaps) == 9 and request.tokens == 10
    assert request.first_seconds < request.seconds - 0.3


def test_a_prompt_too_long_for_the_server_is_left_out(
    servers: tuple[StreamingServer, StreamingServer], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plain, _ = servers
    prompts = [("s", Prompt(text, text), 4) for text in ("Hi", "too long")]
    (request,) = Endpoint(plain.url).send(prompts, 2, 0.0)
    assert request.prompt == "Hi"
    assert "left out: s: too long: " in capsys.readouterr().err
    assert Endpoint(plain.url).send(prompts[1:], 2, 0.0) == []
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "too long"}\n')
    words = ["--server", plain.url, "--prompts", str(path), "--out", str(tmp_path / "o")]
    with pytest.raises(SystemExit):
        eval.main([*words, "--concurrency", "1"])
    assert "refused the shortest prompts" in capsys.readouterr().err


@pytest.mark.parametrize("event", ["{oops", "[1]", "{}"])
def test_a_broken_event_is_one_error(
    servers: tuple[StreamingServer, StreamingServer], event: str
) -> None:
    plain, _ = servers
    plain.broken = event
    with pytest.raises(UserError, match=f"{plain.url}: a broken event in its stream"):
        Endpoint(plain.url).send([("s", Prompt("p", "Hi"), 10)], 1, 0.0)


def test_tokens_are_not_guessed_from_pieces(
    servers: tuple[StreamingServer, StreamingServer],
) -> None:
    servers[1].counts = False
    with pytest.raises(UserError, match=f"{servers[1].url}: its streams have no usage"):
        Endpoint(servers[1].url).send([("s", Prompt("p", "Hi"), 10)], 1, 0.0)


def test_a_speed_up_above_tau_is_doubted() -> None:
    def measure(accepted: float) -> list[str]:
        rounds = []
        for name, seconds in ((PLAIN, 4.0), (DRAFTED, 2.0)):
            for i in range(5):
                requests = [ServedRequest("s", str(i), 0.0, seconds, 11, [])]
                rounds.append(ServedRound(name, 1, 0, seconds, requests, 100.0, accepted, i))
        return doubts(rounds)

    assert measure(150.0) == []  # twice as fast at τ 2.5
    (line,) = measure(4.0)
    assert "2.00×" in line and "(1.04)" in line


def serve_groups(noise: np.ndarray, size: int = 8, load: float | None = None) -> list[ServedRound]:
    """Rounds of groups of `size` prompts, two repeats; noise: of the servers' times per token, by
    server, repeat and group."""
    return [
        ServedRound(name, size, repeat, 1.0, [
            ServedRequest("s", f"{part}.{i}", 0.0, 1 + i / size + extra, 2, []) for i in range(size)
        ], part=part, load=load)
        for name, of_server in zip((PLAIN, DRAFTED), noise, strict=True)
        for repeat, of_repeat in enumerate(of_server)
        for part, extra in enumerate(of_repeat)
    ]  # fmt: skip


def test_the_stated_number_is_in_flight(
    servers: tuple[StreamingServer, StreamingServer], tmp_path: Path
) -> None:
    """Groups hold several prompts per request in flight; the page notes when fewer were in flight."""
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(17)))
    words = ["--server", servers[1].url, "--prompts", str(path), "--concurrency", "2"]
    eval.main([*words, "--max-new-tokens", "4", "--out", str(tmp_path / "o")])
    assert [len(one.requests) for one in read_rounds(tmp_path)] == [9, 8] * 2
    assert [count_groups(n, 8) for n in (8, 63, 64, 320, 9999)] == [1, 1, 2, 10, 10]
    assert count_groups(20, 1) == 20
    requests = [ServedRequest("s", str(i), 0.0, seconds, 9, []) for i, seconds in ((0, 1), (1, 5))]
    rounds = [ServedRound(PLAIN, 2, 0, 5.0, requests)]
    assert mean_in_flight(rounds) == 1.2 and serving_rows(rounds)[0][-1] == "1.2"
    (line,) = doubts(rounds)
    assert "2 in flight: on average fewer were (plain 1.2)" in line


def test_equal_servers_show_no_difference() -> None:
    """The requests of a group share the state of the machine, so they are not independent."""
    generator = np.random.default_rng(0)
    found = [speed_up(serve_groups(0.3 * generator.random((2, 2, 8))), 8) for _ in range(100)]
    wrong = sum(not one.lo <= 1 <= one.hi for one in found)
    assert wrong <= 10 and found[0].prompts == 8


def test_too_few_groups_and_a_busy_machine_are_noted() -> None:
    few = serve_groups(np.zeros((2, 2, 4)))
    gain = speed_up(few, 8)
    assert gain is not None and gain.value == 1 and gain.lo is None
    assert doubts(few) == ["NOTE: 8 in flight: too few prompts for an interval; it needs 160."]
    assert doubts(serve_groups(np.zeros((2, 2, 5)))) == []
    (line,) = doubts(serve_groups(np.zeros((2, 2, 5)), load=1e3))
    assert "8 in flight: the machine was not idle (load 1000.0 on" in line
    slow = np.zeros((2, 2, 5))
    slow[0, 1, 3] = 9.0
    (line,) = doubts(serve_groups(slow))
    assert "plain decoding's own speed varied" in line


def test_wrong_servers(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--server", "http://127.0.0.1:1"]
    for words, message in (
        (server, "is the server up?"),
        (["--baseline-server", "http://127.0.0.1:1"], "--baseline-server needs --server"),
        ([*server, "--methods", "lookup"], "--methods can't be combined"),
        ([*server, "--concurrency", "8"], "need 8 prompts, not 3; raise"),
    ):
        with pytest.raises(SystemExit) as exit:
            eval.main([*words, "--prompts", str(prompts)])
        assert exit.value.code == 2 and message in capsys.readouterr().err
