"""DSpark's layout (arXiv 2607.05147; vLLM, SGLang, SpecForge), read and written: DFlash's layers,
blocks whose anchor drafts too, a Markov head (written: vanilla ones) and a confidence head.

vanilla: bias = W2·W1[x]; gated: W2·(σ(W_g·[h; W1[x]] + b) ⊙ W1[x]); rnn: W2·tanh(W_j·[state; W1[x];
h] + b), of W_j's rows (gate, candidate, output) the last third. The confidence head reads h, and
W1[x] if the config asks for it.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from specalign.common.errors import UserError, in_one_line
from specalign.common.schema import JsonObject
from specalign.formats.published import ConfigReader, Exported, check_fit, qwen3_config, taps_config
from specalign.formats.tensors import embed_vocabulary, published_tensors, vocabulary_tensors
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel")
WRITTEN = ("vanilla", "linear")
"""Values of `drafter.markov` that are written, as vanilla heads, which all engines have."""
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
GATE, JOINT, CONFIDENCE = "markov_head.gate_proj", "markov_head.joint_proj", "confidence_head.proj"


# ---- read ----


def read_dspark(s: ConfigReader, target: Target) -> JsonObject:
    """Settings of a folder's config.json (`ConfigReader.read_layers`)."""
    s.check_architecture(*ARCHITECTURES)
    return {**s.read_layers(target, from_anchor=True), **read_head_settings(s)}


def read_head_settings(s: ConfigReader) -> JsonObject:
    """Markov and confidence head by the config; the tensors decide which kind of ours it is."""
    rank = s.get_int("markov_rank", 0, low=0)
    kind = s.get("markov_head_type", "vanilla")
    found: JsonObject = {"markov_rank": rank, "markov": kind if rank else ""}
    if s.get("enable_confidence_head", False):
        reads = s.get("confidence_head_with_markov", rank > 0)
        if reads and not rank:
            raise UserError("confidence_head_with_markov=true needs markov_rank above 0")
        found |= {"confidence_head": True, "confidence_input": "markov" if reads else "hidden"}
    return found


def take_heads(
    tensors: dict[str, Tensor], settings: JsonObject, path: Path
) -> tuple[JsonObject, dict[str, Tensor]]:
    """Take the heads' tensors out of a folder's, by what `read_head_settings` found. Returns the
    settings of `BlockConfig` and the tensors, by this project's names. Raises UserError for a
    missing tensor, or an rnn whose output reads the state of the drafts before, which is not
    carried here."""

    def take(name: str) -> Tensor:
        if name not in tensors:
            raise UserError(f"missing tensor {name!r}")
        return tensors.pop(name)

    rank, kind = settings.get("markov_rank", 0), settings.get("markov", "")
    options: JsonObject = {}
    taken: dict[str, Tensor] = {}
    with in_one_line(f"{path}/model.safetensors"):
        if rank:
            w1, w2 = take(W1), take(W2)
            if kind == "vanilla" and settings.get("confidence_input") != "markov" and not w2.any():
                rank = 0  # a bias of zeros
            else:
                taken |= {"markov.table.weight": w1, "markov.basis": w2.t().contiguous()}
        if rank and kind != "vanilla":
            if kind == "gated":  # columns: h, W1[x]
                weight, bias = take(f"{GATE}.weight"), take(f"{GATE}.bias")
                hidden, table = weight.split((weight.shape[1] - rank, rank), dim=1)
            else:  # columns: state, W1[x], h; rows: gate, candidate, output
                weight, bias = take(f"{JOINT}.weight")[-rank:], take(f"{JOINT}.bias")[-rank:]
                state, table, hidden = weight.tensor_split((rank, 2 * rank), dim=1)
                if bool(state.any()):
                    why = "its output reads the state of earlier drafts, which is not decoded here"
                    raise UserError(f"{JOINT}.weight: {why}")
            taken["markov.hidden.weight"] = hidden.contiguous()
            taken["markov.previous.weight"] = table.contiguous()
            if bool(bias.any()):
                options["markov_bias"] = True
                taken["markov.hidden.bias"] = bias.contiguous()
        if settings.get("confidence_head"):
            for part in ("weight", "bias"):
                taken[f"confidence.out.{part}"] = take(f"{CONFIDENCE}.{part}")
    return {**options, "markov_rank": rank, "markov": kind if rank else ""}, taken


# ---- written ----


def make_dspark(drafter: BlockDrafter) -> Exported:
    """DSpark's folder. Raises UserError for a drafter that the format can't hold."""
    c = drafter.config
    check_fit(drafter, "dspark", "anchor_first", WRITTEN)
    heads = write_heads(drafter)
    confidence = drafter.confidence is not None
    config = {
        "architectures": [ARCHITECTURES[0]],
        **qwen3_config(drafter),
        **taps_config(drafter),
        "sample_from_anchor": True,
        "markov_rank": heads[W1].shape[1],
        "markov_head_type": "vanilla",
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and c.confidence_input != "hidden",
    }
    return Exported(config, published_tensors(drafter) | heads | vocabulary_tensors(drafter))


@torch.no_grad()
def write_heads(drafter: BlockDrafter) -> dict[str, Tensor]:
    """A drafter's heads as tensors of DSpark's format, fp32, equal up to rounding: W1 (V, r) and W2
    (Vd, r) of a vanilla head. Without a Markov head: one of rank 1 whose bias is zero.

    A confidence head's share of e(x) becomes one more column of W1, which W2 does not read.
    """
    markov, embedding_VD = drafter.markov, embed_vocabulary(drafter).float()
    w1 = embedding_VD.new_zeros(len(embedding_VD), 1)
    w2 = embedding_VD.new_zeros(drafter.draft_size, 1)
    if markov is not None:
        w2 = markov.basis_Vr().float()
        if markov.table is not None:
            w1 = markov.table.weight.float().clone()
        elif markov.previous is not None:
            w1 = embedding_VD @ markov.previous.weight.float().T
    tensors: dict[str, Tensor] = {}
    if drafter.confidence is not None:
        weight, bias = (p.float().clone() for p in drafter.confidence.out.parameters())
        if not drafter.config.confidence_input:
            width = embedding_VD.shape[1]
            column = embedding_VD @ weight[0, width:, None]
            w1 = column if markov is None else torch.cat((w1, column), dim=1)
            w2 = w2 if markov is None else F.pad(w2, (0, 1))
            reads = w1.new_zeros(1, w1.shape[1])
            reads[0, -1] = 1
            weight = torch.cat((weight[:, :width], reads), dim=1)
        tensors |= {f"{CONFIDENCE}.weight": weight, f"{CONFIDENCE}.bias": bias}
    return {**tensors, W1: w1.contiguous(), W2: w2.contiguous()}
