"""What an exported folder computes in an engine's own class, in this process: transformers', the dflash and the speculators package's."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from align.common.errors import UserError
from align.common.schema import read_config
from align.target.opening import quiet_loading
from decode.exporting.folder import EMBEDDING
from decode.exporting.reader import Reader


class EngineReader(Reader):
    """An engine's own class for drafters.

    settings: what holds `target_layer_ids`, `mask_token_id` and `block_size`. network: the class's instance.
    """

    settings: Any
    network: Any
    of_an_engine = True
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

    def quantities(self, states: tuple[Tensor, ...], anchor: int) -> Iterator[tuple[str, Tensor]]:
        yield "tapped features", (features := self.features(states))
        yield "fused context", self.fused(features)
        tokens = torch.tensor([anchor] + [self.settings.mask_token_id] * (self.settings.block_size - 1))
        positions = torch.arange(len(features) + len(tokens), device=features.device)[None]
        yield "block", torch.cat((tokens, torch.tensor([1])))
        yield "rotary tables", torch.cat(self.network.rotary_emb(features, positions), dim=-1)[0]
        yield "hidden states", (hidden := self.hidden(self.embed(tokens)[None], features, positions)[0, 1:])
        logits, drafts = self.drafted(hidden)
        yield "draft logits", logits
        yield "draft tokens", drafts.cpu()

    def drafted(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Draft logits (K, Vd) and the best tokens (K,) of hidden states (K, D): transformers and the dflash package ask the target's own
        head, with its bias where it has one."""
        logits = self.model.get_output_embeddings()(hidden)
        return logits, logits.argmax(-1)


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

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
        tokens, starts = assisted(
            self.model, prompt, count, assistant_model=self.network, speculation_type="dflash"
        )
        return tokens, [b - a - 1 for a, b in pairwise(starts[1:])]  # the first call reads the prompt


@torch.no_grad()
def assisted(model: Any, prompt: list[int], count: int, **words: Any) -> tuple[list[int], list[int]]:
    """Greedy tokens of transformers' assisted generation, and how much of the text the target's cache held at each of its calls, and at
    the end. words: which assistant."""
    ids = torch.tensor([prompt], device=model.device)
    starts = list[int]()

    def note(module: Any, args: Any, given: dict[str, Any]) -> None:
        cache = next(v for v in given.values() if hasattr(v, "get_seq_length"))  # its name changes
        starts.append(int(cache.get_seq_length()))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **words)
    finally:
        hook.remove()
    return out[0, len(prompt) :].tolist(), [*starts, out.shape[1] - 1]  # the last token is never read


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


class SpeculatorsReader(EngineReader):
    """The speculators package's own class. Its forward is training's, over many blocks in one row; here its modules run one block, which
    sees everything. It embeds with the folder's own rows, or else with the target's as they stand."""

    name = "the speculators package"
    pruned = True

    @classmethod
    def installed(cls) -> bool:
        return importlib.util.find_spec("speculators") is not None

    def __init__(self, folder: Path, model: Any) -> None:
        super().__init__(folder, model)
        kind = importlib.import_module("speculators.models.dflash").DFlashDraftModel
        self.settings = kind.config_class.from_pretrained(folder)
        self.settings.speculators_config.verifier.name_or_path = None  # its last norm is training's
        self.network = kind(self.settings)
        held = self.stored()
        self.network.load_state_dict(held, strict=False)  # what misses is the target's
        self.own_rows = EMBEDDING in held
        self.network.float().eval().to(model.device)

    @property
    def layers(self) -> list[int]:
        return [i - 1 for i in self.network.target_layer_ids]

    def embed(self, tokens: Tensor) -> Tensor:
        rows = self.network.embed_tokens if self.own_rows else self._raw
        return rows(tokens.to(self.model.device)).float()

    def fused(self, features: Tensor) -> Tensor:
        return self.network.hidden_norm(self.network.fc(features))

    def hidden(self, embedded_1RD: Tensor, features: Tensor, positions_1L: Tensor) -> Tensor:
        x, context = embedded_1RD, self.fused(features)[None]
        tables = self.network.rotary_emb(x, positions_1L)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its attention is not compiled for one block
            for layer in self.network.layers:
                x = layer(
                    hidden_states=x, target_hidden=context, attention_mask=None, position_embeddings=tables
                )
        return self.network.norm(x)

    def drafted(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if (offsets := self.network.d2t) is None:  # its head has the target's rows and no bias
            logits = hidden @ self.head().T
            return logits, logits.argmax(-1)
        logits = self.network.lm_head(hidden)
        best = logits.argmax(-1)
        return logits, best + offsets[best]


def package() -> Any:
    """The dflash package's module. Raises UserError where it is not installed."""
    try:
        return importlib.import_module("dflash.model")
    except ImportError as error:
        raise UserError(
            f"the package dflash is not installed ({error}); type: pip install dflash==0.1.0"
        ) from None
