"""vLLM's server with one fault of its build for processors mended, where it is there. Run by vLLM's own environment:

    .venv-vllm/bin/python -P tests/vllm_processor.py --model … --speculative-config …

A DFlash drafter's layers each norm their context keys with weights of their own. vLLM does that for all layers in one call of
`rms_norm`, with weights of shape (layers, head_dim). On a processor that kernel (0.32) takes the first layer's weights for every
layer: drafts of two and more layers come out otherwise than trained, and fewer are accepted.
"""

import runpy
import sys
from typing import Any

import torch
from vllm import _custom_ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model


def faulty() -> bool:
    """Whether this build's kernel norms the second layer with the first one's weights."""
    keys = torch.ones(2, 1, 1, 64)
    weights, out = torch.stack((torch.ones(64), torch.full((64,), 2.0))), torch.empty_like(keys)
    _custom_ops.rms_norm(out, keys, weights, 1e-6)
    return not bool((out[1] > 1.5).all())


def normed(self: Any, keys_LnHd: torch.Tensor) -> torch.Tensor:
    """In place of `DFlashQwen3Model._normalize_context_k`: a call for each layer."""
    out = torch.empty_like(keys_LnHd)
    for layer, weight in enumerate(self._k_norm_weights):
        _custom_ops.rms_norm(out[layer], keys_LnHd[layer], weight, self._rms_norm_eps)
    return out


if faulty():  # at the file's top, so that the server's own processes are mended too
    DFlashQwen3Model._normalize_context_k = normed

if __name__ == "__main__":
    found = "mended" if faulty() else "as it should be"
    sys.stderr.write(f"rms_norm with a weight for each layer: {found}\n")
    # this file stays the main module: the processes that the server starts run it again
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
