"""Bugs planted in the engine, one at a time, and those of `decode.verify --self-test`: the check that each belongs to sees it."""

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
from decode.proposers import base, block, specdiff2
from decode.proposers.autoregressive import AutoregressiveProposer
from decode.proposers.block import BlockProposer, BlockProposerSession
from decode.proposers.diffusion import DiffusionProposer
from decode.proposers.lookup import CopyingProposer, CopyingSession
from decode.proposers.overlapped import OverlappedProposer
from decode.proposers.specdiff2 import SpecDiff2Proposer
from decode.speculation import drafts, rounds, rules, sampling, tree, tree_drafts, verifiers
from decode.speculation.history import History
from decode.speculation.proposal import DraftProbs, Proposal
from decode.speculation.rounds import Round
from decode.speculation.rules import Outcomes
from decode.speculation.settings import Sampling
from decode.verification import end_to_end, proposals, rows, self_test
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


# ---- rows ----


def positions_too_late(late: int = 1) -> list[Patch]:
    """The tokens of a round are placed one position too late."""
    original = Target.forward

    def forward(self: Target, tokens_BL: Tensor, **options: Any) -> Any:
        if "see_LL" in options:
            first = options["cache"].length + late
            options["positions_BL"] = torch.arange(first, first + tokens_BL.shape[1])[None]
        return original(self, tokens_BL, **options)

    return [(Target, "forward", forward)]


def chunks_from_the_start() -> list[Patch]:
    """Later chunks of a prompt are placed at its beginning."""
    original = Target.forward

    def forward(self: Target, tokens_BL: Tensor, **options: Any) -> Any:
        if not options.get("logits", True):
            options["positions_BL"] = torch.arange(tokens_BL.shape[1])[None]
        return original(self, tokens_BL, **options)

    return [(Target, "forward", forward)]


def deep_nodes_without_the_root() -> list[Patch]:
    original = request_module.ancestors

    def ancestors(parents: tuple[int, ...]) -> Tensor:
        see_MM = original(parents).clone()
        see_MM[[i + 1 for i, depth in enumerate(tree.depths(parents)) if depth > 2], 0] = False
        return see_MM

    return [(request_module, "ancestors", ancestors)]


def positions_by_index() -> list[Patch]:
    """The nodes of a tree are placed one after the other, not by their depth."""
    return positions_too_late(late=0)


def row_lost() -> list[Patch]:
    """The last accepted token is rolled back in the cache."""
    original = KVCache.keep
    return [
        (KVCache, "keep", lambda self, start, at: original(self, start, at[: max(1, len(at) - 1)]))
    ]


def outputs_swapped() -> list[Patch]:
    """In a batch, requests get one another's logits."""
    original = engine_module.forward_batch

    def forward(running: Any, calls: Any) -> Any:
        out = original(running, calls)
        same = len({call.tokens_1L.shape for call in calls}) == 1
        return out[::-1] if same else out

    return [(engine_module, "forward_batch", forward)]


def other_first_row() -> list[Patch]:
    """The first token comes from the prompt's last token but one."""
    original = RequestRunner.prefill

    def prefill(self: RequestRunner) -> Prefill[Round]:
        first = yield from original(self)
        at = torch.tensor([self.prompt[:-1]])
        output = self.target.forward(at, cache=self.target.new_cache(1, 40))
        return first._replace(logits_MV=output.logits_BLV[0, -1:])  # type: ignore[index]

    return [(RequestRunner, "prefill", prefill)]


def _history(change: Callable[[History, Sequence[int]], None]) -> list[Patch]:
    original = History.__init__

    def init(self: History, settings: Any, prompt: Any, *more: Any) -> None:
        original(self, settings, prompt, *more)
        change(self, prompt)

    return [(History, "__init__", init)]


def penalty_without_prompt() -> list[Patch]:
    def change(self: History, prompt: Sequence[int]) -> None:
        if self.seen_V is not None:
            self.seen_V.zero_()

    return _history(change)


def presence_of_prompt() -> list[Patch]:
    def change(self: History, prompt: Sequence[int]) -> None:
        if self.written_V is not None:
            self.written_V[list(prompt)] = True

    return _history(change)


def minimum_one_longer() -> list[Patch]:
    def change(self: History, prompt: Sequence[int]) -> None:
        self.min_new_tokens += bool(self.min_new_tokens)

    return _history(change)


def banned_at_the_root_alone() -> list[Patch]:
    original = History._banned_mask

    def barred(self: History, depth: Sequence[int]) -> Tensor | None:
        found_V = original(self, depth)
        if found_V is None or found_V.dim() == 2:
            return found_V
        return torch.stack([found_V if d == 0 else torch.zeros_like(found_V) for d in depth])

    return [(History, "_banned_mask", barred)]


def _probs(change: Callable[..., Tensor]) -> list[Patch]:
    return [(rounds, "probs", change)]


def one_more_of_top_k() -> list[Patch]:
    def probs(z: Tensor, s: Sampling, *more: Any, **options: Any) -> Tensor:
        return sampling.probs(z, replace(s, top_k=s.top_k + 1 if s.top_k else 0), *more, **options)

    return _probs(probs)


def top_p_before_temperature() -> list[Patch]:
    def probs(z: Tensor, s: Sampling, *more: Any, **options: Any) -> Tensor:
        if s.top_p == 1:
            return sampling.probs(z, s, *more, **options)
        p = sampling.probs(z.clone(), replace(s, temperature=1.0), *more) ** (1 / s.temperature)
        return p / p.sum(-1, keepdim=True)

    return _probs(probs)


def temperature_of_the_request_before() -> list[Patch]:
    last: list[float] = []

    def probs(z: Tensor, s: Sampling, *more: Any, **options: Any) -> Tensor:
        last.append(s.temperature)
        return sampling.probs(z, replace(s, temperature=last[-2:][0]), *more, **options)

    return _probs(probs)


# ---- proposals ----


def _reported(change: Callable[[Tensor, Any], Any]) -> list[Patch]:
    original = block.DraftProbs
    return [(block, "DraftProbs", lambda probs, ids=None: original(*change(probs, ids)))]


def ids_shifted() -> list[Patch]:
    """The columns of q belong to other tokens of the pruned vocabulary."""
    return _reported(lambda probs, ids: (probs, ids.roll(1)))


def q_smoothed() -> list[Patch]:
    return _reported(lambda probs, ids: (0.9 * probs + 0.1 / probs.shape[1], ids))


def q_of_the_next_position() -> list[Patch]:
    return _reported(lambda probs, ids: (probs.roll(-1, 0), ids))


def siblings_repeated() -> list[Patch]:
    """Siblings are drawn i.i.d. and reported as drawn without replacement."""
    original = block.draw_tree

    def draw_tree(parents: Any, law: Any, q_of: Any, siblings: Any, *more: Any) -> Any:
        made = original(parents, law, q_of, "iid", *more)
        return made if made.siblings is None else replace(made, siblings=siblings)

    return [(block, "draw_tree", draw_tree)]


def cut_by_its_own_draw() -> list[Patch]:
    """A chain is cut before a drawn token whose q is small."""
    original = BlockProposerSession.propose

    def propose(self: BlockProposerSession, k: int) -> Any:
        made = original(self, k)
        if made.q is None:
            return made
        own = made.q.dense(260).gather(1, made.tokens_K[:, None])[:, 0].tolist()
        count = next((i for i, q in enumerate(own) if q < 0.3), len(own))
        return made.cut(count) if count else None

    return [(BlockProposerSession, "propose", propose)]


def cut_after_its_draw() -> list[Patch]:
    """The drafts of a tree are drawn from q and reported with q after min-p."""
    original = block.draw_tree

    def draw_tree(*given: Any) -> Any:
        made = original(*given)
        rows = sampling.probs(made.q.probs.log(), Sampling(1.0, min_p=0.5))
        return replace(made, q=DraftProbs(rows, made.q.ids))

    return [(block, "draw_tree", draw_tree)]


def equal_candidates_left_out() -> list[Patch]:
    original = specdiff2.merge_chains

    def merge(chains: Sequence[Proposal]) -> Proposal:
        return original([*{tuple(x.tokens_K.tolist()): x for x in chains}.values()])

    return [(specdiff2, "merge_chains", merge)]


def copied_if_drawn() -> list[Patch]:
    """A chain is drawn, and a copy that begins with its first token is proposed in its place."""
    original = CopyingSession.propose

    def propose(self: CopyingSession, k: int) -> Proposal | None:
        copy = original(self, k)
        if copy is None or copy.q is None or float(copy.q.probs.amax(1).min()) < 1:
            return copy
        drawn = self.inner.propose(min(k, self.proposer.inner.draft_tokens))
        return copy.cut(len(drawn)) if drawn and drawn.tokens_K[0] == copy.tokens_K[0] else drawn

    return [(CopyingSession, "propose", propose)]


# ---- rule ----


def _rule(name: str, change: Callable[[Outcomes, Tensor, Any], Outcomes]) -> list[Patch]:
    one = verifiers.VERIFIERS[name]
    original = one.rule
    assert original is not None

    def rule(p_BMV: Tensor, given: Any) -> Outcomes:
        return change(original(p_BMV.clone(), given), p_BMV, given)

    changed = {**verifiers.VERIFIERS, name: replace(one, rule=rule)}
    return [(verifiers, "VERIFIERS", changed)]


def residual_is_p() -> list[Patch]:
    """After a rejection the next token is drawn from p."""
    return _rule("token", lambda out, p_BMV, _: out._replace(rest_BMV=p_BMV.clone()))


def last_row_of_the_parent() -> list[Patch]:
    """The token after a fully accepted chain is drawn from the row before."""

    def change(out: Outcomes, p_BMV: Tensor, _: Any) -> Outcomes:
        rest = out.rest_BMV.clone()
        rest[:, -1] = p_BMV[:, -2]
        return out._replace(rest_BMV=rest)

    return _rule("token", change)


def accepted_too_often() -> list[Patch]:
    """A token is accepted with the root of its probability."""
    original = rules.accept_probability
    return [(rules, "accept_probability", lambda p, q: original(p, q).sqrt())]


def residual_not_clamped() -> list[Patch]:
    return [(rules, "residual", lambda p, q: rules.fall_back_to_p((p - q).abs(), p))]


def sibling_tested_with_the_first_q() -> list[Patch]:
    """Of siblings with several q, each is tested with the first one's."""

    def q_BV(self: Any, i: Any, above_BN: Tensor) -> Tensor:
        i = i if isinstance(i, int) else int(i[0])
        above = above_BN[0].tolist()
        return self.q()[:, above.index(above[i])]

    return [(drafts.Drafts, "q_BV", q_BV)]


def padding_removes_a_token() -> list[Patch]:
    """The padding of smaller trees in a batch changes what is left of p at the root."""
    return [(drafts.Drafts, "whole", True)]


def padding_is_visited() -> list[Patch]:
    def visit_together(*args: Any) -> Any:
        def zip_longest(*walks: Any, fillvalue: Any) -> Any:
            return itertools.zip_longest(*walks, fillvalue=(0, True))

        with mock.patch.object(tree, "zip_longest", zip_longest):
            return tree.visit_together.__wrapped__(*args)

    return [(rules, "visit_together", visit_together)]


def kernel_reads_one_block() -> list[Patch]:
    """The C kernel draws the next token from the first 512 tokens alone."""
    original = choice.verified_chain

    def verified(p_MV: Tensor, *given: Any) -> Any:
        cut_MV = p_MV.clone()
        cut_MV[:, 512:] *= 1e-6
        return original(p_MV, *given)._replace(following=original(cut_MV, *given).following)

    return [(choice, "verified_chain", verified)]


def kernel_takes_one_less() -> list[Patch]:
    """The C kernel accepts one draft less than it should."""
    original = verifiers._chains_in_c

    def chains(*given: Any) -> Any:
        found = original(*given)
        return found and found._replace(end_B=(found.end_B - 1).clamp(min=0))

    return [(verifiers, "_chains_in_c", chains)]


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


def larger_of_two() -> list[Patch]:
    original = sampling.uniform

    def uniform(count: int, generator: torch.Generator) -> Tensor:
        return torch.maximum(original(count, generator), original(count, generator))

    return [(verifiers, "uniform", uniform)]


def noise_of_the_round() -> list[Patch]:
    """Coupled draws of a round share the noise of its first position."""
    return [(rounds, "depths", lambda parents: [0] * len(parents))]


def seed_and_position_swapped() -> list[Patch]:
    original = sampling.position_noise
    swapped = lambda seed, position, *more: original(position, seed, *more)  # noqa: E731
    return [(request_module, "position_noise", swapped)]


def numbers_from_the_first_position() -> list[Patch]:
    """Every round begins with the number of the output's first position."""
    original = RequestRunner._round

    def round_of(self: RequestRunner, *args: Any) -> Round:
        return original(self, *args)._replace(numbers_T=self.request.numbers_T)

    return [(RequestRunner, "_round", round_of)]


def numbers_by_node() -> list[Patch]:
    """A node takes the number of its index, not of its depth."""
    original = rounds.depths

    def depths(parents: tuple[int, ...]) -> list[int]:
        return [min(i + 1, max(original(parents))) for i in range(len(parents))]

    return [(rounds, "depths", depths)]


def one_seed_for_all() -> list[Patch]:
    """The requests of a batch with one `Sampling` have the same seed."""
    original = decoder_module._sampling_of_each
    return [
        (
            decoder_module,
            "_sampling_of_each",
            lambda one, *more: [original(one, *more)[0]] * more[-1],
        )
    ]


# ---- commit and end ----


def accepted_token_dropped() -> list[Patch]:
    original = RequestRunner._append

    def commit(self: RequestRunner, tokens: list[int]) -> list[int]:
        return original(self, tokens if len(tokens) == 1 else tokens[1:])

    return [(RequestRunner, "_append", commit)]


def first_end_alone() -> list[Patch]:
    """Of several end-of-sequence ids one alone ends the text."""
    original = RequestRunner._append

    def commit(self: RequestRunner, tokens: list[int]) -> list[int]:
        self.eos = frozenset([max(self.eos)])
        return original(self, tokens)

    return [(RequestRunner, "_append", commit)]


def one_token_too_many() -> list[Patch]:
    original = RequestRunner._append

    def commit(self: RequestRunner, tokens: list[int]) -> list[int]:
        self.limit += len(self.out.tokens) + len(tokens) >= self.limit
        return original(self, tokens)

    return [(RequestRunner, "_append", commit)]


def other_reason() -> list[Patch]:
    """A text that fills the context finishes with `length`."""
    original = RequestRunner._append

    def commit(self: RequestRunner, tokens: list[int]) -> list[int]:
        self.full = "length"
        return original(self, tokens)

    return [(RequestRunner, "_append", commit)]


def first_stop_listed() -> list[Patch]:
    """The text is cut at the stop string that is listed first, not at the earliest."""

    def cut(self: TextStream, text: str) -> bool:
        found = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if found:
            self.text, self.settled = text[: found[0]], len(self.tokens)
        return bool(found)

    return [(TextStream, "_cut", cut)]


def minimum_bars_one_end() -> list[Patch]:
    """Below the minimum length one of several end-of-sequence ids alone is barred."""
    original = History.__init__

    def init(
        self: History, settings: Any, prompt: Any, size: int, eos_ids: Any, device: Any
    ) -> None:
        original(self, settings, prompt, size, sorted(eos_ids)[:1], device)

    return [(History, "__init__", init)]


def penalties_of_forty_tokens() -> list[Patch]:
    """Tokens after the first forty are not penalised."""
    original = History.extend

    def extend(self: History, tokens: Sequence[int]) -> None:
        original(self, tokens if self.count < 40 else [])

    return [(History, "extend", extend)]


def noise_of_64_positions() -> list[Patch]:
    """Coupled draws repeat their noise."""
    original = sampling.position_noise
    repeated = lambda seed, position, *more: original(seed, position % 64, *more)  # noqa: E731
    return [(request_module, "position_noise", repeated)]


def stop_within_a_token() -> list[Patch]:
    """A stop string is found inside of one token alone."""

    def cut(self: TextStream, text: str) -> bool:
        found = [at for at in (text.find(stop, len(self.text)) for stop in self.stops) if at >= 0]
        if found:
            self.text, self.settled = text[: min(found)], len(self.tokens)
        return bool(found)

    return [(TextStream, "_cut", cut)]


def special_tokens_alone() -> list[Patch]:
    """A stop string that is a special token is not found."""
    return [(request_module, "special_tokens_in", lambda stops, tokenizer: frozenset())]


def half_lost_at_the_end() -> list[Patch]:
    """A text that ends within a character loses the half."""
    original = TextStream.finish

    def finish(self: TextStream) -> str:
        self.settled = len(self.tokens)
        return original(self)

    return [(TextStream, "finish", finish)]


def half_lost_between_rounds() -> list[Patch]:
    """The second half of a character is lost."""
    original = TextStream.push

    def push(self: TextStream, token: int) -> bool:
        if self.decode(self.tokens[self.window :]).endswith(UNFINISHED):
            self.window = self.settled = len(self.tokens)
        return original(self, token)

    return [(TextStream, "push", push)]


def stop_is_streamed() -> list[Patch]:
    """The beginning of a stop string is streamed before the string is complete."""
    return [(TextStream, "_maybe_stop", lambda self: 0)]


# ---- what they are seen with ----


def decoder(target: Target, kind: str) -> Decoder:
    network = block_network(target, "shared_kv", markov_rank=8)
    if kind == "tree":
        return Decoder(target, BlockProposer(network, tree_nodes=6))
    if kind == "drawn tree":
        proposer = BlockProposer(network, 3, tree_nodes=4, siblings="without_replacement")
        return Decoder(target, proposer, "traversal")
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
    if kind == "confidence":
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
    settings: tuple[Sampling, ...] = SAMPLED
    size: int = 3


BUGS: dict[Callable[[], list[Patch]], Seen] = {
    positions_too_late: Seen("rows", size=1),
    positions_by_index: Seen("rows", "tree", size=1),
    chunks_from_the_start: Seen("rows"),
    deep_nodes_without_the_root: Seen("rows", "drawn tree", size=1),
    row_lost: Seen("rows", "oracle", (REPEATED,), 1),
    outputs_swapped: Seen("rows", settings=SAMPLED[:2]),
    other_first_row: Seen("rows"),
    penalty_without_prompt: Seen("rows"),
    presence_of_prompt: Seen("rows"),
    minimum_one_longer: Seen("rows"),
    banned_at_the_root_alone: Seen("rows"),
    one_more_of_top_k: Seen("rows"),
    top_p_before_temperature: Seen("rows"),
    temperature_of_the_request_before: Seen("rows"),
    ids_shifted: Seen("proposals"),
    q_smoothed: Seen("proposals"),
    q_of_the_next_position: Seen("proposals"),
    siblings_repeated: Seen("proposals", "drawn tree"),
    cut_by_its_own_draw: Seen("proposals"),
    cut_after_its_draw: Seen("proposals", "drawn tree"),
    equal_candidates_left_out: Seen("proposals", "candidates", SAMPLED[:3]),
    one_generator: Seen("randomness"),
    drafts_by_the_shared_generator: Seen("randomness"),
    number_of_the_first_draw: Seen("randomness", "drawn tree"),
    numbers_of_numpy: Seen("randomness", "confidence"),
    larger_of_two: Seen("randomness"),
    noise_of_the_round: Seen("randomness", "gumbel"),
    seed_and_position_swapped: Seen("randomness", "gumbel"),
    numbers_from_the_first_position: Seen("randomness", "tree"),
    numbers_by_node: Seen("randomness", "tree", TWO_TOKENS),
    minimum_bars_one_end: Seen("rows"),
    accepted_token_dropped: Seen("commit", "oracle", (REPEATED,), 1),
    self_test.reused_numbers: Seen("randomness"),
    self_test.half_top_k: Seen("rows", "block"),
    self_test.no_min_p: Seen("rows", settings=MIN_P),
    self_test.rounded_logits: Seen("rows"),
    self_test.other_temperature: Seen("proposals"),
    self_test.swapped_states: Seen("rows", settings=PENALISED),
    self_test.stale_cache: Seen("rows", "tree", GREEDY * 2),
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
    last_row_of_the_parent: "token",
    accepted_too_often: "block",
    residual_not_clamped: "recursive",
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
    asked = tuple(run.requests.half_characters())
    batch = RequestBatch("halves", decoder(run.target, "tree"), asked)
    assert len(asked) > 8 and findings(run, batch, []) == set()
    assert findings(run, batch, bug()) == {"commit"}


@pytest.mark.parametrize("bug", [q_smoothed, residual_is_p, positions_too_late], ids=name_of)
def test_the_joint_law_sees_a_bug(run: VerificationRun, bug: Callable[[], list[Patch]]) -> None:
    tally = run.tallies["end_to_end"]
    with ExitStack() as stack:
        for patch in bug():
            stack.enter_context(mock.patch.object(*patch))
        made = decoder(run.target, "token")
        sampling = Sampling(1.2, top_k=2, seed=1)
        end_to_end.check_joint_law("chain", made, PROMPTS[0], run.reference, tally, sampling)
    assert tally.findings
