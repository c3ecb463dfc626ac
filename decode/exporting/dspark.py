"""DSpark (arXiv 2607.05147): read by vLLM and SGLang. Anchor-first blocks, Markov and confidence
heads."""

from __future__ import annotations

from decode.exporting import qwen3
from decode.exporting.base import Format
from decode.exporting.folder import Exported
from decode.exporting.serving import ServedTarget, Snippet, sglang_line, vllm_line
from specalign.formats.dspark import KINDS, dspark_tensors
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig

_BASIS = "markov_head.markov_w2.weight"


def make_dspark(drafter: BlockDrafter, name: str = "dspark") -> Exported:
    """DSpark's folder. `name`: of the format, for errors. Raises UserError if it can't hold the
    drafter."""
    c = drafter.config
    layout = "anchor_first" if name == "dspark" else ""  # llama.cpp reads the layout in the file
    qwen3.check_fits(drafter, name, layout, KINDS, "tanh, linear, vanilla or gated")
    embedding_VD = qwen3.embed_vocabulary(drafter)
    confidence = None if drafter.confidence is None else drafter.confidence.out
    head = dspark_tensors(
        drafter.markov, embedding_VD, drafter.draft_size, confidence, c.confidence_input
    )
    config = {
        "architectures": ["Qwen3DSparkModel"],
        **qwen3.qwen3_config(drafter),
        **qwen3.taps_config(drafter),
        "sample_from_anchor": not c.fill_in,
        "markov_rank": head.rank,
        "markov_head_type": head.kind,
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None and c.confidence_input != "hidden",
    }
    made = Exported(config, qwen3.published_tensors(drafter) | head.tensors)
    if head.kind == "vanilla":
        qwen3.add_draft_vocabulary(made, drafter)
    elif drafter.draft_vocab is not None:  # SGLang's, which has whole vocabularies only
        basis_VdR = made.tensors[_BASIS]
        whole_VR = basis_VdR.new_zeros(c.vocab_size, head.rank)
        made.tensors[_BASIS] = whole_VR.index_copy(0, drafter.draft_vocab, basis_VdR)
        made.notes.append(qwen3.WHOLE_VOCABULARY)
    qwen3.add_scaled_embedding(made, drafter)
    return made


def serve_dspark(config: BlockConfig, target: ServedTarget, folder: str) -> list[Snippet]:
    """vLLM serves vanilla heads, SGLang whole vocabularies; both silu only."""
    if config.hidden_act != "silu":
        return []
    vanilla = KINDS.get(config.markov_kind, "vanilla") == "vanilla"
    snippets = []
    if vanilla:
        snippets.append(vllm_line("dspark", target, folder, config.block_size))
    if not vanilla or not config.draft_vocab_size:
        snippets.append(sglang_line("DSPARK", target, folder, config.block_size))
    return snippets


DSPARK = Format("dspark", make_dspark, serve_dspark)
