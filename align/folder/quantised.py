"""Quantised checkpoints: what config.json says of them, and which package or device they need, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from align.common.errors import UserError, nearest
from align.common.text import short


@dataclass(frozen=True)
class Method:
    """title: as its papers call it. modules: what Python has to find. install: what pip is asked for. gpu: whether it runs on a GPU
    alone."""

    title: str
    modules: tuple[str, ...] = ()
    install: str = ""
    gpu: bool = False


METHODS = {
    "aqlm": Method("AQLM", ("aqlm",), "aqlm[gpu,cpu]"),
    "auto-round": Method("AutoRound", ("auto_round",), "auto-round"),
    "awq": Method("AWQ", ("gptqmodel",), "gptqmodel"),
    "bitnet": Method("BitNet", ("accelerate",), "accelerate"),
    "bitsandbytes": Method("bitsandbytes", ("bitsandbytes",), "bitsandbytes"),
    "compressed-tensors": Method("compressed-tensors", ("compressed_tensors",), "compressed-tensors"),
    "eetq": Method("EETQ", ("kernels",), "kernels", gpu=True),
    "fbgemm_fp8": Method("FBGEMM FP8", ("fbgemm_gpu",), "fbgemm-gpu", gpu=True),
    "fouroversix": Method("Four Over Six", ("fouroversix",), "fouroversix"),
    "fp8": Method("fine-grained FP8", ("accelerate",), "accelerate"),
    "fp_quant": Method("FP-Quant", ("fp_quant",), "fp_quant", gpu=True),
    "gemma": Method("Gemma's own quantisation"),
    "gptq": Method("GPTQ", ("optimum", "gptqmodel"), "optimum gptqmodel"),
    "higgs": Method("HIGGS", ("flute", "fast_hadamard_transform"), "flute-kernel fast_hadamard_transform", gpu=True),
    "hqq": Method("HQQ", ("hqq",), "hqq"),
    "metal": Method("Metal's affine quantisation"),
    "mxfp4": Method("MXFP4", ("accelerate",), "accelerate"),
    "mxfp8": Method("MXFP8", ("accelerate",), "accelerate"),
    "nvfp4": Method("NVFP4", ("kernels",), "kernels", gpu=True),
    "quanto": Method("Quanto", ("optimum.quanto",), "optimum-quanto"),
    "quark": Method("Quark", ("quark",), "amd-quark"),
    "sinq": Method("SINQ", ("sinq",), "sinq"),
    "spqr": Method("SpQR", ("spqr_quant",), "spqr_quant[gpu]", gpu=True),
    "torchao": Method("torchao", ("torchao",), "torchao"),
    "vptq": Method("VPTQ", ("vptq",), "vptq", gpu=True),
}  # fmt: skip
"""By `quant_method`, what `transformers.quantizers` asks for where it opens such a checkpoint."""
_KEY, _OLD_KEY = "quantization_config", "compression_config"
"""The older one is what the first checkpoints of compressed-tensors have."""


def quantisation(config: Mapping[str, Any]) -> str | None:
    """The `quant_method` of a config.json, or of its text model's part; None where the weights are ordinary ones.

    Raises:
        UserError: the key holds no such thing.
    """
    key, found = _said(config)
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise UserError(f"config.json: {key}={short(found)} must be an object")
    if key == _OLD_KEY:
        return "compressed-tensors"
    if found.get("load_in_4bit") or found.get("load_in_8bit"):
        return "bitsandbytes"
    if not isinstance(name := found.get("quant_method"), str):
        raise UserError(f"config.json: {key}.quant_method={short(name)} must be text")
    return name


def _said(config: Mapping[str, Any]) -> tuple[str, Any]:
    """The key that says how the weights are quantised, and its value; nothing where there is none."""
    for values in (config, config.get("text_config")):
        if isinstance(values, Mapping):
            for key in (_KEY, _OLD_KEY):
                if found := values.get(key):
                    return key, found
    return _KEY, None


def check_quantised(config: Mapping[str, Any], what: str, device: str | None = None) -> None:
    """Raises UserError for a quantisation that is unknown, or whose package or device is not there.

    Args:
        config: config.json.
        what: the target, for the message.
        device: where it is to run, as torch calls its kind; None = not asked.
    """
    try:
        name = quantisation(config)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None
    if name is None:
        return
    if name not in METHODS:
        raise UserError(
            f"{what}: its weights are quantised by {short(name)} (config.json: quant_method), which is unknown{nearest(name, METHODS)}"
        )
    method = METHODS[name]
    key = f"quant_method={name}" if _said(config)[0] == _KEY else _OLD_KEY
    said = f"{what}: its weights are quantised by {method.title} (config.json: {key})"
    lacking = [module for module in method.modules if not _is_there(module)]
    if lacking:
        packages = f"the package{'s' * (len(lacking) > 1)} {' and '.join(lacking)}"
        on_gpu = " (it runs on a GPU alone)" if method.gpu else ""
        raise UserError(f"{said}, which needs {packages}: pip install {method.install}{on_gpu}")
    if key == _OLD_KEY:
        raise UserError(f"{said}, a key that transformers does not read: rename it to {_KEY}")
    if method.gpu and device not in (None, "cuda", "xpu"):
        raise UserError(f"{said}, which runs on a GPU alone, and the device is {device}")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the package around it is not there, or half of it is
        return False
