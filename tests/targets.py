"""Two tables of architectures and what works, from tiny random models: docs/targets.md holds them.

python -m tests.targets                    # all, a quarter of an hour: before a release
python -m tests.targets wrappers           # the second table alone
python -m tests.targets llama gemma3       # these, printed
python -m tests.targets write llama gemma3 # these, in the page

The second table is of models that hold a text model beside towers for images or sound. They are saved as folders and opened by
path, and compared with the whole model on text.

Columns. *p*: the largest total variation of our p, through the cache in pieces, to the model's own logits in one call.
Where it is above 1e-5 (5e-5 of replayed states), the model's own fp32 stands beside it, against fp64 and, of states, through its own
cache. *plain*: greedy output = transformers' own `generate`, token for token, past the window; `its forward's` where that writes
another text than the model's own forward without a cache, and ours is the forward's. *lookup* and *batch*: outputs with drafts
copied from the text, and of four requests at once, = plain. *tree*: TV of branching drafts, or that it takes chains alone.
*taps*, *shared_kv*: outputs with a block drafter of that context, after 20 training steps, = plain: greedy chains and trees, four
requests at once, coupled at temperature 1. *autoregressive*, *masked_lm*: greedy output with a drafter out of the target's own
layers, saved and loaded, = plain. A model that is not p with weights out of bf16 ends in a traceback. *a tie*: the outputs part at a place where two tokens, or two experts of a router, are equal to the
last digits (`decode.verification.divergence`).
"""

from __future__ import annotations

import copy
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from align.common.errors import UserError, cli, nearest
from align.common.text import say
from align.target.debug import debug_model
from align.target.inspection.anatomy import cache_name, decoder
from align.target.inspection.own_cache import cache_of_its_own
from align.target.inspection.own_output import positions
from align.target.loading import load_target
from align.target.model import Target
from align.target.proof import proven
from decode.drafters.lookup import LookupDrafter
from decode.engine.decoder import Decoder
from tests.compared import Plain, same
from tests.target_drafters import cell, compared, of_own_layers, trained_drafter
from tests.target_models import WINDOW, generated, some_text, tiny_model, tiny_target
from tests.target_wrappers import save_wrapper, text_of, tiny_wrapper

NAMES = """
afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation big_bird
bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom blt camembert codegen cohere cohere2 cohere2_moe
cohere_compass_text cpmant ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge
dory dots1 dots3_note_text electra ernie ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon falcon_alibi falcon_h1
falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_assistant gemma4_text gemma4_unified_assistant gemma4_unified_text git glm glm4
glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite
granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_loop_text inkling2_text inkling_text internlm3 iquestcoder jais2 jamba
jetmoe kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4_text longcat_flash mamba mamba2 marian
mbart megatron-bert mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral
mistral4 mixtral modernbert-decoder moshi mpt musicgen musicgen_melody mvp nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe
openai-gpt opt pegasus persimmon phi phi3 phimoe plbart prophetnet qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text
qwen3_moe qwen3_next qwen4_exp_text recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert roformer
rwkv sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xglm xlm
xlm-roberta xlm-roberta-xl xlnet xlstm xmod youtu zamba zamba2 zaya
"""
WRAPPERS = """
apertus1p5 aria aya_vision blip blip-2 chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_ocr2
deepseek_vl deepseek_vl_hybrid emu3 ernie4_5_vl_moe exaone4_5 fun_asr_nano fuyu gemma3 gemma3n gemma4 gemma4_unified
glm46v glm4v glm4v_moe glm5_next glm_ocr glmasr glmga got_ocr2 granite4_vision granite_docling granite_speech
granite_speech_plus hunyuan_vl hy_v4_vl hyperclovax_vision_v2 idefics2 idefics3 inkling2 inkling2_loop instructblip
instructblipvideo internvl janus kimi_k25 kosmos-2 kosmos-2.5 kyutai_speech_to_text lfm2_vl lfm3_vl lighton_ocr llama4
llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3
mistral_large4 mllama molmo2 moss_transcribe_diarize muse_glimmer muse_spark omniasr ovis2 paddleocr_vl paligemma
perception_lm phi4_multimodal pix2struct pp_chart2table pp_formulanet qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl
qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp shieldgemma2 smolvlm
step3p7 unlimited_ocr video_llama_3 video_llava vipllava vision-encoder-decoder voxtral voxtral_realtime
"""
HEAD = "| architecture | attention | states | p | plain | lookup | batch | tree | taps | shared_kv | autoregressive | masked_lm |\n"
HEAD += "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
WRAPPED = HEAD.replace("| attention", "| opened as | attention", 1).replace("|---", "|---|---", 1)
NEW = 24
"""Tokens written after a prompt that is longer than the window."""
PIECES = [30, 1, 5, 1, 2 * WINDOW + 10 - 37]
"""Tokens of each call through a cache."""
PAGE = Path(__file__).parents[1] / "docs/targets.md"


def main(names: list[str]) -> int:
    transformers.logging.set_verbosity_error()
    new = names[:1] == ["write"]
    names = names[new:]
    if names and names != ["wrappers"]:
        if unknown := [name for name in names if name not in (*NAMES.split(), *WRAPPERS.split())]:
            raise UserError(
                f"{unknown[0]!r} is no architecture of these tables{nearest(unknown[0], NAMES.split())}"
            )
        rows = [*map(printed, names)]
        return write(rows) if new else faults(rows)
    found = 0 if names else write([*map(printed, NAMES.split())])
    return found + write([*map(printed, WRAPPERS.split())])


def printed(name: str) -> str:
    line = wrapped_row(name) if name in WRAPPERS.split() else row(name)
    say(line)
    return line


def faults(rows: list[str]) -> int:
    return sum("wrong" in r or "traceback" in r for r in rows)


def write(rows: list[str]) -> int:
    """Put rows into their tables on the page, in order; how many of them are faults."""
    for mark, head, names in (
        ("architectures", HEAD, NAMES.split()),
        ("wrappers", WRAPPED, WRAPPERS.split()),
    ):
        begin, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
        before, _, rest = PAGE.read_text().partition(begin)
        old, _, behind = rest.partition(end)
        by_name = {line.split(" ")[1]: line for line in [*old.splitlines()[2:], *rows]}
        table = "".join(by_name[name] + "\n" for name in names if name in by_name)
        PAGE.write_text(f"{before}{begin}{head}{table}{end}{behind}")
    return faults(rows)


def row(name: str) -> str:
    """One line of the table; a refusal is one, a traceback a fault."""
    try:
        target = tiny_target(name)
        own = tiny_model(name, len(target.tokenizer))
        cells = judged(target, own)
        prove_out_of_bf16(own, name)
    except UserError as error:
        why = str(error).partition("architecture ")[2].partition("' ")[2]
        return f"| {name} | refused: {why[:150].replace('|', '/')} | | | | | | | | | | |"
    except Exception:
        say(traceback.format_exc(), error=True)
        return f"| {name} | traceback | | | | | | | | | | |"
    return f"| {name} | {' | '.join(cells)} |"


def wrapped_row(name: str) -> str:
    """The same of a model with towers, opened from its folder."""
    rest = " |" * 11
    with TemporaryDirectory() as folder:
        try:
            own = tiny_wrapper(name)
            save_wrapper(own, Path(folder))
            target = load_target(folder, "float32", "cpu")
            cells = judged(target, text_of(own))
            prove_out_of_bf16(own, name)
            return f"| {name} | {type(target.model).__name__} | {' | '.join(cells)} |"
        except UserError as error:
            why = str(error).partition("architecture ")[2].partition("' ")[2]
            why = why or str(error).removeprefix(f"target {folder!r}: ").replace(folder, "it")
            return f"| {name} | refused: {why[:200].replace('|', '/')} |{rest}"
        except ImportError as error:
            return f"| {name} | not tried: {' '.join(str(error).split()).partition(' but ')[0]} |{rest}"
        except Exception:
            say(traceback.format_exc(), error=True)
            return f"| {name} | traceback |{rest}"


def prove_out_of_bf16(own: Any, name: str) -> None:
    """Weights out of bf16 stay so in memory (align/kernels/linear.py); with them it is p as well.

    Raises:
        AssertionError: it is refused with them, and not with the same weights in fp32.
    """
    tokenizer = debug_model("Llama")[1]
    half = copy.deepcopy(own).bfloat16().float()
    try:
        proven(copy.deepcopy(half), tokenizer, name, fast=False)
    except UserError:  # the rounded weights make another model, whose own cache may round coarsely
        return
    try:
        proven(half, tokenizer, name)
    except UserError as error:
        raise AssertionError(f"with weights out of bf16: {error}") from None


def judged(target: Target, own: Any) -> list[str]:
    """The cells of one architecture."""
    prompts = [prompt(target, seed) for seed in range(4)]
    plain = [Decoder(target).generate(p, max_new_tokens=NEW).tokens for p in prompts]
    drafted = Decoder(target, LookupDrafter(4))
    lookup = same(Plain(Decoder(target), prompts, NEW, None), drafted)
    batch = [o.tokens for o in drafted.generate_batch(prompts, batch_size=4, max_new_tokens=NEW)]
    wanted = [generated(own, target, p, NEW) for p in prompts]
    states = "replayed, by token" if target.stepwise else "replayed" if target.anatomy.recurrent else "—"
    return [
        target.attention,
        states,
        # a state summed by chunks and by steps rounds apart: in transformers' own cache as much as in ours
        within(in_pieces(target, own), own, 5e-5 if target.anatomy.recurrent else 1e-5),
        "yes" if plain == wanted else greedy(own, prompts, plain),
        cell(lookup),
        "yes"
        if batch in (plain, [drafted.generate(p, max_new_tokens=NEW).tokens for p in prompts])
        else "wrong",
        "chains alone" if target.chains_only else within(in_a_tree(target, own), own),
        *drafters(target, prompts, plain),
    ]


def drafters(target: Target, prompts: list[list[int]], plain: list[list[int]]) -> list[str]:
    """The cells of each kind of drafter."""
    return [
        *(block(target, prompts, plain, context) for context in ("taps", "shared_kv")),
        *(of_own_layers(target, kind, prompts[:2], NEW // 2) for kind in ("autoregressive", "masked_lm")),
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
        best = own(torch.tensor([before + after]), use_cache=False).logits[0, len(before) - 1 : -1].argmax(-1)
        if best.tolist() != after:
            return "wrong"
    return "its forward's"


def prompt(target: Target, seed: int) -> list[int]:
    """Longer than the window; its end repeats its beginning."""
    tokens: list[int] = some_text(target, WINDOW + 6 + seed, seed)[0].tolist()
    return tokens + tokens[:8]


def variation(one: Tensor, other: Tensor) -> float:
    """The largest total variation of the softmax of two rows of logits; a model's own may leave the last columns out."""
    other = F.pad(other, (0, one.shape[-1] - other.shape[-1]), value=-torch.inf)
    return float((one.double().softmax(-1) - other.double().softmax(-1)).abs().sum(-1).max() / 2)


def within(found: float, own: Any, limit: float = 1e-5) -> str:
    """The figure, fine below the limit, or where the model itself rounds as coarsely in fp32."""
    if found < limit:
        return f"{found:.0e}"
    rounding = own_rounding(own, limit > 1e-5)
    return f"{found:.0e} (its own fp32: {rounding:.0e})" if found < 3 * rounding else f"wrong: {found:.1e}"


@torch.no_grad()
def own_rounding(own: Any, recurrent: bool) -> float:
    """Total variation of the model's own logits in fp32 to those in fp64; of states, also of those through its own cache."""
    tokens = torch.randint(4, 260, (1, 2 * WINDOW + 10), generator=torch.Generator().manual_seed(9))
    whole, exact = own(tokens).logits, copy.deepcopy(own).double()
    exact.set_experts_implementation("eager")  # grouped products know no fp64
    found = variation(whole, exact(tokens).logits)
    if not recurrent:
        return found
    cache: Any = DynamicCache(config=own.config.get_text_config(decoder=True))
    name, past, parts = cache_name(own), 0, []
    pieces = PIECES
    if (
        cache_of_its_own(decoder(own), name, own.device) is not None
    ):  # MiniMax's goes on by single tokens alone
        cache, pieces = None, [PIECES[0], *[1] * sum(PIECES[1:])]
    for part in tokens.split(pieces, dim=1):
        output = own(input_ids=part, use_cache=True, **{name: cache}, **positions(own, part, past))
        parts.append(output.logits)
        past, cache = past + part.shape[1], output[name]
    return max(found, min(1e-4, variation(torch.cat(parts, 1), whole)))  # some caches are wrong themselves


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
    see_LL = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]],
        dtype=torch.bool,
    )
    found = target.forward(tokens[:, -5:], cache=cache, see_LL=see_LL).logits_BLV
    assert found is not None
    first = own(tokens[:, :-2]).logits[:, size - 5 :]
    second = own(torch.cat((tokens[:, :-4], tokens[:, -2:]), 1)).logits[:, size - 5 :]
    return max(variation(found[:, [0, 1, 2]], first), variation(found[:, [0, 3, 4]], second))


if __name__ == "__main__":
    cli(lambda: sys.exit(main(sys.argv[1:])))()
