"""What a recorded drafter writes down, and that it changes nothing."""

from __future__ import annotations

import pytest

from decode.engine.decoder import Decoder
from decode.methods.build import build
from decode.methods.registry import Parts
from decode.methods.spec import read_method
from decode.speculation.sampling import Sampling
from decode.wrappers.recorded import RecordedDrafter


@pytest.mark.parametrize("text", ["block", "block_tree:nodes=6", "lookup"])
def test_every_round_is_written_down_and_nothing_changes(text: str, shallow_parts: Parts) -> None:
    decoder = build(read_method(text), shallow_parts)
    assert decoder.drafter is not None
    recorded = RecordedDrafter(decoder.drafter)
    prompts, settings = [[5, 6, 7, 5, 6], [9, 9, 9]], [Sampling(0.8, seed=s) for s in (1, 2)]
    for_each = {"max_new_tokens": 10, "sampling": settings}
    plain = decoder.generate_batch(prompts, **for_each)
    outs = Decoder(decoder.target, recorded, decoder.verifier).generate_batch(prompts, **for_each)
    assert [out.tokens for out in outs] == [out.tokens for out in plain]
    for out, session in zip(outs, recorded.sessions, strict=True):
        places, place = [], 1
        for depth, accepted in zip(out.drafted, out.accepted, strict=True):
            places += [place] if depth else []
            place += accepted + 1
        assert [first.place for first in session.rounds] == places
        for first in session.rounds:
            if text != "block":  # point drafts
                assert first.q_V is None and len(first.tokens) >= 1
            else:
                assert first.q_V is not None and float(first.q_V.sum()) == pytest.approx(1.0, abs=1e-5)
