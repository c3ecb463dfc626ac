"""Advice from measured speeds, measuring a tiny target, and the command."""

from pathlib import Path

import pytest

from decode.advise import main
from decode.evaluation.advice import (
    PLAIN,
    DraftSize,
    MeasuredSpeed,
    measure_speeds,
    open_decoders,
    render_advice,
)
from specalign.lm.loading import load_target


def advise(*gains: tuple[int, float]) -> list[str]:
    """The advice for a chain of 2 and one of 4 with these gains, by batch."""
    found = []
    for batch, gain in gains:
        for size, speed in ((PLAIN, 10.0), (DraftSize(2), 9.0), (DraftSize(4), 10.0 * gain)):
            found.append(MeasuredSpeed(size, 0.0, batch, 1.0 + size.tokens / 4, speed))
    return render_advice(found).splitlines()


def test_the_fastest_size_is_advised_where_it_pays() -> None:
    lines = advise((1, 1.5), (4, 1.2), (16, 0.8))
    batches = [f"batch {batch}, tokens/s" for batch in (1, 4, 16)]
    assert lines[0] == f"| drafts | temperature | τ | {' | '.join(batches)} |"
    assert lines[4] == "| γ = 4 | 0 | 2.00 | 15.0 (1.50×) | 12.0 (1.20×) | 8.0 (0.80×) |"
    use = "Use γ = 4 (--draft-tokens 4 --tree-nodes 0)"
    assert lines[-1] == f"**{use}, but no drafting for batch 16 at temperature 0.**"
    assert advise((1, 1.5))[-1] == f"**{use}.**"
    assert advise((1, 0.5))[-1].startswith("**Do not use drafting")


def test_every_size_is_measured_at_every_temperature_and_batch() -> None:
    target = load_target("debug")
    sizes, make_decoder = open_decoders(target, "debug", "lookup", 3)
    assert sizes == [PLAIN, *map(DraftSize, (1, 2, 3))] and make_decoder(PLAIN).drafter is None
    prompts = ["abcabcabc", "one two", "three"]
    found = measure_speeds(sizes, make_decoder, prompts, (0.0, 1.0), (1, 2), 12)
    points = [(m.size.tokens, m.temperature, m.batch) for m in found]
    assert points == [(k, t, b) for k in range(4) for t in (0.0, 1.0) for b in (1, 2)]
    assert all(m.tau == 1 for m in found if m.size == PLAIN) and min(m.speed for m in found) > 0


def test_a_page_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--limit 2 --max-new-tokens 6 --temperatures 0,1 --batches 1,2 --draft-tokens 2"
    main(["--target", "debug", "--drafter", "lookup", *sizes.split(), "--out", str(tmp_path)])
    path, page = tmp_path / "advice.md", capsys.readouterr().out
    assert "| drafts | temperature | τ | batch 1, tokens/s |" in page
    assert path.read_text() in page.replace(f"\n\n{path}\n", "\n")
