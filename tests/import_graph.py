"""Which module imports which, read from the sources; lazy imports count, those under TYPE_CHECKING do not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def imports(source: str, lazily: bool = True) -> frozenset[str]:
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
        elif isinstance(node, ast.Call) and "import" in _called(node):  # import_module("x")
            found.update(
                a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)
            )
        pending.extend(ast.iter_child_nodes(node))
    return frozenset(found)


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def room_of(module: str) -> str:
    """`decode.engine.engine` → `decode.engine`; a module beside the rooms is a room of its own."""
    return ".".join(module.split(".")[:2])


def ours(module: str) -> bool:
    return module.partition(".")[0] in ("align", "decode")


def cycles(modules: dict[str, str]) -> list[str]:
    """Import cycles among the modules, lazy imports counted."""
    edges = {
        name: {m for m in imports(source) if m in modules and m != name} for name, source in modules.items()
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


def files(root: Path = ROOT) -> Iterator[Path]:
    return (p for package in ("align", "decode") for p in sorted((root / package).rglob("*.py")))


def tree(root: Path = ROOT) -> dict[str, str]:
    """The source of every module by its dotted name."""
    names = {
        p: ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for p in files(root)
    }
    return {name: p.read_text(encoding="utf-8") for p, name in names.items()}
