"""What several test files build: networks of every kind with weights that are nowhere zero, rows, records, runs."""

import copy
import csv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from align.config.drafter import DrafterConfig
from align.config.parser import load_recipe
from align.data.draft_vocab import frequent_tokens
from align.makers.block import from_target
from align.makers.standalone import make_causal, make_standalone
from align.training.base_module import DrafterModule
from align.training.run import train
from decode.engine.decoder import Decoder
from decode.engine.loop import EagerEngine, prefill_batch
from decode.engine.output import Generation
from decode.engine.request import RequestRunner
from decode.proposers.autoregressive import AutoregressiveProposer, AutoregressiveSession
from decode.proposers.diffusion import DiffusionProposer
from decode.speculation.proposal import Proposal
from decode.speculation.settings import Sampling
from specalign.common.batch import Anchors, Batch
from specalign.common.hub import DEFAULT_TARGET
from specalign.formats.block import save_drafter
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.lm.names import ModelSource
from specalign.models.block import BlockDrafter
from specalign.models.block_session import BlockSession
from specalign.models.causal import CausalDrafter
from specalign.models.ddit import DDiT
from specalign.models.ddit_layers import DDiTConfig
from specalign.models.standalone import DiffusionDrafter
from specalign.models.target_features import target_features
from specalign.rows import shards as data

PROMPT = [4, 90, 17, 203, 90, 17]
PROMPTS = [[4, 90, 17, 203, 90, 17], [5], [1, 90, 17, 2, 3, 1, 40, 0, 90]]
VARIED = Sampling(repetition_penalty=1.4)
SWITCHES = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<none>' }}{% endif %}"
    "{% generation %}{% endgeneration %}{% endif %}"
)
"""A chat template that reads `enable_thinking` and `tools`."""
DRAFT_IDS = torch.cat((torch.arange(2, 3), torch.arange(10, 250, 2)))
ANCHORS = Anchors(torch.tensor([[3, 5, 11], [1, 9, 16]]), torch.ones(2, 3, 3, dtype=torch.bool))
_DDIT: dict[str, Any] = {"kind": "ddit", "hidden_size": 32, "layers": 2, "heads": 2}
_MASKED_LM: dict[str, Any] = {"kind": "masked_lm", "layers": 2}
DIFFUSION_KINDS: dict[str, dict[str, Any]] = {
    "ddit": {**_DDIT, "cond_dim": 16},
    "ddit, full": {**_DDIT, "attention": "full", "window": 6},
    "ddit, zero": {**_DDIT, "time_input": "zero", "prediction": "logits"},
    "masked_lm": _MASKED_LM,
    "masked_lm, full": {**_MASKED_LM, "attention": "full", "window": 6},
    "masked_lm, own head": {**_MASKED_LM, "share_embedding": False},
}


def shaken(network: Any, scale: float, seed: int) -> Any:
    """Away from the symmetric start, so that a slip can't hide."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return network


def diffusion_drafter(target: Target, kind: str, seed: int = 0) -> DiffusionDrafter:
    """With weights that are nowhere zero, so that every path counts."""
    made = make_standalone(target, DrafterConfig(block_size=3, **DIFFUSION_KINDS[kind]), seed)
    return shaken(made, 0.08, seed).eval()


def switching_target() -> Target:
    """The debug target with the template `SWITCHES`."""
    target = load_target("debug", dtype="float32", device="cpu")
    target.tokenizer.chat_template = SWITCHES
    return target


def packed_batch(target: Target, seed: int = 0) -> Batch:
    """Two rows: two documents and padding; one document."""
    tokens = torch.randint(4, 200, (2, 20), generator=torch.Generator().manual_seed(seed))
    document = torch.tensor([[0] * 9 + [1] * 8 + [-1] * 3, [0] * 20])
    positions = torch.tensor([[*range(9), *range(8), *range(3)], [*range(20)]])
    return Batch(tokens, positions, document, document >= 0)


def block_options(**changes: Any) -> DrafterConfig:
    return DrafterConfig(**{"taps": 2, "markov_rank": 0, **changes})


TRAINED_BLOCKS = [
    {"context": "shared_kv"},
    {"context": "taps"},
    {"context": "shared_kv", "markov_rank": 8},
    {"context": "taps", "init_from_target": False},
    {"context": "shared_kv", "markov_rank": 8, "markov": "vanilla", "convolution": True},
    {"context": "taps", "markov_rank": 8, "markov": "gated", "convolution": True},
    {"context": "shared_kv", "markov_rank": 8, "markov": "tanh", "convolution": True},
    {"context": "taps", "markov_rank": 8, "markov": "tanh", "block_layout": "fill_in"},
    {"context": "shared_kv", "markov_rank": 8, "markov": "linear", "block_layout": "fill_in"},
]


def trained_block(target: Target, samples: data.Samples, **changes: Any) -> BlockDrafter:
    vocab = frequent_tokens(data.ShardSamples.of([samples]), target, 64)
    return shaken(from_target(target, block_options(**changes), vocab), 0.05, seed=1)


def ddit_config(**changes: Any) -> DDiTConfig:
    small: dict[str, Any] = {"vocab_size": 11, "hidden_size": 16, "n_blocks": 2, "n_heads": 2}
    small |= {"cond_dim": 6, "dropout": 0.0}
    return DDiTConfig(**{**small, **changes})


def ddit(seed: int = 0, **changes: Any) -> DDiT:
    """A small network whose zero-initialised parts are filled, so that they are seen."""
    generator = torch.Generator().manual_seed(seed)
    net = DDiT(ddit_config(**changes)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return net


def random_tokens(*shape: int, seed: int = 1, vocab: int = 11) -> Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


_SHARED: dict[str, Any] = {"context": "shared_kv"}
_TAPS: dict[str, Any] = {"context": "taps"}
_MARKOV = {"markov_rank": 8}
_FILL_IN, _CONVOLVED = {"block_layout": "fill_in"}, {"convolution": True}
BLOCK_VARIANTS: dict[str, dict[str, Any]] = {
    "shared": _SHARED,
    "taps": _TAPS,
    "shared markov": {**_SHARED, **_MARKOV},
    "taps whole vocabulary": {**_TAPS, "whole": True},
    "confidence": {**_SHARED, "confidence": True},
    "markov confidence": {**_SHARED, **_MARKOV, "confidence": True},
    "markov whole vocabulary": {**_SHARED, **_MARKOV, "whole": True},
    "vanilla convolution": {**_SHARED, **_MARKOV, "options": {"markov": "vanilla", **_CONVOLVED}},
    "gated": {**_TAPS, **_MARKOV, "options": {"markov": "gated"}},
    "fill-in": {**_TAPS, **_MARKOV, "options": _FILL_IN},
    "fill-in tanh": {**_SHARED, **_MARKOV, "options": {"markov": "tanh", **_FILL_IN}},
    "linear": {**_TAPS, **_MARKOV, "options": {"markov": "linear"}},
    "rnn": {**_TAPS, **_MARKOV, "options": {"markov": "rnn"}},
    "fill-in convolution": {**_SHARED, "confidence": True, "options": {**_FILL_IN, **_CONVOLVED}},
}


def block_network(
    target: Target,
    context: str,
    markov_rank: int = 0,
    whole: bool = False,
    confidence: bool = False,
    options: dict[str, Any] | None = None,
) -> BlockDrafter:
    sizes: dict[str, Any] = {"context": context, "taps": 2, "markov_rank": markov_rank}
    sizes |= {"confidence_head": confidence}
    config = DrafterConfig(**{**sizes, **(options or {})})
    drafter = shaken(from_target(target, config, None if whole else DRAFT_IDS), 0.05, seed=1)
    if drafter.confidence is not None:  # embeddings are small; so that it is sometimes sure
        drafter.confidence.out.weight.data[:, drafter.config.hidden_size :].mul_(40)
    return drafter


def saved_taps_drafter(folder: Path, target: Target) -> str:
    """A fill-in taps drafter over the whole vocabulary of `debug`, in that folder; returns the folder."""
    drafter = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    drafter.config.target = "debug"
    save_drafter(drafter, folder)
    return str(folder)


def overfit_block_network(target: Target, prompt: list[int], steps: int = 14) -> BlockDrafter:
    """A fill-in taps drafter over the whole vocabulary that has learnt the target's greedy answer to one prompt by heart."""
    drafter = block_network(
        target, "taps", whole=True, options={"block_layout": "fill_in", "block_size": 4}
    )
    answer = Decoder(target).generate(prompt, max_new_tokens=28).tokens
    text = torch.tensor([[*prompt, *answer, *prompt]])
    places = torch.arange(text.shape[1])[None]
    batch = Batch(text, places, torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool))
    index = torch.arange(len(prompt), text.shape[1] - len(prompt) - 1)[None]
    anchors = Anchors(index, torch.ones(*index.shape, 4, dtype=torch.bool))
    features, wanted = target_features(target, batch, drafter.config), anchors.blocks_BAK(text)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=0.01)
    with torch.enable_grad():
        for _ in range(steps):
            logits = drafter(batch, features, anchors) @ drafter.head_weight_VdD.T
            loss = F.cross_entropy(logits.flatten(0, 2), wanted.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return drafter.eval()


def sharp_block_network(
    target: Target, seed: int, context: str, taps: int = 2, size: int = 4, **more: Any
) -> BlockDrafter:
    ids, whole = more.pop("ids", DRAFT_IDS), more.pop("whole", False)
    sizes = {"taps": taps, "block_size": size, "markov_rank": 0, "mask_token_id": 0}
    options = DrafterConfig(**{"context": context, **sizes, **more})
    drafter = shaken(from_target(target, options, None if whole else ids), 0.1, seed)
    drafter.norm.weight.data.mul_(6)  # confidences of all sizes
    return drafter


def fresh_session(drafter: BlockDrafter, tokens: list[int]) -> BlockSession:
    """One that has seen all but the last of the tokens in a single forward."""
    cache = drafter.target.new_cache(1, len(tokens))
    session = BlockSession(drafter, cache, len(tokens))
    given, options = torch.tensor([tokens[:-1]]), {"taps": session.taps, "logits": False}
    output = drafter.target.forward(given, cache=cache, **options)
    session.observe(output.hidden_BLD, output.taps_BLFD, len(tokens) - 1)
    return session


def session_after_prefill(target: Target, proposer: DiffusionProposer, sampling: Sampling):  # type: ignore[no-untyped-def]
    """An engine's session after the prompt's first token, and the engine."""

    runner = RequestRunner(target, PROMPT, 40, sampling, proposer, "point_mass")
    prefill(runner)
    assert runner.session is not None
    return runner, runner.session


def smaller_model(
    target: Target, layers: int = 3, noise: float = 0.02, vocab_size: int | None = None
) -> Target:
    """A model with the target's first layers, changed a little."""
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = layers
    model = type(target.model)(config)
    model.load_state_dict(target.model.state_dict(), strict=False)
    shaken(model, noise, seed=1)
    if vocab_size is not None:
        model.resize_token_embeddings(vocab_size)
    return Target(model, target.tokenizer, ModelSource("smaller"), fast=False)


def watched(
    drafter: AutoregressiveProposer, seen: list[tuple[list[int], Proposal]]
) -> AutoregressiveProposer:
    """Notes every proposal with the text that it was made for."""
    start: Callable[..., AutoregressiveSession] = drafter.start

    def begin(request):  # type: ignore[no-untyped-def]
        session = start(request)
        propose = session.propose

        def note(k: int) -> Proposal | None:
            proposal = propose(k)
            assert proposal is not None
            seen.append((list(request.tokens), proposal))
            return proposal

        session.propose = note  # type: ignore[method-assign]
        return session

    drafter.start = begin  # type: ignore[method-assign]
    return drafter


def manifest(**more: Any) -> dict[str, Any]:
    """What a data folder's manifest must hold."""
    written: dict[str, Any] = {"samples": 0, "tokens": 0, "seed": 0, "prompt_temperature": 1.0}
    written |= {"answer_temperatures": [1.0], "sha256": ["0" * 64]}
    return {"shards": 1, **written, **more}


def tree_prefixes(tokens: tuple[int, ...], parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What stands after the root and after each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent + 1], token))
    return found


def write_recipe(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return f"recipe={folder / name}"


def causal_drafter(target: Target, init: str | None = None) -> CausalDrafter:
    """Changed a little, so that q is not p."""
    options = DrafterConfig(kind="autoregressive", block_size=3, layers=2, init=init)
    return shaken(make_causal(target, options), 0.05, seed=0).eval()


def train_debug(recipe: str, output: Path, debug_data: Path, *words: str) -> DrafterModule:
    given = [f"recipe={recipe}", f"output={output}", f"data.path={debug_data}", *words]
    return train(load_recipe(given), quiet=True)


train_debug_block = partial(train_debug, "debug_block")


def shallow_target(layers: int, fast: bool = True) -> Target:
    """The first of the debug target's layers, for tests that write much and look at no number of it."""
    whole = load_target("debug", dtype="float32", device="cpu", fast=False)
    whole.body.layers = whole.layers[:layers]
    whole.model.config.num_hidden_layers = layers
    return Target(whole.model, whole.tokenizer, ModelSource("debug"), fast=fast)


NEEDS_TARGET = ("adapt", "autoregressive", "block", "mdlm", "sedd", "taps", "variable_prefix")


def needed_words(name: str) -> list[str]:
    """What a recipe without a model's name is given."""
    init = ["drafter.init=pretrained/smollm2-135m-block"] * (name == "variable_prefix")
    return [f"target.name={DEFAULT_TARGET}"] * (name in NEEDS_TARGET) + init


def read_metric(output: Path, name: str = "train/loss") -> list[float]:
    """A column of a run's metrics.csv."""
    with (output / "metrics.csv").open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def read_weights(output: Path) -> dict[str, Tensor]:
    """The tensors of a run's drafter."""
    return load_file(str(output / "drafter" / "model.safetensors"))


@torch.no_grad()
def prefill(runner: RequestRunner) -> None:
    """Read a request's prompt and choose its first token."""
    joining = {runner: runner.prefill()}
    while joining:
        prefill_batch(joining)


@torch.no_grad()
def run_batch(runners: Sequence[RequestRunner], most: int = 1) -> None:
    """Run requests to their ends."""
    for _ in EagerEngine().run_rounds(runners, most):
        pass


def run_request(runner: RequestRunner) -> Generation:
    run_batch([runner])
    return runner.out


def same_drafter(output: Path, other: Path) -> bool:
    """Saved in bf16, a last bit may fall the other way."""
    mine, its = read_weights(output), read_weights(other)
    far = [(mine[n].float() - w.float()).abs().max() > 2e-2 * w.abs().max() for n, w in its.items()]
    return mine.keys() == its.keys() and not any(far)
