"""`python -m tests.feature_bytes`: what a token's stored outputs take on disk, by the size of the target and what the drafter reads of it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import LlamaConfig, MixtralConfig, Qwen3Config

from align.common.text import say
from align.config.parser import load_recipe
from align.planning.drafter_sizes import plan_drafter_sizes
from align.planning.memory import feature_bytes
from align.planning.target_sizes import read_target_sizes

TARGETS = {
    "SmolLM2-135M": LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    "Llama-3.2-1B": LlamaConfig(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True),
    "Llama-3.1-8B": LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8),
    "Qwen3-32B": Qwen3Config(vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8, head_dim=128),
    "Mixtral-8x7B": MixtralConfig(num_hidden_layers=32),
    "Llama-3.1-70B": LlamaConfig(vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8),
}  # fmt: skip
RECIPES = {
    "shared keys of four layers": "smollm2_block",
    "taps of five layers": "smollm2_taps",
    "nothing (standalone)": "smollm2_mdlm",
}


def main() -> None:
    say(
        "| target | hidden size | "
        + " | ".join(f"{name}, kB a token" for name in RECIPES)
        + " | GB for 10M tokens |"
    )
    say("|---|---|" + "---|" * (len(RECIPES) + 1))
    for name, config in TARGETS.items():
        with TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            target = read_target_sizes(folder)
            found = []
            for recipe in RECIPES.values():
                read = load_recipe(
                    [f"recipe={recipe}", f"target.name={folder}", f"output={Path(folder) / 'out'}"]
                )
                found.append(feature_bytes(read, target, plan_drafter_sizes(read, target)))
            cells = " | ".join(f"{size / 1000:.1f}" for size in found)
            say(
                f"| {name} | {config.hidden_size} | {cells} | {found[0] / 100:.0f} / {found[1] / 100:.0f} / {found[2] / 100:.0f} |"
            )


if __name__ == "__main__":
    main()
