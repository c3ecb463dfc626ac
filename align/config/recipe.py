"""The recipe: everything a run depends on, as dataclasses.

`align.config.parser` fills them from YAML and key=value.

Every field carries its documentation and its limits (`option.py`): `--help` and the error messages are made from them. The drafter's and
its objective's keys are in `drafter.py`. No torch here.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from align.config.drafter import PARTS, DrafterConfig, ObjectiveConfig
from align.config.option import Group, option


@dataclass
class TargetConfig(Group):
    """The language model that is to become faster."""

    name: str = option("HuggingFaceTB/SmolLM2-135M-Instruct", "hub id, hub folder, FILE.gguf, or debug")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "weights and products; auto = bf16 where the hardware multiplies it, else float32"
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    revision: str | None = option(None, "hub revision: branch, tag or commit")
    trust_remote_code: bool = option(False, "run modelling code that comes with the model")
    parallel: Literal["replicate", "fsdp", "tp", "absent"] = option(
        "replicate",
        "in training: a copy in each process, its layers in parts that are put together as they run (FSDP2), each layer's products "
        "shared out (tensor parallelism), or no layers at all: what they compute is read from trainer.features_path (align.features)",
    )


WRITTEN_PROMPT = 80
"""Tokens of the longest prompt that the target writes, unless given."""
TEMPLATE = 40
"""Tokens that a chat template is taken to add where its tokenizer is not known."""


@dataclass
class DataConfig(Group):
    """The text that the target writes, and other text that it reads."""

    path: str | None = option(None, "data folder; default: data in the output folder")
    samples: int = option(2000, "samples to write in all", low=2)
    prompts: str | None = option(
        None,
        "null = the target writes them; else a hub id, or a file or a folder of them: .jsonl .ndjson .json .csv .tsv .parquet .arrow "
        ".txt, also .gz and .zst",
    )
    prompts_split: str = option("train", "split of a data set; in a folder, file names tell it")
    prompts_config: str | None = option(None, "configuration of a hub data set that has several")
    prompts_revision: str | None = option(None, "branch, tag or commit of a hub data set")
    prompts_column: str | None = option(
        None,
        "column that holds the prompts; null = the first of messages, conversations, prompt, question, turns, problem, instruction, "
        "query, input, text, content that holds a user's text",
    )
    template_kwargs: dict[str, Any] = option(
        {}, "variables of the target's chat template, name: value (enable_thinking: false)"
    )
    system: str | None = option(
        None, "system prompt of every sample; null = what the template does without", prose=True
    )
    prompt_temperature: float = option(1.0, "temperature of written prompts", low=0)
    prompt_openings: list[str] = option(
        [], "words that written prompts begin with, taken in turn ('' = none); chat targets only"
    )
    answer_temperatures: list[float] = option([0.0, 0.0, 0.7, 1.0], "of answers, taken in turn", low=0)
    top_p: float = option(1.0, "nucleus limit of what is written", above=0, high=1)
    top_k: int = option(0, "top-k limit of what is written; 0 = none", low=0)
    max_prompt_tokens: int | None = option(
        None,
        "longest prompt, in tokens beyond the bare chat template; null = 80 for prompts that the target writes, and what data.length leaves "
        "beside an answer for given ones",
        low=1,
        high=2**24,
    )
    long_prompts: Literal["drop", "cut"] = option(
        "drop",
        "given prompts longer than data.max_prompt_tokens: drop = leave them out; cut = remove the oldest turns, then the start of the "
        "longest message (without a chat template: the end of the text)",
    )
    turns: Literal["last", "all"] = option(
        "last",
        "answers of a given conversation that the target writes: last = the one to its last user turn, all = each in turn",
    )
    max_answer_tokens: int = option(160, "longest answer", low=1, high=2**24)
    batch_size: int = option(128, "rows written at a time; one shard each", low=1)
    writer: str = option(
        "target",
        "who writes: target = the target in this process; openai:URL = a server that has it, through the OpenAI protocol (vLLM, "
        "SGLang, TGI, llama.cpp)",
    )
    concurrency: int = option(64, "requests in flight to a server", low=1, high=65536)
    served_model: str | None = option(
        None, "the target's name on the server; null = the one that is called as target.name"
    )
    server_check: Literal["auto", "never"] = option(
        "auto",
        "auto = the server's answers to a few prompts are compared with the target's own, where its weights are here and fit",
    )
    reply_seconds: float = option(
        600.0, "seconds after which a request without a reply is sent again", above=0
    )
    retry_seconds: float = option(
        300.0, "seconds for which a request that fails is sent again before the writing stops", low=0
    )
    length: int = option(512, "length of a packed row", low=8, high=2**24)
    validation_fraction: float = option(0.02, "share of samples held out", above=0, high=0.5)
    near_duplicate_threshold: float = option(
        0.8, "share of 3-grams from which a prompt counts as seen; above 1 = off", above=0
    )
    text: list[str] = option(
        [],
        "other text, learnt as it stands before the target's own words: files and folders of text, source code, .jsonl, "
        ".csv, .parquet, or hub ids",
    )
    mixture: list[float] = option([], "share of each source of data.text; empty = equal ones", above=0)
    text_tokens: int = option(1_000_000, "tokens of data.text to read in all", low=1)
    text_share: float = option(
        0.5, "share of the training steps, the first ones, that read data.text", above=0, high=1
    )
    text_column: str = option("text", "column that holds the text")
    text_split: str = option("train", "split of a data set of data.text")
    text_config: str | None = option(None, "configuration of a hub data set of data.text that has several")
    text_revision: str | None = option(None, "branch, tag or commit of a hub data set of data.text")
    exclude: list[str] = option(
        ["suites"],
        "documents of data.text that share 13 words in a row with these are left out: suites = every benchmark of "
        "decode.eval, or files of rows",
    )
    write: Literal["missing", "never"] = option(
        "missing", "align.train first writes the data that are missing; never = it refuses"
    )
    follow: bool = option(
        False,
        "align.train reads shards in the order in which align.synthesize writes them, while it does; where nobody writes, "
        "it writes the next one itself",
    )
    follow_after: int = option(
        4, "shards that must be there first: held-out rows and the draft vocabulary are theirs", low=1
    )

    @property
    def prompt_limit(self) -> int:
        """`max_prompt_tokens`, or what its null stands for."""
        if self.max_prompt_tokens is not None:
            return self.max_prompt_tokens
        if self.prompts is None:
            return WRITTEN_PROMPT
        return max(WRITTEN_PROMPT, self.length - self.max_answer_tokens - TEMPLATE)

    @property
    def server(self) -> str | None:
        """The address of the server that writes, without `/v1`; None = the target itself writes."""
        return server_address(self.writer, "openai")


@dataclass
class TrainerConfig(Group):
    """The optimisation."""

    max_steps: int = option(1000, "optimizer steps", low=1)
    batch_size: int = option(2, "packed rows a step, over all devices", low=1)
    anchors: int = option(256, "random anchors a row; a row with fewer places for them takes them all", low=1)
    anchors_per: Literal["row", "document"] = option(
        "row",
        "document = so many anchors in each document of a row: short answers count as much as they do alone",
    )
    optimizer: Literal["adamw", "muon"] = option(
        "adamw",
        "muon: the layers' matrices move by orthogonalised gradients, all else by AdamW; more is learnt in a step, and a step takes "
        "longer on a CPU",
    )
    learning_rate: float = option(8e-4, "peak learning rate of AdamW", above=0, high=100)
    muon_learning_rate: float = option(1e-2, "peak learning rate of Muon's matrices", above=0, high=100)
    learning_rates: dict[str, float] = option(
        {},
        f"peak rates of parts of a block drafter, part: rate; the others take learning_rate. Parts: {', '.join(PARTS)}",
        above=0,
        high=100,
    )
    min_learning_rate_ratio: float = option(0.05, "last learning rate over the peak", low=0, high=1)
    warmup_steps: int = option(50, "linear warm-up", low=0)
    weight_decay: float = option(0.01, "AdamW's decoupled weight decay", low=0)
    betas: list[float] = option([0.9, 0.98], "AdamW's two decays", low=0, high=0.99999)
    gradient_clip: float = option(1.0, "largest gradient norm; 0 = no clipping", low=0)
    accumulate: int = option(1, "micro-batches a step; batch_size is split over them", low=1)
    ema: float = option(0.0, "decay of the averaged weights; 0 = off", low=0, high=0.99999)
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", "of products; auto = bf16 where the target is in half precision, else fp32"
    )
    show_samples: int = option(
        0,
        "standalone, one process: texts that the drafter writes by itself at every validation, to samples.txt",
        low=0,
    )
    validate_first: bool = option(False, "validate once before the first step")
    validate_every: int = option(200, "steps between validations", low=1)
    validation_rows: int = option(16, "packed rows to validate on", low=1)
    checkpoint_every: int = option(200, "steps between checkpoints", low=1)
    milestones: list[int] = option(
        [],
        "text tokens after which the drafter is saved as it is, in milestones/TOKENS of the output folder",
        low=1,
    )
    keep_checkpoints: int = option(2, "checkpoints that stay on disk", low=1)
    resume: str = option(
        "auto", "auto = newest complete checkpoint of the output folder, never, or a checkpoint's path"
    )
    keep_features_gb: float = option(
        0.0,
        "memory, in GB a process, for caching the target's outputs from epoch to epoch; 0 = computed every time",
        low=0,
    )
    features_gb: float = option(
        0.0,
        "disk, in GB of all processes, for the target's outputs: align.features or the first epoch stores them; 0 = none",
        low=0,
    )
    features_path: str | None = option(
        None, "folder of those outputs; default: features in the output folder"
    )
    features_dtype: Literal["fp16", "bf16", "fp32"] = option(
        "fp16", "type of outputs that are cached or stored; what overflows fp16 stays fp32"
    )
    features_top_k: int = option(
        0,
        "of cached or stored outputs, tokens of p a place; the losses take p of all others for 0. 0 = all of p, out of the last hidden state",
        low=0,
    )
    features_writer: str = option(
        "target",
        "who runs the target for align.features: target = this process, or vllm:URL = a server that stores hidden states in a folder that "
        "this machine sees (data.concurrency, data.served_model, data.reply_seconds and data.retry_seconds hold for it)",
    )
    logger: list[str] = option(["csv"], "any of csv, tensorboard, wandb (which includes csv)")
    wandb_artifacts: bool = option(
        False, "with trainer.logger=wandb: also log the drafter as an artefact and the validations as a table"
    )
    log_every: int = option(10, "steps between progress lines", low=1)
    max_minutes: float | None = option(None, "stop in time, the learning rate brought down by then", above=0)

    @property
    def features_server(self) -> str | None:
        """The address of the server that returns hidden states, without `/v1`; None = the target runs here."""
        return server_address(self.features_writer, "vllm")


@dataclass
class LaunchConfig(Group):
    """Where it runs."""

    strategy: Literal["auto", "ddp", "fsdp", "deepspeed_1", "deepspeed_2", "deepspeed_3"] = option(
        "auto",
        "how to spread over devices; auto = ddp when there are several, fsdp = FSDP2, deepspeed_N = ZeRO-N",
    )
    offload: bool = option(
        False,
        "deepspeed: the optimizer's state stays in the host's memory, of deepspeed_3 the weights too; fsdp: both",
    )
    devices: int = option(1, "processes on this machine, one a device; auto = one a GPU, else 1", low=1)
    accelerator: Literal["auto", "cpu", "gpu"] = option("auto", "what to run on")
    num_nodes: int = option(1, "machines", low=1, high=10_000)
    timeout: float = option(
        600.0, "seconds that a process waits for the others before the run ends with an error", low=1
    )


@dataclass
class Recipe(Group):
    """One run: what is aligned to what, on which text, how, where."""

    name: str = option("unnamed", "the recipe's name; the file's, unless given")
    base: str | None = option(
        None, "in a file: the recipe (a name, or a path from that file) whose values this one starts from"
    )
    stage: Literal["pretrain", "finetune", "calibrate"] = option(
        "calibrate",
        "pretrain = whole rows, finetune = blocks behind clean prefixes, both by the diffusion loss; calibrate = blocks, with "
        "the distillation terms (block and autoregressive drafters are calibrated)",
    )
    seed: int = option(0, "seed of data, initialisation and order", low=0, high=2**32 - 1)
    output: str = option("", "output folder; default: runs/NAME")
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    @property
    def processes(self) -> int:
        """Training processes over all machines."""
        return self.launch.devices * self.launch.num_nodes

    @property
    def data_folder(self) -> Path:
        """Where the data lie: `data.path`, or `data` in the output folder."""
        return Path(self.data.path) if self.data.path else Path(self.output) / "data"

    @property
    def target_options(self) -> dict[str, Any]:
        """What `load_target` is told beside the target's name and the device."""
        t, d = self.target, self.data
        return {
            "dtype": t.dtype,
            "revision": t.revision,
            "trust_remote_code": t.trust_remote_code,
            "template_kwargs": d.template_kwargs,
            "system": d.system,
        }

    @property
    def features_folder(self) -> Path:
        """Where the target's outputs lie: `trainer.features_path`, or `features` in the output folder."""
        return Path(self.trainer.features_path or Path(self.output) / "features")


def server_address(writer: str, kind: str) -> str | None:
    """The address in KIND:URL, without `/v1`; None where that is no such thing."""
    found, _, url = writer.partition(":")
    return url.rstrip("/").removesuffix("/v1") if found == kind else None


API_KEY = "SPECALIGN_API_KEY"
"""The environment variable that holds a server's API key. One of its own: another service's key is sent to nobody."""
LOGGERS = ("csv", "tensorboard", "wandb")
GROUPS = ("", "target", "data", "drafter", "objective", "trainer", "launch")


@dataclass(frozen=True)
class Key:
    """One settable key: its dotted name, type, default and documentation."""

    name: str
    type: Any
    default: Any
    doc: str


def keys() -> dict[str, Key]:
    """All settable keys by dotted name, in the order of the dataclasses."""
    found: dict[str, Key] = {}
    hints = get_type_hints(Recipe)
    for group in GROUPS:
        cls = Recipe if group == "" else hints[group]
        types = get_type_hints(cls)
        for f in fields(cls):
            if group == "" and f.name in GROUPS:
                continue
            factory = f.default_factory
            default = f.default if factory is MISSING else factory()
            name = f"{group}.{f.name}" if group else f.name
            found[name] = Key(name, types[f.name], default, f.metadata["doc"])
    return found


def resolve(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, every key present: feeding it back in gives the same recipe."""
    return {key: value for key, value in asdict(recipe).items() if key != "base"}
