"""`python -m decode.report DIR`: rebuild a measurement's report from its records, or
compare several measurements on one page."""

from collections.abc import Sequence

from decode.cli import Parser, path
from specalign.common.claims import check_folder
from specalign.common.errors import UserError, cli
from specalign.common.files import write_text
from specalign.common.terminal import PlainConsole
from specalign.common.text import say


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = Parser(
        prog="python -m decode.report",
        description="Rebuild a measurement's report from its records, or compare measurements.",
    )
    folder = "output folders of `python -m decode.eval --out DIR`"
    parser.add_argument("folders", type=path, nargs="+", metavar="DIR", help=folder)
    parser.add_argument("--markdown", action="store_true", help="print only the table, in Markdown")
    out = "the page that compares several folders (default comparison.html)"
    parser.add_argument("--out", type=path, metavar="FILE", help=out)
    project = "also log the figures, the charts and the replays to this W&B project"
    parser.add_argument("--wandb", metavar="PROJECT", help=project)
    options = parser.parse_args(arguments)
    for one in options.folders:
        if one.is_dir():
            check_folder(one, "DIR")
    several = len(options.folders) > 1
    if several and (options.markdown or options.wandb):
        raise UserError("--markdown and --wandb take one folder")
    if options.out and not several:
        raise UserError("--out names the page that compares several folders; give more than one")
    from decode.evaluation.page import compare_runs, log_report, make_report, print_report
    from decode.evaluation.tables import markdown

    if several:
        target = options.out or path("comparison.html")
        write_text(target, compare_runs(options.folders))
        say(f"Comparison: {target}")
        return
    (folder_of,) = options.folders
    summary, records = make_report(folder_of)
    if options.wandb:
        log_report(options.wandb, folder_of, summary, records)
    if options.markdown:
        say(markdown(summary))
        return
    print_report(summary, folder_of, PlainConsole())


if __name__ == "__main__":
    main()
