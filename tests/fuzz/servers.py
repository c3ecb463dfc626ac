"""Cases of servers: one that is asked to write answers with something else than it should."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from align import synthesize
from tests.fuzz.corpus import Corpus
from tests.fuzz.hostile import changed_bytes, changed_json, deep, text
from tests.fuzz.options import Case
from tests.loopback_server import FAULTS, Loopback

DATA = [
    "recipe=debug_block", "output=out", "data.samples=4", "data.batch_size=2", "data.concurrency=2", "data.max_answer_tokens=4",
    "data.reply_seconds=5", "data.retry_seconds=0.5",
]  # fmt: skip


def altered(r: random.Random) -> Callable[[int, bytes], tuple[int, bytes]]:
    """Status and body of a reply → others, of some replies or of all."""
    share, seed = r.choice((0.2, 1.0)), r.random()
    statuses = (200, 200, 200, 204, 301, 304, 400, 401, 404, 418, 422, 429, 500, 503, 999)

    def alter(status: int, body: bytes) -> tuple[int, bytes]:
        own = random.Random(f"{seed} {hash_of(body)}")
        if own.random() > share:
            return status, body
        if own.random() < 0.2:
            status = own.choice(statuses)
        match own.randrange(6):
            case 0:
                return status, changed_bytes(body, own)
            case 1:
                return status, deep(own)
            case 2:
                said = {"error": {"message": text(own)}}
                return own.choice(statuses), json.dumps(said).encode("utf-8", "surrogatepass")
        try:
            changed = changed_json(json.loads(body), own)
        except ValueError:  # cut already
            return status, body
        return status, json.dumps(changed).encode("utf-8", "surrogatepass")

    return alter


def hash_of(body: bytes) -> int:
    """Of what it says, the same in every process."""
    return sum(body) * len(body)


def reply(corpus: Corpus, r: random.Random) -> Case:
    """A server whose replies are not what they should be."""
    ids, fault, alter = r.random() < 0.7, r.choice((None, *FAULTS[:3], *FAULTS[5:])), altered(r)
    at = r.randrange(6)

    def served(words: list[str]) -> None:
        with Loopback(
            corpus.target, ids=ids, fault=lambda n: fault if n == at else None, alter=alter
        ) as server:
            synthesize.main([*words, f"data.writer=openai:{server.url}"])

    served.__module__ = "align.synthesize"
    checked = ["data.server_check=never"] if r.random() < 0.3 else []
    return served, [*DATA, *checked], f"a server that alters its replies (ids {ids}, {fault} at request {at})"
