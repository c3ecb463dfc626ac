"""Checks that a network made from a target's layers computes the same in training and decoding."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from specalign.common.batch import Batch
from specalign.common.errors import UserError
from specalign.lm.logits import PLAIN, candidates
from specalign.lm.masks import NAME
from specalign.lm.model import Target
from specalign.lm.proof import first_line
from specalign.models.causal import CausalDrafter
from specalign.models.masked_lm import MaskedLM

LENGTH, CLEAN = 12, 7
_MOST = 2e-3
"""The largest difference that counts as rounding, in standard deviations."""


def check_served(drafter: CausalDrafter, served_LV: Tensor, where: str) -> None:
    """Raises UserError if a causal drafter's training graph differs from the saved model's logits
    of `some_tokens`."""
    with refuse_on_error(where, "autoregressive"), torch.no_grad():
        tokens_1L = some_tokens(len(served_LV[0]), served_LV.device)
        twice_1M = torch.cat((tokens_1L, tokens_1L), dim=1)
        positions = torch.arange(LENGTH, device=tokens_1L.device).repeat(2)[None]
        document = (torch.arange(2 * LENGTH, device=tokens_1L.device) // LENGTH)[None]
        found = drafter.logits(drafter(Batch(twice_1M, positions, document, document >= 0)))[0]
        _check_same(found, torch.cat((served_LV, served_LV)), "its training graph")


def check_opened(network: MaskedLM, where: str) -> None:
    """Raises UserError for an architecture that does not run as a masked language model: under a
    causal mask it must equal the model's own forward, with an open mask earlier places must see
    later ones, and a cached prefix must give what a whole forward gives."""
    with refuse_on_error(where, "masked_lm"), torch.no_grad():
        biased = any(target.head_bias_V is not None for target in network._target)
        if list(candidates(network.model.config)) != [PLAIN] or biased:
            raise NotImplementedError("its head has a scale, a cap or a bias")
        tokens = some_tokens(len(network.head_weight_VD), network.head_weight_VD.device)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).tril()
        places = torch.arange(LENGTH, device=tokens.device)[None]
        own = network.model.get_decoder()(
            inputs_embeds=network.embed(tokens),
            attention_mask=torch.ones_like(tokens),
            position_ids=places,
            use_cache=False,
        ).last_hidden_state
        found = network.run(tokens, causal[None, None], places, None)
        _check_same(found, own, "under a causal mask it")
        full, other = torch.ones_like(causal), tokens.clone()
        other[0, -1] = tokens[0, 0]
        one, two = (network.run(t, full[None, None], places, None)[0] for t in (tokens, other))
        if not bool(((one - two).abs().amax(-1) > 1e-6).all()):
            raise NotImplementedError("its attention can't be made bidirectional")
        if network.attention == "prefix_causal":
            block = tokens[:, CLEAN:].clone()
            block[:, 1:] = network.mask_token_id
            found, _ = network.denoise(tokens[:, :CLEAN], block, network.new_cache(LENGTH))
            causal[CLEAN:] = True
            whole = network(torch.cat((tokens[:, :CLEAN], block), dim=1), see=causal[None, None])
            _check_same(found[0], whole[0, CLEAN:], "through a cache it")


def some_tokens(vocab_size: int, device: torch.device) -> Tensor:
    """(1, LENGTH) ids, spread over the vocabulary."""
    return torch.arange(1, LENGTH + 1, device=device)[None] * 7919 % vocab_size


def first_tokens_logits(target: Target) -> Tensor:
    """The target's logits of `some_tokens`, (LENGTH, V)."""
    logits = target.forward(some_tokens(target.vocab_size, target.device)).logits_BLV
    assert logits is not None
    return logits[0]


def _check_same(found: Tensor, wanted: Tensor, what: str) -> None:
    apart = float((found.float() - wanted.float()).abs().max() / wanted.float().std())
    if not apart < (_MOST if wanted.dtype == torch.float32 else 0.25):
        raise NotImplementedError(f"{what} differs from the model's own by {apart:.2g} σ")


@contextmanager
def refuse_on_error(where: str, kind: str, failures: type[Exception] = Exception) -> Iterator[None]:
    """Turn the many ways in which models fail into one line that names an alternative."""
    try:
        yield
    except failures as error:
        raise refusal_error(where, kind, error) from None


def refusal_error(where: str, kind: str, error: Exception) -> UserError:
    """The error of a target that can't be used for a kind of drafter."""
    reason = first_line(error).removeprefix(f"{where}: ")
    if NAME in reason or "attention implementation" in reason:
        reason = "it supports only its own attention"
    elif not isinstance(error, NotImplementedError | UserError):
        reason = f"it fails in this mode ({reason[:120]})"
    hint = "use drafter.kind=block"
    return UserError(f"{where} can't serve as drafter.kind={kind}: {reason}; {hint}")
