"""What an exported folder computes in an engine's own class, in this process: transformers' and the dflash package's."""

from __future__ import annotations

import importlib
import importlib.util
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from align.common.errors import UserError
from align.common.schema import read_config
from align.target.loading import quiet_loading
from decode.exporting.reader import Reader


class EngineReader(Reader):
    """An engine's own class for drafters.

    settings: what holds `target_layer_ids`, `mask_token_id` and `block_size`. network: the class's instance.
    """

    settings: Any
    network: Any
    pruned = False

    def __init__(self, folder: Path, model: Any) -> None:
        super().__init__(folder, model)
        quiet_loading()

    @property
    def layers(self) -> list[int]:
        return list(self.settings.target_layer_ids)

    @abstractmethod
    def fused(self, features: Tensor) -> Tensor:
        """The context, (n, D)."""

    @abstractmethod
    def hidden(self, embedded_1RD: Tensor, features: Tensor, positions_1L: Tensor) -> Tensor:
        """Hidden states of the block, (1, R, D)."""

    def _trace(self, states: tuple[Tensor, ...], anchor: int) -> dict[str, Tensor]:
        features = self.features(states)
        tokens = torch.tensor([anchor] + [self.settings.mask_token_id] * (self.settings.block_size - 1))
        positions = torch.arange(len(features) + len(tokens), device=features.device)[None]
        embedded = self.embed(tokens)[None]
        hidden = self.hidden(embedded, features, positions)[0, 1:]
        logits = hidden @ self.head().T
        return {
            "tapped features": features,
            "fused context": self.fused(features),
            "rotary tables": torch.cat(self.network.rotary_emb(embedded, positions), dim=-1)[0],
            "block": torch.cat((tokens, torch.tensor([1]))),
            "hidden states": hidden,
            "draft logits": logits,
            "draft tokens": logits.argmax(-1).cpu(),
        }


class TransformersReader(EngineReader):
    """transformers' own assistant class."""

    name = "transformers"
    generation = "generate(assistant_model=…)"

    def __init__(self, folder: Path, model: Any) -> None:
        from transformers import AutoModel

        super().__init__(folder, model)
        if "auto_map" in read_config(folder):
            raise UserError("comes with Python code of its own, which is not run; decode.export writes none")
        # not given, transformers would ask on the terminal
        options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
        self.network = AutoModel.from_pretrained(folder, **options).eval().to(model.device)
        self.settings = self.network.config

    def fused(self, features: Tensor) -> Tensor:
        return self.network.encoder(features)

    def hidden(self, embedded_1RD: Tensor, features: Tensor, positions_1L: Tensor) -> Tensor:
        return self.network(
            noise_embeds=embedded_1RD,
            context_hidden_states=features[None],
            position_ids=positions_1L,
            attention_mask=None,
        ).last_hidden_state

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt], device=self.model.device)
        words: dict[str, Any] = {"assistant_model": self.network, "speculation_type": "dflash"}
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **words
        )
        return [int(t) for t in out[0, len(prompt) :]]


class PackageReader(EngineReader):
    """The dflash package's own class."""

    name = "the dflash package"

    @classmethod
    def installed(cls) -> bool:
        return importlib.util.find_spec("dflash") is not None

    @classmethod
    def check_installed(cls) -> None:
        package()

    def __init__(self, folder: Path, model: Any) -> None:
        super().__init__(folder, model)
        self.network = package().DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
        self.settings = self.network.to(model.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Raw rows times the scale that the config says."""
        scale = float(getattr(self.network.config, "dflash_config", {}).get("input_embedding_scale", 1.0))
        return self._raw(tokens) * scale

    def fused(self, features: Tensor) -> Tensor:
        return self.network.hidden_norm(self.network.fc(features))

    def hidden(self, embedded_1RD: Tensor, features: Tensor, positions_1L: Tensor) -> Tensor:
        return self.network(
            target_hidden=features[None], noise_embedding=embedded_1RD, position_ids=positions_1L
        )


def package() -> Any:
    """The dflash package's module. Raises UserError where it is not installed."""
    try:
        return importlib.import_module("dflash.model")
    except ImportError as error:
        raise UserError(
            f"the package dflash is not installed ({error}); type: pip install dflash==0.1.0"
        ) from None
