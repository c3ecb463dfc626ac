"""Wrong input to every command: exit code 0 or 2, one `error:` line, existing results untouched."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from align import plan, sweep, synthesize, train
from align.config.recipe import keys
from align.config.recipe_files import list_recipes
from decode import advise, compare, eval, export, generate, parity, report, verify
from specalign.common import hub
from specalign.formats.block import save_drafter
from specalign.lm.loading import load_target
from specalign.rows import hub_rows
from tests.builders import block_network
from tests.target_models import save_target, write_gguf

TEXTS = (
    "", " ", "~", "-", "--", "null", "true", "0", "-1", "1e300", "nan", "inf", "1e-300", "9" * 5000,
    str(2**63), "a" * 300, "a/" * 3000, ".", "..", "file", "file/inside", "folder", "pipe", "no/where",
    "/proc/nowhere", "[/b]", "$5_vs_$10", "a|b", "\x1b[2J", "\x07", "\u202e", "é語👩‍🔬", "{", "[]", "{}",
    "[1,2", "&a", "!!python/object/apply:os.system ['true']", "%s%n", "{0}", "a=b", "a,b,,c", "debug",
    "lookup:draft_tokens=", "block:draft_tokens=99999", "debug_block", "x.gguf", "x.yaml", "x.jsonl",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**200, 0.5, 1e308, float("nan"), "", "x", "1", [], {}, [None],
    {"a": {"b": []}}, "\x1b[2J", "é" * 1000,
)  # fmt: skip
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
WORDS = st.one_of(st.sampled_from(TEXTS), ANY_TEXT)
REPEATABLE: dict[str, Any] = {
    "derandomize": True, "deadline": None, "database": None, "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}  # fmt: skip
SHORT = "--device cpu --max-new-tokens 4"
DEBUG = f"--target debug {SHORT}"
EVALUATE = f"{DEBUG} --dtype float32 --methods lookup --no-hf-check --prompts"
SYNTHESIZE = "recipe=debug_block output=new data.samples=2 data.exclude=[]"
TRAIN = f"{SYNTHESIZE} data.write=never trainer.max_steps=1 trainer.warmup_steps=0"
COMMANDS: dict[Any, str] = {
    eval: f"{EVALUATE} file.txt --out out",
    generate: f"{DEBUG} --drafter lookup Hello",
    plan: "recipe=debug_block --no-pilot",
    # these would take seconds; every option is parsed before what does not exist is looked for
    **dict.fromkeys((advise, verify), "--target debug --out out --drafter nowhere"),
    export: "--target debug --out out --drafter nowhere --format dflash",
    parity: "--target debug --drafter lookup --export nowhere --engine transformers",
    compare: "nowhere.yaml nowhere.yaml --out out",
    sweep: "nowhere.yaml --out out",
}
READERS: list[tuple[str, Any, str]] = [
    ("prompts", eval, f"{EVALUATE} PATH --out new"),
    ("prompts", synthesize, f"{SYNTHESIZE} data.prompts=PATH"),
    ("prompts", synthesize, f"{SYNTHESIZE} data.text=[PATH] data.text_column=prompt"),
    ("recipe", train, "recipe=PATH --print"),
    ("target", generate, f"--target FOLDER {SHORT} --drafter lookup Hello"),
    ("target", plan, "recipe=debug_block target.name=FOLDER --no-pilot"),
    ("gguf", generate, f"--target PATH {SHORT} --drafter lookup Hello"),
    ("drafter", generate, f"{DEBUG} --drafter FOLDER Hello"),
    ("data", train, f"{TRAIN} data.path=FOLDER"),
    ("measured", report, "FOLDER"),
]
"""Kind of file, a command that reads it, its arguments."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Intact files of every kind; the Hub is out of reach."""
    root = tmp_path_factory.mktemp("inputs")
    for name in ("gguf", "recipe", "prompts"):
        (root / name).mkdir()
    rows = [{"prompt": "One."}, {"messages": [{"role": "user", "content": "1 2 3 1 2"}]}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (root / "prompts/p.jsonl").write_text(lines)
    (root / "prompts/p.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (root / "prompts/p.json").write_text(json.dumps(rows))
    (root / "prompts/p.csv").write_text("id,prompt\n1,Say one.\n2,Say two.\n")
    (root / "prompts/p.txt").write_text("Say one.\nSay two.\n")
    parquet.write_table(pyarrow.Table.from_pylist(rows[:1]), root / "prompts/p.parquet")
    shutil.copy(Path(__file__).parents[1] / "recipes/debug_block.yaml", root / "recipe/r.yaml")
    target = load_target("debug", dtype="float32", device="cpu")
    save_target(target, root / "target")
    write_gguf(root / "gguf/t.gguf", target)
    save_drafter(block_network(target, "shared_kv"), root / "drafter")
    synthesize.main(SYNTHESIZE.replace("=new", f"={root}").split())
    (root / "work/folder").mkdir(parents=True)
    (root / "work/file").write_text("x")
    os.mkfifo(root / "work/pipe")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root / "work")
        patch.setenv("HOME", str(root))
        patch.setenv("SPECALIGN_CACHE", str(root / "cache"))
        patch.setattr(hub, "hub_reachable", lambda: False)
        patch.setattr(hub_rows, "hub_reachable", lambda: False)
        eval.main([*EVALUATE.split(), f"{root}/prompts/p.txt", "--out", "out"])
        shutil.copytree("out", root / "measured")
        yield root


def check(command: Any, argv: list[str], result: str = "out") -> None:
    """Exit code 2 must come with one line and leave the files in `result` as they are."""
    before = hash_files(result)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command.main(argv)
        except SystemExit as stop:
            code = int(stop.code or 0)
    said = err.getvalue()
    assert code in (0, 2) and "Traceback (most" not in said, said
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", out.getvalue() + said), said
    if code == 2:  # an indented list may follow the line
        assert re.search(r"(?:^|\n)error: [^\n]+\n(?: +[^\n]+\n)*\Z", said), said
        assert hash_files(result) == before, said


def hash_files(folder: str) -> dict[str, str]:
    files = [p for p in Path(folder).rglob("*") if p.is_file() and not p.name.startswith(".")]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@settings(max_examples=35, **REPEATABLE)
@given(command=st.sampled_from(list(COMMANDS)), data=st.data(), value=WORDS)
def test_options(inputs: Path, command: Any, data: st.DataObject, value: str) -> None:
    names = re.findall(r"--[a-z][a-z-]+", command.parser().format_usage().replace("--help", ""))
    option = f"{data.draw(st.sampled_from(names))}={value}"
    check(command, [*COMMANDS[command].split(), option])


KEYS = st.one_of(st.sampled_from(sorted(keys())), ANY_TEXT)
RECIPES = st.one_of(st.just("debug_block"), st.sampled_from(sorted(list_recipes())), WORDS)


@settings(max_examples=30, **REPEATABLE)
@given(command=st.sampled_from([train, synthesize, plan]), recipe=RECIPES, key=KEYS, value=WORDS)
def test_recipe_keys(inputs: Path, command: Any, recipe: str, key: str, value: str) -> None:
    end = "--no-pilot" if command is plan else "--print"
    check(command, [f"recipe={recipe}", f"{key}={value}", end])


@settings(max_examples=15, **REPEATABLE)
@given(prompt=WORDS)
def test_prompts(inputs: Path, prompt: str) -> None:
    check(generate, [*DEBUG.split(), "--drafter", "lookup", prompt])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "command", "words"), READERS)
@settings(max_examples=12, **REPEATABLE)
@given(data=st.data())
def test_bad_files(inputs: Path, kind: str, command: Any, words: str, data: Any) -> None:
    for folder in (kind, "new"):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(inputs / kind, kind)
    files = [p for p in sorted(Path(kind).iterdir()) if p.suffix not in ("", ".png", ".html")]
    path = data.draw(st.sampled_from(files))
    raw = path.read_bytes()
    path.unlink()
    how = data.draw(st.sampled_from(["removed", "folder", *["torn", "changed"] * 5]))
    if how == "folder":
        path.mkdir()
    elif how != "removed":
        path.write_bytes((tear if how == "torn" else change)(raw, path.suffix, data.draw))
    argv = words.replace("PATH", str(path.absolute())).replace("FOLDER", kind).split()
    check(command, argv, kind)


def tear(raw: bytes, suffix: str, draw: Any) -> bytes:
    at = draw(st.integers(0, len(raw)))
    flipped = raw[:at] + b"\xff\x00" + raw[at + 2 :]
    torn = [b"", raw[:at], raw[:at] + raw, flipped, b"[" * 100_000, b"9" * 5000]
    return draw(st.sampled_from(torn))


def change(raw: bytes, suffix: str, draw: Any) -> bytes:
    """Another value in a file that is otherwise whole."""
    if suffix == ".json":
        return json.dumps(change_value(json.loads(raw), draw)).encode()
    if suffix == ".jsonl":
        return b"\n".join(change(line, ".json", draw) for line in raw.splitlines())
    if suffix == ".yaml":
        return yaml.safe_dump(change_value(yaml.safe_load(raw), draw)).encode()
    if suffix == ".gz":
        return gzip.compress(tear(gzip.decompress(raw), suffix, draw))
    if suffix == ".safetensors":
        end = 8 + int.from_bytes(raw[:8], "little")
        header = change(raw[8:end], ".json", draw)
        return len(header).to_bytes(8, "little") + header + raw[end:]
    if suffix == ".gguf":  # the type, length or value after a key
        names = re.findall(rb"(?:general|llama|tokenizer)\.[a-z0-9_.]+", raw[:12_000])
        key = draw(st.sampled_from([b"GGUF", *names]))
        at = raw.index(key) + len(key) + draw(st.sampled_from([0, 4, 8, 12]))
        number = draw(st.sampled_from([0, 1, 9, 255, 1 << 20, 1 << 31, (1 << 32) - 1]))
        return raw[:at] + number.to_bytes(4, "little") + raw[at + 4 :]
    if suffix == ".parquet":
        cells = draw(st.sampled_from([1, b"\xff\xfe", [{"role": "user"}], None, {"a": 1}, ""]))
        buffer = io.BytesIO()
        parquet.write_table(pyarrow.table({draw(WORDS): [cells, None]}), buffer)
        return buffer.getvalue()
    return tear(raw, suffix, draw)


def change_value(value: Any, draw: Any) -> Any:
    """The value with one part of it replaced or removed."""
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value)))
        changed = value | {key: change_value(value[key], draw)}
        return changed if draw(st.integers(0, 5)) else {k: changed[k] for k in changed if k != key}
    return draw(st.sampled_from(VALUES))
