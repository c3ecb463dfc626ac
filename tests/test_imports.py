"""The import rule: one direction between the rooms, and no cycle.

recipes and tests ← nobody; decode → align.{networks, target, …}; align never imports decode.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# what of align decoding may know: the target and the networks, nothing of data, losses or training
OPEN_TO_DECODE = {
    "drafters",
    "target",
    "cache",
    "attention",
    "linear",
    "schedules",
    "graphs",
    "parameterization",
    "corruption",
    "errors",
    "hub",
    "files",
}
TRAINING = {f"align.{name}" for name in ("calibrate", "pretrain", "datamodule", "launch", "train")}
NO_MODEL = {
    f"decode.{name}" for name in ("proposal", "sampling", "history", "verifiers", "rules", "tree", "grow")
}
NO_TORCH = {"decode.report", "decode.records", "decode.statistics", "decode.figures", "decode.page"}


def imports(source: str, lazily: bool = True) -> set[str]:
    """Every dotted module that the source imports; with `lazily` also inside functions, never under TYPE_CHECKING."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending.extend(node.orelse)
            continue
        if not lazily and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(
            node.func
        ):  # import_module("x"), __import__("x")
            found.update(
                a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)
            )
        pending.extend(ast.iter_child_nodes(node))
    return found


def faults(modules: dict[str, str]) -> list[str]:
    """Broken rules in modules given as {dotted name: source}."""
    found: list[str] = []
    for name, source in modules.items():
        seen = imports(source)
        tops = {m.split(".")[0] for m in seen}
        room = name.split(".")
        if "" in tops:
            found.append(f"{name} imports by a relative name, which this check can't follow")
        if "tests" in tops or "recipes" in tops:
            found.append(f"{name} imports tests or recipes")
        if room[0] == "align" and "decode" in tops:
            found.append(f"{name} imports decode")
        if room[0] == "decode":
            inner = {m.split(".")[1] for m in seen if m.startswith("align.")}
            found += [f"{name} imports align.{m}" for m in sorted(inner - OPEN_TO_DECODE)]
        if tops & {"lightning", "pytorch_lightning", "deepspeed"} and name not in TRAINING:
            found.append(f"{name} imports lightning or deepspeed")
        if "deepspeed" in tops and name != "align.launch":
            found.append(f"{name} imports deepspeed; only align.launch may")
        loaded = reached(name, modules)
        if name in NO_MODEL and any(
            m.startswith(("align.target", "align.drafters", "transformers")) for m in loaded | seen
        ):
            found.append(f"{name} knows a model")
        if name in NO_TORCH and {m.split(".")[0] for m in loaded | seen} & {"torch", "transformers"}:
            found.append(f"{name} imports torch")
    return found + cycles(modules)


def reached(name: str, modules: dict[str, str]) -> set[str]:
    """All that is imported when `name` is, through others and the packages that hold them too."""
    found: set[str] = set()
    pending = [name]
    while pending:
        module = pending.pop()
        parts = module.split(".")
        for part in (".".join(parts[: i + 1]) for i in range(len(parts))):
            if part in modules and part not in found:
                pending.extend(imports(modules[part], lazily=False))
            found.add(part)
    return found


def cycles(modules: dict[str, str]) -> list[str]:
    """Import cycles among the modules, counting what runs at import time."""
    edges = {
        name: {m for m in imports(source, lazily=False) if m in modules and m != name}
        for name, source in modules.items()
    }
    done: set[str] = set()
    found: list[str] = []

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" → ".join([*path[path.index(name) :], name]))
            return
        if name not in done:
            for other in sorted(edges[name]):
                walk(other, [*path, name])
            done.add(name)

    for name in sorted(edges):
        walk(name, [])
    return found


def tree() -> dict[str, str]:
    files = [p for room in ("align", "decode") for p in (ROOT / room).rglob("*.py")]
    names = {p: ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in files}
    return {names[p]: p.read_text(encoding="utf-8") for p in files}


def test_the_tree_keeps_the_rule() -> None:
    assert faults(tree()) == []


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ({"align.data": "import decode.engine"}, "align.data imports decode"),
        ({"align.data": "def f():\n    from decode import engine"}, "align.data imports decode"),
        ({"decode.engine": "from align.losses import streak"}, "decode.engine imports align.losses"),
        (
            {"decode.engine": "from align import synthesize\nimport align.train"},
            "decode.engine imports align.train",
        ),
        ({"align.losses": "import lightning"}, "align.losses imports lightning or deepspeed"),
        ({"align.drafters.train": "import lightning"}, "align.drafters.train imports lightning"),
        ({"align.data": "from importlib import import_module\nimport_module('decode')"}, "imports decode"),
        ({"align.train": "import deepspeed"}, "only align.launch may"),
        ({"decode.verifiers": "from align.target import Target"}, "decode.verifiers knows a model"),
        ({"decode.report": "import torch"}, "decode.report imports torch"),
        ({"align.a": "import align.b", "align.b": "from align.a import x"}, "align.a → align.b → align.a"),
        ({"align.a": "import tests.x"}, "imports tests or recipes"),
        ({"decode.engine": "from ..align import losses"}, "decode.engine imports by a relative name"),
        (
            {"decode.verifiers": "import decode.help", "decode.help": "from align.target import Target"},
            "decode.verifiers knows a model",
        ),
        ({"decode.report": "import decode.page", "decode": "import torch"}, "decode.report imports torch"),
    ],
)
def test_a_planted_fault_is_found(modules: dict[str, str], says: str) -> None:
    assert any(says in fault for fault in faults(modules))


def test_type_checking_imports_do_not_count() -> None:
    assert (
        faults({"decode.a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import align.losses"})
        == []
    )
