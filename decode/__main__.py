"""`python -m decode`: its commands, a line each."""

from __future__ import annotations

from pathlib import Path

from align.common.commands import listing
from align.common.errors import cli
from align.common.text import say


@cli
def main() -> None:
    """Print the list."""
    say(listing(Path(__file__).parent))


if __name__ == "__main__":
    main()
