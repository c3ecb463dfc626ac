"""A strict YAML SafeLoader that rejects common mistakes.

A key given twice and keys that are not names are errors. Plain scalars are of YAML 1.2's core types
only: 1e-3 is a number; `yes`, `on`, 010, 1:30 and dates are text.
"""

import re
from typing import Any

import yaml

from specalign.common.errors import UserError

_CORE = {
    "null": (r"^(null|Null|NULL|~|)$", ["n", "N", "~", ""]),
    "bool": (r"^(true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "int": (r"^[-+]?(0|[1-9]\d{0,18})$", list("-+0123456789")),
    "float": (
        r"^([-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
}


class _Loader(yaml.SafeLoader):
    """Safe YAML, core types, no key twice."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes what `parse_yaml` would not read as text."""


for _name, (_pattern, _first) in _CORE.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str) or key in result:
            problem = f"key {key!r} {'occurs twice' if isinstance(key, str) else 'is not a name'}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def parse_yaml(text: str, where: str) -> Any:
    """The plain values (None, bool, int, float, str, list, dict with str keys) that `text` holds.
    Raises UserError: not valid YAML, or one of the traps above; its line begins with `where`."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark is not None and "\n" in text.strip() else ""
        problem = error.problem or error.context
        raise UserError(f"{where}: not valid YAML: {line}{problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def dump_yaml(value: Any) -> str:
    """YAML that `parse_yaml` reads back as `value`; plain lists on one line."""
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=110,
    )
