"""`python -m align.train recipe=NAME …`: train a drafter on text that the target generates.

Missing text is generated first (data.write=never fails instead).
"""

import sys

from align.config.hardware import is_launched, use_deterministic_products
from align.config.parser import parse_command
from align.config.preflight import check_training
from align.data.sources import check_sources
from specalign.common.errors import UserError, cli


@cli
def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    recipe = parse_command(arguments, "align.train", __doc__ or "")
    if recipe is None:
        return
    if recipe.processes > 1 and not is_launched():
        launcher = f"torchrun --nproc-per-node {recipe.launch.devices} -m align.train"
        raise UserError(f"several processes need a launcher: {launcher} … (docs/scale.md)")
    check_training(recipe)
    check_sources(recipe.data)
    use_deterministic_products()
    # imported late: torch, Lightning and transformers take seconds
    from align.training.run import run_command

    code = run_command(recipe, arguments)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
