"""The model card of a trained drafter, written from the run: every number in it was measured there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from align.drafters.block import BlockConfig
from align.recipe import Recipe, resolve
from align.run_record import versions


def write_card(
    recipe: Recipe,
    config: BlockConfig,
    manifest: dict[str, Any],
    run: dict[str, Any],
    validation: dict[str, float],
    coverage: float,
) -> str:
    """Markdown with hub metadata. `run`: steps, tokens_seen, positions, minutes, parameters."""
    found = versions()
    acceptance = [v for k, v in validation.items() if k.startswith("acceptance_")]
    layers = ", ".join(str(i) for i in config.target_layer_ids)
    lines = [
        "---",
        "library_name: block-drafter",
        f"base_model: {config.target}",
        "license: apache-2.0",
        "tags: [speculative-decoding, discrete-diffusion, drafter]",
        "---",
        "",
        f"# {Path(recipe.output).name}: a block-diffusion drafter for {config.target}",
        "",
        f"Drafts {config.block_size} tokens in one pass, conditioned on the target (`{config.context}`, target layers {layers}). "
        "Useful with that target alone: embedding and head are the target's and not stored here.",
        "",
        '    python -m decode.generate --drafter FOLDER "your prompt"',
        "",
        "| | |",
        "|---|---|",
        f"| trainable parameters | {run['parameters']:,} |",
        f"| draft vocabulary | {config.draft_vocab_size or config.vocab_size:,} of {config.vocab_size:,} tokens, "
        f"{coverage:.1%} of the training answers |",
        f"| target sha256 | `{config.target_sha256}` |",
        f"| data | {manifest['samples']:,} samples, {manifest['tokens']:,} tokens written by the target "
        f"(temperatures {manifest['prompt_temperature']} / {manifest['answer_temperatures']}, seed {manifest['seed']}) |",
        f"| training | {run['steps']:,} steps, {run['tokens_seen']:,} text tokens seen, {run['positions']:,} drafted positions, "
        f"{run['minutes']:.0f} minutes |",
    ]
    if validation:
        lines += [
            f"| expected τ, held-out text, greedy | {validation['tau_greedy']:.3f} ± {validation['tau_greedy_se']:.3f} (on-path) |",
            f"| expected τ, held-out text, sampling | {validation['tau_sampling']:.3f} ± {validation['tau_sampling_se']:.3f} |",
            f"| acceptance Σmin(p, q) by position | {' / '.join(f'{a:.3f}' for a in acceptance)} |",
        ]
    lines += [
        f"| versions | torch {found['torch']}, transformers {found['transformers']}, commit {found['git_commit']} |",
        "",
        "The recipe, resolved:",
        "",
        "```yaml",
        yaml.safe_dump(resolve(recipe), sort_keys=False).rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)
