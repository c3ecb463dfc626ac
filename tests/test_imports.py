"""The import rule. A package is a folder of `align` or `decode`, or a module beside the folders; lazy imports count."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "align": {"features", "plan", "sweep", "synthesize", "train"},
    "decode": {"advise", "compare", "eval", "export", "generate", "parity", "report", "verify"},
}
TRAINING = {
    "config",
    "data",
    "losses",
    "makers",
    "outputs",
    "planning",
    "sweeping",
    "training",
    "writing",
}
"""Packages of `align` that `decode` never reaches, whatever stands between."""
WITHOUT_TORCH = ("decode.reporting", "decode.report", "decode.systems.registry")


@cache
def imports(source: str, lazy: bool = True) -> frozenset[str]:
    """Every module that the source imports; with `lazy` also inside functions, never under TYPE_CHECKING."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending.extend(node.orelse)
            continue
        if not lazy and isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.update([module, *(f"{module}.{alias.name}" for alias in node.names)])
        pending.extend(ast.iter_child_nodes(node))
    return frozenset(found)


def package_of(module: str) -> str:
    """`decode.engine.engine` → `decode.engine`."""
    return ".".join(module.split(".")[:2])


def read_tree() -> dict[str, str]:
    """The source of every module by its dotted name."""
    paths = [path for top in COMMANDS for path in sorted((ROOT / top).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return {
        name.removesuffix(".__init__"): path.read_text()
        for name, path in zip(names, paths, strict=True)
    }


def reach(name: str, tree: Mapping[str, str], lazy: bool) -> set[str]:
    """All modules that importing `name` leads to, with the packages that hold them."""
    found: set[str] = set()
    pending = [name]
    while pending:
        parts = pending.pop().split(".")
        for module in (".".join(parts[: i + 1]) for i in range(len(parts))):
            if module in tree and module not in found:
                pending.extend(imports(tree[module], lazy and module != "decode"))
            found.add(module)
    return found


def find_cycle(edges: Mapping[str, Set[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [f"cycle: {' → '.join(error.args[1])}"]
    return []


def find_faults(tree: Mapping[str, str]) -> list[str]:
    """Broken rules in modules given as {dotted name: source}."""
    found: list[str] = []
    packages: dict[str, set[str]] = {}
    for name, source in tree.items():
        package = package_of(name)
        top = package.partition(".")[0]
        direct = imports(source)
        tops = {module.partition(".")[0] for module in direct}
        others = {package_of(m) for m in direct if m.startswith(("align.", "decode."))} - {package}
        packages.setdefault(package, set()).update(others)
        found += [f"{name} imports {other}" for other in tops & {"tests", "recipes", ""}]
        found += [
            f"{name} imports {o}" for o in others if o.split(".")[1] in COMMANDS[o.split(".")[0]]
        ]
        if top == "align" and "decode" in tops:
            found.append(f"{name} imports decode")
        if tops & {"lightning", "deepspeed"} and package != "align.training":
            found.append(f"{name} imports lightning or deepspeed")
        if "deepspeed" in tops and not name.endswith(".strategies"):
            found.append(f"{name} imports deepspeed")
        reached = reach(name, tree, lazy=True)
        if top == "decode":
            found += [f"{name} reaches {m}" for m in reached & {f"align.{p}" for p in TRAINING}]
        if package == "decode.speculation" and "transformers" in reached:
            found.append(f"{name} reaches transformers")
        if package in WITHOUT_TORCH and reach(name, tree, lazy=False) & {"torch", "transformers"}:
            found.append(f"{name} imports torch")
    modules = {name: (imports(source) & tree.keys()) - {name} for name, source in tree.items()}
    return found + find_cycle(modules) + find_cycle(packages)


def test_the_tree_keeps_the_rule() -> None:
    assert find_faults(read_tree()) == []


@pytest.mark.parametrize(
    ("tree", "fault"),
    [
        ({"align.data.x": "def f():\n    from decode import engine"}, "align.data.x imports decode"),
        ({"decode.engine.x": "import align.models.y", "align.models.y": "import align.data.z"}, "decode.engine.x reaches align.data"),
        ({"align.models.x": "def f():\n    import lightning"}, "imports lightning"),
        ({"align.training.trainer": "import deepspeed"}, "imports deepspeed"),
        ({"decode.speculation.x": "import align.common.y", "align.common.y": "import transformers"}, "reaches transformers"),
        ({"decode.reporting.page": "import align.common.x", "align.common.x": "import torch"}, "imports torch"),
        ({"align.a.x": "import align.a.y", "align.a.y": "import align.a.x"}, "cycle: "),
        ({"align.a.x": "import align.b.y", "align.b.z": "import align.a.w"}, "cycle: "),
        ({"decode.engine.x": "from decode.eval import main"}, "imports decode.eval"),
        ({"align.common.x": "import tests.x"}, "imports tests"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(tree: dict[str, str], fault: str) -> None:
    assert any(fault in found for found in find_faults(tree))


def test_only_commands_end_the_process() -> None:
    for name, source in read_tree().items():
        if name.count(".") > 1 and name != "align.common.errors":
            assert "raise SystemExit" not in source and "sys.exit(" not in source, name
