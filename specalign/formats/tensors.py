"""What other engines' layouts share: the tensors of a block drafter, which DFlash and this project
name alike, and its draft vocabulary, read and written."""

from pathlib import Path

import torch
from torch import Tensor

from specalign.common.errors import UserError
from specalign.lm.inspection.parts import embedding_scale
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter

NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""transformers' names → DFlash's."""
EMBEDDING = "embed_tokens.weight"
"""A drafter's own input embeddings."""
_COPIES = (EMBEDDING, "verifier_lm_head.weight", "verifier_norm.weight", "t2d")
"""Copies of the target's weights, and the draft vocabulary once more."""
_RELATED = 0.5
"""The least mean cosine of a target's weights with those of a finetuned descendant."""


# ---- read ----


def read_vocabulary(
    tensors: dict[str, Tensor], target: Target, path: Path
) -> tuple[Tensor | None, Tensor | None]:
    """Take the vocabulary's tensors out. Returns the draft vocabulary, ascending, None = the whole
    one; and the head's rows for it (Vd, D), None = the target's, as over the whole vocabulary,
    whatever the folder holds (as in the speculators package). Raises UserError for a vocabulary
    that is not of this target's tokens, or rows of another target."""
    where = f"{path}/model.safetensors"
    offsets, head = tensors.pop("d2t", None), tensors.pop("lm_head.weight", None)
    rows, *_ = [tensors.pop(name, None) for name in _COPIES]
    if rows is not None:
        _check_related(rows, target.embedding_VD, f"{where}: {EMBEDDING}", target)
    if offsets is None:
        if head is not None:
            _check_related(head, target.head_weight_VD, f"{where}: lm_head.weight", target)
        return None, None
    tokens, order = (offsets.flatten() + torch.arange(offsets.numel())).sort()  # token − row
    vocab = check_vocabulary(tokens, target.vocab_size, f"{where}: d2t")
    basis = "markov_head.markov_w2.weight"
    if basis in tensors and tensors[basis].shape[:1] == vocab.shape:
        tensors[basis] = tensors[basis][order]
    if head is None:
        return vocab, None
    wanted = target.head_weight_VD.detach().cpu()[vocab]
    if head.shape[:1] == order.shape:
        head = head[order]
    _check_related(head, wanted, f"{where}: lm_head.weight", target)
    same = torch.equal(head.bfloat16(), wanted.bfloat16())
    return vocab, None if same else head.float()


def check_vocabulary(vocab: Tensor, vocab_size: int, where: str) -> Tensor:
    """The ids, int64. Raises UserError unless they are distinct and ascending, as token
    verification needs them."""
    if vocab.dim() == 1 and len(vocab) and not vocab.is_floating_point():
        vocab = vocab.long()
        if bool((vocab.diff() > 0).all()) and int(vocab[0]) >= 0 and int(vocab[-1]) < vocab_size:
            return vocab
    raise UserError(f"{where} must hold ascending distinct token ids within 0..{vocab_size - 1}")


def _check_related(rows: Tensor, wanted: Tensor, what: str, target: Target) -> None:
    """Raises UserError if rows belong neither to the target nor to a model that it was finetuned
    from."""
    wanted = wanted.detach().cpu()
    if rows.shape != wanted.shape:
        shapes = f"{tuple(rows.shape)}, target {target.spec!r} has {tuple(wanted.shape)}"
        raise UserError(f"{what} has shape {shapes}")
    some = torch.linspace(0, len(rows) - 1, min(len(rows), 512)).long()
    alike = float(torch.cosine_similarity(rows[some].float(), wanted[some].float(), dim=-1).mean())
    if not alike > _RELATED:
        near = f"cosine {alike:.2f} with those of {target.spec!r}"
        raise UserError(f"{what} holds another target's rows ({near})")


def rename_tensors(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Layers, norms and projection under their names here, without rotary tables and zero biases.
    Raises UserError for a bias that layers here don't have."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("o_proj.bias"):  # of Qwen3's option; zero if the target has none
            if bool(tensor.any()):
                raise UserError(f"{path}: {name} is not zero; layers here have no such bias")
        elif not name.endswith("rotary_emb.inv_freq"):
            found[NAMES.get(name, name)] = tensor
    return found


# ---- written ----


def published_tensors(drafter: BlockDrafter) -> dict[str, Tensor]:
    """Layers, norms and projection, whose names are the published ones."""
    heads = ("markov.", "confidence.")
    found = {n: p.detach() for n, p in drafter.named_parameters() if not n.startswith(heads)}
    if drafter.config.attention_bias:  # Qwen3's option adds one to this projection too
        for i, layer in enumerate(drafter.blocks):
            weight = layer.self_attn.o_proj.weight
            found[f"layers.{i}.self_attn.o_proj.bias"] = weight.new_zeros(weight.shape[0])
    return found


def vocabulary_tensors(drafter: BlockDrafter) -> dict[str, Tensor]:
    """Of a draft vocabulary the head's rows and `d2t` (token − row of each); Gemma's scaled input
    embeddings, which vLLM and speculators would not scale."""
    vocab, found = drafter.draft_vocab, dict[str, Tensor]()
    if vocab is not None:
        found["d2t"] = vocab - torch.arange(len(vocab), device=vocab.device)
        found["lm_head.weight"] = drafter.head_weight_VdD
    if embedding_scale(drafter.target) != 1:
        found[EMBEDDING] = embed_vocabulary(drafter)
    return found


def embed_vocabulary(drafter: BlockDrafter) -> Tensor:
    """The target's input embeddings as it reads them, (V, D)."""
    tokens = torch.arange(drafter.config.vocab_size, device=drafter.norm.weight.device)
    return drafter.target.embed(tokens).detach()
