"""What a request would draft now, for check 2."""

from typing import Any, Protocol

from decode.engine.request import RequestRunner
from decode.speculation.proposal import Proposal
from decode.speculation.settings import Sampling


class DraftSource(Protocol):
    """What a request would draft now. sampling: its settings, which may be replaced until
    `restore`. room: how many levels of drafts fit. chosen: nothing is drawn."""

    sampling: Sampling

    @property
    def room(self) -> int: ...

    @property
    def chosen(self) -> bool: ...

    def propose(self, levels: int) -> Proposal | None: ...

    def restore(self) -> None: ...


class SessionDrafts:
    """Drafts of a request of the eager engine."""

    def __init__(self, runner: RequestRunner) -> None:
        self.session, self.request, self.drafter = runner.session, runner.request, runner.drafter
        self._left = runner.limit - len(runner.out.tokens) - 1
        self._sampling = runner.request.sampling
        self._numbers, self._states = runner.request.generator.get_state(), []
        part: Any = runner.session
        while part is not None and hasattr(part, "__dict__"):
            self._states.append((part, dict(vars(part))))
            part = getattr(part, "inner", None)

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        self.request.sampling = sampling

    @property
    def room(self) -> int:
        return 0 if self.session is None or self.drafter is None else self._left

    @property
    def chosen(self) -> bool:
        return self.sampling.greedy or self.request.noise is not None

    def propose(self, levels: int) -> Proposal | None:
        assert self.session is not None and self.drafter is not None
        self._rewind()
        return self.session.propose(min(levels, self.drafter.draft_tokens))

    def restore(self) -> None:
        self.sampling = self._sampling
        self._rewind()

    def _rewind(self) -> None:
        """Put the session, those that it wraps, and the random numbers back into their state."""
        self.request.generator.set_state(self._numbers)
        for session, fields in self._states:
            vars(session).clear()
            vars(session).update(fields)
