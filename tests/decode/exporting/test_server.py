"""A server's answers and counters are read, and what it does wrong is said in one line. The server speaks the protocol over this
project's decoder."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from align.common.errors import UserError
from align.models.block import BlockDrafter
from align.models.checkpoints.block import save_drafter
from align.models.checkpoints.causal import save_causal
from align.target.loading import load_target
from align.target.model import Target
from decode import parity as parity_command
from decode.drafters.autoregressive import AutoregressiveDrafter
from decode.drafters.base import Drafter
from decode.drafters.block import BlockProposer
from decode.engine.decoder import Decoder, prompt_tokens
from decode.exporting import server as server_module
from decode.exporting.registry import FORMATS
from decode.exporting.server import Server
from decode.exporting.verdict import Counts
from decode.suites.prompt import Prompt
from tests.builders import PROMPT, block_network, causal_drafter, overfit_block_network

PROMPTS = [Prompt(id=str(i), content=text, category="") for i, text in enumerate(("x", "Once upon"))]


class App:
    """Completions by a decoder with a drafter, and counters, as vLLM or llama.cpp's server sends them; `change` alters what it sends for
    a path."""

    def __init__(self, drafter: BlockDrafter) -> None:
        self.llama = False
        self.use(drafter.target, BlockProposer(drafter, tree_nodes=0))
        self.accepted, self.drafted = list[int](), list[int]()
        self.positions = 4
        self.change: dict[str, Callable[[str], str | int]] = {}

    def use(self, target: Target, drafter: Drafter) -> None:
        """Serve with this drafter."""
        self.decoder = Decoder(target, drafter)

    def answer(self, path: str, body: dict[str, Any]) -> str:
        if path == "/v1/models":
            return json.dumps({"data": [{"id": "mine", "owned_by": "llamacpp" if self.llama else "vllm"}]})
        if path == "/metrics":
            at = [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model="mine",position="{k}"}} {sum(a > k for a in self.accepted)}.0'
                for k in range(self.positions)
            ]
            totals = {
                "drafts": len(self.accepted),
                "draft_tokens": sum(self.drafted),
                "accepted_tokens": sum(self.accepted),
            }
            lines = [
                f'vllm:spec_decode_num_{name}_total{{model="mine"}} {value}.0'
                for name, value in totals.items()
            ]
            page = "\n".join(["# HELP something", *lines, *at]) + "\n"
            return page.replace("vllm:", "llamacpp:").replace('model="mine",', "") if self.llama else page
        assert path == ("/completion" if self.llama else "/v1/completions") and body["temperature"] == 0
        penalty = body.get(
            "repeat_penalty" if self.llama else "repetition_penalty", 1.4
        )  # the model's own default
        out = self.decoder.generate(
            body["prompt"],
            repetition_penalty=penalty,
            max_new_tokens=body["n_predict" if self.llama else "max_tokens"],
        )
        self.accepted += out.accepted
        self.drafted += out.drafted
        if self.llama:
            return json.dumps({"content": out.text, "tokens": out.tokens if body["return_tokens"] else []})
        return json.dumps({"choices": [{"text": out.text, "token_ids": out.tokens}]})


@pytest.fixture(scope="module")
def drafter(target: Target) -> BlockDrafter:
    return overfit_block_network(target, prompt_tokens(target, "x"))


@pytest.fixture
def served(drafter: BlockDrafter) -> Iterator[tuple[App, str]]:
    app = App(drafter)

    class Handler(BaseHTTPRequestHandler):
        def _send(self, body: dict[str, Any]) -> None:
            found: str | int = app.answer(self.path, body)
            if self.path in app.change:
                found = app.change[self.path](str(found))
            self.send_response(found if isinstance(found, int) else 200)
            self.end_headers()
            self.wfile.write(str(found).encode())

        def do_GET(self) -> None:
            self._send({})

        def do_POST(self) -> None:
            self._send(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *words: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield app, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("llama", [False, True], ids=["vLLM", "llama.cpp"])
def test_a_server_that_drafts_as_trained(
    tmp_path: Path, drafter: BlockDrafter, served: tuple[App, str], llama: bool
) -> None:
    served[0].llama = llama
    save_drafter(drafter, tmp_path / "drafter")
    verdict = server_module.served(
        str(tmp_path / "drafter"), "block", "debug", PROMPTS, 12, served[1] + "/v1", device="cpu"
    )
    assert verdict.same, verdict.lines
    assert "outputs: 2 of 2 as plain greedy" in verdict.lines[0]
    ours, theirs = (part.rpartition("position ")[2] for part in verdict.lines[1].split("; the server's"))
    assert ours == theirs and not ours.startswith("0")


@pytest.mark.parametrize("drafts", [2, 3])
def test_drafts_are_as_many_as_the_servers(
    tmp_path: Path, drafter: BlockDrafter, served: tuple[App, str], drafts: int
) -> None:
    """By what it counts: neither the drafter's own number nor ours."""
    app, url = served
    app.positions = drafts
    save_drafter(drafter, tmp_path / "block")
    save_causal(causal_drafter(drafter.target), tmp_path / "autoregressive")
    small = load_target(str(tmp_path / "autoregressive"), "float32", "cpu")
    kinds: dict[str, Drafter] = {
        "block": BlockProposer(drafter, drafts, tree_nodes=0),
        "autoregressive": AutoregressiveDrafter(small, drafts),
    }
    for role, proposer in kinds.items():
        app.use(drafter.target, proposer)
        verdict = server_module.served(str(tmp_path / role), role, "debug", PROMPTS, 12, url, device="cpu")
        ours, theirs = (part.split(": ", 1)[1] for part in verdict.lines[1].split(": ", 2)[2].split("; "))
        assert verdict.same and len(theirs.rpartition("position ")[2].split()) == drafts, verdict.lines
        assert ours.split("position")[1] == theirs.split("position")[1]


def test_a_server_that_does_not(tmp_path: Path, drafter: BlockDrafter, served: tuple[App, str]) -> None:
    app, url = served
    save_drafter(drafter, tmp_path / "drafter")

    def one_other(text: str) -> str:
        answer = json.loads(text)
        tokens = answer["choices"][0]["token_ids"]
        tokens[0] = (tokens[0] + 1) % 256
        return json.dumps(answer)

    app.change["/v1/completions"] = one_other
    verdict = server_module.served(
        str(tmp_path / "drafter"), "block", "debug", PROMPTS, 12, url, device="cpu"
    )
    assert not verdict.same and "outputs: 0 of 2" in verdict.lines[0] and "at place 0" in verdict.lines[0]
    app.change["/v1/completions"] = lambda text: re.sub(r"\[\d+", f"[{10**30}", text)
    verdict = server_module.served(
        str(tmp_path / "drafter"), "block", "debug", PROMPTS, 12, url, device="cpu"
    )
    assert not verdict.same and "which the target does not have" in verdict.lines[0]
    app.change = {"/metrics": lambda text: text.replace("num_accepted_tokens_total", "other_total")}
    verdict = server_module.served(
        str(tmp_path / "drafter"), "block", "debug", PROMPTS, 12, url, device="cpu"
    )
    assert not verdict.same and "τ 1.000" in verdict.lines[1]


def test_an_engine_that_drafts_otherwise_is_told_from_wrong_files(
    tmp_path: Path, drafter: BlockDrafter, served: tuple[App, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Right files in a server that accepts less: exit code 3. Wrong ones: 1, whatever the server drafts."""
    app, url = served
    drafter.config.target = "debug"
    save_drafter(drafter, tmp_path / "drafter")
    FORMATS["dflash"].write(drafter, out := tmp_path / "my export", torch.bfloat16, "")
    (tmp_path / "prompts.txt").write_text("x\n")
    words = [
        "--drafter",
        str(tmp_path / "drafter"),
        "--engine",
        url,
        "--device",
        "cpu",
        "--max-new-tokens",
        "12",
    ]
    words += ["--prompts", str(tmp_path / "prompts.txt")]

    def compared(*more: str) -> tuple[int, str]:
        try:
            parity_command.main([*words, *more])
        except SystemExit as ended:
            return int(ended.code or 0), capsys.readouterr().out
        return 0, capsys.readouterr().out

    assert compared("--export", str(out))[0] == 0
    other = block_network(
        drafter.target, "taps", whole=True, options={"block_layout": "fill_in", "block_size": 4}
    )
    app.use(drafter.target, BlockProposer(other, tree_nodes=0))
    for more in (("--export", str(out)), ()):
        code, text = compared(*more)
        assert code == 3 and text.endswith("FILES RIGHT, THE ENGINE DRAFTS OTHERWISE\n")
        assert re.search(r"acceptance \(τ -[1-9]\d\.\d%\): ours: ", text)
        assert ("--export DIR" in text) is not bool(more)
    held = load_file(weights := out / "model.safetensors")
    save_file({**held, "norm.weight": held["norm.weight"] * 2}, weights)
    for proposer in (other, drafter):
        app.use(drafter.target, BlockProposer(proposer, tree_nodes=0))
        code, text = compared("--export", str(out))
        assert code == 1 and text.endswith("NOT THE SAME DRAFTER\n") and "tensor norm.weight" in text


def test_only_an_export_that_a_server_loads_is_checked(
    tmp_path: Path, drafter: BlockDrafter, served: tuple[App, str]
) -> None:
    FORMATS["custom_generate"].write(drafter, tmp_path / "out", torch.bfloat16, "")
    with pytest.raises(UserError, match="is in the format 'custom_generate', which no server loads"):
        server_module.served("x", "block", "debug", PROMPTS, 12, served[1], tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: re.sub(r" [0-9]+\.0", " 7.0", text), "after 2 prompts 0 drafting calls"),
        (lambda text: re.sub(r" ([0-9]+)\.0", lambda m: f" {900 - int(m[1])}.0", text), "after 2 prompts -[0-9]+ drafting calls"),
        (lambda text: re.sub(r"tokens_total(.*) ([0-9]+)\.0", lambda m: f"tokens_total{m[1]} {900 - int(m[2])}.0", text), "after 2 prompts [0-9]+ drafting calls, -"),
    ],
    ids=["idle", "started anew", "counts that fall"],
)  # fmt: skip
def test_a_server_that_drafted_nothing_meanwhile(
    tmp_path: Path, target: Target, served: tuple[App, str], change: Callable[[str], str], says: str
) -> None:
    """With a drafter of which nothing is accepted, so that τ is 1 on both sides."""
    app, url = served
    save_drafter(network := block_network(target, "taps"), tmp_path / "drafter")
    app.use(target, BlockProposer(network, tree_nodes=0))
    arguments: Any = (str(tmp_path / "drafter"), "block", "debug", PROMPTS, 8, url)
    assert server_module.served(*arguments, device="cpu").same
    app.change["/metrics"] = change
    with pytest.raises(UserError, match=f"/metrics: {says}.*started anew meanwhile") as refused:
        server_module.served(*arguments, device="cpu")
    assert "\n" not in str(refused.value)


def test_a_model_is_called_whatever_it_is(served: tuple[App, str], drafter: BlockDrafter) -> None:
    """A label's value may hold any character, quotes with a backslash before."""
    app, url = served
    app.accepted, app.drafted = [3, 1], [4, 4]
    named = r'model="a {b} \\ \"}\", c=\"} 7"'
    app.change["/metrics"] = lambda text: text.replace('model="mine"', named)
    assert Server(url).counts() == Counts(2, 8, 4, (2, 1, 1, 0))


@pytest.mark.parametrize(
    ("path", "sent", "says"),
    [
        ("/v1/models", "[]", "no JSON object"),
        ("/v1/models", '{"data": []}', "names no model"),
        ("/v1/completions", '{"choices": [{"text": "x"}]}', "has no token ids"),
        ("/v1/completions", '{"choices": {"text": "x"}}', "has no token ids"),
        ("/v1/completions", '{"choices": [3]}', "has no token ids"),
        ("/v1/completions", '{"choices": [{"token_ids": ["a", null]}]}', "has no token ids"),
        ("/v1/completions", "[" * 9000, "no JSON object"),
        ("/v1/completions", 429, "answered 429"),
        ("/metrics", "vllm:spec_decode_num_accepted_tokens_total --", "counts no drafts"),
        ("/metrics", "# nothing", "counts no drafts"),
        (
            "/metrics",
            'vllm:spec_decode_num_accepted_tokens_per_pos{position="99999999999"} 1',
            "counts no drafts",
        ),
        (
            "/metrics",
            f'vllm:spec_decode_num_accepted_tokens_per_pos{{position="{"9" * 5000}"}} 1',
            "counts no drafts",
        ),
        ("/v1/models", " " * 70_000, "more than 0 MiB"),
    ],
)
def test_answers_of_another_kind(
    served: tuple[App, str], monkeypatch: pytest.MonkeyPatch, path: str, sent: str | int, says: str
) -> None:
    app, url = served
    monkeypatch.setattr(server_module, "_MOST", 1 << 16)
    app.change[path] = lambda text: sent
    with pytest.raises(UserError, match=says):
        server = Server(url)
        server.counts()
        server.greedy(PROMPT, 2)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("here", "no address"),
        ("http://127.0.0.1:1", "is the server up"),
        ("http://127.0.0.1:1/é", "is the server up"),
        ("http://a..b", "is the server up"),
    ],
)
def test_no_server(url: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Server(url)


def test_an_error_page_that_breaks_off() -> None:
    """Its length is a chunk's that never comes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as one:
                one.recv(4096)
                one.sendall(b"HTTP/1.1 500 x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(UserError, match="is the server up"):
            Server(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=10)


def test_counts_of_a_server_that_was_started_anew() -> None:
    assert Counts(1, 4, 1, (1.0,)).since(Counts(3, 12, 5, (3.0, 2.0))).at_position == (-2.0, -2.0)
