"""`python -m align`: its commands, a line each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specalign.common.commands import print_listing
from specalign.common.errors import cli


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the list."""
    print_listing(Path(__file__).parent, arguments)


if __name__ == "__main__":
    main()
