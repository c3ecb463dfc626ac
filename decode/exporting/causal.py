"""Autoregressive drafters are ordinary language models: their export is the folder itself, with a card that says how it is served."""

from __future__ import annotations

import shutil
from pathlib import Path

from align.common.checksums import check_checksums
from align.common.errors import UserError
from align.common.hub import model_folder
from align.importing.layouts import RECORD
from decode.exporting.folder import bullets, card, unnamed, write_folder
from decode.exporting.verdict import Verdict

_SKIPPED = ("README.md", RECORD, "checksums.json")
DRAFTS = 5


def export(drafter: str, target: str, format_name: str, out: Path) -> Verdict:
    """Copy the folder; there is nothing to translate, so nothing to compare.

    Raises:
        UserError: another format than `draft_model`, which alone holds such a drafter.
    """
    if format_name != "draft_model":
        raise UserError(
            f"--format {format_name}: holds block drafters, this one is an ordinary language model; use --format draft_model"
        )
    source = model_folder(drafter, "drafter", ["config.json"])
    check_checksums(source)
    files = [p for p in sorted(source.iterdir()) if p.is_file() and p.name not in _SKIPPED]
    title, lead = (
        f"{out.name}: a small language model that drafts for {target}",
        "FOLDER is where this page lies:",
    )
    tags = ("speculative-decoding", "drafter")
    notes = unnamed(target)
    page = card(source, "transformers", target, tags, title, lead, serve(target, "FOLDER")) + bullets(notes)

    def fill(part: Path) -> None:
        for path in files:
            shutil.copyfile(path, part / path.name)

    write_folder(out, {"format": format_name, "target": target}, page, fill)
    return Verdict(format_name, out, notes=notes, serve=serve(target, str(out)))


def serve(target: str, folder: str) -> list[str]:
    """Lines that serve the folder."""
    said = f'{{"method":"draft_model","model":"{folder}","num_speculative_tokens":{DRAFTS}}}'
    return [
        f"vllm serve {target} --speculative-config '{said}'",
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm STANDALONE "
        f"--speculative-draft-model-path {folder} --speculative-num-draft-tokens {DRAFTS + 1}",
        f'model.generate(**words, assistant_model=AutoModelForCausalLM.from_pretrained("{folder}"))',
    ]
