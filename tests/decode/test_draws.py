"""What a drafter draws has the distribution that its q claims, exactly, at several temperatures: for every
system of the registry.

A new system is tested by being registered. Every draw that is made while a draft is proposed is watched: the
weights it was made with and the token that came of it. Each drafted token must be one of those draws, made
with just the q that its proposal
states (of siblings drawn without replacement: with what earlier ones left of it). Nothing is sampled but the
state in which a drafter is asked, so a bug of any size shows.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from decode import Decoder, Sampling
from decode.proposers.base import DraftSession, Proposer, Request
from decode.speculation import sampling as drawing
from decode.speculation.proposal import Proposal
from decode.systems.construction import build, make_given
from decode.systems.opening import OpenDrafters
from decode.systems.parsing import read_method
from decode.systems.registry import SYSTEMS, GivenDrafter
from specalign.formats.block import load_drafter
from specalign.lm.model import Target
from tests.builders import BLOCK_VARIANTS, PROMPT, block_network, diffusion_drafter
from tests.published_blocks import backbone, pruned, speculators_config, write

VARIANTS = [
    *(name for name in SYSTEMS if name not in ("plain", "drafter", "combined")),
    "autoregressive:copying=true",
    "block:draft_tokens=3:verifier=token",
    "specdiff:draft_tokens=3:steps=3",
    "specdiff:draft_tokens=3:steps=2:order=random",
    "specdiff2:candidates=3:keep_q=true:verifier=traversal",
    "specdiff2:candidates=3:keep_q=true:draft_temperature=1.5:verifier=k_seq",
    "specdiff2:candidates=3:keep_q=true:draft_temperature=0.5:verifier=recursive",
    "d2sd:verifier=traversal",
]
"""Ways of drafting that no system's defaults show."""
POINT = {"lookup", "retrieval", "block_tree", "specdiff2", "diffuspec", "double", "tolerator"}
"""Systems that claim no q: nothing to hold a draw against."""
ELSEWHERE = {"hierarchical": "drafts of a verification: proposers/test_hierarchical.py"}
TEMPERATURES = [2.0, pytest.param(0.5, marks=pytest.mark.slow)]
NOT_LESS, ROUNDING = 3, 1e-6


class Draw(NamedTuple):
    """The weights of a draw, normalised, and the index that came of it."""

    weights_V: Tensor
    index: int


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_drawn_is_distributed_as_q_says(
    shallow_parts: OpenDrafters, name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = name.split(":")[0]
    if system in ELSEWHERE:
        pytest.skip(ELSEWHERE[system])
    sampling = Sampling(temperature, top_k=20, repetition_penalty=1.2, seed=3)
    decoder = build(read_method(name), shallow_parts, None)
    checked = checked_tokens(decoder, sampling, monkeypatch)
    assert (checked == 0) == (name in POINT), f"{checked} drafted tokens with a q"
    assert not checked or checked >= NOT_LESS


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["block", "recursive", "k_seq"])
@pytest.mark.parametrize("kind", [*BLOCK_VARIANTS, "another engine's", "ddit"])
def test_drafters_of_all_shapes(
    target: Target, kind: str, verifier: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Chains, and trees whose siblings are drawn with and without replacement."""
    if kind == "another engine's":  # with a head of its own
        tensors = backbone(target) | pruned(target, 0.3)
        network = load_drafter(write(tmp_path, speculators_config(target), tensors), target)
    elif kind == "ddit":
        network = diffusion_drafter(target, kind)
    else:
        network = block_network(target, **BLOCK_VARIANTS[kind])
    nodes = 0 if verifier == "block" or kind == "ddit" else 6
    options = GivenDrafter(draft_tokens=3, tree_nodes=nodes, verifier=verifier)
    drafter = make_given(options, OpenDrafters(target, {"any": network}))
    decoder = Decoder(target, drafter, verifier)
    assert checked_tokens(decoder, Sampling(2.0, seed=3), monkeypatch) >= NOT_LESS


def checked_tokens(decoder: Decoder, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> int:
    """Decode, hold every drafted token that has a q against the draws it was made with, and count them."""
    assert decoder.drafter is not None
    watched = Watched(decoder.drafter)
    monkeypatch.setattr(drawing, "draw_at", watched.draw_at)
    decoder = Decoder(decoder.target, watched, decoder.verifier)
    decoder.generate(PROMPT, max_new_tokens=20, sampling=sampling)
    return watched.checked


class Watched:
    """A drafter whose draws are watched and held against its proposals."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.name, self.draft_tokens = inner.name, inner.draft_tokens
        self.draft_nodes = inner.draft_nodes
        self.draws: list[Draw] = []
        self.checked = 0
        self._draw_at = drawing.draw_at

    def law(self, sampling: Sampling) -> Any:
        return self.inner.law(sampling)

    def start(self, request: Request) -> DraftSession:
        session = self.inner.start(request)
        propose = session.propose

        def watched(k: int) -> Proposal | None:
            proposal = propose(k)
            if proposal is not None and proposal.q is not None:
                self.hold(proposal)
            return proposal

        session.propose = watched  # type: ignore[method-assign]
        return session

    def draw_at(self, weights: Tensor, u: Tensor) -> Tensor:
        drawn = self._draw_at(weights, u)
        rows = weights.detach().double().reshape(-1, weights.shape[-1])
        for weights_V, index in zip(rows, drawn.reshape(-1).tolist(), strict=True):
            self.draws.append(Draw(weights_V / weights_V.sum(), index))
        return drawn

    def hold(self, proposal: Proposal) -> None:
        """Each drafted token against a draw of its own."""
        assert proposal.q is not None
        ids = None if proposal.q.ids is None else proposal.q.ids.tolist()
        for i, token in enumerate(proposal.tokens_K.tolist()):
            index = token if ids is None else ids.index(token)
            q_V = proposal.q.probs[i].detach().double()
            if proposal.siblings == "without_replacement":
                gone = [j for j in range(i) if proposal.tree[j] == proposal.tree[i]]
                tokens = [int(proposal.tokens_K[j]) for j in gone]
                q_V = q_V.clone()
                q_V[[t if ids is None else ids.index(t) for t in tokens]] = 0.0
            if not q_V.sum() > 0:  # nothing was left to draw: no verifier takes such a token
                continue
            q_V = q_V / q_V.sum()
            same = (x for x in self.draws if (x.index, len(x.weights_V)) == (index, len(q_V)))
            own = [x for x in same if apart(x.weights_V, q_V) < ROUNDING]
            assert own, f"token {i} of {len(proposal)} was not drawn from the q that is stated"
            self.draws = [x for x in self.draws if x is not own[0]]
            self.checked += 1


def apart(a_V: Tensor, b_V: Tensor) -> float:
    """Total variation."""
    return float((a_V - b_V).abs().sum() / 2)
