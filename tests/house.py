"""How large the house is: files, rooms, arrows between rooms, lines of code, and what a command passes through.

python -m tests.house            # of this checkout
python -m tests.house FOLDER     # of another one

The functions that a command passes through are counted without running it: those that its `main` names, and so on. A method counts
where its class is reached and its name is read as an attribute. So the count is too large rather than too small: both sides of
every `if` are in it, and all that a table names. No test runs this.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from align.common.text import say
from tests.import_graph import ROOT, cycles, imports, ours, room_of, tree

COMMANDS = ("decode.generate", "decode.eval", "align.train")


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    modules = tree(root)
    rooms = {room_of(name) for name in modules if name.count(".") > 1}
    arrows = {
        (room_of(name), room_of(other))
        for name, source in modules.items()
        for other in imports(source)
        if ours(other) and {room_of(name), room_of(other)} <= rooms and room_of(name) != room_of(other)
    }
    lines = sum(code_lines(source) for source in modules.values())
    say(
        f"{len(modules)} files, {len(rooms)} rooms, {len(arrows)} arrows between rooms, {len(cycles(modules))} cycles"
    )
    functions = sum(
        isinstance(node, ast.FunctionDef)
        for source in modules.values()
        for node in ast.walk(ast.parse(source))
    )
    say(f"{lines:,} lines of code without docstrings, comments and blanks; {functions:,} functions")
    for command in COMMANDS:
        found = Passed(modules).through(command)
        say(f"{command}: {len(found)} functions in {len({module for module, _ in found})} files")
    say(f"README: {len((root / 'README.md').read_text(encoding='utf-8').splitlines())} lines")


def code_lines(source: str) -> int:
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(x.strip()) and not x.lstrip().startswith("#") and i not in texts for i, x in lines)


class Passed:
    """The functions that a command passes through, as (module, name)."""

    def __init__(self, modules: dict[str, str]) -> None:
        self.own: dict[str, dict[str, ast.AST]] = {}
        """By module: what its top level defines."""
        self.foreign: dict[str, dict[str, tuple[str, str]]] = {}
        """By module: names that it imports, anywhere, and where they come from; "" = the module itself."""
        for module, source in modules.items():
            tree = ast.parse(source)
            self.own[module] = {name: node for node in tree.body for name in defined(node)}
            self.foreign[module] = dict(imported(tree, modules))
        self.found: set[tuple[str, str]] = set()
        self.seen: set[tuple[str, str]] = set()
        self.read: set[str] = set()
        self.methods: defaultdict[str, list[tuple[str, str, ast.AST]]] = defaultdict(list)
        self.pending: list[tuple[str, ast.AST]] = []

    def through(self, command: str) -> set[tuple[str, str]]:
        self.reach(command, "main")
        while self.pending:
            module, node = self.pending.pop()
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name):
                    self.reach(module, inner.id)
                elif isinstance(inner, ast.Attribute):
                    self.attribute(module, inner)
        return self.found

    def reach(self, module: str, name: str) -> None:
        """What a name means in a module."""
        module, name = self.foreign.get(module, {}).get(name, (module, name))
        node = self.own.get(module, {}).get(name)
        if node is None or (module, name) in self.seen:
            if name in self.foreign.get(module, {}) and (module, name) not in self.seen:  # handed on
                self.seen.add((module, name))
                self.reach(module, name)
            return
        self.seen.add((module, name))
        if isinstance(node, ast.ClassDef):
            self.open(module, node)
            return
        if isinstance(node, ast.FunctionDef):
            self.found.add((module, name))
        self.pending.append((module, node))

    def open(self, module: str, node: ast.ClassDef) -> None:
        """A class: its bases and fields; its methods where their names are read, those with underscores at once."""
        for part in (*node.bases, *node.decorator_list):
            self.pending.append((module, part))
        for part in node.body:
            if not isinstance(part, ast.FunctionDef):
                self.pending.append((module, part))
            elif part.name in self.read or part.name.startswith("__"):
                self.method(module, f"{node.name}.{part.name}", part)
            else:
                self.methods[part.name].append((module, f"{node.name}.{part.name}", part))

    def method(self, module: str, name: str, node: ast.AST) -> None:
        self.found.add((module, name))
        self.pending.append((module, node))

    def attribute(self, module: str, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            other, name = self.foreign.get(module, {}).get(node.value.id, ("", "."))
            if name == "":  # of a module
                self.reach(other, node.attr)
                return
        if node.attr not in self.read:
            self.read.add(node.attr)
            for waiting in self.methods.pop(node.attr, ()):
                self.method(*waiting)


def defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    for target in getattr(node, "targets", [getattr(node, "target", None)]):
        if isinstance(target, ast.Name):
            yield target.id


def imported(tree: ast.Module, modules: dict[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and ours(node.module):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (
                    alias.asname or alias.name,
                    (whole, "") if whole in modules else (node.module, alias.name),
                )
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and ours(alias.name):
                    yield alias.asname, (alias.name, "")


if __name__ == "__main__":
    main()
