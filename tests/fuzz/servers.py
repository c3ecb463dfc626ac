"""Cases of servers: one that is asked to write answers with something else than it should."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from align import features, synthesize
from align.config.parser import load_recipe
from align.outputs.stand_ins import layers_asked
from align.target.loading import load_target
from align.training.build import conditioning
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


def states(corpus: Corpus, r: random.Random) -> Case:
    """A server of hidden states whose replies or files are not what they should be."""
    folder, alter, waits = Path("states"), altered(r), ["data.reply_seconds=0.5", "data.retry_seconds=0.5"]
    folder.mkdir()
    words = [*corpus.stores(Path("out")), *waits]
    target = load_target("debug")
    layers = layers_asked(target, conditioning(load_recipe(words), target))
    kind, change = r.choice(list(STATES.items()))

    def served(words: list[str]) -> None:
        with Loopback(target, alter=alter, states=folder, layers=layers, change=change) as server:
            features.main([*words, f"trainer.features_writer=vllm:{server.url}"])

    served.__module__ = "align.features"
    checked = ["data.server_check=never"] if r.random() < 0.5 else []
    return served, [*words, *checked], f"a server of states, {kind}, that alters its replies"


STATES: dict[str, Callable[[Tensor], Tensor]] = {
    "right": lambda x: x, "8 bits": lambda x: x.to(torch.float8_e4m3fn), "complex": lambda x: x.to(torch.complex64),
    "no numbers": lambda x: x > 0, "none": lambda x: x[:0], "flat": torch.flatten, "infinite": lambda x: x / 0, "large": lambda x: x * 1e30,
    "double": lambda x: x.double(), "a number": lambda x: x.flatten()[0].clone(), "zeros": torch.zeros_like,
}  # fmt: skip
