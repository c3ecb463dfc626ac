"""Every one-line mutation of a module: operators, indices, off by one, dropped terms, swapped branches."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARED = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "in": "not in",
    "not in": "in",
}
COMPUTED = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "&": "|", "|": "&"}
DROPPED = ("+", "-", "*", "/")
"""Of these the right side is left out, too."""
NAMES = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin",
    "argmax": "argmin", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor", "zeros": "ones",
    "tril": "triu", "cumsum": "clone", "cumprod": "clone", "bisect_left": "bisect_right", "bisect_right": "bisect_left",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A line and what it becomes."""

    path: str
    function: str
    line: int
    old: str
    new: str

    @property
    def name(self) -> str:
        """Stays as it is when lines above come or go."""
        return f"{self.path} {self.function}: {self.old.strip()} → {self.new.strip()}"

    @property
    def tests(self) -> str:
        """The folder of its room's tests."""
        return f"tests/{self.path.rsplit('/', 1)[0]}"

    def applied(self, source: str) -> str:
        lines = source.splitlines()
        lines[self.line - 1] = self.new
        return "\n".join(lines) + "\n"


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """In the order of the file; such as do not compile are left out."""
    source = (root / path).read_text()
    found = [m for m in _Finder(path, source).found() if m.old != m.new]
    return [m for m in dict.fromkeys(found) if _compiles(m.applied(source))]


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Finder:
    def __init__(self, path: str, source: str) -> None:
        self.path, self.tree = path, ast.parse(source)
        self.lines = [line.encode() for line in source.splitlines()]

    def found(self) -> Iterator[Mutant]:
        yield from self._within(self.tree, "")

    def _within(self, node: ast.AST, function: str) -> Iterator[Mutant]:
        """What says nothing of behaviour is passed over: messages, annotations, docstrings, decorators, imports."""
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.arg):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".strip(".")
        yield from self._of(node, function)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._within(child, function)

    def _of(self, node: ast.AST, function: str) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, comparators=[right]):
                for old, new in COMPARED.items():
                    yield from self._between(node, left, right, old, new, function)
            case ast.BinOp(left=left, right=right):
                for old, new in COMPUTED.items():
                    yield from self._between(node, left, right, old, new, function)
                if self._gap(left, right) in DROPPED:
                    yield from self._replaced(node, left, function)
            case ast.BoolOp(values=[left, right, *_]):
                for old, new in (("and", "or"), ("or", "and")):
                    yield from self._between(node, left, right, old, new, function)
            case ast.IfExp(body=body, orelse=other):
                yield from self._replaced(node, body, function)
                yield from self._replaced(node, other, function)
            case ast.UnaryOp(operand=operand):
                yield from self._replaced(node, operand, function)
            case ast.Constant(value=bool() as value):
                yield from self._text(node, str(not value), function)
            case ast.Constant(value=int() as value):
                yield from self._text(node, str(value + 1), function)
            case ast.Constant(value=float() as value):
                yield from self._text(node, str(value / 2 if value else 1.0), function)
            case ast.Call(func=ast.Name(id=name) as function_name) if name in NAMES:
                yield from self._text(function_name, NAMES[name], function)
            case ast.Call(func=ast.Attribute(attr=name) as called) if name in NAMES:
                yield from self._text(
                    called, (self._segment(called) or "")[: -len(name)] + NAMES[name], function
                )

    def _segment(self, node: ast.expr) -> str | None:
        if node.lineno != node.end_lineno:
            return None
        return self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()

    def _gap(self, left: ast.expr, right: ast.expr) -> str | None:
        if left.end_lineno != right.lineno:
            return None
        return self.lines[right.lineno - 1][left.end_col_offset : right.col_offset].decode().strip(" ()")

    def _between(
        self, node: ast.expr, left: ast.expr, right: ast.expr, old: str, new: str, function: str
    ) -> Iterator[Mutant]:
        whole = self._segment(node)
        if whole is None or self._gap(left, right) != old:
            return
        text = self.lines[node.lineno - 1]
        start = left.end_col_offset or 0
        at = start + text[start : right.col_offset].index(old.encode())
        before, after = text[node.col_offset : at], text[at + len(old) : node.end_col_offset]
        yield from self._text(node, before.decode() + new + after.decode(), function)

    def _replaced(self, node: ast.expr, by: ast.expr, function: str) -> Iterator[Mutant]:
        new = self._segment(by)
        if new is not None:
            yield from self._text(node, f"({new})", function)

    def _text(self, node: ast.expr, new: str, function: str) -> Iterator[Mutant]:
        if node.lineno == node.end_lineno:
            line = self.lines[node.lineno - 1]
            changed = line[: node.col_offset] + new.encode() + line[node.end_col_offset :]
            yield Mutant(self.path, function, node.lineno, line.decode(), changed.decode())
