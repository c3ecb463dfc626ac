"""Chat templates of every shape that models have, and a tiny target for each kind of tokenizer."""

import copy
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specalign.lm.model import Target
from specalign.lm.names import ModelSource
from tests import tokenizers

_SYSTEM = "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}"
SHAPES = {
    "chatml": "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' + m.content + '<|turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}",
    "no generation prompt": "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' + m.content + '<|turn|>\n' }}{% endfor %}",
    "llama 2": _SYSTEM
    + "{% for m in messages %}{% if m.role == 'user' %}{% if loop.first and s %}{% set text = '<<SYS>>\n' + s + '\n<</SYS>>\n\n' + m.content %}"
    "{% else %}{% set text = m.content %}{% endif %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama 3": "{{ bos_token }}{% for m in messages %}{{ '<|turn|>' + m.role + '<|turn|>\n\n' + (m.content | trim) + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant<|turn|>\n\n' }}{% endif %}",
    "gemma": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<|turn|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (m.content | trim) + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>model\n' }}{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    "vicuna": "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% else %}{{ 'USER: ' + m.content + ' ' }}{% endif %}"
    "{% endfor %}ASSISTANT:",
    "alpaca": "### Instruction: {{ messages[-1].content }}\n\n### Response:",
    "phi": "{% for m in messages %}{{ '<|turn|>' + m.role + '<|begin|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant<|begin|>' }}{% endif %}",
    "date": "{{ '<|turn|>system\nToday is ' + strftime_now('%d %b %Y') + '<|turn|>\n' }}{% for m in messages %}"
    "{{ '<|turn|>' + m.role + '\n' + m.content + '<|turn|>\n' }}{% endfor %}{{ '<|turn|>assistant\n' }}",
    "system in the user's turn": _SYSTEM
    + "{% for m in messages %}{{ '<|turn|>' + m.role + ': ' + (s + ' ' if loop.first else '') + m.content + '<|end|>' }}{% endfor %}{{ '<|turn|>assistant: ' }}",
    "nothing around": "{{ messages[-1].content }}",
    "text in the middle": "Q: {{ messages[-1].content }}\nA:",
}
KINDS = ("byte-level", "sentencepiece", "sentencepiece, legacy", "unigram")


def talking(kind: str, shape: str, layers: int = 1) -> Target:
    """A tiny random target whose tokenizer is of that kind and whose chat template has that shape."""
    tokenizer: Any = copy.deepcopy(tokenizers.KINDS[kind]())
    if kind != "byte-level":
        tokenizer.add_special_tokens(
            {"additional_special_tokens": ["<|turn|>", "<|end|>", "<|begin|>"]}
        )
    if tokenizer.bos_token is None:
        tokenizer.bos_token = "<|begin|>"
    tokenizer.chat_template = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
        tie_word_embeddings=True, initializer_range=0.15, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    with torch.no_grad():  # so that turns end now and then
        model.get_input_embeddings().weight[tokenizer.eos_token_id] *= 2
    return Target(model, tokenizer, ModelSource(f"{shape} of {kind}"), fast=False, fuse=False)
