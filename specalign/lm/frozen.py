"""A frozen causal language model as loaded: its structure, embedding, head and tokenizer."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from threading import RLock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.folder.chat import chat_ids, note_readings
from specalign.folder.tokenizer import opening_ids, text_ids
from specalign.kernels.replacing import speed_up_linears
from specalign.lm.fused import fuse_layers
from specalign.lm.inspection.anatomy import (
    context_limit,
    eos_ids,
    find_body,
    inspect_model,
    query_heads,
)
from specalign.lm.inspection.own_output import placeholder_ids
from specalign.lm.logits import PLAIN, Readout
from specalign.lm.masks import install
from specalign.lm.names import ModelSource
from specalign.rows.conversation import Conversation
from specalign.rows.shapes import as_conversation


class FrozenModel:
    """A frozen causal language model, its embedding and head, and its tokenizer.

    Args:
        model: of transformers, with its own eager attention.
        readout: what the model does to its head's product.
        fast: replace linear layers by faster ones for few rows (CPU).
        own_attention: keep the model's attention instead of ours.
        fuse: run the layers in one call for few rows, where they are of that kind.
        read_past: layers whose weights are read without calling them.

    chains_only: drafts cannot branch. together: one forward pass takes several requests. stepwise:
    recurrent states advance by single tokens only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        source: ModelSource,
        readout: Readout | None = None,
        *,
        fast: bool = True,
        own_attention: bool = False,
        fuse: bool = True,
        read_past: Collection[nn.Module] = (),
    ) -> None:
        self.spec, self.revision = source.spec, source.revision
        self.trust_remote_code = source.trust_remote_code
        self.weights, self.chat = source.weights, source.chat
        self.tokenizer = tokenizer
        self.model = model.eval().requires_grad_(False)
        self.config = config = model.config.get_text_config(decoder=True)
        self.device, self.dtype = model.device, model.dtype
        install(model, own_attention)
        self.body = find_body(model)
        self.anatomy = inspect_model(model, self.body)
        self.layers = self.anatomy.layers
        self.num_layers = len(self.layers)
        self.hidden_size: int = config.hidden_size
        self.num_heads = query_heads(config)
        self.num_kv_heads, self.head_dim = self.anatomy.heads()
        self.groups = self.anatomy.groups
        self.chains_only = self.anatomy.chains_only
        self.together = self.anatomy.ours and not self.anatomy.recurrent
        self.stepwise = False
        self.readout = readout or Readout()
        self.logit_form = self.readout.form
        self.never_V = self.readout.never_V
        self.context_limit = context_limit(config)
        self.head_bias_V: Tensor | None = getattr(model.get_output_embeddings(), "bias", None)
        self.vocab_size = len(model.get_output_embeddings().weight)
        self.eos_ids = eos_ids(config, model.generation_config, tokenizer)
        self.placeholder_ids = placeholder_ids(model)
        self.fast = fast
        self.lock = RLock()  # for a forward pass: taps hook the layers, which threads share
        self._read_past = read_past
        if fast:
            speed_up_linears(model, self.dtype, self.device, None, read_past)
        self._find_ends()
        self.fused = fuse_layers(model, self.body, self.layers) if fuse else None

    def _find_ends(self) -> None:
        """Note the embedding and the head; either may be in bf16 where the model runs in fp32."""
        self.head_weight_VD: Tensor = self.model.get_output_embeddings().weight
        self.embedding_VD: Tensor = self.model.get_input_embeddings().weight

    def restrict(
        self, *, chains_only: bool = False, stepwise: bool = False, one_by_one: bool = False
    ) -> None:
        """Note what the proof found it cannot do exactly."""
        self.chains_only |= chains_only
        self.stepwise |= stepwise
        self.together &= not one_by_one

    def unfuse(self) -> None:
        """Run through the model's modules from now on, as they are about to change."""
        self.fused = None

    def round_weights(self) -> None:
        """Round the linear layers to bf16 where that halves what is read. For drafters, never p."""
        speed_up_linears(self.model, self.dtype, self.device, torch.bfloat16, self._read_past)
        self._find_ends()
        self.fast, self.fused = True, fuse_layers(self.model, self.body, self.layers)

    def note_moved(self, device: torch.device) -> None:
        """The model's tensors were moved to this device."""
        self.device = device
        self._find_ends()

    @contextmanager
    def overridden(
        self, eos_ids: tuple[int, ...] | None, context_limit: int | None
    ) -> Iterator[None]:
        """Context manager that overrides the end-of-text tokens and the context limit; None =
        unchanged."""
        own = self.eos_ids, self.context_limit
        self.eos_ids = own[0] if eos_ids is None else eos_ids
        self.context_limit = own[1] if context_limit is None else context_limit
        try:
            yield
        finally:
            self.eos_ids, self.context_limit = own

    def fix_date(self, date: str) -> None:
        """Set the clock that the chat template reads to this day, ISO."""
        self.chat = replace(self.chat, date=date)

    @property
    def dtype_name(self) -> str:
        """The dtype's name, as in `load_target`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def attention(self) -> str:
        """A description of the attention in use."""
        if not self.anatomy.attends:
            return "none"
        return "grouped" if self.anatomy.ours else "its own, eager"

    def branch_error(self) -> UserError:
        """The error for drafts that branch, where `chains_only`."""
        why = "has recurrent states" if self.anatomy.recurrent else "can't attend along branches"
        hint = "use tree_nodes=0, or a method that drafts chains"
        return UserError(f"target {self.spec!r} {why}, so drafts can't branch: {hint}")

    @property
    def rope_theta(self) -> float:
        rope = getattr(self.config, "rope_parameters", None) or {}
        return float(rope.get("rope_theta") or getattr(self.config, "rope_theta", None) or 10000.0)

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) over every weight's name, dtype, shape and bytes: it identifies p."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            if self.dtype == torch.float32 and tensor.dtype == torch.bfloat16:
                tensor = tensor.float()  # kept in half the memory (specalign/kernels/linear.py)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings, (…) → (…, D)."""
        return self.model.get_input_embeddings()(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits in fp32, (…, D) → (…, V): all that the model does to its last hidden state."""
        return self.readout(self.head_product(hidden))

    def head_product(self, hidden: Tensor) -> Tensor:
        """The head's product alone, in fp32, (…, D) → (…, V)."""
        return self.model.get_output_embeddings()(hidden.contiguous()).float()

    @property
    def finish(self) -> Callable[[Tensor, Tensor | None], Tensor] | None:
        """(product (…, columns), the columns' ids or None = all) → logits; None = the same."""
        if self.head_bias_V is None and self.logit_form == PLAIN and self.never_V is None:
            return None
        return self._finish

    def _finish(self, product: Tensor, columns: Tensor | None) -> Tensor:
        if self.head_bias_V is not None:
            bias = self.head_bias_V if columns is None else self.head_bias_V[columns]
            product = product + bias.to(product.dtype)
        return self.readout(product, columns)

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def chat_tokens(self, prompt: str | Sequence[JsonObject] | Conversation) -> list[int]:
        """A user's text, messages or a conversation as tokens, up to where the answer begins; a
        base model gets the plain text after its BOS. Raises UserError for malformed messages, or a
        conversation that the chat template refuses."""
        conversation = as_conversation(prompt)
        ids = chat_ids(self.tokenizer, conversation, self.chat, len(self.embedding_VD), self.spec)
        note_readings(self)
        return ids

    def text_tokens(self, text: str) -> list[int]:
        """Plain text as tokens, after those that the tokenizer puts in front (`opening_ids`)."""
        where = f"target {self.spec!r}"
        rows = len(self.embedding_VD)
        opening = opening_ids(self.tokenizer, rows, where)
        return [*opening, *text_ids(self.tokenizer, text, rows, where)]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
