"""The import rule: which room may import which, no cycle between files, and who knows Lightning, DeepSpeed or torch.

A room is a folder of `align` or `decode`, or a module that lies beside the folders. Lazy imports count, those under
TYPE_CHECKING do not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.import_graph import ROOT, cycles, files, imports, ours, room_of, tree

ROOMS = {
    "align.common": "",
    "align.kernels": "",
    "align.benchmarks": "",
    "align.rows": "align.common",
    "align.gguf": "align.common",
    "align.folder": "align.common align.rows",
    "align.target": "align.rows align.common align.kernels align.gguf align.folder",
    "align.importing": "align.common align.target",
    "align.config": "align.common align.target align.importing",
    "align.diffusion": "align.common",
    "align.models": "align.common align.kernels align.target align.importing align.diffusion",
    "align.losses": "align.common align.diffusion align.kernels",
    "align.writing": "align.rows align.common align.config align.folder align.target",
    "align.data": "align.rows align.common align.benchmarks align.config align.folder align.target align.writing",
    "align.outputs": "align.common align.config align.target align.diffusion align.models align.losses align.writing",
    "align.makers": "align.common align.rows align.folder align.config align.target align.models",
    "align.training": "align.common align.config align.folder align.target align.diffusion align.models align.losses align.data align.outputs "
    "align.makers",
    "align.planning": "align.common align.config align.folder align.target align.diffusion align.models align.losses align.data align.outputs "
    "align.makers align.training",
    "align.sweeping": "align.common align.config align.training align.planning",
    "decode.method_names": "",
    "decode.portable": "",
    "decode.speculation": "align.common align.kernels",
    "decode.drafters": "align.common align.rows align.kernels align.target align.models decode.speculation",
    "decode.wrappers": "align.common align.target decode.speculation decode.drafters",
    "decode.engine": "align.common align.rows align.folder align.kernels align.target decode.speculation decode.drafters",
    "decode.methods": "align.common align.gguf align.folder align.target align.importing align.models decode.method_names decode.speculation decode.drafters "
    "decode.wrappers decode.engine",
    "decode.suites": "align.common align.rows align.folder align.benchmarks decode.engine",
    "decode.reporting": "align.common align.folder decode.method_names",
    "decode.verification": "align.common align.kernels align.target decode.method_names decode.speculation decode.drafters "
    "decode.engine decode.methods decode.suites decode.reporting",
    "decode.benchmark": "align.common align.target decode.method_names decode.speculation decode.drafters "
    "decode.wrappers decode.engine decode.methods decode.suites decode.reporting decode.verification",
    "decode.exporting": "align.common align.gguf align.folder align.importing align.target decode.method_names align.models decode.drafters decode.engine decode.suites "
    "decode.portable",
    "decode.advising": "align.common align.target decode.speculation decode.drafters decode.engine decode.methods",
    "decode.cli": "align.common align.folder decode.method_names",
}
"""What each room may import. Commands (align.train, decode.eval, …) may import any room of their own package and
`align.common`; nobody imports a command. Only `decode.methods` answers to `import decode`."""

SEEN_BY_DECODE = {
    "align.common",
    "align.benchmarks",
    "align.rows",
    "align.kernels",
    "align.folder",
    "align.gguf",
    "align.target",
    "align.importing",
    "align.models",
    "align.diffusion",
}
"""All that `decode` may reach of `align`, through whatever stands between."""


def faults(modules: dict[str, str]) -> list[str]:
    """Broken rules in modules given as {dotted name: source}."""
    found: list[str] = []
    for name, source in modules.items():
        seen, room = imports(source), room_of(name)
        tops = {m.partition(".")[0] for m in seen}
        if "" in tops:
            found.append(f"{name} imports by a relative name, which this check can't follow")
        if "tests" in tops or "recipes" in tops:
            found.append(f"{name} imports tests or recipes")
        for other in sorted({room_of(m) for m in seen if ours(m)} - {room, "align", "decode"}):
            if not may_import(room, other):
                found.append(f"{name} imports {other}")
        if "decode" in seen and room != "decode":
            found.append(f"{name} imports the package decode, not the module that it needs")
        if tops & {"lightning", "pytorch_lightning", "deepspeed"} and room != "align.training":
            found.append(f"{name} imports lightning or deepspeed; only align.training may")
        if "deepspeed" in tops and name != "align.training.parallel.strategies":
            found.append(f"{name} imports deepspeed; only align.training.parallel.strategies may")
        if room == "decode":
            continue
        reach = {room_of(m) for m in reached(name, modules, lazily=True) if ours(m)}
        if name.startswith("decode.") and (far := {r for r in reach if is_room(r, "align")} - SEEN_BY_DECODE):
            found.append(f"{name} reaches {', '.join(sorted(far))}")
        if room == "decode.speculation" and "transformers" in reached(name, modules, lazily=True):
            found.append(f"{name} knows a model")
        if room in ("decode.reporting", "decode.report", "decode.method_names"):
            loaded = {m.partition(".")[0] for m in reached(name, modules, lazily=False) | seen}
            if loaded & {"torch", "transformers"}:
                found.append(f"{name} imports torch")
    return found + cycles(modules)


def test_only_commands_end_the_process() -> None:
    """Below a command nothing raises SystemExit; `align.common.errors.cli` turns what is raised into an exit code."""
    for name, source in tree().items():
        if room_of(name) not in ("align", "decode") and name.count(".") > 1 and name != "align.common.errors":
            assert "raise SystemExit" not in source and "sys.exit(" not in source, name


def is_room(room: str, package: str) -> bool:
    return room.startswith(package + ".")


def may_import(room: str, other: str) -> bool:
    """Whether a module of `room` may import from `other`, another room."""
    if room in ROOMS:
        return other in ROOMS[room].split()
    command_of = room.partition(".")[0]  # a command, or the package itself
    return other in ROOMS and (is_room(other, command_of) or other in SEEN_BY_DECODE)


def reached(name: str, modules: dict[str, str], lazily: bool) -> set[str]:
    """All modules that importing `name` leads to, through others too, and through the packages that hold them."""
    found: set[str] = set()
    pending = [name]
    while pending:
        module = pending.pop()
        parts = module.split(".")
        for part in (".".join(parts[: i + 1]) for i in range(len(parts))):
            if part in modules and part not in found:
                pending.extend(imports(modules[part], lazily and part != "decode"))
            found.add(part)
    return found


def test_the_tree_keeps_the_rule() -> None:
    assert faults(tree()) == []


def test_the_rule_is_a_one_way_street() -> None:
    """The table itself has no cycle: every room stands after those that it may import."""
    order = list(ROOMS)
    for room, allowed in ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in allowed.split())


def test_rooms_are_small_and_have_one_name_each() -> None:
    rooms: dict[Path, int] = {}
    for path in files():
        rooms[path.parent] = rooms.get(path.parent, 0) + (path.name != "__init__.py")
    assert {str(room): count for room, count in rooms.items() if count > 16} == {}
    names = [room.name for room in rooms]
    assert sorted(names) == sorted(set(names))
    assert not {"drafters", "data"} & {p.name for p in ROOT.iterdir() if p.is_dir()}


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ({"align.data.shards": "import decode.engine"}, "align.data.shards imports decode.engine"),
        ({"align.data.shards": "def f():\n    from decode import engine"}, "imports decode.engine"),
        ({"decode.engine.engine": "from align.losses import x"}, "decode.engine.engine imports align.losses"),
        ({"decode.engine.engine": "import align.train"}, "decode.engine.engine imports align.train"),
        ({"align.losses.objective": "import lightning"}, "only align.training may"),
        ({"align.models.block": "def f():\n    import lightning"}, "only align.training may"),
        ({"align.data.x": "from importlib import import_module\nimport_module('decode.cli')"}, "decode.cli"),
        ({"align.training.trainer": "import deepspeed"}, "only align.training.parallel.strategies may"),
        ({"decode.speculation.rules": "from align.target.model import Target"}, "imports align.target"),
        ({"decode.speculation.rules": "import transformers"}, "knows a model"),
        ({"decode.reporting.page": "import torch"}, "decode.reporting.page imports torch"),
        ({"align.a.x": "import align.a.y", "align.a.y": "def f():\n    import align.a.x"}, "→ align.a.y →"),
        ({"align.common.x": "import tests.x"}, "imports tests or recipes"),
        ({"decode.engine.x": "from ..align import losses"}, "imports by a relative name"),
        ({"decode.benchmark.x": "from decode.eval import main"}, "decode.benchmark.x imports decode.eval"),
        ({"decode.benchmark.x": "import decode"}, "imports the package decode"),
        ({"decode.verification.x": "from decode.benchmark import y"}, "imports decode.benchmark"),
        (
            {"decode.drafters.x": "import align.models.y", "align.models.y": "import align.data.z"},
            "decode.drafters.x reaches align.data",
        ),
        (
            {"decode.reporting.page": "import align.common.x", "align.common.x": "import torch"},
            "decode.reporting.page imports torch",
        ),
    ],
)
def test_a_planted_fault_is_found(modules: dict[str, str], says: str) -> None:
    assert any(says in fault for fault in faults(modules))


def test_type_checking_imports_do_not_count() -> None:
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import align.losses.objective"
    assert faults({"decode.engine.x": lazy}) == []


def test_no_test_file_imports_another() -> None:
    """What two of them share stands in a module beside them: tests/builders.py, measurements.py, fakes.py, …"""
    for path in (ROOT / "tests").rglob("*.py"):
        for module in imports(path.read_text(encoding="utf-8")):
            parts = module.split(".")
            assert parts[0] != "tests" or not any(p.startswith("test_") for p in parts[:-1]), (path, module)
