"""What works with every architecture, tried on tiny random models; docs/architectures.md holds the
results.

python -m tests.targets                    # all, a quarter of an hour, written to the page: before a release
python -m tests.targets llama gemma3       # these, printed
python -m tests.targets write llama gemma3 # these, written to the page

Models with image or audio towers are saved as folders, opened by path and compared with the whole model on text.

Each architecture is judged by: attention; states; p (largest total variation between our p, through the cache in pieces, and the
model's own logits in one forward); plain (greedy output equals transformers' `generate`); lookup and batch (outputs equal plain
decoding's); tree (total variation over branching drafts); taps and shared_kv (outputs with a block drafter trained for 20 steps equal
plain decoding's: chains, trees, batches, coupled sampling); autoregressive and masked_lm (the same with a drafter made of the
target's layers, saved and loaded). The page lists exceptions only.
"""

import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from decode.engine.decoder import Decoder
from decode.proposers.lookup import LookupProposer
from decode.speculation.tree import ancestors
from specalign.common.errors import UserError, cli, nearest
from specalign.common.text import say
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.compared import Plain, same
from tests.target_drafters import cell, compared, of_own_layers, trained_drafter
from tests.target_models import WINDOW, generated, some_text, tiny_model, tiny_target
from tests.target_wrappers import save_wrapper, text_of, tiny_wrapper

NAMES = """
afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert-generation bigbird_pegasus
biogpt bitnet blenderbot blenderbot-small bloom codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm dbrx
deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama dory dots1 dots3_note_text ernie4_5 ernie4_5_moe exaone
exaone4 exaone_moe falcon falcon_alibi falcon_h1 falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma3n_text
gemma4_text gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2 gpt_bigcode gpt_neo
gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_loop_text
inkling2_text inkling_text internlm3 iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 laguna lara_mini lfm2
lfm2_moe lfm3 llama llama4_text longcat_flash mamba mamba2 marian mbart mellum mimo_v2_flash minicpm3 minimax
minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mistral4 mixtral moshi mpt mvp nanochat nemotron nemotron_h
olmo olmo2 olmo3 olmo_hybrid olmoe opt pegasus persimmon phi phi3 phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5_moe_text
qwen3_5_text qwen3_moe qwen3_next qwen4_exp_text recurrent_gemma sarvam_mla sarvam_moe seed_oss smollm3 solar_open
stablelm starcoder2 trocr vaultgemma whisper xglm xlstm youtu zamba zamba2 zaya
"""
WRAPPERS = """
apertus1p5 aria aya_vision chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_ocr2 deepseek_vl
deepseek_vl_hybrid ernie4_5_vl_moe exaone4_5 fun_asr_nano fuyu gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v
glm4v_moe glm5_next glm_ocr glmasr glmga got_ocr2 granite4_vision granite_docling granite_speech granite_speech_plus
hunyuan_vl hy_v4_vl hyperclovax_vision_v2 idefics2 idefics3 inkling2 inkling2_loop internvl janus kimi_k25 lfm2_vl
lfm3_vl lighton_ocr llama4 llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7
minimax_m3_vl mistral3 mistral_large4 mllama molmo2 moss_transcribe_diarize muse_glimmer muse_spark omniasr ovis2
paddleocr_vl paligemma phi4_multimodal pp_chart2table qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_vl
qwen3_5 qwen3_5_moe qwen3_asr qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp smolvlm step3p7 video_llama_3
video_llava vipllava voxtral
"""
COLUMNS = ["attention", "states", "p", "plain", "lookup", "batch", "tree"]
COLUMNS += ["taps", "shared_kv", "autoregressive", "masked_lm"]
ITS_FORWARD = "its forward's"
"""Result of a model whose `generate` differs from its own forward pass, which our outputs equal."""
TABLES = {"architectures": "", "refused": "refused: "}
"""Tables of the page and how their results begin."""
NEW = 24
"""Tokens written after a prompt that is longer than the window."""
PIECES = [30, 1, 5, 1, 2 * WINDOW + 10 - 37]
"""Tokens of each call through a cache."""
ROUNDING = 1e-4
PAGE = Path(__file__).parents[1] / "docs/architectures.md"


def main(names: list[str]) -> int:
    transformers.logging.set_verbosity_error()
    known = [*NAMES.split(), *WRAPPERS.split()]
    on_the_page = not names or names[0] == "write"
    names = names[on_the_page:] or known
    for name in names:
        if name not in known:
            raise UserError(f"{name!r} is not an architecture of the page{nearest(name, known)}")
    results = {}
    for name in names:
        results[name] = judge_wrapper(name) if name in WRAPPERS.split() else judge_model(name)
        say(f"{name}: {results[name]}")
    if on_the_page:
        PAGE.write_text(updated(PAGE.read_text(), results))
    return sum("wrong" in result or "traceback" in result for result in results.values())


def updated(page: str, results: dict[str, str]) -> str:
    """The page with these results. Architectures with the same result share a line."""
    by_name = read_results(page) | results
    for mark, prefix in TABLES.items():
        groups: dict[str, list[str]] = {}
        for name, result in sorted(by_name.items()):
            if result.startswith("refused: ") == bool(prefix):
                groups.setdefault(result.removeprefix(prefix), []).append(name)
        largest_first = sorted(groups.items(), key=lambda group: -len(group[1]))
        rows = [f"| {' '.join(names)} | {result} |" for result, names in largest_first]
        old = between(page, mark)
        page = page.replace(old, "\n".join([*old.splitlines()[:2], *rows]) + "\n")
    return page


def read_results(page: str) -> dict[str, str]:
    """The result of every architecture on the page."""
    results = {}
    for mark, prefix in TABLES.items():
        for line in between(page, mark).splitlines()[2:]:
            names, result = line.strip("| ").split(" | ")
            results.update(dict.fromkeys(names.split(), prefix + result))
    return results


def between(page: str, mark: str) -> str:
    """The table of a mark."""
    return page.partition(f"<!-- {mark} -->\n")[2].partition(f"<!-- /{mark} -->")[0]


def judge_model(name: str) -> str:
    """The limits of one architecture; a refusal is one, a traceback a fault."""

    def judge() -> str:
        target = tiny_target(name)
        own = tiny_model(name, len(target.tokenizer))
        return limits(judged(target, own))

    return reported(judge)


def judge_wrapper(name: str) -> str:
    """The same for a model with towers, opened from its folder."""

    def judge() -> str:
        own = tiny_wrapper(name)
        save_wrapper(own, Path(folder))
        target = load_target(folder, "float32", "cpu")
        return limits(judged(target, text_of(own)))

    with TemporaryDirectory() as folder:
        return reported(judge, f"target {folder!r}: ")


def reported(judge: Callable[[], str], prefix: str = "") -> str:
    """What `judge` returns, or why it was refused."""
    try:
        return judge()
    except UserError as error:
        return refusal(str(error).removeprefix(prefix))
    except ImportError as error:
        return f"refused: {' '.join(str(error).split()).partition(' but ')[0]}"
    except Exception:
        say(traceback.format_exc(), error=True)
        return "traceback"


def refusal(error: str) -> str:
    """The reason in a few words, without names of classes and modules of one release."""
    why = error.partition("architecture ")[2].partition("' ")[2] or error
    aside = r"^\([^)]*\) |^failed the exactness check: |^is not supported: | \(it is .*"
    why = re.sub(aside, "", why)
    return f"refused: {why.partition(':')[0].replace('|', '/')}"


def limits(cells: list[str]) -> str:
    """What does not work, in a few words; `none` where everything does."""
    result = dict(zip(COLUMNS, cells, strict=True))
    found = []
    if result["states"] != "—":
        found.append("recurrent" + result["states"].removeprefix("replayed"))
    elif result["tree"] == "chains alone":
        found.append("chains only")
    if "own" in result["attention"]:
        found.append("own attention")
    found += [f"{name} {result[name]}" for name in ("p", "tree") if "wrong" in result[name]]
    outputs = {name: result[name] for name in ("plain", "lookup", "batch")}
    found += [f"{n}: {cell}" for n, cell in outputs.items() if cell not in ("yes", ITS_FORWARD)]
    if result["plain"] == ITS_FORWARD:
        found.append("`generate` ≠ forward pass")
    drafters = COLUMNS[COLUMNS.index("taps") :]
    refused = [name for name in drafters if result[name].startswith("refused")]
    if refused:
        found.append("no " + ", ".join(refused))
    others = [name for name in drafters if name not in refused and result[name] != "yes"]
    for what in dict.fromkeys(result[name] for name in others):
        names = ", ".join(name for name in others if result[name] == what)
        reason = "outputs can diverge at router ties" if what == "a tie" else what
        found.append(f"{names}: {reason}")
    return "; ".join(found) or "none"


def judged(target: Target, own: Any) -> list[str]:
    """What was found for each of COLUMNS."""
    prompts = [prompt(target, seed) for seed in range(4)]
    plain = [Decoder(target).generate(p, max_new_tokens=NEW).tokens for p in prompts]
    drafted = Decoder(target, LookupProposer(4))
    lookup = same(Plain(Decoder(target), prompts, NEW, None), drafted)
    alone = [drafted.generate(p, max_new_tokens=NEW).tokens for p in prompts]
    batch = [o.tokens for o in drafted.generate_batch(prompts, batch_size=4, max_new_tokens=NEW)]
    wanted = [generated(own, target, p, NEW) for p in prompts]
    states = "replayed" if target.anatomy.recurrent else "—"
    return [
        target.attention,
        "replayed, by token" if target.stepwise else states,
        within(in_pieces(target, own)),
        "yes" if plain == wanted else greedy(own, prompts, plain),
        cell(lookup),
        "yes" if batch in (plain, alone) else "wrong",
        "chains alone" if target.chains_only else within(in_a_tree(target, own)),
        *(block(target, prompts, plain, context) for context in ("taps", "shared_kv")),
        of_own_layers(target, "autoregressive", prompts[:2], NEW // 2),
        of_own_layers(target, "masked_lm", prompts[:2], NEW // 2),
    ]


def block(target: Target, prompts: list[list[int]], plain: list[list[int]], context: str) -> str:
    """The cell of a block drafter of this context."""
    texts = [p + written for p, written in zip(prompts, plain, strict=True)]
    try:
        drafter = trained_drafter(target, texts, context)
    except UserError as error:
        return "refused" if "drafter.context=" in str(error) else f"refused: {error}"
    return compared(target, drafter, prompts, NEW)


@torch.no_grad()
def greedy(own: Any, prompts: list[list[int]], written: list[list[int]]) -> str:
    """Where `generate` says something else: is it what the model's own forward gives, over the whole text without a cache?"""
    for before, after in zip(prompts, written, strict=True):
        logits = own(torch.tensor([before + after]), use_cache=False).logits[0]
        if logits[len(before) - 1 : -1].argmax(-1).tolist() != after:
            return "wrong"
    return ITS_FORWARD


def prompt(target: Target, seed: int) -> list[int]:
    """Longer than the window; its end repeats its beginning."""
    tokens: list[int] = some_text(target, WINDOW + 6 + seed, seed)[0].tolist()
    return tokens + tokens[:8]


def variation(one: Tensor, other: Tensor) -> float:
    """The largest total variation of the softmax of two rows of logits; a model's own may leave the last columns out."""
    other = F.pad(other, (0, one.shape[-1] - other.shape[-1]), value=-torch.inf)
    return float((one.double().softmax(-1) - other.double().softmax(-1)).abs().sum(-1).max() / 2)


def within(found: float) -> str:
    """The figure; rounding in fp32 is below the limit."""
    return f"{found:.0e}" if found < ROUNDING else f"wrong: {found:.1e}"


@torch.no_grad()
def in_pieces(target: Target, own: Any) -> float:
    tokens, cache = some_text(target, 2 * WINDOW + 10, 9), target.new_cache(1, 2 * WINDOW + 10)
    found = [target.forward(part, cache=cache).logits_BLV for part in tokens.split(PIECES, dim=1)]
    return variation(torch.cat([x for x in found if x is not None], 1), own(tokens).logits)


@torch.no_grad()
def in_a_tree(target: Target, own: Any) -> float:
    """Two branches behind a text that is longer than the window, each against its text alone."""
    tokens = some_text(target, WINDOW + 20, 5)
    size, cache = tokens.shape[1], target.new_cache(1, WINDOW + 30)
    target.forward(tokens[:, :-5], cache=cache)
    see_LL = ancestors((-1, 0, -1, 2))
    found = target.forward(tokens[:, -5:], cache=cache, see_LL=see_LL).logits_BLV
    assert found is not None
    first = own(tokens[:, :-2]).logits[:, size - 5 :]
    second = own(torch.cat((tokens[:, :-4], tokens[:, -2:]), 1)).logits[:, size - 5 :]
    return max(variation(found[:, [0, 1, 2]], first), variation(found[:, [0, 3, 4]], second))


if __name__ == "__main__":
    cli(lambda: sys.exit(main(sys.argv[1:])))()
