"""Case N: a command, what is wrong with its input, and whether it took that as it should."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

from align.common.text import printable, say
from tests.fuzz import files, options, servers
from tests.fuzz.corpus import Corpus
from tests.fuzz.options import Case

MOST_GIB = 1.5
"""What a case may add to the most that its process has taken; every model of the corpus is tiny."""


def run(corpus: Corpus, seed: int, number: int, show: bool = False) -> str:
    """What is wrong with how a command took case `number`; nothing where it took it well."""
    r = random.Random(f"{seed} {number}")
    shutil.rmtree(corpus.place, ignore_errors=True)
    corpus.place.mkdir()
    os.chdir(corpus.place)
    Path("file").write_text("x")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    main, words, what = r.choices(list(KINDS), list(KINDS.values()))[0](corpus, r)
    name = f"{main.__module__} {' '.join(map(repr, words))[:600]}{' · ' * bool(what)}{what}"
    if show:
        say(printable(name))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, out, err = corpus.run(main, words)
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    if show:
        say(f"exit {code}\n--- stdout\n{printable(out)}\n--- stderr\n{printable(err)}")
    why = fault(code, out, err, words) or (f"takes {taken:.1f} GiB" if taken > MOST_GIB else "")
    return f"{why}: {printable(name)}" if why else ""


def fault(code: int | None, out: str, err: str, words: list[str]) -> str:
    if code is None:
        return f"traceback ({' '.join(err.strip().splitlines()[-1:])[:300]})"
    if "Traceback (most recent call last)" in err:
        return f"a traceback on standard error ({err[-1500:]!r})"
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if code == 2:
        # behind the line may stand, indented, what is missing or the commands that fit
        line = re.search(r"(?:^|\n)error: ([^\n]+)\n(?: +[^\n]+\n)*\Z", err)
        if not line:
            return f"exit code 2 without one line ({err[-200:]!r})"
        given = {part for word in words for part in re.split("[=/]", word) if part}
        if not re.search(r"prompt|[=/'.\":-]", line[1]) and not any(part in line[1] for part in given):
            return f"exit code 2 with a line that names nothing ({line[1]!r})"
    raw = [c for c in out + err if printable(c) != c and c != "\r"]
    return f"control characters on the terminal: {raw[:5]}" if raw else ""


KINDS: dict[Callable[[Corpus, random.Random], Case], float] = {
    options.recipe_words: 30, options.recipe_file: 12, options.eval_options: 12, options.generate_options: 10, options.verify_options: 6,
    files.report_file: 14, files.continued_file: 4, files.prompts_file: 8, files.data_file: 3, files.checkpoint_file: 2,
    files.drafter_file: 3, files.target_file: 4, files.gguf_file: 6, options.prompt: 5, options.advise_options: 6,
    options.export_options: 5, options.parity_options: 4, options.plan_words: 10, options.sweep_file: 12, files.trained_file: 8,
    files.published_file: 10, files.exported_file: 5, files.stored_file: 3, files.planned_target: 6, servers.reply: 6, servers.states: 3, files.texts_file: 10,
    options.compare_options: 4, files.compared_file: 4, files.written_file: 8,
}  # fmt: skip
