"""`decode.parity` against a server that speaks vLLM's and llama.cpp's protocols over this project's decoder."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode import parity as parity_command
from decode.engine.decoder import Decoder, prompt_tokens
from decode.exporting.exports import ExportVerdict
from decode.exporting.formats import write_export
from decode.exporting.server import Counts, DraftingServer, check_server
from decode.proposers.base import Proposer
from decode.proposers.block import BlockProposer
from specalign.common.errors import UserError
from specalign.formats.block import save_drafter
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.suites.prompt import Prompt
from tests.builders import PROMPT, block_network, overfit_block_network

PROMPTS = [
    Prompt(id=str(i), content=text, category="") for i, text in enumerate(("x", "Once upon"))
]


class App:
    """Completions by a decoder with a drafter, and counters; `change` alters what is sent for a path."""

    def __init__(self, drafter: BlockDrafter) -> None:
        self.llama = False
        self.use(drafter.target, BlockProposer(drafter, tree_nodes=0))
        self.accepted: list[int] = []
        self.drafted: list[int] = []
        self.change: dict[str, Callable[[str], str | int]] = {}

    def use(self, target: Target, drafter: Proposer) -> None:
        self.decoder = Decoder(target, drafter)

    def answer(self, path: str, body: dict[str, Any]) -> str:
        name = "llamacpp" if self.llama else "vllm"
        if path == "/v1/models":
            return json.dumps({"data": [{"id": "mine", "owned_by": name}]})
        if path == "/metrics":
            totals = {"drafts": len(self.accepted), "draft_tokens": sum(self.drafted)}
            totals["accepted_tokens"] = sum(self.accepted)
            counter = name + ':spec_decode_num_{}_total{{model="a {{b}}"}} {}.0\n'
            return "# HELP something\n" + "".join(counter.format(*item) for item in totals.items())
        assert path == ("/completion" if self.llama else "/v1/completions")
        assert body["temperature"] == 0
        # without a penalty in the request: the model's default
        penalty = body.get("repeat_penalty" if self.llama else "repetition_penalty", 1.4)
        new = body["n_predict" if self.llama else "max_tokens"]
        out = self.decoder.generate(body["prompt"], repetition_penalty=penalty, max_new_tokens=new)
        self.accepted += out.accepted
        self.drafted += out.drafted
        if self.llama:
            return json.dumps({"content": out.text, "tokens": out.tokens * body["return_tokens"]})
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
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield app, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def check(folder: Path, url: str) -> ExportVerdict:
    return check_server(str(folder), load_target("debug", "float32", "cpu"), url, PROMPTS, 12)


@pytest.mark.parametrize("llama", [False, True], ids=["vLLM", "llama.cpp"])
def test_a_server_that_drafts_as_trained(
    tmp_path: Path, drafter: BlockDrafter, served: tuple[App, str], llama: bool
) -> None:
    served[0].llama = llama
    save_drafter(drafter, tmp_path / "drafter")
    verdict = check(tmp_path / "drafter", served[1] + "/v1")
    assert verdict.exit_code == 0, verdict.lines
    assert "outputs: 2 of 2 equal" in verdict.lines[0]
    here, there = re.findall(r"\((\d+ (?:drafts )?in \d+)", verdict.lines[1])
    assert here == there and not here.startswith("0")


def test_drafts_per_round(tmp_path: Path, drafter: BlockDrafter, served: tuple[App, str]) -> None:
    app, url = served
    save_drafter(drafter, tmp_path / "block")
    app.use(drafter.target, BlockProposer(drafter, 2, tree_nodes=0))
    verdict = check(tmp_path / "block", url)
    here, there = re.findall(r"\((\d+ (?:drafts )?in \d+)", verdict.lines[1])
    assert verdict.exit_code == 0 and here == there, verdict.lines


def test_other_outputs(tmp_path: Path, drafter: BlockDrafter, served: tuple[App, str]) -> None:
    app, url = served
    save_drafter(drafter, tmp_path / "drafter")

    def one_other(text: str) -> str:
        answer = json.loads(text)
        tokens = answer["choices"][0]["token_ids"]
        tokens[0] = (tokens[0] + 1) % 256
        return json.dumps(answer)

    app.change["/v1/completions"] = one_other
    verdict = check(tmp_path / "drafter", url)
    assert verdict.exit_code == 3
    assert "outputs: 0 of 2" in verdict.lines[0] and "at place 0" in verdict.lines[0]


def test_an_engine_that_differs_is_told_from_wrong_files(
    tmp_path: Path,
    drafter: BlockDrafter,
    served: tuple[App, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Right files in a server that accepts less: exit code 3. Wrong ones: 1, whatever the server drafts."""
    app, url = served
    drafter.config.target = "debug"
    save_drafter(drafter, tmp_path / "drafter")
    write_export("dflash", drafter, out := tmp_path / "my export", torch.bfloat16, "")
    (tmp_path / "prompts.txt").write_text("x\n")
    words = ["--drafter", str(tmp_path / "drafter"), "--engine", url, "--device", "cpu"]
    words += ["--max-new-tokens", "12", "--prompts", str(tmp_path / "prompts.txt")]

    def run(*more: str) -> tuple[int, str]:
        try:
            parity_command.main([*words, *more])
        except SystemExit as ended:
            return int(ended.code or 0), capsys.readouterr().out
        return 0, capsys.readouterr().out

    assert run("--export", str(out))[0] == 0
    options = {"block_layout": "fill_in", "block_size": 4}
    other = block_network(drafter.target, "taps", whole=True, options=options)
    app.use(drafter.target, BlockProposer(other, tree_nodes=0))
    for more, files in ((("--export", str(out)), "MATCH"), ((), "NOT CHECKED")):
        code, text = run(*more)
        assert code == 3 and text.endswith(f"FILES {files}, THE ENGINE DRAFTS DIFFERENTLY\n")
    held = load_file(weights := out / "model.safetensors")
    save_file({**held, "norm.weight": held["norm.weight"] * 2}, weights)
    code, text = run("--export", str(out))
    assert code == 1 and text.endswith("NOT THE SAME DRAFTER\n") and "tensor norm.weight" in text


def test_no_server_drafts(tmp_path: Path, drafter: BlockDrafter, served: tuple[App, str]) -> None:
    app, url = served
    save_drafter(drafter, tmp_path / "drafter")
    app.change["/metrics"] = lambda text: re.sub(r" [0-9]+\.0", " 7.0", text)
    with pytest.raises(UserError, match="/metrics: 0 rounds.*restarted"):
        check(tmp_path / "drafter", url)


@pytest.mark.parametrize(
    ("path", "sent", "says"),
    [
        ("/v1/completions", '{"choices": [{"text": "x"}]}', "no token ids"),
        ("/v1/completions", 429, "answered 429"),
        ("/metrics", "# nothing", "no draft metrics"),
    ],
)
def test_wrong_protocols(served: tuple[App, str], path: str, sent: str | int, says: str) -> None:
    app, url = served
    app.change[path] = lambda text: sent
    with pytest.raises(UserError, match=says):
        server = DraftingServer(url)
        server.counts()
        server.greedy(PROMPT, 2)


@pytest.mark.parametrize(
    ("ours", "theirs", "parted", "same"),
    [
        ((416, 132), (416, 137), 0.0, True),
        ((522, 42), (533, 31), 0.0, False),  # vLLM's fault
        ((416, 132), (416, 150), 0.25, True),  # a quarter of the texts part
        ((208, 65), (416, 132), 0.0, True),  # of twice the rounds
    ],
)
def test_accepted_drafts_match_up_to_near_ties(
    ours: tuple[int, int], theirs: tuple[int, int], parted: float, same: bool
) -> None:
    own, other = (Counts(rounds, 4 * rounds, accepted) for rounds, accepted in (ours, theirs))
    assert own.matches(other, parted) is same
