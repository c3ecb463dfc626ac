"""Tiny random targets over a byte vocabulary, one per architecture, to test the wiring."""

from __future__ import annotations

from typing import Any

DEBUG = {
    "debug": "Llama",
    "debug-gpt2": "GPT2",
    "debug-gptneo": "GPTNeo",
    "debug-qwen2": "Qwen2",
}
"""The targets' names and their architectures."""


def debug_model(kind: str) -> tuple[Any, Any]:
    """A random model of 4 layers, with its own attention, and its tokenizer."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unused>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    template = (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=specials[1],
        eos_token=specials[2],
        pad_token=specials[2],
        chat_template=template,
    )
    common: dict[str, Any] = {
        "vocab_size": len(vocab), "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": None, "initializer_range": 0.15,
    }  # fmt: skip
    wide: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "Llama": {**wide, "num_key_value_heads": 2, "rope_theta": 10000.0},
        "Qwen2": {**wide, "num_key_value_heads": 2, "rope_theta": 10000.0},
        "GPT2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512},
        "GPTNeo": {
            "hidden_size": 64, "intermediate_size": 128, "num_layers": 4, "num_heads": 4,
            "max_position_embeddings": 512, "attention_types": [[["global", "local"], 2]], "window_size": 256,
        },
    }  # fmt: skip
    made = getattr(transformers, f"{kind}Config")
    config = made(**common, **own[kind], attn_implementation="eager")
    architecture = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = getattr(transformers, f"{kind}{architecture}")(config)
    with torch.no_grad():  # so that turns end now and then and text can be generated
        model.get_input_embeddings().weight[2] *= 2
    return model, tokenizer
