"""A script that merges an adapter into its base with `peft`, for engines that serve whole
models."""

from __future__ import annotations

import json

from specalign.common.schema import read_object
from specalign.folder.adapter import Adapter


def merge_script(adapter: Adapter, shown: tuple[str, str], merged: str) -> list[str]:
    """Lines of Python that write the merged model with its tokenizer.

    Args:
        shown: the names of base and adapter in the script.
        merged: the folder that is written.
    """
    base, own, out = (json.dumps(name, ensure_ascii=False) for name in (*shown, merged))
    path = adapter.folder / "generation_config.json"
    has_ends = path.is_file() and read_object(path).get("eos_token_id") is not None
    lines = [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer"
        + ", GenerationConfig" * has_ends,
        "",
        f'model = AutoModelForCausalLM.from_pretrained({base}, dtype="auto")',
        f"model = PeftModel.from_pretrained(model, {own}).merge_and_unload()",
    ]
    if has_ends:
        lines.append(f"model.generation_config = GenerationConfig.from_pretrained({own})")
    tokenizer = base if adapter.tokenizer_folder is None else own
    lines += [
        f"model.save_pretrained({out})",
        f"tokenizer = AutoTokenizer.from_pretrained({tokenizer})",
    ]
    if adapter.tokenizer_folder is None and adapter.chat_template is not None:
        path_text = json.dumps(f"{shown[1]}/chat_template.jinja", ensure_ascii=False)
        lines.append(f'tokenizer.chat_template = open({path_text}, encoding="utf-8").read()')
    lines.append(f"tokenizer.save_pretrained({out})")
    return lines
