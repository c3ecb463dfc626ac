"""Cases of files: one of those that a command reads is damaged."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

from align import features, plan, sweep, synthesize, train
from align.common.checksums import CHECKSUMS
from decode import compare, eval, export, generate, parity, report
from decode.exporting import EXPORTS
from tests.fuzz.corpus import COMPARED, DATA, QUICK, STEPS, TWINS, Corpus
from tests.fuzz.hostile import changed_gguf, copied, damage, put
from tests.fuzz.options import SWEPT, Case


def damaged(corpus: Corpus, r: random.Random, name: str, choose: Callable[[Path], bool]) -> tuple[Path, str]:
    folder = copied(corpus.whole / name, Path(name))
    files = sorted(p for p in folder.rglob("*") if p.is_file() and choose(p))
    path = r.choice(files)
    return folder, f"{path}: {damage(path, r)}"


def report_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "measured", lambda p: p.name in ("run.json", "records.jsonl"))
    return report.main, [str(folder), *(["--markdown"] if r.random() < 0.3 else [])], what


def continued_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "measured", lambda p: p.name in ("run.json", "records.jsonl"))
    words = [
        *QUICK,
        "--prompts",
        str(corpus.whole / "prompts/p.jsonl"),
        "--no-hf-check",
        "--out",
        str(folder),
    ]
    return eval.main, words, what


def prompts_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "prompts", lambda p: True)
    path = (
        r.choice(sorted(folder.iterdir()))
        if r.random() < 0.1
        else folder / what.split(":")[0].rpartition("/")[2]
    )
    if r.random() < 0.5:
        words = [*QUICK, "--methods", "lookup", "--no-hf-check", "--out", "out", "--prompts", str(path)]
        return eval.main, words, what
    words = [
        "recipe=debug_block",
        "output=out",
        f"data.prompts={path}",
        "data.samples=2",
        "data.max_answer_tokens=4",
    ]
    return synthesize.main, words, what


def texts_file(corpus: Corpus, r: random.Random) -> Case:
    """Texts that training reads, or those that they are compared with."""
    folder, what = damaged(corpus, r, "texts", lambda p: True)
    path = folder / what.split(":")[0].rpartition("/")[2]
    read, left_out = r.choice(((path, ""), (path, ""), (folder, ""), (corpus.whole / "texts/t.jsonl", path)))
    words = ["recipe=debug_block", "output=out", f"data.text=[{read}]", f"data.exclude=[{left_out}]"]
    words += ["data.text_tokens=400", "data.samples=2", "data.max_answer_tokens=4"]
    return synthesize.main, words, what


def compared_file(corpus: Corpus, r: random.Random) -> Case:
    """What two recipes that were compared have left: a comparison's record, a run's drafters."""
    os.chdir(copied(corpus.compared, Path("compared")))
    files = sorted(p for p in Path().rglob("*") if p.is_file() and {*p.parts} & {"out", "milestones"})
    path = r.choice(
        [*files, *(p for p in files if p.parts[0] == "out"), *(p for p in files if p.suffix == ".json")]
    )
    return compare.main, TWINS, f"{path}: {damage(path, r)}"


def written_file(corpus: Corpus, r: random.Random) -> Case:
    """Where a command writes lies something else than a file."""
    data = [f"data.path={corpus.whole / 'run/data'}", *STEPS, "trainer.max_steps=1"]
    prompts = ["--prompts", str(corpus.whole / "prompts/p.txt"), "--methods", "lookup", "--no-hf-check"]
    main, words, names = r.choice((
        (train.main, ["recipe=debug_block", "output=out", *data],
         ("metrics.csv", "samples.txt", "recipe.yaml", "run.json", "drafter", "drafter/config.json", "checkpoints", "data")),
        (synthesize.main, ["recipe=debug_block", "output=out", "data.samples=2", "data.max_answer_tokens=4"],
         ("data/manifest.json", "data/shard-00000.safetensors", "data/near-duplicates.sqlite", "data/near-duplicates.sqlite-journal",
          "data/.lock", "data", "data/text")),
        (eval.main, [*QUICK, *prompts, "--out", "out"],
         ("records.jsonl", "run.json", "summary.json", "report.html", "report.png", "tuning")),
        (plan.main, ["recipe=debug_block", "--no-pilot", "--json", "out/plan.json"], ("plan.json",)),
        (sweep.main, ["recipe.yaml", *data, "--method", "random", "--count", "1", "--out", "out"], ("sweep.md", "sweep.json", "trials")),
    ))  # fmt: skip
    Path("recipe.yaml").write_text(json.dumps(SWEPT))
    path = Path("out", r.choice([*names, ".lock"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    return main, words, f"{path} is {put(path, r)}"


def data_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "run", lambda p: p.parent.name == "data")
    words = ["recipe=debug_block", f"output={folder}", *DATA]
    if r.random() < 0.5:
        return synthesize.main, words, what
    small = [*STEPS, "trainer.max_steps=1", "trainer.resume=never"]
    return train.main, [*words, *small, f"data.path={folder}/data"], what


def checkpoint_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "run", lambda p: p.parent.name == "checkpoints")
    words = ["recipe=debug_block", f"output={folder}", *DATA]
    return train.main, [*words, *STEPS, "trainer.max_steps=5"], what


def drafter_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "run", lambda p: p.parent.name == "drafter")
    return generate.main, [*QUICK[:-2], "--drafter", f"{folder}/drafter", "Say one."], what


def target_file(corpus: Corpus, r: random.Random) -> Case:
    folder, what = damaged(corpus, r, "target", lambda p: True)
    words = ["--target", str(folder), *QUICK[2:-2], "--drafter", "lookup", "Say one."]
    return generate.main, words, what


def gguf_file(corpus: Corpus, r: random.Random) -> Case:
    os.environ["SPECALIGN_CACHE"] = str(Path("cache").absolute())
    path = copied(corpus.whole / "gguf", Path("gguf")) / "t.gguf"
    if r.random() < 0.8:
        raw, what = changed_gguf(path.read_bytes(), r)
        path.write_bytes(raw)
    else:
        what = damage(path, r)
    words = ["--target", str(path), *QUICK[2:-2], "--drafter", "lookup", "Say one."]
    return generate.main, words, f"{path}: {what}"


def trained_file(corpus: Corpus, r: random.Random) -> Case:
    """A drafter of another kind, used or exported."""
    folder, what = damaged_at(corpus.drafters, r)
    if r.random() < 0.3:
        words = [
            "--drafter",
            str(folder),
            "--target",
            "debug",
            "--device",
            "cpu",
            "--format",
            r.choice(EXPORTS),
        ]
        return export.main, [*words, "--no-check", "--out", "out"], what
    return generate.main, [*QUICK[:-2], "--drafter", str(folder), "Say one."], what


def published_file(corpus: Corpus, r: random.Random) -> Case:
    """A block drafter out of another engine's folder."""
    folder, what = damaged_at(corpus.published, r)
    return generate.main, [*QUICK[:-2], "--drafter", str(folder), "Say one."], what


def exported_file(corpus: Corpus, r: random.Random) -> Case:
    """An export that is read back."""
    folder, what = damaged_at(corpus.exports, r)
    words = [*corpus.taps, *COMPARED, "--export", str(folder)]
    if folder.name != "transformers" or r.random() < 0.3:  # as a drafter
        return generate.main, [*QUICK[:-2], "--drafter", str(folder), "Say one."], what
    return parity.main, words, what


def stored_file(corpus: Corpus, r: random.Random) -> Case:
    """Stored outputs of the target."""
    folder = copied(corpus.features, Path("stored"))
    path = r.choice(sorted(p for p in (folder / "features").rglob("*") if p.is_file()))
    what = f"{path}: {damage(path, r)}"
    return r.choice((features.main, train.main)), corpus.stores(folder), what


def planned_target(corpus: Corpus, r: random.Random) -> Case:
    """A plan for a target whose config.json is damaged."""
    folder, what = damaged(corpus, r, "target", lambda p: p.name == "config.json")
    return plan.main, ["recipe=debug_block", f"target.name={folder}", "--no-pilot"], what


def damaged_at(place: Path, r: random.Random) -> tuple[Path, str]:
    """A copy of one of a folder's folders in which a file is damaged, and what was done."""
    folder = copied(r.choice(sorted(p for p in place.iterdir() if p.is_dir())), Path("drafters"))
    if r.random() < 0.8:  # what another made has none
        (folder / CHECKSUMS).unlink(missing_ok=True)
    path = r.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    return folder, f"{path}: {damage(path, r)}"
