"""The Python API: `decode.load(target, drafter).generate(prompt)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from align.drafters.block import BlockDrafter
from align.drafters.diffusion import DiffusionDrafter
from align.drafters.standalone import load_standalone, open_drafter
from align.errors import UserError, nearest
from align.target import DEFAULT_TARGET, Target, load_target, load_tokenizer
from decode.drafters.autoregressive import AutoregressiveDrafter, AutoregressiveWriter
from decode.drafters.base import Drafter
from decode.drafters.block import BlockProposer
from decode.drafters.copying import CopyingDrafter
from decode.drafters.diffusion import ORDERS, DiffusionProposer, DiffusionWriter
from decode.drafters.lookup import LookupDrafter
from decode.drafters.translated import TranslatedDrafter
from decode.engine import Engine, run_together
from decode.generation import Generation
from decode.proposal import Siblings
from decode.sampling import Sampling
from decode.tree import MOST_NODES
from decode.verifiers import check_pair, choose, find
from decode.vocabularies import VocabularyMap

Prompt = str | list[dict[str, str]] | list[int]
_NAMES = ("lookup", "none")


class Decoder:
    """A target and what drafts for it. `generate` may be called any number of times; nothing is kept in
    between.

    Args:
        target: the model whose output law is kept.
        drafter: None = plain decoding.
        verifier: a name in `decode.verifiers.VERIFIERS`, or auto: greedy at temperature 0, traversal (on
            a chain: block verification) where the drafts have a q, else point_mass.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, verifier: str = "auto") -> None:
        if verifier != "auto":
            find(verifier)
        self.target, self.drafter, self.verifier = target, drafter, verifier

    @property
    def name(self) -> str:
        """The drafter's name; `plain` without one."""
        return self.drafter.name if self.drafter is not None else "plain"

    def verifier_for(self, sampling: Sampling) -> str:
        """The verifier used under these settings.

        Raises:
            UserError: it would change the target's output law: why, and which verifiers fit.
        """
        law = self.drafter.law(sampling) if self.drafter is not None else "point"
        name = choose(law, sampling.temperature) if self.verifier == "auto" else self.verifier
        return name if self.drafter is None else check_pair(law, name, sampling.temperature).name

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        stream: Callable[[str], object] | None = None,
        record_gaps: bool = False,
        raw: bool = False,
    ) -> Generation:
        """Continue a prompt.

        Args:
            prompt: a user message, a conversation (role, content), or tokens taken as they are.
            max_new_tokens: the output ends after this many, at EOS, at a stop string or when the context is
                full.
            sampling: default greedy.
            stop: the text ends before the first of these strings. They are looked for in the text, so special
                tokens, which it leaves out, can't be matched.
            stream: called with pieces of text; they never hold half a character and make up
                `Generation.text`. An exception out of it ends the generation and is passed on.
            record_gaps: keep each token's top-2 logit gap.
            raw: a string is plain text, no chat template around it.

        Raises:
            UserError: nothing can be generated from this, or not without changing the target's output law.
        """
        engine = self._engine(prompt, max_new_tokens, sampling, stop, stream, record_gaps, raw)
        return engine.run()

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int = 32,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: str | Sequence[str] = (),
        raw: bool = False,
    ) -> list[Generation]:
        """Continue many prompts, `batch_size` at a time in one target call; as one ends the next begins.

        Every output is the one that `generate` gives for its prompt, sampling and seed, whatever stands beside it (but for
        the rounding of products over more rows). Times of a request count what it shared with others.

        Args:
            prompts, max_new_tokens, sampling, stop, raw: as in `generate`; `max_new_tokens` and `sampling` one for all, or
                one for each. With one `Sampling` for all, the seed counts on from request to request.

        Raises:
            UserError: as `generate`, before anything is generated.
        """
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise UserError(f"batch_size={batch_size!r}: must be a whole number, at least 1")
        if sampling is None or isinstance(sampling, Sampling):
            base = sampling or Sampling()
            settings = [replace(base, seed=(base.seed + i) % 2**63) for i in range(len(prompts))]
        else:
            settings = list(sampling)
        limits = (
            list(max_new_tokens) if isinstance(max_new_tokens, Sequence) else [max_new_tokens] * len(prompts)
        )
        for name, each in (("sampling", settings), ("max_new_tokens", limits)):
            if len(each) != len(prompts):
                raise UserError(f"{name}: {len(each)} for {len(prompts)} prompts")
        engines = [
            self._engine(prompt, limit, own, stop, None, False, raw)
            for prompt, limit, own in zip(prompts, limits, settings, strict=True)
        ]
        run_together(engines, batch_size)
        return [engine.out for engine in engines]

    def _engine(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampling: Sampling | None,
        stop: str | Sequence[str],
        stream: Callable[[str], object] | None,
        record_gaps: bool,
        raw: bool,
    ) -> Engine:
        sampling = sampling or Sampling()
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens!r}: must be a whole number, at least 1")
        if not all(isinstance(s, str) and s for s in stops):
            raise UserError(f"stop={stop!r}: must be non-empty strings")
        verifier = self.verifier_for(sampling)
        check_banned(sampling, self.target)
        if sampling.min_new_tokens > max_new_tokens:
            raise UserError(
                f"min_new_tokens={sampling.min_new_tokens}: more than max_new_tokens={max_new_tokens}"
            )
        tokens = prompt_tokens(self.target, prompt, raw)
        return Engine(
            self.target, tokens, max_new_tokens, sampling, self.drafter, verifier, stops, stream, record_gaps
        )


def check_banned(sampling: Sampling, target: Target) -> None:
    """Raises UserError where banned tokens are not the target's, or leave nothing to say."""
    outside = [i for i in sampling.banned if i >= target.vocab_size]
    if outside:
        raise UserError(f"banned: token {outside[0]} is not within 0..{target.vocab_size - 1}")
    held_back = target.eos_ids if sampling.min_new_tokens else ()
    if len({*sampling.banned, *held_back}) == target.vocab_size:
        raise UserError("banned: every token is, so nothing could be said")


def prompt_tokens(target: Target, prompt: Prompt, raw: bool = False) -> list[int]:
    """A prompt as the target's tokens, checked.

    Raises:
        UserError: empty, malformed, or as long as the context.
    """
    if isinstance(prompt, str):
        _check_text(prompt, "the prompt")
        tokens = target.text_tokens(prompt) if raw else _chat(target, prompt)
    elif not isinstance(prompt, list | tuple) or not prompt:
        raise UserError(f"the prompt must be text, messages or tokens, not {_short(prompt)}")
    elif isinstance(prompt[0], dict):
        tokens = _chat(target, [_message(m) for m in prompt])
    else:
        tokens = [_token(t, target.vocab_size) for t in prompt]
    if not tokens:
        raise UserError("the prompt is empty")
    limit = target.context_limit
    if len(tokens) >= limit:
        raise UserError(
            f"the prompt has {len(tokens)} tokens: the target's context of {limit} leaves no room"
        )
    return tokens


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
        raise UserError(f"a message needs the strings 'role' and 'content', not {_short(message)}")
    _check_text(message["content"], f"the {_short(message['role'])} message", empty=True)
    return message


def _token(token: Any, vocab_size: int) -> int:
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise UserError(f"prompt token {_short(token)} is not a whole number within 0..{vocab_size - 1}")
    return token


def _check_text(text: str, what: str, empty: bool = False) -> None:
    if not empty and not text.strip():
        raise UserError(f"{what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not valid Unicode at character {error.start}") from None


def _chat(target: Target, messages: str | list[dict[str, str]]) -> list[int]:
    from jinja2 import TemplateError

    try:
        return target.chat_tokens(messages)
    except TemplateError as error:
        raise UserError(f"the target's chat template refuses these messages: {error}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def load(
    target: str | Target = DEFAULT_TARGET,
    drafter: str | Path | Drafter | BlockDrafter | DiffusionDrafter | None = None,
    verifier: str = "auto",
    *,
    dtype: str = "auto",
    device: str = "auto",
    draft_tokens: int | None = None,
    tree_nodes: int | None = None,
    copying: bool = False,
    steps: int = 1,
    order: str = "left_to_right",
    drafter_tokenizer: str | Path | None = None,
    method: str | None = None,
) -> Decoder:
    """A decoder for a target.

    Args:
        target: hub id, folder, GGUF file or `debug`; or one already loaded.
        drafter: a trained drafter's folder or hub id, `lookup`, `none` or None (plain decoding), or one
            already loaded.
        verifier: see `Decoder`.
        dtype, device: where `target` is to be loaded; see `align.target.load_target`.
        draft_tokens: draft at most this many tokens ahead; default: the drafter's own number.
        tree_nodes: verify this many drafted tokens a call, branching; 0 = a chain of `draft_tokens`. Default:
            by the temperature (`decode.drafters.block`). For verifiers that test drafts which were drawn: a chain, and
            trees are drawn with the siblings that the verifier takes.
        steps, order: of standalone drafters: how many passes unmask a draft, and in which order
            (`decode.drafters.diffusion`).
        drafter_tokenizer: hub id or folder of the tokenizer of a standalone drafter whose vocabulary is not the target's.
        copying: where the text repeats itself, copy instead of drafting (`decode.drafters.copying`).
        method: a system by name with its options, `specdiff:steps=4` (`decode.systems`); `drafter` is then what it is made of,
            FOLDER or KIND=FOLDER,…, and no other option of drafting goes with it.

    Raises:
        UserError: what can't be found, read or combined.
    """
    if method is not None:
        from decode.methods import open_method, read_method

        others = (draft_tokens, tree_nodes, drafter_tokenizer, verifier, steps, order, copying)
        if others != (None, None, None, "auto", 1, ORDERS[0], False):
            raise UserError(
                f"method={method!r} takes its options behind colons ({method.split(':')[0]}:gamma=4)"
            )
        read_method(method)
        where = load_target(target, dtype=dtype, device=device) if isinstance(target, str) else target
        return open_method(method, where, None if drafter is None else str(drafter))
    if draft_tokens is not None and draft_tokens < 1:
        raise UserError(f"draft_tokens={draft_tokens!r}: must be at least 1")
    if tree_nodes is not None and not 0 <= tree_nodes <= MOST_NODES:
        raise UserError(f"tree_nodes={tree_nodes!r}: must be 0 (a chain) to {MOST_NODES}")
    if steps < 1:
        raise UserError(f"steps={steps!r}: must be at least 1")
    if order not in ORDERS:
        raise UserError(f"order={order!r} is unknown{nearest(order, ORDERS)}")
    if verifier != "auto":
        find(verifier)
    if isinstance(drafter, str | Path):
        _check_drafter(str(drafter))
    if isinstance(target, str):
        target = load_target(target, dtype=dtype, device=device)
    if tree_nodes is None and target.chains_only:
        tree_nodes = 0
    siblings: Siblings | None = None
    if verifier != "auto" and "point" not in find(verifier).laws:  # drafts have to be drawn
        tree_nodes = tree_nodes or 0
        fitting = find(verifier).siblings
        siblings = next((x for x in ("without_replacement", "iid") if x in fitting), None)
    if isinstance(drafter, str | Path) and drafter not in _NAMES:
        drafter = _read(drafter, target, drafter_tokenizer, draft_tokens)
    if isinstance(drafter, DiffusionDrafter):
        _check_masks(drafter)
        drafter = DiffusionProposer(drafter, draft_tokens, steps, order, False, tree_nodes or 0, siblings)
    elif steps != 1 or order != ORDERS[0]:
        raise UserError(
            "steps and order are a standalone drafter's (DDiT, masked language model): this one has none"
        )
    found = _drafter(drafter, draft_tokens, tree_nodes, siblings)
    if copying and found is not None:
        found = (
            CopyingDrafter(found)
            if draft_tokens is None
            else CopyingDrafter(found, draft_tokens, draft_tokens)
        )
    return Decoder(target, found, verifier)


def open_part(folder: str, role: str, target: Target) -> Any:
    """A trained drafter for `target`, of a kind of `decode.systems.ROLES`.

    Raises:
        UserError: not found, or not of that kind.
    """
    if role == "autoregressive":
        return load_target(folder, dtype=target.dtype_name, device=str(target.device))
    _check_drafter(folder)
    found = _read(folder, target, None, None)
    wanted = DiffusionDrafter if role == "diffusion" else BlockDrafter
    if not isinstance(found, wanted):
        raise UserError(f"--drafter {role}={folder}: that is no drafter of the kind {role}")
    if isinstance(found, DiffusionDrafter):
        _check_masks(found)
    return found


def _check_masks(drafter: DiffusionDrafter) -> None:
    if drafter.mask_id < 0:
        raise UserError(
            "the drafter undoes uniform noise and has no masks to draft from: absorbing ones have"
        )


def _read(
    spec: str | Path, target: Target, tokenizer: str | Path | None, draft_tokens: int | None
) -> Drafter | BlockDrafter | DiffusionDrafter:
    """A trained drafter from disk, ready for `target`; with a tokenizer of its own behind a translation."""
    from decode.methods import role_of

    causal = (
        open_part(str(spec), "autoregressive", target) if role_of(str(spec)) == "autoregressive" else None
    )
    more = () if draft_tokens is None else (draft_tokens,)
    if tokenizer is not None:
        own = load_tokenizer(tokenizer)
        inner = (
            AutoregressiveWriter(causal, *more) if causal else _writer(spec, target, len(own), draft_tokens)
        )
        return TranslatedDrafter(inner, VocabularyMap(own, target.tokenizer), draft_tokens)
    if causal:
        return AutoregressiveDrafter(causal, *more)
    drafter = open_drafter(spec, target)
    if isinstance(drafter, BlockDrafter):
        drafter = drafter.to(target.dtype)
        if target.fast:
            drafter.lighten()
    return drafter


def _writer(spec: str | Path, target: Target, tokens: int, draft_tokens: int | None) -> DiffusionWriter:
    drafter = load_standalone(spec, target, tokens)
    _check_masks(drafter)
    return DiffusionWriter(drafter, draft_tokens)


def _check_drafter(spec: str) -> None:
    """Raises UserError, before the target is loaded, for a drafter that is not there."""
    folder = Path(spec).expanduser()
    if spec in _NAMES or folder.is_file() or any((folder / x).exists() for x in ("config.json", ".hydra")):
        return
    if folder.is_dir():
        raise UserError(f"drafter {spec!r}: no config.json in that folder")
    if spec.count("/") != 1 or spec.startswith((".", "/", "~")):  # else perhaps a hub id
        known = "" if "/" in spec else nearest(spec, _NAMES)
        raise UserError(f"drafter {spec!r}: neither a folder nor a known name{known}")


def _drafter(
    drafter: str | Path | Drafter | BlockDrafter | None,
    draft_tokens: int | None,
    tree_nodes: int | None,
    siblings: Siblings | None,
) -> Drafter | None:
    if drafter is None or drafter == "none":
        return None
    if drafter == "lookup":
        return LookupDrafter(draft_tokens) if draft_tokens else LookupDrafter()
    if isinstance(drafter, BlockDrafter):
        return BlockProposer(drafter, draft_tokens, tree_nodes, siblings)
    assert not isinstance(drafter, str | Path)
    return drafter
