"""DSpark (arXiv 2607.05147): its Markov and confidence heads, read and written; its folder, written.

vanilla: bias = W2·W1[x]; gated: W2·(σ(W_g·[h; W1[x]] + b) ⊙ W1[x]); rnn: W2·tanh(W_j·[state; W1[x];
h] + b), of W_j's rows (gate, candidate, output) the last third. The confidence head reads h, and
W1[x] if the config asks for it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.formats.dflash import (
    WHOLE_VOCABULARY,
    Exported,
    add_draft_vocabulary,
    add_scaled_embedding,
    check_fits,
    embed_vocabulary,
    published_tensors,
    qwen3_config,
    taps_config,
)
from specalign.models.block import BlockDrafter
from specalign.models.markov import MarkovHead

KINDS = {"tanh": "rnn", "linear": "vanilla", "vanilla": "vanilla", "gated": "gated", "rnn": "rnn"}
"""`drafter.markov` → `markov_head_type`, for the kinds that the format has."""
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
GATE, JOINT, CONFIDENCE = "markov_head.gate_proj", "markov_head.joint_proj", "confidence_head.proj"


def take_heads(
    tensors: dict[str, Tensor], settings: JsonObject, width: int, path: Path
) -> tuple[JsonObject, dict[str, Tensor]]:
    """Take the heads' tensors out of a folder's. Returns the settings of `BlockConfig` and the
    tensors, by this project's names. Raises UserError for a missing or misshapen tensor, or an rnn
    whose output reads the state of the drafts before, which is not carried here.

    Args:
        settings: `markov_rank`, `markov` (DSpark's kind), `confidence_head`, `confidence_input`.
            width: D.
    """
    where = f"{path}/model.safetensors"

    def take(name: str, *shape: int) -> Tensor:
        """−1 = any number of rows."""
        if name not in tensors:
            raise UserError(f"{where}: misses tensor {name!r}")
        tensor = tensors.pop(name)
        found = tuple(tensor.shape)
        if len(found) != len(shape) or found[1:] != shape[1:] or shape[0] not in (-1, found[0]):
            raise UserError(f"{where}: {name} has shape {found}, expected {shape}")
        return tensor

    rank, kind = settings.get("markov_rank", 0), settings.get("markov", "")
    reads_markov = settings.get("confidence_input") == "markov"
    options: JsonObject = {}
    taken: dict[str, Tensor] = {}
    if rank:
        w1, w2 = take(W1, -1, rank), take(W2, -1, rank)
        if kind == "vanilla" and not reads_markov and not bool(w2.any()):
            rank = 0  # a bias of zeros
        else:
            taken |= {"markov.table.weight": w1, "markov.basis": w2.t().contiguous()}
    if rank and kind != "vanilla":
        if kind == "gated":  # columns: h, W1[x]
            weight, bias = take(f"{GATE}.weight", rank, width + rank), take(f"{GATE}.bias", rank)
            hidden, table = weight.split((width, rank), dim=1)
        else:  # columns: state, W1[x], h; rows: gate, candidate, output
            weight = take(f"{JOINT}.weight", 3 * rank, 2 * rank + width)
            bias = take(f"{JOINT}.bias", 3 * rank)[2 * rank :]
            state, table, hidden = weight[2 * rank :].split((rank, rank, width), dim=1)
            if bool(state.any()):
                why = "its output reads the state of earlier drafts, which is not decoded here"
                raise UserError(f"{where}: {JOINT}.weight: {why}")
        taken["markov.hidden.weight"] = hidden.contiguous()
        taken["markov.previous.weight"] = table.contiguous()
        if bool(bias.any()):
            options["markov_bias"] = True
            taken["markov.hidden.bias"] = bias.contiguous()
    options |= {"markov_rank": rank, "markov": kind if rank else ""}
    if settings.get("confidence_head"):
        size = width + (rank if reads_markov else 0)
        taken["confidence.out.weight"] = take(f"{CONFIDENCE}.weight", 1, size)
        taken["confidence.out.bias"] = take(f"{CONFIDENCE}.bias", 1)
    return options, taken


def make_dspark(drafter: BlockDrafter, name: str = "dspark") -> Exported:
    """DSpark's folder. `name`: of the format, for errors. Raises UserError where it does not fit."""
    c = drafter.config
    layout = "anchor_first" if name == "dspark" else ""  # llama.cpp reads the layout in the file
    check_fits(drafter, name, layout, KINDS, "tanh, linear, vanilla or gated")
    kind, heads = write_heads(drafter)
    rank = heads[W1].shape[1]
    confidence = drafter.confidence is not None
    config = {
        "architectures": ["Qwen3DSparkModel"],
        **qwen3_config(drafter),
        **taps_config(drafter),
        "sample_from_anchor": not c.fill_in,
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and c.confidence_input != "hidden",
    }
    made = Exported(config, published_tensors(drafter) | heads)
    if kind == "vanilla":
        add_draft_vocabulary(made, drafter)
    elif drafter.draft_vocab is not None:  # SGLang's, which has whole vocabularies only
        whole_VR = heads[W2].new_zeros(c.vocab_size, rank)
        made.tensors[W2] = whole_VR.index_copy(0, drafter.draft_vocab, heads[W2])
        made.notes.append(WHOLE_VOCABULARY)
    add_scaled_embedding(made, drafter)
    return made


@torch.no_grad()
def write_heads(drafter: BlockDrafter) -> tuple[str, dict[str, Tensor]]:
    """A drafter's heads as `markov_head_type` and tensors of DSpark's format, fp32, equal up to
    rounding. Without a Markov head: a vanilla one of rank 1 whose bias is zero.

    A confidence head's share of e(x) becomes one more column of W1, which W2 does not read; the
    state columns of an rnn are zero.
    """
    markov, embedding_VD = drafter.markov, embed_vocabulary(drafter).float()
    kind = KINDS[drafter.config.markov_kind] if markov is not None else "vanilla"
    w1, w2 = _write_tables(markov, embedding_VD, drafter.draft_size)
    rank, width, tensors = w1.shape[1], embedding_VD.shape[1], dict[str, Tensor]()
    if drafter.confidence is not None:
        weight, bias = (p.float().clone() for p in drafter.confidence.out.parameters())
        if not drafter.config.confidence_input:
            column = embedding_VD @ weight[0, width:, None]
            w1 = column if markov is None else torch.cat((w1, column), dim=1)
            w2 = w2 if markov is None else F.pad(w2, (0, 1))
            reads = w1.new_zeros(1, w1.shape[1])
            reads[0, -1] = 1
            weight = torch.cat((weight[:, :width], reads), dim=1)
        tensors |= {f"{CONFIDENCE}.weight": weight, f"{CONFIDENCE}.bias": bias}
    size = w1.shape[1]
    tensors |= {W1: w1.contiguous(), W2: w2.contiguous()}
    if kind == "vanilla":
        return kind, tensors
    assert markov is not None and markov.hidden is not None and markov.previous is not None
    if kind == "gated":  # columns: h, W1[x]
        name, unread = GATE, 0
        weight = w1.new_zeros(size, width + size)
        hidden, table = weight.split((width, size), dim=1)
    else:  # columns: state, W1[x], h; rows: gate, candidate, output
        name, unread = JOINT, 2 * size
        weight = w1.new_zeros(3 * size, 2 * size + width)
        _, table, hidden = weight[unread:].split((size, size, width), dim=1)
    bias = w1.new_zeros(unread + size)
    hidden[:rank] = markov.hidden.weight
    if markov.table is None:
        table[:rank, :rank].fill_diagonal_(1)
    else:
        table[:rank, :rank] = markov.previous.weight
    if markov.hidden.bias is not None:
        bias[unread : unread + rank] = markov.hidden.bias
    return kind, tensors | {f"{name}.weight": weight, f"{name}.bias": bias}


def _write_tables(
    markov: MarkovHead | None, embedding_VD: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """W1 (V, r) and W2 (Vd, r) of a head of one of the `KINDS`."""
    if markov is None:
        zeros = embedding_VD.new_zeros
        return zeros(len(embedding_VD), 1), zeros(vocabulary, 1)
    basis_Vr = markov.basis_Vr(folded=True).float()
    if markov.table is not None:
        return markov.table.weight.detach().float().clone(), basis_Vr
    assert markov.previous is not None
    return embedding_VD @ markov.previous.weight.float().T, basis_Vr
