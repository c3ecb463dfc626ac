"""Trees through a real forward: every branch as if it were alone, the cache after a path was kept, the grown tree the
best there is, and greedy output that of plain decoding."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import decode
from decode import Decoder, Sampling
from decode.engine.engine import Engine
from decode.proposers.block import BlockDrafts, BlockProposer
from decode.speculation.processors import History
from decode.speculation.proposal import Proposal, Siblings
from decode.speculation.sampling import ProcessorState, draw_at, position_noise, probs, uniform
from decode.speculation.tree import ancestors, depths, path_to, walk
from decode.speculation.verification import Outcome, Round, verify_rounds
from decode.verification.divergence import replay
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import BLOCK_VARIANTS as VARIANTS
from tests.builders import PROMPT, VARIED
from tests.builders import block_network as network
from tests.builders import tree_prefixes as prefixes
from tests.exact_distribution import exact_law
from tests.fakes import DRAFTERS, ScriptedDrafter, TableTarget, plausible, sampled

PARENTS = (-1, -1, 0, 0, 1, 3, 4, 3)
TOKENS = (7, 9, 11, 7, 30, 31, 9, 50)


@pytest.fixture(scope="module")
def target() -> Target:
    target = load_target("debug", dtype="float32", device="cpu")
    target.eos_ids = ()
    return target


def test_every_branch_as_if_it_were_alone(target: Target) -> None:
    for past in (1, len(PROMPT)):
        cache = target.new_cache(1, 40)
        target.forward(torch.tensor([PROMPT[:past]]), cache=cache)
        root = 5
        output = target.forward(
            torch.tensor([[root, *TOKENS]]), cache=cache, see_LL=ancestors(PARENTS), taps=(1, 3)
        )
        assert output.logits_BLV is not None and output.taps_BLFD is not None
        for row, branch in enumerate(prefixes(TOKENS, PARENTS)):
            alone = target.forward(torch.tensor([[*PROMPT[:past], root, *branch]]), taps=(1, 3))
            assert alone.logits_BLV is not None and alone.taps_BLFD is not None
            torch.testing.assert_close(
                output.logits_BLV[0, row], alone.logits_BLV[0, -1], atol=1e-4, rtol=1e-4
            )
            torch.testing.assert_close(
                output.taps_BLFD[0, row], alone.taps_BLFD[0, -1], atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize("path", [[], [0], [1, 4, 6], [0, 3, 7]])
def test_the_cache_keeps_a_path(target: Target, path: list[int]) -> None:
    """What follows a kept path is what follows the same tokens written one after another."""
    tokens = [TOKENS[i] for i in path]
    cache = target.new_cache(1, 40)
    target.forward(torch.tensor([PROMPT]), cache=cache)
    start = cache.length
    target.forward(torch.tensor([[5, *TOKENS]]), cache=cache, see_LL=ancestors(PARENTS))
    cache.keep(start, [0, *(i + 1 for i in path)])
    assert cache.length == start + 1 + len(path)
    after = target.forward(torch.tensor([[3, 4]]), cache=cache).logits_BLV
    alone = target.forward(torch.tensor([[*PROMPT, 5, *tokens, 3, 4]])).logits_BLV
    assert after is not None and alone is not None
    torch.testing.assert_close(after, alone[:, -2:], atol=1e-4, rtol=1e-4)


def test_trees_of_several_sizes_are_followed_as_if_alone() -> None:
    forest = ((-1, 0, 0), (-1,), ())
    said = [[2, 3, 0, 1], [2, 0], [0]]
    found = walk([[2, 1, 3], [2], []], forest, lambda at: [said[b][node] for b, node in at])
    assert found == [([0, 2], 1), ([0], 0), ([], 0)]


@pytest.mark.parametrize("parents", [PARENTS, None])
@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.7, top_k=3, repetition_penalty=2.5, seed=1)]
)
def test_draws_on_the_path_are_those_that_all_nodes_would_make(
    target: Target, parents: tuple[int, ...] | None, sampling: Sampling
) -> None:
    """The processors on each node's own prefix and its own uniform, though nodes off the path are never looked at."""
    engine = Engine(target, PROMPT, 20, sampling, None, "point_mass")
    with torch.no_grad():
        engine._prefill()
    lengths = Counter[int]()
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(4, (len(PARENTS),), generator=generator)
        logits = torch.randn(len(PARENTS) + 1, 4, generator=generator)
        engine.request.history = History(sampling, [seed % 4], 4, (), torch.device("cpu"))
        engine.request.generator.manual_seed(seed)
        (outcome,) = verify_rounds(
            [engine._round(logits.clone(), Proposal(tokens, "point", parents=parents))]
        )
        shape = parents or tuple(range(-1, len(PARENTS) - 1))
        held = [[seed % 4, *tokens[path_to(shape, m)].tolist()] for m in range(len(shape) + 1)]
        rows = ProcessorState(torch.tensor([[i in text for i in range(4)] for text in held]))
        u = uniform(len(logits), torch.Generator().manual_seed(seed))
        said = draw_at(probs(logits, sampling, rows), u)
        ((path, following),) = walk(
            [tokens.tolist()], [shape], lambda at, said=said: said[[i for _, i in at]].tolist()
        )
        assert outcome.path == path and outcome.following == following
        assert outcome.accepted == tokens[path].tolist()
        lengths[len(outcome.path)] += 1
    assert len(lengths) > 2


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("nodes", [1, 5, 14])
def test_greedy_output_is_that_of_plain_decoding(target: Target, variant: str, nodes: int) -> None:
    drafter = BlockProposer(network(target, **VARIANTS[variant]), tree_nodes=nodes)
    for sampling in (Sampling(), VARIED):
        expected = Decoder(target).generate(PROMPT, max_new_tokens=40, sampling=sampling)
        out = Decoder(target, drafter).generate(PROMPT, max_new_tokens=40, sampling=sampling)
        assert out.tokens == expected.tokens
        assert max(out.nodes) == nodes and max(out.drafted) <= 4


@pytest.mark.parametrize("kind", ["branching", "guessed"])
def test_the_penalty_looks_at_each_nodes_own_prefix(kind: str) -> None:
    """A strong penalty, a vocabulary that the prompt leaves unseen: a node that minds its siblings gives itself away."""
    for seed in range(60):
        table, penalty = TableTarget(6, seed=seed), Sampling(repetition_penalty=3.0)
        outputs = [
            Decoder(table, drafter).generate([0, 1], max_new_tokens=12, sampling=penalty).tokens  # type: ignore[arg-type]
            for drafter in (None, ScriptedDrafter(*DRAFTERS[kind]))
        ]
        assert outputs[0] == outputs[1]


def session_of(target: Target, drafter: BlockProposer, sampling: Sampling) -> BlockDrafts:
    engine = Engine(target, PROMPT, 20, sampling, drafter, "point_mass")
    with torch.no_grad():
        engine.begin()
    assert isinstance(engine.session, BlockDrafts)
    return engine.session


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(repetition_penalty=1.4)])
def test_the_tree_is_the_best_of_its_size(target: Target, variant: str, sampling: Sampling) -> None:
    """The least probable path taken is no less probable than the most probable one left out, among the children of
    the few nodes a level whose children are looked at."""
    net = network(target, **VARIANTS[variant])
    drafts = session_of(target, BlockProposer(net, tree_nodes=9), sampling)
    tree = drafts.propose(3)
    assert tree.parents is not None and len(tree) == 9 and tree.law == "point" and tree.depth <= 3
    branches = prefixes(tuple(tree.tokens_K.tolist()), tree.parents)[1:]
    assert len(set(branches)) == 9  # no twins
    last = drafts.request.tokens[-1]
    ids = torch.arange(target.vocab_size) if net.draft_vocab is None else net.draft_vocab
    hidden = drafts.session.hidden(last)
    inputs = drafts.session.bias_inputs(hidden)
    seen = torch.tensor([int(t) in drafts.request.tokens for t in ids])

    def rows(branch: tuple[int, ...]) -> torch.Tensor:
        k = len(branch)
        logits = net.logits(hidden[k])
        if inputs is not None:
            logits = logits + drafts.session.bias(inputs[k], torch.tensor([last, *branch][-1]))
        if sampling.repetition_penalty != 1:
            penalty = sampling.repetition_penalty
            logits = torch.where(
                seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits
            )
        return (logits / (sampling.temperature or 1)).log_softmax(-1)

    def log_q(branch: tuple[int, ...]) -> float:
        where = [int((ids == t).nonzero()) for t in branch]
        return sum(float(rows(branch[:k])[i]) for k, i in enumerate(where))

    least = min(log_q(branch) for branch in branches)
    inner = [(), *(b for b in branches if len(b) < 3)]
    for branch in inner:
        own = log_q(branch) if branch else 0.0
        for value, index in zip(*(t.tolist() for t in rows(branch).topk(10)), strict=True):
            child = (*branch, int(ids[index]))
            same = [b for b in branches if len(b) == len(branch)]
            looked_at = not branch or sorted(same, key=log_q, reverse=True).index(branch) < 4
            if child not in branches and looked_at:
                assert own + value <= least + 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_coupled_drafts_use_the_noise_of_their_positions(target: Target, variant: str) -> None:
    """Each draft is what the target would say if p were q: ln q plus the noise of the very position."""
    net, sampling = network(target, **VARIANTS[variant]), Sampling(1.0, seed=5)
    engine = Engine(target, PROMPT, 20, sampling, BlockProposer(net), "gumbel")
    with torch.no_grad():
        engine.begin()
        drafts = engine.session
        assert isinstance(drafts, BlockDrafts)
        tree = drafts.propose(3)
        tokens, hidden = engine.request.tokens, drafts.session.hidden(engine.request.tokens[-1])
        inputs = drafts.session.bias_inputs(hidden)
        ids = torch.arange(target.vocab_size) if net.draft_vocab is None else net.draft_vocab
        last = tokens[-1]
        for k, token in enumerate(tree.tokens_K.tolist()):
            logits = net.logits(hidden[k : k + 1])[0]
            if inputs is not None:
                logits = logits + drafts.session.bias(inputs[k], torch.tensor([last]))[0]
            noise = position_noise(5, len(tokens) + k, target.vocab_size, target.device)[ids]
            assert token == int(ids[(logits.double().log_softmax(-1) + noise).argmax()])
            last = token
    assert tree.law == "point" and tree.q is None


DRAWN: dict[str, tuple[Siblings | None, str]] = {
    "chosen": (None, "point_mass"),
    "drawn, recursive": ("without_replacement", "recursive"),
    "drawn, traversal": ("without_replacement", "traversal"),
    "drawn, k_seq": ("iid", "k_seq"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", DRAWN)
@pytest.mark.parametrize("variant", ["shared", "taps", "shared markov"])
def test_sampled_output_has_the_targets_joint_law(
    target: Target, shallow: Target, variant: str, how: str
) -> None:
    shallow = target if variant == "taps" else shallow  # its taps are of deeper layers
    runs, sampling, (siblings, verifier) = 250, Sampling(1.0, top_k=2), DRAWN[how]
    proposer = BlockProposer(network(shallow, **VARIANTS[variant]), tree_nodes=9, siblings=siblings)
    decoder = Decoder(shallow, proposer, "auto" if siblings is None else verifier)
    assert decoder.verifier_for(sampling) == verifier
    outputs = sampled(decoder, sampling, runs, PROMPT, 4)
    found = Counter(tuple(out.tokens) for out in outputs)
    assert plausible(found, exact_law(shallow, PROMPT, 4, sampling), runs)
    assert max(node for out in outputs for node in out.nodes) == 9


def test_a_replay_over_trees_gives_the_very_logits(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `divergence` judges by: bit for bit the rows that the tokens were chosen from."""
    chosen: list[torch.Tensor] = []

    def watched(rounds: list[Round]) -> list[Outcome]:
        kept = [one.logits_MV.clone() for one in rounds]
        outcomes = verify_rounds(rounds)
        chosen.extend(
            rows[row] for rows, out in zip(kept, outcomes, strict=True) for row in out.rows
        )
        return outcomes

    monkeypatch.setattr("decode.engine.engine.verify_rounds", watched)
    net = network(target, "shared_kv", markov_rank=8)
    out = Decoder(target, BlockProposer(net, tree_nodes=14)).generate(PROMPT, max_new_tokens=40)
    assert sum(out.accepted) > 2
    for index in range(len(out.tokens)):
        found = replay(target, PROMPT, out.tokens, index, out.drafted, out.accepted, out.trees)
        assert torch.equal(found, chosen[index])


def test_options(target: Target) -> None:
    from specalign.common.errors import UserError

    with pytest.raises(UserError, match="tree_nodes=-1"):
        decode.load(target, "lookup", tree_nodes=-1)
    net = network(target, "taps")
    assert BlockProposer(net, tree_nodes=3).draft_nodes == 4
    sampled = Sampling(1.0)
    decoder = decode.load(target, net)
    assert (
        decoder.verifier_for(sampled) == "traversal"
        and decoder.verifier_for(Sampling(0.7)) == "point_mass"
    )
    assert [
        BlockProposer(net, tree_nodes=None).nodes(Sampling(t)) for t in (0.0, 0.7, 0.71, 1.0)
    ] == [
        5,
        5,
        0,
        0,
    ]
    assert decode.load(target, net, "token").verifier_for(sampled) == "token"  # which needs a chain
    with pytest.raises(UserError, match="these fit: point_mass"):
        decode.load(target, net, "token", tree_nodes=3).verifier_for(sampled)
    text = [3, 4, 5] * 5
    out = decode.load(target, net, draft_tokens=1, copying=True).generate(text, max_new_tokens=20)
    assert max(out.drafted) == 1  # copies too
    assert max(depths((-1,) * 5)) == 1
