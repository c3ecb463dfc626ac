"""Trees through a real forward: every branch as if it were alone, the cache after a path was kept, the grown tree the
best there is, and greedy output that of plain decoding."""

import pytest
import torch

from decode import Decoder, Sampling
from decode.engine.request import RequestRunner
from decode.evaluation.divergence import replay
from decode.proposers.block import BlockProposer, BlockProposerSession
from decode.speculation.rounds import Round, verify_rounds
from decode.speculation.sampling import position_noise
from decode.speculation.tree import ancestors
from decode.speculation.verifiers import Outcome
from specalign.lm.model import Target
from tests.builders import BLOCK_VARIANTS as VARIANTS
from tests.builders import PROMPT, prefill
from tests.builders import block_network as network
from tests.builders import tree_prefixes as prefixes
from tests.fakes import DRAFTERS, ScriptedDrafter, TableTarget

PARENTS = (-1, -1, 0, 0, 1, 3, 4, 3)
TOKENS = (7, 9, 11, 7, 30, 31, 9, 50)


pytestmark = pytest.mark.usefixtures("endless")


def test_every_branch_as_if_it_were_alone(target: Target) -> None:
    for past in (1, len(PROMPT)):
        cache = target.new_cache(1, 40)
        target.forward(torch.tensor([PROMPT[:past]]), cache=cache)
        given = torch.tensor([[5, *TOKENS]])
        output = target.forward(given, cache=cache, see_LL=ancestors(PARENTS), taps=(1, 3))
        for row, branch in enumerate(prefixes(TOKENS, PARENTS)):
            alone = target.forward(torch.tensor([[*PROMPT[:past], 5, *branch]]), taps=(1, 3))
            for name in ("logits_BLV", "taps_BLFD"):
                found, expected = getattr(output, name)[0, row], getattr(alone, name)[0, -1]
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


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


@pytest.mark.parametrize("kind", ["branching", "guessed"])
def test_the_penalty_looks_at_each_nodes_own_prefix(kind: str) -> None:
    """A strong penalty, a vocabulary that the prompt leaves unseen: a node that minds its siblings gives itself away."""
    for seed in range(30):
        table, penalty = TableTarget(6, seed=seed), Sampling(repetition_penalty=3.0)
        outputs = [
            Decoder(table, drafter).generate([0, 1], max_new_tokens=12, sampling=penalty).tokens  # type: ignore[arg-type]
            for drafter in (None, ScriptedDrafter(*DRAFTERS[kind]))
        ]
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_coupled_drafts_use_the_noise_of_their_positions(target: Target, variant: str) -> None:
    """Each draft is what the target would say if p were q: ln q plus the noise of the very position."""
    net, sampling = network(target, **VARIANTS[variant]), Sampling(1.0, seed=5)
    runner = RequestRunner(target, PROMPT, 20, sampling, BlockProposer(net), "gumbel")
    with torch.no_grad():
        prefill(runner)
        drafts = runner.session
        assert isinstance(drafts, BlockProposerSession)
        tree = drafts.propose(3)
        tokens = runner.request.tokens
        hidden = drafts.session.draft_hidden(tokens[-1])
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


def test_a_replay_of_trees_has_the_logits(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `divergence` judges by: bit for bit the rows that the tokens were chosen from."""
    chosen: list[torch.Tensor] = []

    def watched(rounds: list[Round]) -> list[Outcome]:
        kept = [one.logits_MV.clone() for one in rounds]
        outcomes = verify_rounds(rounds)
        for rows, out in zip(kept, outcomes, strict=True):
            chosen.extend(rows[row] for row in out.rows)
        return outcomes

    monkeypatch.setattr("decode.engine.loop.verify_rounds", watched)
    net = network(target, "shared_kv", markov_rank=8)
    out = Decoder(target, BlockProposer(net, tree_nodes=14)).generate(PROMPT, max_new_tokens=40)
    assert sum(out.accepted) > 2
    for index in range(len(out.tokens)):
        found = replay(target, PROMPT, out.tokens, index, out.drafted, out.accepted, out.trees)
        assert torch.equal(found, chosen[index])
