"""`specalign COMMAND …`: the same as `python -m align.COMMAND` or `python -m decode.COMMAND`."""

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from specalign.common.errors import UserError, cli, nearest

ROOT = Path(__file__).resolve().parents[1]


def find_commands() -> dict[str, Path]:
    """Every module of `align` and `decode` that runs as a command, by its short name."""
    paths = [*(ROOT / "align").glob("[!_]*.py"), *(ROOT / "decode").glob("[!_]*.py")]
    found = {path.stem: path for path in paths if '__name__ == "__main__"' in path.read_text()}
    return dict(sorted(found.items(), key=lambda item: (item[1].parent.name, item[0])))


def describe(path: Path) -> str:
    """The first sentence of a module's docstring, without the command. Imports nothing."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(docstring.partition("\n\n")[0].split())
    return first.rpartition("`: ")[2] or first


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, or list all of them."""
    name, *words = [*(sys.argv[1:] if arguments is None else arguments), ""]
    commands = find_commands()
    if name in ("", "-h", "--help"):
        print("usage: specalign COMMAND …   (COMMAND --help lists its options)\n")
        for short, path in commands.items():
            print(f"  {short:<12}{describe(path)}")
        return
    if name not in commands:
        raise UserError(f"unknown command {name!r}{nearest(name, commands)}")
    sys.argv = [name, *words[:-1]]
    runpy.run_module(f"{commands[name].parent.name}.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
