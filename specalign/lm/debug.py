"""Tiny random targets over a byte vocabulary, one per architecture, for tests."""

from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specalign.common.schema import JsonObject

_COMMON = {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_WIDE = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 10000.0}
_LLAMA = {**_WIDE, **_HEADS, "num_hidden_layers": 4}
_LOCAL = {"attention_types": [[["global", "local"], 2]], "window_size": 256}
_SIZES: dict[str, JsonObject] = {
    "Llama": _LLAMA,
    "Qwen2": _LLAMA,
    "GPT2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512},
    "GPTNeo": {**_WIDE, **_LOCAL, "num_layers": 4, "num_heads": 4},
}
_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unused>"]
_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def debug_model(kind: str) -> tuple[Any, PreTrainedTokenizerFast]:
    """A random model of 4 layers, with its own attention, and its tokenizer."""
    tokenizer = _byte_tokenizer()
    options = {"initializer_range": 0.15, "attn_implementation": "eager", **_COMMON, **_SIZES[kind]}
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), **options)
    architecture = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = getattr(transformers, f"{kind}{architecture}")(config)
    with torch.no_grad():  # so that texts end now and then
        model.get_input_embeddings().weight[2] *= 2
    return model, tokenizer


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*_SPECIALS, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIALS])
    special = {"bos_token": _SPECIALS[1], "eos_token": _SPECIALS[2], "pad_token": _SPECIALS[2]}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=_TEMPLATE, **special)
