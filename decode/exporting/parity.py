"""From a drafter to exported folders and a verdict on each: what is written is read back and compared on the user's own target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from align.common.claims import scratch
from align.common.errors import UserError, in_one_line
from align.common.files import check_ordinary
from align.common.hub import hub_id, local_path, model_folder
from align.models.block import BlockDrafter
from align.models.checkpoints.block import load_drafter
from align.target.loading import adapter_behind, load_target
from align.target.model import Target
from decode.drafters.block import BlockProposer
from decode.engine.compiled import stock_model
from decode.exporting import causal
from decode.exporting.folder import Exported, check_free, read_record
from decode.exporting.registry import FORMATS, UnfitFormat, fitting_formats, make_export
from decode.exporting.serving import ServedTarget, merge_snippet, merged_name, on_this_machine
from decode.exporting.verdict import Verdict, decoded
from decode.suites.prompt import Prompt
from decode.suites.registry import prompts_of
from decode.suites.tokenized import tokenize_prompts


def exported(
    drafter: str,
    role: str,
    target: str,
    folders: Mapping[str, Path],
    *,
    dtype: str = "bfloat16",
    device: str = "auto",
    trust_remote_code: bool = False,
    limit: int = 4,
    max_new_tokens: int = 48,
    vocabulary: Path | None = None,
    repo: str | None = None,
) -> list[Verdict]:
    """Write a drafter in formats, each into its folder, and compare each with it over built-in prompts.

    Args:
        drafter: folder or hub id. role: its kind. target: as `load_target` takes it; opened in fp32.
        dtype: of the written weights. limit: prompts; 0 = nothing is compared. vocabulary: the target's GGUF file, for `gguf`.
        repo: the hub repository that the folder is for: its files then name no path of this machine.

    Raises:
        UnfitFormat: a format that can't hold the drafter; it names those that can.
        UserError: folders of something else.
    """
    for name, out in folders.items():
        check_free(out, name)
    if role == "diffusion":
        raise UnfitFormat(f"--format {next(iter(folders))}: {STANDALONE}", [])
    if role == "autoregressive":
        causal.check_format(folders)
        place = (device, trust_remote_code)
        return [_export_causal(drafter, target, folders, dtype, place, limit, max_new_tokens, repo)]
    network = open_drafter(drafter, target, device, trust_remote_code)
    # a folder may hold a finetuned model, of which the name that the drafter was made under says nothing
    own = network.config.target
    known = _shared_name(target if hub_id(target) or local_path(target).is_dir() else own, repo)
    network.config = replace(network.config, target=known)
    number = getattr(torch, dtype)
    notes = [causal.ROUNDED.format(dtype)] if round_weights(network, number) else []
    if vocabulary is None and target.endswith(".gguf"):
        vocabulary = Path(target)
    for name in folders:  # all that can be refused, before anything is written
        made = made_for(name, network)
        FORMATS[name].check(made, vocabulary)
    served = ServedTarget(known) if repo else on_this_machine(target, device, network.config, vocabulary)
    served = _as_merged(served, target, repo)
    prompts = _builtin(network.target, limit) if limit else []
    source = model_folder(drafter, "drafter", ["config.json", "README.md"])
    verdicts = list[Verdict]()
    for name, out in folders.items():
        form = FORMATS[name]
        snippets = form.snippets(network, served, repo or str(out.absolute()))
        card = form.card(source, network, out.name, snippets)
        made = form.write(network, out, number, card, vocabulary)
        verdicts.append(Verdict(name, out, notes=[*made.notes, *notes], serve=snippets))
    if prompts:
        compare(network, verdicts, prompts, max_new_tokens)
    return verdicts


def _export_causal(
    drafter: str,
    target: str,
    folders: Mapping[str, Path],
    dtype: str,
    place: tuple[str, bool],
    limit: int,
    max_new_tokens: int,
    repo: str | None,
) -> Verdict:
    """The same of an autoregressive drafter. place: the device, and whether code that comes with models is trusted."""
    device, trust = place
    known = _shared_name(target, repo)
    opened = load_target(target, "float32", device, trust_remote_code=trust) if limit else None
    served = _as_merged(ServedTarget(known) if repo else on_this_machine(target, device), target, repo)
    verdict = causal.export(drafter, known, folders, dtype, served, repo)
    if opened is not None:
        causal.compare(verdict, drafter, opened, _builtin(opened, limit), max_new_tokens)
    return verdict


STANDALONE = (
    "a standalone diffusion drafter is decoded by this project only; for other engines train with drafter.kind=block and "
    "drafter.context=taps"
)


def _as_merged(served: ServedTarget, target: str, repo: str | None) -> ServedTarget:
    """What engines open for a target: of an adapter the merged model, after the lines that write it."""
    snippet = merge_snippet(target, public=repo is not None)
    if snippet is None:
        return served
    return replace(served, name=merged_name(target, public=repo is not None), preparation=(snippet,))


def _shared_name(target: str, repo: str | None) -> str:
    """The name that an export has for its target: the hub id, else the folder's path, or its last part where it is uploaded. For an
    adapter it is the merged model's."""
    if adapter_behind(target) is not None:
        return merged_name(target, public=repo is not None)
    if found := hub_id(target):
        return found
    path = local_path(target)
    if repo:
        return path.name
    return str(path.absolute()) if path.exists() else target


def _builtin(target: Target, limit: int) -> list[list[int]]:
    """So many of this project's own prompts."""
    return tokens_of(
        target, [prompt for suite in prompts_of("builtin", limit=limit)[0] for prompt in suite.prompts]
    )


def made_for(name: str, network: BlockDrafter) -> Exported:
    """What a format holds of a block drafter. Raises UnfitFormat, with the formats that hold it."""
    if name not in FORMATS:
        raise UnfitFormat(
            f"--format {name}: an autoregressive language model, and this is a block drafter (train with drafter.kind=autoregressive)",
            fitting_formats(network),
        )
    return make_export(name, network)


def open_drafter(drafter: str, target: str, device: str, trust_remote_code: bool) -> BlockDrafter:
    """With its target, in fp32: what is compared are networks, not roundings."""
    return load_drafter(drafter, load_target(target, "float32", device, trust_remote_code=trust_remote_code))


@torch.no_grad()
def round_weights(network: BlockDrafter, dtype: torch.dtype) -> bool:
    """Leave in fp32 what weights of `dtype` hold; whether that is less than there was."""
    changed = False
    for weights in (*network.parameters(), *network.buffers()):
        if weights.is_floating_point():
            held = weights.to(dtype).to(weights.dtype)
            changed |= not torch.equal(held, weights)
            weights.copy_(held)
    return changed


def stored_dtype(folder: Path) -> torch.dtype:
    """Of an export's weights. Raises UserError where they can't be read."""
    path = folder / "model.safetensors"
    with in_one_line(f"{folder}: can't be read"):
        check_ordinary(path)
        with safe_open(path, "pt") as file:
            return next(t.dtype for name in file.keys() if (t := file.get_tensor(name)).is_floating_point())  # noqa: SIM118


def in_process(
    drafter: str,
    role: str,
    target: str,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    engine: str,
    export: Path | None = None,
    *,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Verdict:
    """Compare an engine's own class, reading an export, with the drafter.

    Args:
        engine: `transformers` or `dflash`. export: what `decode.export` wrote in that format; None = written anew.
        role: the drafter's kind; an autoregressive one is an ordinary language model, which transformers alone drafts with here.

    Raises:
        UserError: a package that is not installed, an export in another format, a drafter that the format can't hold.
    """
    if role == "autoregressive":
        opened = load_target(target, "float32", device, trust_remote_code=trust_remote_code)
        return causal.in_process(drafter, opened, tokens_of(opened, prompts), max_new_tokens, engine, export)
    for reader in FORMATS[engine].readers:
        reader.check_installed()
    network = open_drafter(drafter, target, device, trust_remote_code)
    try:
        made_for(engine, network)
    except UserError as error:  # written for decode.export
        message = str(error).replace(f"--format {engine}:", f"--engine {engine}:")
        raise UserError(message.replace("--format ", "decode.export --format ")) from None
    with scratch("specalign-parity-") as made:
        folder = export or made / engine
        if export is None:
            round_weights(network, torch.bfloat16)
            FORMATS[engine].write(network, folder, torch.bfloat16, "")
        elif (found := read_record(export).get("format")) != engine:
            raise UserError(
                f"--export={export}: is in the format {found!r}, --engine {engine} reads {engine!r}"
            )
        else:
            round_weights(network, stored_dtype(export))
        verdict = Verdict(engine, folder)
        compare(network, [verdict], tokens_of(network.target, prompts), max_new_tokens)
    return verdict


def tokens_of(target: Target, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Prompts as the target reads them. Raises UserError where it takes none."""
    fitting, refused = tokenize_prompts(target, prompts)
    if not fitting:
        raise UserError(f"target {target.spec!r} takes none of the prompts: {refused[0]}")
    return [tokens for _, tokens in fitting]


def compare(
    drafter: BlockDrafter, verdicts: Sequence[Verdict], prompts: Sequence[list[int]], max_new_tokens: int
) -> None:
    """Compare each export with the drafter, over prompts decoded greedily. Writes into the verdicts, whatever another one meets."""
    chains = BlockProposer(drafter, tree_nodes=0)
    texts, model = decoded(drafter.target, chains, prompts, max_new_tokens), stock_model(drafter.target)
    for verdict in verdicts:
        try:
            FORMATS[verdict.format].compare(drafter, verdict, model, texts)
        except UserError as error:
            verdict.fail(str(error))
