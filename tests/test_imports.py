"""The import rule: `align` and `decode` import `specalign` and never each other; no cycles.

Imports inside functions count, except where a rule says otherwise.
"""

import ast
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {
    "specalign": {"align", "decode", "tests", "lightning", "deepspeed"},
    "align": {"decode", "tests"},
    "decode": {"align", "tests", "lightning", "deepspeed"},
}
WITHOUT_TORCH = ("decode.report", "decode.evaluation.statistics", "decode.evaluation.page")


@cache
def find_imports(source: str, lazy: bool = True) -> set[str]:
    """All imported modules; with `lazy` also those imported inside functions."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.FunctionDef) and not lazy:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.add(str(node.module))
        pending.extend(ast.iter_child_nodes(node))
    return found


def read_tree() -> dict[str, str]:
    """The source of every module by its dotted name."""
    paths = [path for top in FORBIDDEN for path in sorted((ROOT / top).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    texts = [path.read_text() for path in paths]
    return dict(zip((name.removesuffix(".__init__") for name in names), texts, strict=True))


def find_faults(tree: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    edges: dict[str, set[str]] = {}
    for name, source in tree.items():
        imported = find_imports(source)
        tops = {module.partition(".")[0] for module in imported}
        found += [f"{name} imports {top}" for top in tops & FORBIDDEN[name.partition(".")[0]]]
        if "deepspeed" in tops and not name.endswith(".strategies"):
            found.append(f"{name} imports deepspeed")
        edges[name] = (imported & tree.keys()) - {name}
    for name in {*WITHOUT_TORCH} & tree.keys():
        found += [f"{name} reaches torch" for _ in reach_on_import(name, tree) & {"torch"}]
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found.append(f"cycle: {' → '.join(error.args[1])}")
    return found


def reach_on_import(name: str, tree: Mapping[str, str]) -> set[str]:
    found: set[str] = set()
    pending = [name]
    while pending:
        module = pending.pop()
        if module not in found:
            found.add(module)
            pending.extend(find_imports(tree.get(module, ""), lazy=False))
    return found


def test_the_tree_keeps_the_rule() -> None:
    assert find_faults(read_tree()) == []


def test_only_commands_end_the_process() -> None:
    for name, source in read_tree().items():
        if name.count(".") > 1 and name != "specalign.common.errors":
            assert "raise SystemExit" not in source and "sys.exit(" not in source, name
