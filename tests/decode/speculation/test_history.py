"""History holds each node's own prefix."""

import torch

from decode.speculation.history import History
from decode.speculation.sampling import ProcessorState
from decode.speculation.settings import Sampling


def test_history_holds_each_nodes_own_prefix() -> None:
    """Repetition: prompt and output; presence: output alone; minimum length: by how deep a node lies."""
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 1.0}
    settings = Sampling(1.0, **penalties, banned=(7,), min_new_tokens=4)  # type: ignore[arg-type]
    history = History(settings, [2, 3], 9, (8,), torch.device("cpu"))
    history.extend([5, 2])

    def sets(rows: torch.Tensor | None) -> list[set[int]]:
        assert rows is not None
        return [set(row.nonzero()[:, 0].tolist()) for row in rows.reshape(-1, 9)]

    tree = history.rows(torch.tensor([4, 6, 2, 0]), (-1, -1, 0, 2))
    assert sets(tree.seen) == [{2, 3, 5}, {2, 3, 4, 5}, {2, 3, 5, 6}, {2, 3, 4, 5}, {0, 2, 3, 4, 5}]
    assert sets(tree.written) == [{2, 5}, {2, 4, 5}, {2, 5, 6}, {2, 4, 5}, {0, 2, 4, 5}]
    assert sets(tree.barred) == [{7, 8}, {7, 8}, {7, 8}, {7}, {7}]
    chain = history.rows(torch.tensor([4, 6]), (-1, 0))
    assert sets(chain.seen) == [{2, 3, 5}, {2, 3, 4, 5}, {2, 3, 4, 5, 6}]
    assert sets(chain.barred) == [{7, 8}, {7, 8}, {7}]
    ahead = history.ahead(1, 3)
    assert sets(ahead.seen) == [{2, 3, 5}] and sets(ahead.barred) == [{7, 8}, {7}, {7}]
    assert sets(ahead.written) == [{2, 5}]
    columns = ahead.columns(torch.tensor([8, 7, 0])).barred
    assert columns is not None
    assert sets(columns.repeat(1, 3)) == [{0, 1, 3, 4, 6, 7}, {1, 4, 7}, {1, 4, 7}]
    history.extend([1])
    assert sets(history.rows(torch.tensor([6]), (-1,)).barred) == [{7, 8}, {7}]
    history.extend([1])
    assert sets(history.rows(torch.tensor([], dtype=torch.int64), ()).barred) == [{7}]
    plain = History(Sampling(1.0), [2], 9, (8,), torch.device("cpu"))
    assert plain.rows(torch.tensor([1]), (-1,)) == ProcessorState() == plain.ahead(0, 3)


def test_a_fork_is_independent() -> None:
    """What is appended to one of two forks does not reach the other."""
    settings = Sampling(1.0, repetition_penalty=2.0, presence_penalty=1.0, min_new_tokens=3)
    history = History(settings, [2], 9, (8,), torch.device("cpu"))
    history.extend([5])
    none = torch.tensor([], dtype=torch.int64)
    twin, before = history.fork(), history.rows(none, ())
    assert all(torch.equal(a, b) for a, b in zip(twin.rows(none, ()), before, strict=True))  # type: ignore[arg-type]
    before = ProcessorState(*(rows.clone() for rows in before))  # type: ignore[union-attr]
    twin.extend([7, 7])
    assert twin.seen_V is not None and twin.seen_V.nonzero()[:, 0].tolist() == [2, 5, 7]
    assert twin.written_V is not None and twin.written_V.nonzero()[:, 0].tolist() == [5, 7]
    assert twin.rows(none, ()).barred is None
    assert all(torch.equal(a, b) for a, b in zip(history.rows(none, ()), before, strict=True))  # type: ignore[arg-type]
    assert History(Sampling(1.0), [2], 9, (8,), torch.device("cpu")).fork().seen_V is None
