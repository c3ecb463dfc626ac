"""The fit of τ over tokens, and what it rests on."""

from __future__ import annotations

from align.planning.tau import predict_tau, read_runs


def test_more_tokens_give_more_tau_in_a_band_that_holds_the_runs() -> None:
    rows, inside = read_runs()["tokens_per_row"], 0
    for run in read_runs()["runs"]:
        found = predict_tau(run["kind"], run["rows"] * rows, 4)
        assert found is not None and 1 < found.low < found.value < found.high
        inside += found.low <= run["sampling"] <= found.high
    assert inside >= len(read_runs()["runs"]) - 1
    few, many = (predict_tau("block", n, 4, "greedy") for n in (1e5, 1e6))
    assert few is not None and many is not None and few.value < many.value


def test_a_guess_is_called_one() -> None:
    near = predict_tau("block", 5e5, 4, target=read_runs()["target"])
    far, limit = predict_tau("block", 1e9, 4, target="other/model"), predict_tau("block", 1e8, 4)
    assert near is not None and far is not None and limit is not None
    assert near.guess == "" and "as its target" in far.guess and "30M tokens" not in near.guess
    assert far.high <= 5 and far.value == limit.value
    assert predict_tau("ddit", 1e6, 8, "greedy") is None and predict_tau("block", 0, 4) is None
