"""The child of `decode.evaluation.accuracy.score_exact`: compares answers with math-verify. An answer
such as 9^{9^9} keeps Python's integers busy for ever, so the system's alarm ends this process."""

import json
import logging
import resource
import signal
import sys
from contextlib import suppress

from math_verify import parse, verify

MEMORY = 2 << 30


def compare(reference: str, text: str) -> bool:
    """Whether the last answer in a text equals the reference as mathematics."""
    gold = parse(f"${reference}$", parsing_timeout=None)
    return bool(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))


def main() -> None:
    """For each line of JSON, `[reference, text, seconds]`, print `true` or `false`."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    replies = sys.stdout
    sys.stdout = sys.stderr
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        reference, text, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        equal = compare(reference, text)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(equal), file=replies, flush=True)


if __name__ == "__main__":
    main()
