"""Windows, chunks, trees and batches by position, over a cache that keeps everything: each is the model's own whole forward."""

import pytest
import torch
from torch import Tensor

from decode.speculation.tree import ancestors
from specalign.lm import masks
from specalign.lm.attention import BLOCK, sparse_mask
from specalign.lm.masks import Layout, use_layout
from tests.target_models import WINDOW, some_text, tiny_model, tiny_target

LENGTH = 2 * WINDOW + 12
KINDS = {
    "windows of every second layer": "gemma3_text",
    "windows and sinks": "gpt_oss",
    "chunks": "llama4_text",
    "caps and windows": "gemma2",
    "keys and values of different widths": "deepseek_v3",
    "heads that vary by layer": "mimo_v2_flash",
    "interleaved, scaled logits": "cohere2",
    "learned positions": "gpt2",
    "one key head, its own attention": "falcon",
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_trees_and_rollback_beyond_the_window(kind: str) -> None:
    """Against the model alone, which has its own attention, masks and no cache."""
    target, own = tiny_target(kind), tiny_model(kind, 260)
    tokens, branch = some_text(target, LENGTH), some_text(target, 3, 1)
    start = LENGTH - 8
    with torch.no_grad():
        wanted = own(tokens).logits
        other = own(torch.cat((tokens[:, : start + 1], branch), 1)).logits[:, start + 1 :]
    cache = target.new_cache(1, LENGTH + 8)
    first = target.forward(tokens[:, :start], cache=cache).logits_BLV
    # last token; a branch of three drafts; beside it the text's own next two
    see_LL = ancestors((-1, 0, 1, -1, 3))
    drafts = torch.cat((tokens[:, start : start + 1], branch, tokens[:, start + 1 : start + 3]), 1)
    tree = target.forward(drafts, cache=cache, see_LL=see_LL).logits_BLV
    cache.keep(start, [0, 4, 5])
    rest = target.forward(tokens[:, start + 3 :], cache=cache).logits_BLV
    assert first is not None and tree is not None and rest is not None
    found = torch.cat((first, tree[:, [0, 4, 5]], rest), 1)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(tree[:, 1:4], other, atol=2e-4, rtol=1e-4)
    together = [target.new_cache(1, LENGTH) for _ in range(2)]
    parts = [tokens, some_text(target, WINDOW + 9, 2)]
    target.forward_batch([p[:, :-4] for p in parts], together, [None, None])
    ends = target.forward_batch([p[:, -4:] for p in parts], together, [None, None])
    for part, end in zip(parts, ends, strict=True):
        with torch.no_grad():
            expected = own(part).logits[:, -4:]
        torch.testing.assert_close(end.logits_BLV, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "gpt_oss", "mimo_v2_flash"])
def test_flex_attention_computes_the_same(kind: str) -> None:
    """Over two blocks of a cache, with a mask that leaves most of it out in one row."""
    target = tiny_target(kind)
    tokens = torch.cat([some_text(target, BLOCK + 20, seed) for seed in (0, 1)])
    mask = torch.ones(BLOCK + 20, BLOCK + 20, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask[1, :, 8:, :7] = False

    def run() -> Tensor | None:
        return target.forward(tokens, mask=mask).logits_BLV

    wanted = run()
    with masks.sparse_masks():
        torch.testing.assert_close(run(), wanted, atol=2e-4, rtol=1e-4)


def test_blocks_that_a_token_sees_are_read() -> None:
    see = torch.zeros(2, 1, 6, 3 * BLOCK - 7, dtype=torch.bool)
    see[0, 0, 2, BLOCK + 1] = see[0, 0, 5, -1] = see[1, 0, 0, 0] = True
    read = sparse_mask(see).to_dense()
    assert read[:, 0, 0].tolist() == [[0, 1, 1], [1, 0, 0]]
    wide = sparse_mask(see[:, :, :1].expand(-1, -1, BLOCK + 1, -1)).to_dense()
    assert wide.shape[2] == 2 and wide[:, 0, 0].equal(wide[:, 0, 1])


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])  # plain, capped, with sinks
def test_a_model_computes_what_it_did(kind: str) -> None:
    model, tokens = tiny_model(kind, 260), torch.arange(4, 40)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        masks.install(model)
        with use_layout(Layout(torch.arange(36)[None], 0, 2, torch.float32)):
            torch.testing.assert_close(model(tokens).logits, expected, atol=2e-5, rtol=2e-4)
    assert model.config._attn_implementation == masks.NAME


def test_a_tensor_that_is_not_known_is_refused() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match="its attention takes 'position_bias'"):
        masks.attention_forward(torch.nn.Identity(), q, q, q, None, position_bias=torch.zeros(1))
