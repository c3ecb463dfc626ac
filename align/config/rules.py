"""Which values of a recipe are impossible, alone or beside another. No torch here."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from align.common.errors import UserError, nearest
from align.config.drafter import LOSS_NAMES, PARTS
from align.config.recipe import API_KEY, GROUPS, LOGGERS, DataConfig, Recipe


def check(recipe: Recipe) -> None:
    """Raises UserError at the first impossible value, alone or beside another; the line names the key."""
    for group in GROUPS:
        part = recipe if group == "" else getattr(recipe, group)
        problem = part.problem(f"{group}." if group else "")
        if problem:
            raise UserError(problem)
    for problem in _together(recipe):
        raise UserError(problem)


def _together(recipe: Recipe) -> list[str]:
    """What no single number shows: unknown names, and values that exclude one another."""
    found = [
        f"objective.terms.{name}: unknown loss{nearest(name, LOSS_NAMES)}"
        for name in recipe.objective.terms
        if name not in LOSS_NAMES
    ]
    found += [
        f"trainer.learning_rates.{name}: unknown part{nearest(name, PARTS)}"
        for name in recipe.trainer.learning_rates
        if name not in PARTS
    ]
    found += [
        f"trainer.logger: unknown logger {name!r}{nearest(name, LOGGERS)}"
        for name in recipe.trainer.logger
        if name not in LOGGERS
    ]
    rules = [
        *_run_rules(recipe),
        *_kind_rules(recipe),
        *_network_rules(recipe),
        *_objective_rules(recipe),
        *_trainer_rules(recipe),
    ]
    return found + [text for broken, text in rules if broken]


def _run_rules(recipe: Recipe) -> list[tuple[bool, str]]:
    """(broken, what to say) of the run as a whole, target and data."""
    d, text = recipe.drafter, recipe.data.text
    place = re.fullmatch(r"auto|cpu|cuda(:\d+)?", recipe.target.device)
    return [
        (recipe.name in ("", ".", "..") or "/" in recipe.name, f"name={recipe.name!r} must be a file name"),
        (not recipe.target.name.strip(), "target.name must not be empty"),
        (place is None, f"target.device={recipe.target.device!r} must be auto, cpu, cuda or cuda:N"),
        (
            not recipe.data.answer_temperatures,
            "data.answer_temperatures must hold at least one temperature",
        ),
        (
            d.block_size >= recipe.data.length,
            f"drafter.block_size={d.block_size} must be less than data.length={recipe.data.length}",
        ),
        (
            bool(recipe.data.mixture) and len(recipe.data.mixture) != len(text),
            f"data.mixture has {len(recipe.data.mixture)} entries for {len(text)} sources of data.text",
        ),
        (len(set(text)) < len(text), f"data.text={text} names a source twice"),
        *(
            (
                not text and value != getattr(DataConfig, key),
                f"data.{key}={value} is of data.text, which names nothing",
            )
            for key, value in vars(recipe.data).items()
            if key.startswith("text_")
        ),
        (
            recipe.launch.offload and recipe.launch.strategy in ("auto", "ddp"),
            f"launch.offload=true: launch.strategy={recipe.launch.strategy} has every weight in every process (fsdp, deepspeed_N)",
        ),
        (
            recipe.target.parallel in ("fsdp", "tp") and recipe.processes == 1,
            f"target.parallel={recipe.target.parallel} needs several processes (launch.devices)",
        ),
        (
            recipe.target.parallel != "replicate" and recipe.data.follow,
            f"target.parallel={recipe.target.parallel}: data.follow=true may write, which needs the target whole (align.synthesize first)",
        ),
        (
            recipe.target.parallel == "absent" and not recipe.trainer.features_gb,
            "target.parallel=absent reads what align.features stored: give trainer.features_gb",
        ),
        (
            recipe.trainer.features_top_k > 0
            and not (recipe.trainer.features_gb or recipe.trainer.keep_features_gb),
            f"trainer.features_top_k={recipe.trainer.features_top_k} is of outputs that are stored or cached: give trainer.features_gb or "
            "trainer.keep_features_gb",
        ),
        (
            recipe.trainer.features_top_k > 0 and "reverse_kl" in recipe.objective.terms,
            "objective.terms.reverse_kl reads all of p: trainer.features_top_k=0, or another term",
        ),
        *_writer_rules("data.writer", recipe.data.writer, "openai", recipe.data.server),
        *_writer_rules(
            "trainer.features_writer", recipe.trainer.features_writer, "vllm", recipe.trainer.features_server
        ),
    ]


def _writer_rules(key: str, writer: str, kind: str, address: str | None) -> list[tuple[bool, str]]:
    """Of who writes, `target` or KIND:URL. A key in an address would be written into every record of the run."""
    words, example = f"{key}={writer!r}", f"{key}={kind}:http://127.0.0.1:8000"
    try:
        parts = urlsplit("http://none" if address is None else address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        parts, good = urlsplit("http://none"), False
    if parts.username is not None or parts.query or parts.fragment:
        return [
            (
                True,
                f"{key}: an address with a user, a key or a query would be written into the run's records; put the key into the "
                f"environment variable {API_KEY}",
            )
        ]
    return [
        (
            writer != "target" and address is None,
            f"{words} must be target or {kind}:URL ({example})",
        ),
        (not good or " " in writer, f"{words}: no address; an example: {example}"),
    ]


def _kind_rules(recipe: Recipe) -> list[tuple[bool, str]]:
    """Of the drafter's kind: what block drafters alone have, and what their heads need."""
    d, standalone = recipe.drafter, recipe.drafter.standalone
    return [
        (
            not standalone and recipe.stage != "calibrate",
            f"stage={recipe.stage}: drafter.kind={d.kind} is calibrated (stage=calibrate)",
        ),
        (
            d.confidence_head and d.kind != "block",
            "drafter.confidence_head=true needs drafter.kind=block",
        ),
        (
            (d.markov is not None or d.convolution) and d.kind != "block",
            f"drafter.{'convolution' if d.convolution else 'markov'} needs drafter.kind=block",
        ),
        (
            d.attention_bias is not None and (d.kind != "block" or d.init is not None),
            f"drafter.attention_bias={str(d.attention_bias).lower()} is of fresh block drafters (drafter.kind=block without drafter.init)",
        ),
        (
            d.block_layout is not None and d.kind != "block",
            f"drafter.block_layout={d.block_layout} needs drafter.kind=block",
        ),
        (
            d.self_conditioning and d.kind != "block",
            "drafter.self_conditioning=true needs drafter.kind=block",
        ),
        (
            d.markov is not None and d.markov_rank == 0,
            f"drafter.markov={d.markov} needs drafter.markov_rank above 0",
        ),
        (
            d.markov_width > 0 and d.markov != "mlp",
            f"drafter.markov_width={d.markov_width} needs drafter.markov=mlp",
        ),
        (
            d.train == "confidence_head" and not d.confidence_head,
            "drafter.train=confidence_head needs drafter.confidence_head=true",
        ),
        (
            d.train == "confidence_head" and d.init is None,
            "drafter.train=confidence_head freezes all else: it needs drafter.init, a drafter that is trained",
        ),
    ]


def _network_rules(recipe: Recipe) -> list[tuple[bool, str]]:
    """Of the network's noise, sizes and layers."""
    d = recipe.drafter
    layers = d.target_layers if d.context == "shared_kv" and d.kind == "block" else None
    return [
        (
            d.kind == "masked_lm" and d.graph == "uniform",
            "drafter.graph=uniform: a masked language model undoes the mask (absorbing)",
        ),
        (
            d.kind == "ddit" and d.init is None and d.time_input == "none" and d.prediction == "log_score",
            "drafter.time_input=none needs drafter.prediction=logits: a log-score depends on the noise (RADD)",
        ),
        (
            d.attention_backend == "flash_attn" and (d.kind != "ddit" or d.attention != "full"),
            "drafter.attention_backend=flash_attn needs drafter.kind=ddit with drafter.attention=full",
        ),
        (
            d.kind == "ddit" and d.hidden_size % (2 * d.heads) != 0,
            f"drafter.hidden_size={d.hidden_size} must be a multiple of twice drafter.heads={d.heads}",
        ),
        (
            d.lora_rank > 0 and d.kind != "masked_lm" and (d.kind != "block" or d.init is None),
            "drafter.lora_rank needs drafter.kind=masked_lm, or drafter.kind=block with drafter.init, a drafter that is trained",
        ),
        (
            d.lora_rank > 0 and d.train == "confidence_head",
            f"drafter.lora_rank={d.lora_rank}: drafter.train=confidence_head freezes all else",
        ),
        (d.target_layers == [], "drafter.target_layers must name at least one layer"),
        (
            layers is not None and len(layers) != d.layers,
            f"drafter.target_layers={layers} must name drafter.layers={d.layers} layers for shared_kv",
        ),
    ]


def _objective_rules(recipe: Recipe) -> list[tuple[bool, str]]:
    """Of the loss, beside the network that it trains."""
    d, o, standalone = recipe.drafter, recipe.objective, recipe.drafter.standalone
    return [
        (
            d.kind != "block" and o.prefix_decay > 0,
            f"objective.prefix_decay={o.prefix_decay} needs drafter.kind=block; standalone: objective.block_lengths",
        ),
        (
            ("confidence" in o.terms) != d.confidence_head,
            "objective.terms.confidence needs drafter.confidence_head=true"
            if "confidence" in o.terms
            else "drafter.confidence_head=true needs objective.terms.confidence, which trains it",
        ),
        (
            standalone and d.graph == "uniform" and o.diffusion == "masked_nll",
            "objective.diffusion=masked_nll needs drafter.graph=absorbing",
        ),
        (
            standalone and d.graph == "uniform" and o.times == "count",
            "objective.times=count counts masks: it needs drafter.graph=absorbing",
        ),
        (
            d.graph == "uniform" and recipe.stage == "calibrate" and o.distillation > 0 and d.kind == "ddit",
            "drafter.graph=uniform has no one-step q to calibrate: stage=finetune, or objective.distillation=0",
        ),
        (
            bool(o.block_lengths) and len(o.block_lengths) != d.block_size,
            f"objective.block_lengths has {len(o.block_lengths)} entries for drafter.block_size={d.block_size}",
        ),
        (
            bool(o.block_lengths) and sum(o.block_lengths) == 0,
            "objective.block_lengths must not all be 0",
        ),
        (not o.terms, f"objective.terms must name at least one loss{nearest('', LOSS_NAMES)}"),
    ]


def _trainer_rules(recipe: Recipe) -> list[tuple[bool, str]]:
    """Of the optimisation."""
    t = recipe.trainer
    return [
        (
            t.warmup_steps > t.max_steps,
            f"trainer.warmup_steps={t.warmup_steps} must be at most trainer.max_steps={t.max_steps}: give both",
        ),
        (
            bool(t.learning_rates) and recipe.drafter.kind != "block",
            "trainer.learning_rates needs drafter.kind=block",
        ),
        (
            t.optimizer == "muon" and recipe.launch.strategy not in ("auto", "ddp"),
            f"trainer.optimizer=muon needs whole matrices: launch.strategy={recipe.launch.strategy} keeps parts of them (auto, ddp)",
        ),
        (
            t.optimizer == "muon" and recipe.drafter.lora_rank > 0,
            "trainer.optimizer=muon moves whole matrices: drafter.lora_rank=0",
        ),
        (len(t.betas) != 2, f"trainer.betas={t.betas} must be two numbers"),
        (
            t.batch_size % (t.accumulate * recipe.processes) != 0,
            f"trainer.batch_size={t.batch_size} must be a multiple of trainer.accumulate={t.accumulate} "
            f"times the {recipe.processes} processes of launch.devices",
        ),
        (
            t.wandb_artifacts and "wandb" not in t.logger,
            "trainer.wandb_artifacts=true needs trainer.logger=wandb",
        ),
        (not t.resume.strip(), "trainer.resume must be auto, never or a checkpoint's path"),
    ]
