"""Saving and loading masked-diffusion language models (align/models/masked_lm.py).

`load_masked_lm` reads the published families (`align.models.families`) and drafters made from a target (`adapted`).
"""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from align.common.errors import UserError
from align.common.files import write_json
from align.common.hub import model_folder
from align.common.schema import read_config
from align.models.checkpoints.adapted import ADAPTED, adapted_from
from align.models.checkpoints.masked_model import config_of, filled, renamed, skeleton, with_ids
from align.models.checkpoints.weights import SAFE, read_weights, weight_files, write_weights
from align.models.families import family_of
from align.models.masked_lm import MaskedLM, is_lora
from align.target.inspection.text_model import embedding_names
from align.target.model import Target
from align.target.names import check_sizes

_BUFFER = re.compile(
    r"\.(rotary_emb\.inv_freq|attn\.(masked_)?bias)$"
)  # stored by older versions of transformers


def load_masked_lm(spec: str | Path, target: Target | None = None) -> MaskedLM:
    """A published masked-diffusion language model, or an adapted drafter, from a folder or hub id, in fp32; in evaluation mode.

    Args:
        target: for an adapted drafter that shares its target's embedding and head.

    Raises:
        UserError: no known family; missing, unknown, torn or misshapen tensors, or values that are no numbers.
    """
    folder = model_folder(str(spec), "drafter", ["*.json", "*.safetensors"])
    values = read_config(folder)
    adapted = values.get("architectures") == list(ADAPTED.architectures)
    family = ADAPTED if adapted else family_of(values, str(spec))
    files = weight_files(folder)
    if not files:
        folder = model_folder(str(spec), "drafter", ["*.json", "pytorch_model*.bin"])
        files = weight_files(folder)
    if not files:
        raise UserError(f"drafter {str(spec)!r}: {folder} has neither {SAFE} nor pytorch_model.bin")
    check_sizes(folder, f"drafter {str(spec)!r}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        found = read_weights(file).items()
        tensors |= {family.ours(name): tensor for name, tensor in found if not _BUFFER.search(name)}
    if adapted:
        return adapted_from(values, str(folder), tensors, target)
    config = config_of(family.base, renamed(family, values), str(folder))
    if family.resized:
        embedding, _ = embedding_names(skeleton(family.base, config, str(folder)))
        config.vocab_size = len(tensors.get(embedding, range(config.vocab_size)))
    model = filled(family, config, tensors, str(folder))
    return MaskedLM(model, with_ids(family, values, folder, config.vocab_size, str(folder)), values)


def save_masked_lm(network: MaskedLM, folder: Path, max_shard_size: str = "5GB") -> None:
    """Write the folder in the layout that the network was read from: its family's names, its own config.json.

    Raises:
        ValueError: LoRA weights are not merged.
    """
    if is_lora(network):
        raise ValueError("merge_lora(network) before it is saved")
    folder.mkdir(parents=True, exist_ok=True)
    tied = network.model.config.tie_word_embeddings
    tensors = {
        network.family.theirs(name): tensor.detach().cpu().contiguous()
        for name, tensor in network.model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    write_weights(tensors, folder, max_shard_size)
    write_json(folder / "config.json", network.source)
