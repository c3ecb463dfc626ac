"""Tables of papers, measured again: `decode.eval --reproduce NAME`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from decode.evaluation.config import EvalConfig
from decode.evaluation.statistics import format_estimate, format_number, value_of
from decode.evaluation.summary import Figures, Summary
from decode.evaluation.verdict import list_reservations
from decode.speculation.settings import Sampling
from decode.systems.parsing import read_methods, read_sweep
from decode.systems.registry import PLAIN
from specalign.common.errors import UserError, nearest
from specalign.common.files import read_text
from specalign.common.pages import render_page
from specalign.common.schema import convert
from specalign.common.strict_yaml import parse_yaml

_OURS = ("engine", "repeats", "warmup", "seed", "trust_remote_code", "drafter_tokenizer")
"""Recorded options on which a paper has no say."""


@dataclass(frozen=True)
class Cell:
    """One published figure. tau: None where the paper's is unknown here (see `note`)."""

    target: str
    suite: str
    method: str
    speedup: float
    tau: float | None = None


@dataclass(frozen=True)
class Reproduction:
    """A table of a paper.

    cells: its figures. temperature: at which it was measured. drafters: what to give as --drafter.
    note: what the paper says of τ, where not in cells. max_new_tokens: None = each suite's own.
    sweep: for a figure that is a map, the swept options of its only method; it has no numbers to
    compare with.
    """

    title: str
    source: str
    cells: list[Cell]
    temperature: float
    drafters: str
    note: str = ""
    max_new_tokens: int | None = None
    sweep: list[str] = field(default_factory=list)

    @property
    def targets(self) -> list[str]:
        return list(dict.fromkeys(cell.target for cell in self.cells))


_FILE = Path(__file__).with_suffix(".yaml")
REPRODUCTIONS: dict[str, Reproduction] = convert(
    parse_yaml(read_text(_FILE), _FILE.name), dict[str, Reproduction], "", _FILE.name
)


def find_reproduction(name: str) -> Reproduction:
    """Raises UserError for an unknown name."""
    if name not in REPRODUCTIONS:
        raise UserError(f"--reproduce={name!r} is unknown{nearest(name, REPRODUCTIONS)}")
    return REPRODUCTIONS[name]


def plan_measurements(
    name: str, config: EvalConfig, tiny: bool
) -> list[tuple[EvalConfig, list[Cell]]]:
    """A measurement for each target and suite of a reproduction, with its published cells.

    Args:
        config: drafters, limits, sampling and the rest as given; a target chooses the cells of its
            own.
        tiny: a few short answers to built-in prompts by whatever target is given: the same code,
            no reproduction.

    Raises:
        UserError: a target that the table does not have.
    """
    found = find_reproduction(name)
    target = config.target
    if target is not None and not tiny and target not in found.targets:
        where = f"--target={target!r} is not in {found.title}"
        raise UserError(f"{where}{nearest(target, found.targets)}")
    cells = [cell for cell in found.cells if tiny or target in (None, cell.target)]
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        key = (target or "debug", "builtin") if tiny else (cell.target, cell.suite)
        groups.setdefault(key, []).append(cell)
    sweep = ["draft_tokens=2,3", "steps=1,2"] if tiny and found.sweep else found.sweep
    root = config.out or Path("runs/reproduce") / name
    plans = []
    for (of_target, suite), members in groups.items():
        methods = ",".join(dict.fromkeys(_shorten(cell.method, tiny) for cell in members))
        own = replace(
            config,
            target=of_target,
            suite=suite,
            methods=read_methods(methods),
            sweep=read_sweep(sweep),
            max_new_tokens=config.max_new_tokens or (8 if tiny else found.max_new_tokens),
            limit=config.limit or (max(2, *config.batch_sizes) if tiny else None),
            out=root / f"{of_target.rpartition('/')[2]}-{suite}",
        )
        plans.append((own, members))
    return plans


def _shorten(method: str, tiny: bool) -> str:
    """The method; in tiny, with few enough drafts for any stand-in."""
    name, *options = method.split(":")
    kept = [o for o in options if not (tiny and o.startswith("draft_tokens="))]
    return ":".join([name, *kept])


def reproduce(
    name: str,
    config: EvalConfig,
    tiny: bool,
    evaluate: Callable[[EvalConfig], tuple[Summary, Path]],
) -> tuple[str, int]:
    """Measure a table's cells; returns ours next to the paper's, as Markdown, and how many outputs
    changed."""
    found, bugs = find_reproduction(name), 0
    rows: list[tuple[Cell, str, Figures | None, str]] = []
    errors: list[UserError] = []
    notes: list[str] = []
    plans = plan_measurements(name, config, tiny)
    for own, cells in plans:
        try:
            summary, _ = evaluate(own)
        except UserError as error:
            errors.append(error)
            if len(errors) == len(plans):
                raise errors[0] from None
            rows += [(cell, cell.method, None, f"skipped: {error}") for cell in cells]
            continue
        bugs += summary.bugs
        notes += [f"- {cells[0].suite}: {line}" for line in list_reservations(summary)[1:]]
        methods = [_shorten(cell.method, tiny) for cell in cells]
        if found.sweep:
            methods = [method for method in summary.overall if method != PLAIN]
            cells = cells[:1] * len(methods)
        pairs = zip(cells, methods, strict=True)
        rows += [(cell, method, summary.overall.get(method), "skipped") for cell, method in pairs]
    page = render_page(
        _FILE.with_suffix(".jinja"),
        found=found,
        rows=rows,
        notes=notes,
        tiny=tiny,
        changed=_list_changes(found, plans[0][0]),
        estimate=format_estimate,
        number=format_number,
        value_of=value_of,
    )
    return page.rstrip("\n"), bugs


def _list_changes(found: Reproduction, config: EvalConfig) -> list[str]:
    """The options of a measurement that are not the paper's."""
    sampling = Sampling(found.temperature, seed=config.sampling.seed)
    paper = EvalConfig(
        suite=config.suite, max_new_tokens=found.max_new_tokens, sampling=sampling
    ).recorded
    pairs = config.recorded.items()
    return [f"{key}={value}" for key, value in pairs if key not in _OURS and value != paper[key]]
