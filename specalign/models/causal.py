"""A small causal language model as a drafter, for targets without a smaller sibling: some of the
target's layers, its norm, embedding and head (layer skipping as in LayerSkip, arXiv 2404.16710, but
as a separate model). It is saved as an ordinary causal-LM folder."""

import inspect
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specalign.common.batch import Batch
from specalign.common.schema import JsonObject
from specalign.lm.inspection.anatomy import find_body
from specalign.lm.inspection.parts import embedding_names
from specalign.lm.masks import Layout, use_layout
from specalign.lm.model import Target


@dataclass(frozen=True)
class CausalConfig:
    """What the network's own config.json does not say. block_size: K, the drafts that training
    predicts τ for. layers: of the target that it started from, if any. network: its architecture,
    to tell one checkpoint from another."""

    block_size: int
    vocab_size: int
    layers: list[int]
    target: str = ""
    target_sha256: str = ""
    network: JsonObject = field(default_factory=dict)

    def to_dict(self) -> JsonObject:
        return asdict(self)


class CausalDrafter(nn.Module):
    """The network q, a transformers causal LM. Its parameters are those of layers and norm;
    embedding and head are frozen references: its `own`, (V, D) each, or the target's."""

    draft_vocab: Tensor | None = None

    def __init__(
        self,
        model: Any,
        config: CausalConfig,
        target: Target,
        own: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.names = embedding_names(model)
        scale = getattr(model.get_input_embeddings(), "embed_scale", None)
        self._scale = [scale if scale is None else torch.as_tensor(scale).detach()]
        body, bare = find_body(model), cast(Any, nn.Identity())
        bare.bias = None  # BERT reads it
        model.set_input_embeddings(nn.Identity())
        model.set_output_embeddings(bare)
        self.model, self.config = model, config
        self._takes_positions = "position_ids" in inspect.signature(body.forward).parameters
        # in lists, so that they are neither submodules nor parameters
        self._target, self._body = [target], [body]
        self.has_targets_head = own is None
        self._own = None if own is None else [weight_VD.detach() for weight_VD in own]

    @property
    def target(self) -> Target:
        return self._target[0]

    @property
    def head_weight_VD(self) -> Tensor:
        """The frozen output matrix, (V, D)."""
        return self._frozen()[1]

    @property
    def embedding_VD(self) -> Tensor:
        """The frozen input embedding, (V, D)."""
        return self._frozen()[0]

    def _frozen(self) -> list[Tensor]:
        """Embedding and head: its own, on the device of its parameters, or the target's."""
        if self._own is None:
            return [self.target.embedding_VD.detach(), self.target.head_weight_VD.detach()]
        device = next(self.parameters()).device
        self._own = [weight_VD.to(device) for weight_VD in self._own]
        return self._own

    def forward(self, batch: Batch) -> Tensor:
        """Normalised hidden states over packed rows, (B, L, D): row i predicts token i + 1."""
        inputs_BLD = F.embedding(batch.tokens_BL, self.embedding_VD).to(self.model.dtype)
        if (scale := self._scale[0]) is not None:
            inputs_BLD = inputs_BLD * scale.to(inputs_BLD)
        positions = {"position_ids": batch.positions_BL} if self._takes_positions else {}
        layout = Layout(batch.positions_BL, 0, 1, self.model.dtype, mask=batch.attention_mask())
        with use_layout(layout):
            hidden: Tensor = self._body[0](
                inputs_embeds=inputs_BLD,
                attention_mask=torch.ones_like(batch.tokens_BL),
                use_cache=False,
                **positions,
            ).last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head_weight_VD.to(hidden.dtype)).float()
