"""What a request would draft now, for check 2."""

from abc import ABC, abstractmethod
from typing import Any

from decode.captured.state import RowState
from decode.engine.request import RequestRunner
from decode.proposers.base import Request
from decode.speculation.proposal import Proposal


class DraftSource(ABC):
    """What a request would draft now. settings: whose `sampling` may be replaced until `restore`.
    room: how many levels of drafts fit."""

    def __init__(self, runner: RequestRunner, settings: Request | RowState, room: int) -> None:
        self.runner, self.settings, self.room = runner, settings, room
        self._sampling = settings.sampling

    @property
    def chosen(self) -> bool:
        """Whether nothing is drawn."""
        return self.settings.sampling.greedy or self.runner.request.noise is not None

    @abstractmethod
    def propose(self, levels: int) -> Proposal | None: ...

    @abstractmethod
    def rewind(self) -> None:
        """Put back what `propose` changes."""

    def restore(self) -> None:
        self.settings.sampling = self._sampling
        self.rewind()


class SessionDrafts(DraftSource):
    """Drafts of a request of the eager engine."""

    def __init__(self, runner: RequestRunner) -> None:
        left = runner.limit - len(runner.out.tokens) - 1
        super().__init__(runner, runner.request, 0 if runner.session is None else left)
        self._numbers, self._states = runner.request.generator.get_state(), []
        part: Any = runner.session
        while part is not None and hasattr(part, "__dict__"):
            self._states.append((part, dict(vars(part))))
            part = getattr(part, "inner", None)

    def propose(self, levels: int) -> Proposal | None:
        session, drafter = self.runner.session, self.runner.drafter
        assert session is not None and drafter is not None
        self.rewind()
        return session.propose(min(levels, drafter.draft_tokens))

    def rewind(self) -> None:
        """Put the session, those that it wraps, and the random numbers back into their state."""
        self.runner.request.generator.set_state(self._numbers)
        for session, fields in self._states:
            vars(session).clear()
            vars(session).update(fields)
