"""Autoregressive drafters out of the target's layers: what training computes is what decoding drafts; an ordinary folder."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from align.common.batch import Anchors
from align.common.errors import UserError
from align.config.parser import load_recipe
from align.config.recipe import DrafterConfig
from align.models.causal import CausalDrafter, save_causal
from align.target.loading import load_target
from align.target.model import Target
from align.training.base_module import DrafterModule
from align.training.causal_module import CausalDrafterModule
from align.training.datamodule import Step
from align.training.makers import make_causal
from align.training.run import train
from tests.builders import ANCHORS
from tests.builders import packed_batch as batch

GOLDEN = Path(__file__).parents[2] / "golden" / "debug_autoregressive.json"
OPTIONS = DrafterConfig(kind="autoregressive", block_size=3, layers=2)


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug", dtype="float32", device="cpu")


def drafter(target: Target, init: str | None = None) -> CausalDrafter:
    """Changed a little, so that q is not p."""
    made = make_causal(target, DrafterConfig(kind="autoregressive", block_size=3, layers=2, init=init))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
    return made.eval()


def module(made: CausalDrafter, *words: str) -> CausalDrafterModule:
    return CausalDrafterModule(made, load_recipe(["recipe=debug_autoregressive", *words]))


def test_training_computes_what_decoding_computes(target: Target, tmp_path: Path) -> None:
    """At every place of packed rows: the saved folder, opened as any causal LM, over that document alone."""
    made, rows = drafter(target), batch(target)
    save_causal(made, tmp_path)
    opened = load_target(str(tmp_path), "float32", "cpu")
    with torch.no_grad():
        found = made.logits(made(rows))
    for b, first, last in ((0, 0, 9), (0, 9, 17), (1, 0, 20)):
        alone = opened.forward(rows.tokens_BL[b : b + 1, first:last]).logits_BLV
        torch.testing.assert_close(found[b : b + 1, first:last], alone, atol=1e-4, rtol=1e-3)


def test_statistics_are_those_of_p_and_q_at_every_position(target: Target) -> None:
    made, rows = drafter(target), batch(target)
    valid = ANCHORS.valid_BAK.clone()
    valid[0, 1, 2:] = False
    step = Step(rows, Anchors(ANCHORS.index_BA, valid))
    s = module(made).model_step(step, 1.0)
    with torch.no_grad():
        q = made.logits(made(rows)).softmax(-1)
    mask = rows.attention_mask()
    logits = target.forward(rows.tokens_BL, mask=mask, positions_BL=rows.positions_BL).logits_BLV
    assert logits is not None and s.forward_kl is not None
    p = logits.softmax(-1)
    for b, a, k in valid.nonzero().tolist():
        at = int(ANCHORS.index_BA[b, a]) + k
        label = int(rows.tokens_BL[b, at + 1])
        own_p, own_q = p[b, at], q[b, at]
        expected = {
            "acceptance": torch.minimum(own_p, own_q).sum(),
            "forward_kl": (own_p * (own_p / own_q).log()).sum(),
            "log_q_label": own_q[label].log(),
            "p_label": own_p[label],
            "match": (own_p.argmax() == own_q.argmax()).float(),
        }
        for name, value in expected.items():
            torch.testing.assert_close(getattr(s, name)[b, a, k], value, atol=1e-4, rtol=1e-3)


def test_a_head_of_its_own_gives_the_same_numbers_and_gradients(target: Target) -> None:
    step, results = Step(batch(target), ANCHORS), []
    for own in (False, True):
        made = drafter(target)
        if own:
            made._frozen[1] = made._frozen[1].clone()
        assert made.has_targets_head != own
        trained = module(made, "objective.terms={forward_kl: 1.0, cross_entropy: 0.5, total_variation: 1.0}")
        s = trained.model_step(step, 1.0)
        loss = trained.objective.per_position(s, ANCHORS.valid_BAK).sum()
        loss.backward()
        results.append((loss.detach(), [p.grad for p in made.parameters()]))
    torch.testing.assert_close(results[0][0], results[1][0])
    for one, two in zip(results[0][1], results[1][1], strict=True):
        assert one is not None and two is not None and float(one.abs().sum()) > 0
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-3)


# ---- training ----


def run(output: Path, data: Path, *words: str) -> DrafterModule:
    words = ("recipe=debug_autoregressive", f"output={output}", f"data.path={data}", *words)
    return train(load_recipe(words), quiet=True)


def column(output: Path, name: str) -> list[float]:
    with (output / "metrics.csv").open(newline="") as file:
        return [float(r[name]) for r in csv.DictReader(file) if r.get(name)]


def test_golden_losses(tmp_path: Path, debug_data: Path) -> None:
    module = run(tmp_path, debug_data)
    golden = json.loads(GOLDEN.read_text())["losses"]
    assert column(tmp_path, "train/loss") == pytest.approx(golden, rel=2e-4)
    assert module.validation_numbers["tau_sampling"] > 1.5  # half of a random target's layers know much of it
    assert {"tau_greedy", "acceptance_1", "acceptance_3"} <= module.validation_numbers.keys()
    for kind in ("greedy", "sampling"):
        kept = [v for k, v in module.validation_numbers.items() if k.startswith(f"kept_{kind}_")]
        assert 1 + sum(kept) == pytest.approx(module.validation_numbers[f"tau_{kind}"], rel=1e-5)
        assert kept == sorted(kept, reverse=True) and kept[0] > 0
    state = torch.load(tmp_path / "checkpoints" / "step-12.ckpt", weights_only=True)["state_dict"]
    assert state and not any("embed" in name or "lm_head" in name for name in state)
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "library_name: transformers" in card and "layers 0, 3 of that target" in card


def test_resume_is_bit_identical(tmp_path: Path, debug_data: Path) -> None:
    words = ("trainer.ema=0.9", "trainer.checkpoint_every=4", "trainer.keep_features_gb=1e-4")
    whole = run(tmp_path / "whole", debug_data, *words)
    original = DrafterModule.on_train_batch_start

    class Stop(Exception):
        pass

    def stop_at_7(self: DrafterModule, step: object, index: int) -> None:
        if self.global_step == 7:
            raise Stop
        original(self, step, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DrafterModule, "on_train_batch_start", stop_at_7)
        with pytest.raises(Stop):
            run(tmp_path / "parts", debug_data, *words)
    parts = run(tmp_path / "parts", debug_data, *words)
    assert whole.validation_numbers == parts.validation_numbers
    one, two = (load_file(str(tmp_path / s / "drafter/model.safetensors")) for s in ("whole", "parts"))
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    for name, weight in whole.final_weights.items():  # the averaged ones
        assert torch.equal(one[name.removeprefix("model.")], weight)
    assert column(tmp_path / "whole", "train/loss")[-8:] == column(tmp_path / "parts", "train/loss")[-8:]


def test_a_second_stage_goes_on_from_the_first(tmp_path: Path, debug_data: Path, target: Target) -> None:
    """Its first validation is the last one's; the embedding that was saved with it counts as the target's."""
    first = run(tmp_path / "a", debug_data)
    init = f"drafter.init={tmp_path / 'a/drafter'}"
    run(tmp_path / "b", debug_data, init, "trainer.validate_first=true")
    begun = column(tmp_path / "b", "validation/tau_sampling")
    assert begun[0] == pytest.approx(first.validation_numbers["tau_sampling"], rel=1e-5)
    again = make_causal(
        target, DrafterConfig(kind="autoregressive", block_size=3, init=str(tmp_path / "b/drafter"))
    )
    assert again.has_targets_head and again.config.layers == []


# ---- files ----


def test_the_folder_is_an_ordinary_causal_lm(target: Target, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = drafter(target)
    save_causal(made, tmp_path, card="# card")
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    assert torch.equal(model.get_input_embeddings().weight, target.embedding_VD)
    weights = model.state_dict()
    for name, weight in made.named_parameters():
        assert torch.equal(weights[name.removeprefix("model.")], weight), name
    assert model.generation_config.eos_token_id == target.model.generation_config.eos_token_id
    text = "Say a word."
    own = AutoTokenizer.from_pretrained(str(tmp_path))
    assert own(text)["input_ids"] == target.tokenizer(text)["input_ids"]
    assert load_target(str(tmp_path), "float32", "cpu").chat_tokens(text) == target.chat_tokens(text)
    record = json.loads((tmp_path / "drafter.json").read_text())
    assert record["kind"] == "autoregressive" and record["block_size"] == 3 and record["layers"] == [0, 3]


def test_any_causal_lm_over_the_targets_vocabulary_may_start_it(target: Target, tmp_path: Path) -> None:
    """With an embedding and a head of its own, which stay as they are and are saved."""
    first = drafter(target)
    first._frozen[:] = [t + 0.01 for t in first._frozen]
    save_causal(first, tmp_path / "a")
    made = drafter(target, str(tmp_path / "a"))
    assert not made.has_targets_head
    save_causal(made, tmp_path / "b")
    opened = load_target(str(tmp_path / "b"), "float32", "cpu", fast=False)
    assert torch.equal(opened.embedding_VD, first._frozen[0])
    rows = batch(target)
    with torch.no_grad():
        torch.testing.assert_close(
            made.logits(made(rows))[1:], opened.forward(rows.tokens_BL[1:]).logits_BLV, atol=1e-4, rtol=1e-3
        )


def test_what_does_not_fit_is_one_line(target: Target, tmp_path: Path) -> None:
    other = load_target("debug", dtype="float32", device="cpu", fast=False)
    other.model.resize_token_embeddings(300)
    save_causal(make_causal(Target(other.model, other.tokenizer, "wide", False), OPTIONS), tmp_path)
    with pytest.raises(UserError, match="drafter.init=.* has a vocabulary of 300, target 'debug' has 260"):
        make_causal(target, DrafterConfig(kind="autoregressive", init=str(tmp_path)))
    with pytest.raises(UserError, match="drafter.target_layers=.*target 'debug' has the layers 0 to 3"):
        make_causal(target, DrafterConfig(kind="autoregressive", target_layers=[0, 9]))
    with pytest.raises(UserError, match="its architecture 'GPTNeoForCausalLM' can't be trained"):
        make_causal(load_target("debug-gptneo", dtype="float32", device="cpu"), OPTIONS)
    for words, line in (
        (["stage=finetune"], "stage=finetune: drafter.kind=autoregressive is calibrated"),
        (["drafter.lora_rank=4"], "drafter.lora_rank needs drafter.kind=masked_lm"),
    ):
        with pytest.raises(UserError, match=line):
            load_recipe(["recipe=debug_autoregressive", *words])


@pytest.mark.parametrize("name", ["debug-gpt2", "debug-qwen2"])
def test_other_architectures(name: str, tmp_path: Path) -> None:
    target = load_target(name, dtype="float32", device="cpu")
    made = drafter(target)
    save_causal(made, tmp_path)
    rows = batch(target)
    with torch.no_grad():
        found = made.logits(made(rows))
    opened = load_target(str(tmp_path), "float32", "cpu")
    for b, first, last in ((0, 9, 17), (1, 0, 20)):  # a document that does not begin its row; a whole row
        alone = opened.forward(rows.tokens_BL[b : b + 1, first:last]).logits_BLV
        torch.testing.assert_close(found[b : b + 1, first:last], alone, atol=1e-4, rtol=1e-3)
