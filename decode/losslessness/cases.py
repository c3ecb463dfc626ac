"""What `decode.verify` compares with plain decoding: the ways in which one drafter is used, or methods by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from align.common.errors import UserError, nearest
from decode.methods.build import build, open_parts, verifier_of
from decode.methods.registry import SYSTEMS, Parts
from decode.methods.spec import Method, check_parts, read_method, with_all
from decode.speculation.verifiers import find

if TYPE_CHECKING:
    from align.target.model import Target
    from decode.engine.decoder import Decoder


@dataclass(frozen=True)
class Ways:
    """Args:
    target: p.
    compared: ways whose outputs are compared token by token, greedy and coupled, by name.
    drawn: ways whose sampled tokens are counted, each with its verifier.
    halved: those of `compared` that run in bf16 too.
    open: the decoder of a way over a target, with a verifier.
    """

    target: Target
    compared: Mapping[str, Any]
    drawn: Sequence[tuple[str, str, Any]]
    halved: Sequence[str]
    open: Callable[[Target, str, Any], Decoder]


def of_a_pair(spec: str, drafter: str, options: Any) -> Ways:
    """The ways in which a drafter is used. Read are `device` and `drafter_tokenizer`.

    Raises:
        UserError: no drafter, or one that can't be opened.
    """
    from decode.methods.load import load

    if drafter == "none":
        raise UserError(
            "--drafter=none drafts nothing, so there is nothing to verify: name a drafter, or lookup"
        )
    own = {"drafter_tokenizer": options.drafter_tokenizer}
    first = load(spec, drafter, dtype="float32", device=options.device, **own)
    network, compared, drawn = _of_a_drafter(first, drafter)

    def open_way(target: Target, verifier: str, how: dict[str, Any]) -> Decoder:
        if target is first.target:
            return load(target, network, verifier, **how)
        return load(target, drafter, verifier, **own, **how)

    return Ways(first.target, compared, drawn, list(compared)[-1:], open_way)


def _of_a_drafter(
    first: Decoder, drafter: str
) -> tuple[Any, dict[str, dict[str, Any]], list[tuple[str, str, dict[str, Any]]]]:
    """The drafter, read from disk once, and its ways: those compared token by token, those whose tokens are counted."""
    from decode.drafters.block import BlockProposer
    from decode.drafters.diffusion import ORDERS, DiffusionProposer

    found = first.drafter
    if isinstance(found, BlockProposer):
        tree = {"tree_nodes": 5}
        chosen: dict[str, dict[str, Any]] = {
            "chain": {"tree_nodes": 0},
            "tree": tree,
            "tree, with copies": {**tree, "copying": True},
        }
        drawn: list[tuple[str, str, dict[str, Any]]] = [
            ("chain", v, {"tree_nodes": 0}) for v in ("token", "block")
        ]
        drawn += [("tree", "point_mass", tree)]
        drawn += [("drawn tree", v, {"tree_nodes": 8}) for v in ("recursive", "traversal", "k_seq")]
        return found.network, chosen, [*drawn, ("chain with copies", "token", {"copying": True})]
    if isinstance(found, DiffusionProposer):
        steps = {"steps": 2}
        orders = {f"2 steps, {order}": {"steps": 2, "order": order} for order in ORDERS[1:]}
        chosen = {"1 step": {}, "2 steps": steps, **orders, "with copies": {"copying": True}}
        drawn = [("1 step", v, {}) for v in ("token", "block")] + [("2 steps", "block", steps)]
        drawn += [(name, "hybrid", how) for name, how in orders.items()]
        return found.drafter, chosen, [*drawn, ("with copies", "token", {"copying": True})]
    return found, {drafter: {}}, [(drafter, "point_mass", {})]


def of_methods(
    spec: str, names: str, drafters: dict[str, str], options: Any, say: Callable[[str], None]
) -> Ways:
    """Methods by their names, `all` among them, each with the verifier that `decode.eval` gives it; `say` gets a line for each
    that is left out. Read is `device`.

    Raises:
        UserError: an unknown method, a drafter that is not there, or one that keeps another law on purpose.
    """
    from align.target.loading import load_target

    asked = [name.strip() for name in names.split(",") if name.strip()]
    chosen, left_out = with_all(asked, drafters)
    methods = [_checked(name) for name in dict.fromkeys(chosen)]
    opened: dict[int, Parts] = {}

    def open_way(target: Target, verifier: str, method: Method) -> Decoder:
        if id(target) not in opened:
            opened[id(target)] = open_parts(methods, drafters, target)
        return build(_verified(method, verifier), opened[id(target)])

    def unbuildable(method: Method) -> str | None:
        """Why this target or these drafters don't let it decode."""
        try:
            open_way(target, verifier_of(method), method)
        except UserError as error:
            return str(error)
        return None

    def leave_out(why: Callable[[Method], str | None]) -> None:
        for method in list(methods):
            if reason := why(method):
                if method.name in asked:
                    raise UserError(reason)
                left_out.append(reason)
                methods.remove(method)

    leave_out(_unverifiable)
    check_parts(methods, drafters)
    target = load_target(spec, dtype="float32", device=options.device)
    leave_out(unbuildable)
    if not methods:
        raise UserError(f"--methods={names!r} names nothing to verify{nearest('', SYSTEMS)}")
    for line in left_out:
        say(f"left out: {line}")

    compared = {method.name: method for method in methods}
    drawn = [(m.name, verifier_of(m), m) for m in methods]
    return Ways(target, compared, drawn, list(compared), open_way)


def _checked(name: str) -> Method:
    if name.partition(":")[0] not in SYSTEMS:
        raise UserError(f"--methods: unknown method {name!r}{nearest(name, [*SYSTEMS, 'all'])}")
    return read_method(name)


def _unverifiable(method: Method) -> str | None:
    """Why there is nothing to verify: a line that names the method."""
    if not method.system.drafts:
        return f"method {method.name!r}: it drafts nothing"
    verifier = verifier_of(method)
    if verifier != "auto" and find(verifier).lossy:
        return f"method {method.name!r}: it changes the output's law on purpose"
    return None


def _verified(method: Method, verifier: str) -> Method:
    """The method under another verifier."""
    ways = tuple(_verified(way, verifier) for way in method.ways)
    return replace(method, options={**method.options, "verifier": verifier}, ways=ways)
