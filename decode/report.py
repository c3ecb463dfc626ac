"""`python -m decode.report DIR`: rebuild the summary, page and plots from the records."""

from __future__ import annotations

from collections.abc import Sequence

from decode.cli import Parser, path
from specalign.common.claims import check_folder
from specalign.common.errors import cli
from specalign.common.terminal import PlainConsole
from specalign.common.text import say


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = Parser(
        prog="python -m decode.report",
        description="Rebuild a measurement's report from its records.",
    )
    folder = "output folder of `python -m decode.eval --out DIR`"
    parser.add_argument("folder", type=path, metavar="DIR", help=folder)
    parser.add_argument("--markdown", action="store_true", help="print only the table, in Markdown")
    options = parser.parse_args(arguments)
    if options.folder.is_dir():
        check_folder(options.folder, "DIR")
    from decode.evaluation.page import make_report, print_report
    from decode.evaluation.tables import markdown

    summary, _ = make_report(options.folder)
    if options.markdown:
        say(markdown(summary))
        return
    print_report(summary, options.folder, PlainConsole())


if __name__ == "__main__":
    main()
