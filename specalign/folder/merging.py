"""A script that merges an adapter into its base with `peft`, for engines that serve whole
models."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from specalign.common.schema import read_object
from specalign.folder.adapter import Adapter, changes_tied_head, vocabulary_rows


def merge_script(
    adapter: Adapter, base: Path | str, shown: tuple[str, str], merged: str
) -> list[str]:
    """Lines of Python that write the merged model with its tokenizer.

    Args:
        base: its folder, or its hub id.
        shown: the names of base and adapter in the script.
        merged: the folder that is written.
    """
    before, after = _extra_lines(adapter, base)
    base_text, adapter_text, merged_text = (_quote(name) for name in (*shown, merged))
    tokenizer_text = base_text if adapter.tokenizer_folder is None else adapter_text
    has_ends = _has_ends(adapter)
    lines = [
        *(["import torch"] if any("torch." in line for line in before) else []),
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer"
        + ", GenerationConfig" * has_ends,
        "",
        f'model = AutoModelForCausalLM.from_pretrained({base_text}, dtype="auto")',
        *before,
        f"model = PeftModel.from_pretrained(model, {adapter_text}).merge_and_unload()",
        *after,
    ]
    if has_ends:
        lines.append(f"model.generation_config = GenerationConfig.from_pretrained({adapter_text})")
    lines += [
        f"model.save_pretrained({merged_text})",
        f"tokenizer = AutoTokenizer.from_pretrained({tokenizer_text})",
    ]
    if adapter.tokenizer_folder is None and adapter.chat_template is not None:
        path = _quote(f"{shown[1]}/chat_template.jinja")
        lines.append(f'tokenizer.chat_template = open({path}, encoding="utf-8").read()')
    lines.append(f"tokenizer.save_pretrained({merged_text})")
    return lines


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _has_ends(adapter: Adapter) -> bool:
    path = adapter.folder / "generation_config.json"
    return path.is_file() and read_object(path).get("eos_token_id") is not None


def _extra_lines(adapter: Adapter, base: Path | str) -> tuple[list[str], list[str]]:
    """Lines before and after the merge that an adapter of embedding or head needs."""
    from peft import PeftConfig
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(base)))
        model.tie_weights()
    rows = vocabulary_rows(model, adapter, PeftConfig.from_pretrained(str(adapter.folder)))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    before, after = [], []
    if rows is not None and rows != len(embedding.weight):
        before.append(f"model.resize_token_embeddings({rows}, mean_resizing=False)")
    if changes_tied_head(model, adapter):
        before += [
            "head = model.get_output_embeddings()",
            "head.weight = torch.nn.Parameter(head.weight.detach().clone())",
        ]
    if rows is not None and head is not None and head.weight is embedding.weight:
        tied = "model.get_output_embeddings().weight is model.get_input_embeddings().weight"
        after.append(f"model.config.tie_word_embeddings = {tied}")
    return before, after
