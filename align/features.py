"""`python -m align.features recipe=NAME …`: compute the target's outputs for training once and
store them.

Stores what `align.train` reads with the same arguments, in the same order, up to `trainer.features_gb`;
training computes further rows itself. Rerun an interrupted command to resume it.
"""

import sys

from align.config.hardware import use_deterministic_products
from align.config.parser import parse_command
from align.config.preflight import check_training
from specalign.common.claims import Claim
from specalign.common.errors import UserError, cli


@cli
def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    recipe = parse_command(arguments, "align.features", __doc__ or "")
    if recipe is None:
        return
    if not recipe.trainer.features_gb:
        raise UserError("trainer.features_gb=0 stores nothing; set it to the disk limit in GB")
    check_training(recipe)
    use_deterministic_products()
    with Claim(
        recipe.features_folder,
        "trainer.features_path" if recipe.trainer.features_path else "output",
    ):
        # imported late: torch and transformers take seconds
        from align.training.store_outputs import store_outputs

        store_outputs(recipe)


if __name__ == "__main__":
    main()
