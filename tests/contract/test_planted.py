"""Bugs planted in the engine, one at a time, and those of `decode.verify --self-test`: the check that each belongs to sees it."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.engine import decoder as decoder_module
from decode.engine import loop as engine_module
from decode.engine import request as request_module
from decode.engine.decoder import Decoder
from decode.engine.detokenizer import UNFINISHED, TextStream
from decode.engine.request import Prefill, RequestRunner
from decode.proposers import base, block, overlapped, specdiff2
from decode.proposers.autoregressive import AutoregressiveProposer
from decode.proposers.block import BlockProposer, BlockProposerSession
from decode.proposers.diffusion import DiffusionProposer
from decode.proposers.lookup import CopyingProposer, CopyingSession, LookupProposer
from decode.proposers.overlapped import OverlappedProposer
from decode.proposers.specdiff2 import SpecDiff2Proposer
from decode.speculation import drafts, rounds, rules, sampling, tree, tree_drafts, verifiers
from decode.speculation.history import History
from decode.speculation.proposal import DraftProbs, Proposal
from decode.speculation.rounds import Round
from decode.speculation.rules import Outcomes
from decode.speculation.settings import Sampling
from decode.verification import commit, end_to_end, proposals, rows, self_test
from decode.verification.batches import Asked, RequestBatch
from decode.verification.cases import Cases
from decode.verification.pair import VerifyConfig
from decode.verification.rules import check_rules
from decode.verification.run import VerificationRun
from decode.verification.verdict import Tally
from specalign.kernels import choice
from specalign.kernels.linear import rows_library
from specalign.lm.cache import KVCache
from specalign.lm.debug import debug_model
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import block_network, diffusion_drafter
from tests.fakes import ScriptedDrafter, oracle

Patch = tuple[Any, str, Any]
PROMPTS = [[4, 90, 17, 203, 90, 17], [5, 9, 30], [1, 90, 17, 40, 60, 90]]


@pytest.fixture(scope="module")
def run() -> VerificationRun:
    target = load_target("debug", dtype="float32", device="cpu")
    own = debug_model("Llama")[0].eval()
    return VerificationRun(VerifyConfig(), Cases(target, {}, [], []), PROMPTS, lambda _: None, own)


@pytest.fixture(autouse=True)
def fresh(run: VerificationRun) -> Iterator[None]:
    yield
    run.tallies = {name: Tally(name) for name in run.tallies}
    run.recorded = []


def plants(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[[], list[Patch]]]:
    """A bug in place of a function, which it is given before that one's arguments."""

    def decorate(bug: Callable[..., Any]) -> Callable[[], list[Patch]]:
        @functools.wraps(bug)
        def plant() -> list[Patch]:
            original = getattr(owner, name)
            return [(owner, name, lambda *given, **options: bug(original, *given, **options))]

        return plant

    return decorate


# ---- rows ----


@plants(Target, "forward")
def positions_too_late(original: Any, self: Target, tokens_BL: Tensor, **options: Any) -> Any:
    """The tokens of a round are placed one position too late."""
    if "see_LL" in options:
        first = options["cache"].length + 1
        options["positions_BL"] = torch.arange(first, first + tokens_BL.shape[1])[None]
    return original(self, tokens_BL, **options)


@plants(Target, "forward")
def positions_by_index(original: Any, self: Target, tokens_BL: Tensor, **options: Any) -> Any:
    """The nodes of a tree are placed one after the other, not by their depth."""
    if "see_LL" in options:
        first = options["cache"].length
        options["positions_BL"] = torch.arange(first, first + tokens_BL.shape[1])[None]
    return original(self, tokens_BL, **options)


@plants(Target, "forward")
def chunks_from_the_start(original: Any, self: Target, tokens_BL: Tensor, **options: Any) -> Any:
    """Later chunks of a prompt are placed at its beginning."""
    if not options.get("logits", True):
        options["positions_BL"] = torch.arange(tokens_BL.shape[1])[None]
    return original(self, tokens_BL, **options)


@plants(request_module, "ancestors")
def deep_nodes_without_the_root(original: Any, parents: tuple[int, ...]) -> Tensor:
    see_MM: Tensor = original(parents).clone()
    see_MM[[i + 1 for i, depth in enumerate(tree.depths(parents)) if depth > 2], 0] = False
    return see_MM


@plants(KVCache, "keep")
def row_lost(original: Any, self: KVCache, start: int, at: Sequence[int]) -> None:
    """The last accepted token is rolled back in the cache."""
    original(self, start, at[: max(1, len(at) - 1)])


@plants(engine_module, "forward_batch")
def outputs_swapped(original: Any, running: Any, calls: Any) -> Any:
    """In a batch, requests get one another's logits."""
    out = original(running, calls)
    same = len({call.tokens_1L.shape for call in calls}) == 1
    return out[::-1] if same else out


@plants(RequestRunner, "prefill")
def other_first_row(original: Any, self: RequestRunner) -> Prefill[Round]:
    """The first token comes from the prompt's last token but one."""
    first = yield from original(self)
    at = torch.tensor([self.prompt[:-1]])
    output = self.target.forward(at, cache=self.target.new_cache(1, 40))
    return first._replace(logits_MV=output.logits_BLV[0, -1:])  # type: ignore[index]


@plants(History, "__init__")
def penalty_without_prompt(original: Any, self: History, *given: Any) -> None:
    original(self, *given)
    if self.seen_V is not None:
        self.seen_V.zero_()


@plants(History, "__init__")
def presence_of_prompt(
    original: Any, self: History, settings: Any, prompt: Any, *more: Any
) -> None:
    original(self, settings, prompt, *more)
    if self.written_V is not None:
        self.written_V[list(prompt)] = True


@plants(History, "__init__")
def minimum_one_longer(original: Any, self: History, *given: Any) -> None:
    original(self, *given)
    self.min_new_tokens += bool(self.min_new_tokens)


@plants(History, "_banned_mask")
def banned_at_the_root_alone(original: Any, self: History, depth: Sequence[int]) -> Tensor | None:
    found_V: Tensor | None = original(self, depth)
    if found_V is None or found_V.dim() == 2:
        return found_V
    return torch.stack([found_V if d == 0 else torch.zeros_like(found_V) for d in depth])


@plants(rounds, "probs")
def one_more_of_top_k(original: Any, z: Tensor, s: Sampling, *more: Any, **options: Any) -> Tensor:
    return original(z, replace(s, top_k=s.top_k + 1 if s.top_k else 0), *more, **options)


@plants(rounds, "probs")
def top_p_before_temperature(
    original: Any, z: Tensor, s: Sampling, *more: Any, **options: Any
) -> Tensor:
    if s.top_p == 1:
        return original(z, s, *more, **options)
    p = original(z.clone(), replace(s, temperature=1.0), *more) ** (1 / s.temperature)
    return p / p.sum(-1, keepdim=True)


def temperature_of_the_request_before() -> list[Patch]:
    last: list[float] = []

    def probs(z: Tensor, s: Sampling, *more: Any, **options: Any) -> Tensor:
        last.append(s.temperature)
        return sampling.probs(z, replace(s, temperature=last[-2:][0]), *more, **options)

    return [(rounds, "probs", probs)]


# ---- proposals ----


@plants(block, "DraftProbs")
def ids_shifted(original: Any, probs: Tensor, ids: Any = None) -> DraftProbs:
    """The columns of q belong to other tokens of the pruned vocabulary."""
    return original(probs, ids.roll(1))


@plants(block, "DraftProbs")
def q_smoothed(original: Any, probs: Tensor, ids: Any = None) -> DraftProbs:
    return original(0.9 * probs + 0.1 / probs.shape[1], ids)


@plants(block, "draw_tree")
def siblings_repeated(
    original: Any, parents: Any, law: Any, q_of: Any, siblings: Any, *more: Any
) -> Any:
    """Siblings are drawn i.i.d. and reported as drawn without replacement."""
    made = original(parents, law, q_of, "iid", *more)
    return made if made.siblings is None else replace(made, siblings=siblings)


@plants(BlockProposerSession, "propose")
def cut_by_its_own_draw(original: Any, self: BlockProposerSession, k: int) -> Any:
    """A chain is cut before a drawn token whose q is small."""
    made = original(self, k)
    if made.q is None:
        return made
    own = made.q.dense(260).gather(1, made.tokens_K[:, None])[:, 0].tolist()
    count = next((i for i, q in enumerate(own) if q < 0.3), len(own))
    return made.cut(count) if count else None


@plants(block, "draw_tree")
def cut_after_its_draw(original: Any, *given: Any) -> Any:
    """The drafts of a tree are drawn from q and reported with q after min-p."""
    made = original(*given)
    rows = sampling.probs(made.q.probs.log(), Sampling(1.0, min_p=0.5))
    return replace(made, q=DraftProbs(rows, made.q.ids))


@plants(specdiff2, "merge_chains")
def equal_candidates_left_out(original: Any, chains: Sequence[Proposal]) -> Proposal:
    return original([*{tuple(x.tokens_K.tolist()): x for x in chains}.values()])


@plants(CopyingSession, "propose")
def copied_if_drawn(original: Any, self: CopyingSession, k: int) -> Proposal | None:
    """A chain is drawn, and a copy that begins with its first token is proposed in its place."""
    copy: Proposal | None = original(self, k)
    if copy is None or copy.q is None or float(copy.q.probs.amax(1).min()) < 1:
        return copy
    drawn = self.inner.propose(min(k, self.proposer.inner.draft_tokens))
    return copy.cut(len(drawn)) if drawn and drawn.tokens_K[0] == copy.tokens_K[0] else drawn


# ---- rule ----


def residual_is_p() -> list[Patch]:
    """After a rejection the next token is drawn from p."""

    def rule(p_BMV: Tensor, given: Any) -> Outcomes:
        return rules.token(p_BMV, given)._replace(rest_BMV=p_BMV)

    wrong = replace(verifiers.VERIFIERS["token"], rule=rule)
    return [(verifiers, "VERIFIERS", {**verifiers.VERIFIERS, "token": wrong})]


@plants(drafts.Drafts, "q_BV")
def sibling_tested_with_the_first_q(_: Any, self: Any, i: Any, above_BN: Tensor) -> Tensor:
    """Of siblings with several q, each is tested with the first one's."""
    i = i if isinstance(i, int) else int(i[0])
    above = above_BN[0].tolist()
    return self.q()[:, above.index(above[i])]


def padding_removes_a_token() -> list[Patch]:
    """The padding of smaller trees in a batch changes what is left of p at the root."""
    return [(drafts.Drafts, "whole", True)]


@plants(rules, "visit_together")
def padding_is_visited(_: Any, *args: Any) -> Any:
    def zip_longest(*walks: Any, fillvalue: Any) -> Any:
        return itertools.zip_longest(*walks, fillvalue=(0, True))

    with mock.patch.object(tree, "zip_longest", zip_longest):
        return tree.visit_together.__wrapped__(*args)


@plants(choice, "verified_chain")
def kernel_reads_one_block(original: Any, p_MV: Tensor, *given: Any) -> Any:
    """The C kernel draws the next token from the first 512 tokens alone."""
    cut_MV = p_MV.clone()
    cut_MV[:, 512:] *= 1e-6
    return original(p_MV, *given)._replace(following=original(cut_MV, *given).following)


@plants(verifiers, "_chains_in_c")
def kernel_takes_one_less(original: Any, *given: Any) -> Any:
    """The C kernel accepts one draft less than it should."""
    found = original(*given)
    return found and found._replace(end_B=(found.end_B - 1).clamp(min=0))


# ---- randomness ----


def one_generator() -> list[Patch]:
    """Every request of a batch draws with the first one's generator."""
    original, first = RequestRunner._round, []

    def make_round(self: RequestRunner, *given: Any) -> Any:
        made = original(self, *given)
        first.append(made.generator)
        return made._replace(generator=first[0])

    return [(RequestRunner, "_round", make_round)]


def drafts_by_the_shared_generator() -> list[Patch]:
    def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
        return sampling.draw_at(weights, torch.rand(weights.shape[:-1]))

    return [
        (base, "draw", draw),
        (block, "uniform", lambda count, _: torch.rand(count, dtype=torch.float64)),
    ]


def _draw_with(numbers: Callable[[Tensor, torch.Generator], Tensor]) -> list[Patch]:
    def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
        return sampling.draw_at(weights, numbers(weights, generator))

    return [(base, "draw", draw), (tree_drafts, "draw", draw)]


def number_of_the_first_draw() -> list[Patch]:
    """Every draft of a request is drawn at the first one's number: siblings, unmasking steps, rounds."""
    first: dict[int, Tensor] = {}

    def numbers(weights: Tensor, generator: torch.Generator) -> Tensor:
        if id(generator) not in first:
            first[id(generator)] = sampling.uniform(1, generator)[0]
        return first[id(generator)].expand(weights.shape[:-1])

    return _draw_with(numbers)


def numbers_of_numpy() -> list[Patch]:
    """Drafts are drawn with a numpy generator that is reseeded at every draw."""

    def numbers(weights: Tensor, _: torch.Generator) -> Tensor:
        return torch.from_numpy(np.random.default_rng(0).random(weights.shape[:-1]))

    return _draw_with(numbers)


@plants(verifiers, "uniform")
def larger_of_two(original: Any, count: int, generator: torch.Generator) -> Tensor:
    return torch.maximum(original(count, generator), original(count, generator))


@plants(rounds, "depths")
def noise_of_the_round(_: Any, parents: tuple[int, ...]) -> list[int]:
    """Coupled draws of a round share the noise of its first position."""
    return [0] * len(parents)


@plants(request_module, "position_noise")
def seed_and_position_swapped(original: Any, seed: int, position: int, *more: Any) -> Tensor:
    return original(position, seed, *more)


@plants(RequestRunner, "_round")
def numbers_from_the_first_position(original: Any, self: RequestRunner, *args: Any) -> Round:
    """Every round begins with the number of the output's first position."""
    return original(self, *args)._replace(numbers_T=self.request.numbers_T)


@plants(rounds, "depths")
def numbers_by_node(original: Any, parents: tuple[int, ...]) -> list[int]:
    """A node takes the number of its index, not of its depth."""
    return [min(i + 1, max(original(parents))) for i in range(len(parents))]


@plants(decoder_module, "_sampling_of_each")
def one_seed_for_all(original: Any, one: Any, *more: Any) -> list[Sampling]:
    """The requests of a batch with one `Sampling` have the same seed."""
    return [original(one, *more)[0]] * more[-1]


# ---- commit and end ----


@plants(RequestRunner, "_append")
def accepted_token_dropped(original: Any, self: RequestRunner, tokens: list[int]) -> list[int]:
    return original(self, tokens if len(tokens) == 1 else tokens[1:])


@plants(RequestRunner, "_append")
def first_end_alone(original: Any, self: RequestRunner, tokens: list[int]) -> list[int]:
    """Of several end-of-sequence ids one alone ends the text."""
    self.eos = frozenset([max(self.eos)])
    return original(self, tokens)


@plants(RequestRunner, "_append")
def one_token_too_many(original: Any, self: RequestRunner, tokens: list[int]) -> list[int]:
    self.limit += len(self.out.tokens) + len(tokens) >= self.limit
    return original(self, tokens)


@plants(RequestRunner, "_append")
def other_reason(original: Any, self: RequestRunner, tokens: list[int]) -> list[int]:
    """A text that fills the context finishes with `length`."""
    self.full = "length"
    return original(self, tokens)


@plants(TextStream, "_cut")
def first_stop_listed(_: Any, self: TextStream, text: str) -> bool:
    """The text is cut at the stop string that is listed first, not at the earliest."""
    found = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
    if found:
        self.text, self.settled = text[: found[0]], len(self.tokens)
    return bool(found)


@plants(History, "__init__")
def minimum_bars_one_end(
    original: Any, self: History, settings: Any, prompt: Any, size: int, ends: Any, device: Any
) -> None:
    """Below the minimum length one of several end-of-sequence ids alone is barred."""
    original(self, settings, prompt, size, sorted(ends)[:1], device)


@plants(History, "extend")
def penalties_of_forty_tokens(original: Any, self: History, tokens: Sequence[int]) -> None:
    """Tokens after the first forty are not penalised."""
    original(self, tokens if self.count < 40 else [])


@plants(request_module, "position_noise")
def noise_of_64_positions(original: Any, seed: int, position: int, *more: Any) -> Tensor:
    """Coupled draws repeat their noise."""
    return original(seed, position % 64, *more)


@plants(TextStream, "_cut")
def stop_within_a_token(_: Any, self: TextStream, text: str) -> bool:
    """A stop string is found inside of one token alone."""
    found = [at for at in (text.find(stop, len(self.text)) for stop in self.stops) if at >= 0]
    if found:
        self.text, self.settled = text[: min(found)], len(self.tokens)
    return bool(found)


@plants(request_module, "special_tokens_in")
def special_tokens_alone(_: Any, stops: Any, tokenizer: Any) -> frozenset[int]:
    """A stop string that is a special token is not found."""
    return frozenset()


@plants(TextStream, "finish")
def half_lost_at_the_end(original: Any, self: TextStream) -> str:
    """A text that ends within a character loses the half."""
    self.settled = len(self.tokens)
    return original(self)


@plants(TextStream, "push")
def half_lost_between_rounds(original: Any, self: TextStream, token: int) -> bool:
    """The second half of a character is lost."""
    if self.decode(self.tokens[self.window :]).endswith(UNFINISHED):
        self.window = self.settled = len(self.tokens)
    return original(self, token)


@plants(TextStream, "_maybe_stop")
def stop_is_streamed(_: Any, self: TextStream) -> int:
    """The beginning of a stop string is streamed before the string is complete."""
    return 0


# ---- what they are seen with ----


def decoder(target: Target, kind: str) -> Decoder:
    network = block_network(target, "shared_kv", markov_rank=8)
    if kind == "tree":
        return Decoder(target, BlockProposer(network, tree_nodes=6))
    if kind in ("drawn pair", "drawn tree"):
        nodes = 2 if kind == "drawn pair" else 4
        proposer = BlockProposer(network, 3, tree_nodes=nodes, siblings="without_replacement")
        return Decoder(target, proposer, "traversal")
    if kind == "lookup":
        return Decoder(target, LookupProposer(3))
    if kind == "oracle":
        text = Decoder(target).generate(PROMPTS[0], max_new_tokens=16, sampling=REPEATED).tokens
        return Decoder(
            target, ScriptedDrafter("point", oracle([*PROMPTS[0], *text], wrong_every=5))
        )
    if kind == "candidates":
        standalone = diffusion_drafter(target, "masked_lm")
        return Decoder(target, SpecDiff2Proposer(standalone, 2, keep_q=True), "recursive")
    if kind == "copies":
        return Decoder(target, CopyingProposer(BlockProposer(network)), "token")
    if kind == "in the background":
        return Decoder(target, OverlappedProposer(AutoregressiveProposer(target)), "token")
    if kind in ("left_to_right", "confidence", "random"):
        return Decoder(
            target, DiffusionProposer(diffusion_drafter(target, "masked_lm"), steps=2, order=kind)
        )
    return Decoder(target, BlockProposer(network), kind)


REPEATED = Sampling(repetition_penalty=1.6)
SAMPLED = (
    Sampling(0.7, seed=1),
    Sampling(1.3, top_k=6, seed=2),
    Sampling(1.0, top_p=0.6, repetition_penalty=1.6, seed=4),
    Sampling(1.0, presence_penalty=1.5, banned=(17,), seed=5),
    Sampling(0.5, top_p=0.7, seed=6),
    Sampling(1.0, min_new_tokens=6, seed=7),
)


PENALISED = (SAMPLED[2], *[Sampling(1.0, top_p=0.6, repetition_penalty=1.6, seed=9)] * 2)
MIN_P = (Sampling(1.0, min_p=0.3, seed=3),)
TWO_TOKENS = tuple(
    Sampling(1.0, seed=seed, banned=tuple(i for i in range(260) if i not in (40, 90)))
    for seed in range(6)
)
GREEDY = (Sampling(), REPEATED, Sampling(presence_penalty=2.0))


@dataclass(frozen=True)
class Seen:
    """How a planted bug is seen: the check, the drafts, and how many requests share a forward pass."""

    check: str
    kind: str = "token"
    settings: tuple[Sampling, ...] = SAMPLED[:2]
    size: int = 3


BUGS: dict[Callable[[], list[Patch]], Seen] = {
    positions_too_late: Seen("rows", size=1),
    positions_by_index: Seen("rows", "tree", size=1),
    chunks_from_the_start: Seen("rows"),
    deep_nodes_without_the_root: Seen("rows", "drawn tree", size=1),
    row_lost: Seen("rows", "oracle", (REPEATED,), 1),
    outputs_swapped: Seen("rows"),
    other_first_row: Seen("rows"),
    penalty_without_prompt: Seen("rows", settings=SAMPLED[2:3]),
    presence_of_prompt: Seen("rows", settings=SAMPLED[3:4]),
    minimum_one_longer: Seen("rows", settings=SAMPLED[5:]),
    banned_at_the_root_alone: Seen("rows", settings=SAMPLED[3:4]),
    one_more_of_top_k: Seen("rows"),
    top_p_before_temperature: Seen("rows", settings=SAMPLED[4:5]),
    temperature_of_the_request_before: Seen("rows"),
    ids_shifted: Seen("proposals"),
    q_smoothed: Seen("proposals"),
    siblings_repeated: Seen("proposals", "drawn tree"),
    cut_by_its_own_draw: Seen("proposals"),
    cut_after_its_draw: Seen("proposals", "drawn tree"),
    equal_candidates_left_out: Seen("proposals", "candidates"),
    one_generator: Seen("randomness"),
    drafts_by_the_shared_generator: Seen("randomness"),
    number_of_the_first_draw: Seen("randomness", "drawn tree"),
    numbers_of_numpy: Seen("randomness", "confidence"),
    larger_of_two: Seen("randomness"),
    noise_of_the_round: Seen("randomness", "gumbel"),
    seed_and_position_swapped: Seen("randomness", "gumbel"),
    numbers_from_the_first_position: Seen("randomness", "tree"),
    numbers_by_node: Seen("randomness", "tree", TWO_TOKENS),
    minimum_bars_one_end: Seen("rows", settings=SAMPLED[5:]),
    accepted_token_dropped: Seen("commit", "oracle", (REPEATED,), 1),
    self_test.reused_numbers: Seen("randomness"),
    self_test.half_top_k: Seen("rows", "block"),
    self_test.no_min_p: Seen("rows", settings=MIN_P),
    self_test.rounded_logits: Seen("rows"),
    self_test.other_temperature: Seen("proposals"),
    self_test.swapped_states: Seen("rows", settings=PENALISED),
    self_test.stale_cache: Seen("rows", "tree", GREEDY),
    self_test.blind_tree: Seen("rows", "tree", GREEDY),
    self_test.penalty_of_the_text_alone: Seen("rows", "tree", GREEDY),
    self_test.always_accepted: Seen("randomness", "tree", GREEDY),
}


def name_of(bug: Callable[[], list[Patch]]) -> str:
    return bug.__name__


def skipped(check: str) -> list[Patch]:
    """What takes long in other checks than this one: fresh forward passes, enumerated drafts, requests decoded alone."""
    found: list[Patch] = []
    if check != "rows":
        found.append((rows, "check_rows", lambda *_: None))
    if check != "proposals":
        found.append((proposals, "check_proposal", lambda *_: None))
    if check != "randomness":
        found.append((VerificationRun, "_check_company", lambda *_: None))
    return found


def findings(run: VerificationRun, batch: RequestBatch, patches: list[Patch]) -> set[str]:
    """The checks that find a difference."""
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        run.check(batch)
    return {name for name, tally in run.tallies.items() if tally.findings}


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_bug_is_seen(run: VerificationRun, bug: Callable[[], list[Patch]]) -> None:
    seen = BUGS[bug]
    asked = [
        Asked(tuple(PROMPTS[i % 3]), one, 12 - i, eos=(90, 17) if one.min_new_tokens else None)
        for i, one in enumerate(seen.settings)
    ]
    batch = RequestBatch(
        seen.kind, decoder(run.target, seen.kind), tuple(asked), seen.size, chunk=4
    )
    assert seen.check in findings(run, batch, [*bug(), *skipped(seen.check)])


TOKENS = {copied_if_drawn: ("proposals", "copies"), one_seed_for_all: ("randomness", "token")}


@pytest.mark.parametrize("bug", TOKENS, ids=name_of)
def test_a_bug_is_seen_in_texts_of_two_tokens(
    run: VerificationRun, bug: Callable[[], list[Patch]]
) -> None:
    check, kind = TOKENS[bug]
    run.requests.letters = [90, 40]
    batch = RequestBatch(kind, decoder(run.target, kind), run.requests.of_letters(1))
    assert findings(run, batch, []) == set()
    assert check in findings(run, batch, bug())


def test_rounds_drafted_in_the_background_are_compared(run: VerificationRun) -> None:
    asked = tuple(Asked(tuple(PROMPTS[0]), one, 14) for one in SAMPLED[:2])
    batch = RequestBatch("background", decoder(run.target, "in the background"), asked)
    assert findings(run, batch, []) == set()
    assert "rows" in findings(run, batch, one_more_of_top_k())
    same_stream = [(overlapped, "_OWN_STREAM", 0)]
    assert "randomness" in findings(run, batch, same_stream)


def test_every_bug_of_the_self_test_is_planted() -> None:
    halves = {self_test.lost_half}
    assert {*self_test.BUGS.values()} <= {*BUGS, *RULES, *ENDS, *halves}


LONG: dict[Callable[[], list[Patch]], Seen] = {
    penalties_of_forty_tokens: Seen(
        "rows", "token", (Sampling(1.0, repetition_penalty=1.6, seed=4),)
    ),
    noise_of_64_positions: Seen("randomness", "gumbel", SAMPLED[:1]),
}


@pytest.mark.parametrize("bug", LONG, ids=name_of)
def test_a_bug_of_long_texts_is_seen(run: VerificationRun, bug: Callable[[], list[Patch]]) -> None:
    seen = LONG[bug]
    asked = Asked(tuple(PROMPTS[0]), seen.settings[0], 72, eos=())
    assert seen.check in findings(
        run,
        RequestBatch(seen.kind, decoder(run.target, seen.kind), (asked,), 1),
        [*bug(), *skipped(seen.check)],
    )


RULES = {
    residual_is_p: "token",
    sibling_tested_with_the_first_q: "recursive",
    padding_removes_a_token: "k_seq",
    padding_is_visited: "traversal",
    kernel_reads_one_block: "block",
    kernel_takes_one_less: "block",
    self_test.siblings_not_corrected: "recursive",
    self_test.forgotten_step: "hybrid",
}


@pytest.mark.parametrize("bug", RULES, ids=name_of)
def test_a_bug_of_a_rule_is_seen(bug: Callable[[], list[Patch]]) -> None:
    if bug in (kernel_takes_one_less, kernel_reads_one_block) and rows_library() is None:
        pytest.skip("no C kernels")
    tally = Tally("rule")
    with ExitStack() as stack:
        for patch in bug():
            stack.enter_context(mock.patch.object(*patch))
        check_rules(tally, seeds=2, names={RULES[bug]})
    assert tally.findings


ENDS: dict[Callable[[], list[Patch]], Callable[[Target, list[int]], Asked]] = {
    first_end_alone: lambda _, text: Asked(tuple(PROMPTS[0]), REPEATED, 12, eos=(text[2], 259)),
    self_test.past_the_end: lambda _, text: Asked(tuple(PROMPTS[0]), REPEATED, 8, eos=(text[2],)),
    one_token_too_many: lambda _, text: Asked(tuple(PROMPTS[0]), REPEATED, 4),
    other_reason: lambda _, text: Asked(
        tuple(PROMPTS[0]), REPEATED, 12, context=len(PROMPTS[0]) + 4
    ),
    first_stop_listed: lambda target, text: Asked(
        tuple(PROMPTS[0]),
        REPEATED,
        12,
        stop=(target.detokenize(text)[4:6], target.detokenize(text)[3:5]),
    ),
    stop_within_a_token: lambda target, text: Asked(
        tuple(PROMPTS[0]), REPEATED, 12, stop=(target.detokenize(text)[2:5],)
    ),
    stop_is_streamed: lambda target, text: Asked(
        tuple(PROMPTS[0]), REPEATED, 12, stop=(target.detokenize(text)[2:5],)
    ),
    special_tokens_alone: lambda target, _: Asked(
        tuple(PROMPTS[0]),
        Sampling(
            1.0,
            seed=3,
            banned=tuple(i for i in range(target.vocab_size) if i not in (90, _special(target))),
        ),
        12,
        stop=(target.tokenizer.all_special_tokens[0],),
        eos=(),
    ),
}


def _special(target: Target) -> int:
    return int(target.tokenizer.all_special_ids[0])


@pytest.mark.parametrize("bug", ENDS, ids=name_of)
def test_a_wrong_end_is_seen(run: VerificationRun, bug: Callable[[], list[Patch]]) -> None:
    text = Decoder(run.target).generate(PROMPTS[0], max_new_tokens=12, sampling=REPEATED).tokens
    batch = RequestBatch("end", decoder(run.target, "oracle"), (ENDS[bug](run.target, text),), 1)
    assert findings(run, batch, []) == set()
    assert "commit" in findings(run, batch, bug())


@pytest.mark.parametrize(
    "bug", [self_test.lost_half, half_lost_at_the_end, half_lost_between_rounds], ids=name_of
)
def test_a_lost_half_character_is_seen(
    run: VerificationRun, bug: Callable[[], list[Patch]]
) -> None:
    commit.check_texts(run.target, run.tallies["commit"])
    assert not run.tallies["commit"].findings
    with ExitStack() as stack:
        for patch in bug():
            stack.enter_context(mock.patch.object(*patch))
        commit.check_texts(run.target, run.tallies["commit"])
    assert run.tallies["commit"].findings


@pytest.mark.parametrize("bug", [q_smoothed, residual_is_p], ids=name_of)
def test_the_joint_law_sees_a_bug(run: VerificationRun, bug: Callable[[], list[Patch]]) -> None:
    tally = run.tallies["end_to_end"]
    with ExitStack() as stack:
        for patch in bug():
            stack.enter_context(mock.patch.object(*patch))
        made = decoder(run.target, "token")
        sampling = Sampling(1.2, top_k=2, seed=1)
        end_to_end.check_joint_law("chain", made, PROMPTS[0], run.reference, tally, sampling)
    assert tally.findings
