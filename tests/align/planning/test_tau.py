"""The fit of τ over tokens, and what it rests on."""

from align.planning.tau import ExpectedTau, predict_tau, read_runs


def test_more_tokens_give_more_tau_in_a_band_that_holds_the_runs() -> None:
    rows, inside = read_runs()["tokens_per_row"], 0
    for run in read_runs()["runs"]:
        found = predict_tau(run["kind"], run["rows"] * rows, 4, "sampling", "")
        assert found is not None and 1 < found.low < found.value < found.high
        inside += found.low <= run["sampling"] <= found.high
    assert inside >= len(read_runs()["runs"]) - 1
    few, many = (predict_tau("block", n, 4, "greedy", "") for n in (1e5, 1e6))
    assert few is not None and many is not None and few.value < many.value


def test_a_guess_is_called_one() -> None:
    def predict(tokens: float, target: str, kind: str = "block") -> ExpectedTau | None:
        return predict_tau(kind, tokens, 4, "greedy", target)

    own = read_runs()["target"]
    near, far, other = predict(5e5, own), predict(1e9, own), predict(1e8, "other/model")
    assert near is not None and far is not None and other is not None
    assert near.guess == "" and "no run had more" in far.guess and "as its target" in other.guess
    assert far.high <= 5 and far.value == other.value
    assert predict(1e6, own, "ddit") is None and predict(0, own) is None
