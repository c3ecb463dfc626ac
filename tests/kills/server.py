"""A server that writes answers with the debug target, in a process of its own: it says its address, and ends with standard input."""

from __future__ import annotations

import sys

from align.common.text import say
from align.target.loading import load_target
from tests.loopback_server import Loopback


def main() -> None:
    with Loopback(load_target("debug", device="cpu")) as server:
        say(server.url)
        sys.stdin.read()


if __name__ == "__main__":
    main()
