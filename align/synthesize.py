"""`python -m align.synthesize recipe=NAME …`: generate training data with the target.

Without a data set, the target generates prompts and answers them; data.prompts names a data set of
prompts. Other text (data.text) is read first. An interrupted run resumes to the same data.
"""

import sys

from align.config.hardware import use_deterministic_products
from align.config.parser import parse_command
from align.config.preflight import check_generation
from align.data.sources import check_sources
from specalign.common.claims import Claim
from specalign.common.commands import command
from specalign.common.errors import cli
from specalign.common.text import say


@cli
def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    recipe = parse_command(arguments, "align.synthesize", __doc__ or "")
    if recipe is None:
        return
    check_generation(recipe)
    check_sources(recipe.data)
    use_deterministic_products()
    with Claim(recipe.data_folder, "data.path" if recipe.data.path else "output"):
        # imported late: torch and transformers take seconds
        from align.data.synthesis import synthesize
        from align.data.texts import read_texts
        from align.writing.outline import open_writer

        target = open_writer(recipe)
        if recipe.data.text:
            read_texts(recipe, target)
        synthesize(recipe, target, recipe.data_folder)
    say(f"next:\n  {command('align.train', *arguments)}")


if __name__ == "__main__":
    main()
