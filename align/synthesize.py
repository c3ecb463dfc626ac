"""`python -m align.synthesize recipe=NAME …`: the target writes its own training data.

With no data set at all the target writes prompts and then answers them; or it answers prompts from `datasets` (a hub
id, JSONL or Parquet). Where the recipe names other text (data.text), it is read first. Samples are written in batches, one shard a batch. A batch's text depends on (seed, batch
number) alone, so a run that was killed loses the batch in flight and ends in the same state as an undisturbed one.
"""

from __future__ import annotations

import sys
from functools import partial

from align.common.claims import Claim
from align.common.commands import command
from align.common.errors import check_all, cli
from align.common.text import say
from align.config.launching import use_deterministic_products
from align.config.parser import parse_command
from align.config.preflight import check_writing
from align.data.text_sources import check_sources


@cli
def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    recipe = parse_command(words, "align.synthesize", __doc__ or "")
    if recipe is None:
        return
    check_all([partial(check_writing, recipe), partial(check_sources, recipe.data)])
    use_deterministic_products()
    with Claim(recipe.data_folder, "data.path" if recipe.data.path else "output"):
        # only now: torch and transformers take seconds to import
        from align.data.batches import with_folder_batch
        from align.data.synthesis import synthesize
        from align.data.texts import read_texts
        from align.writing.processes import open_writer

        recipe = with_folder_batch(recipe, recipe.data_folder)
        with open_writer(recipe) as (target, source):
            if recipe.data.text:
                read_texts(recipe, target)
            synthesize(recipe, target, recipe.data_folder, source=source)
    say(f"next:\n  {command('align.train', *words)}")


if __name__ == "__main__":
    main()
