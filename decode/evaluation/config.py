"""The options of a measurement."""

from dataclasses import dataclass, field
from pathlib import Path

from decode.speculation.settings import Sampling
from decode.systems.drafter_folders import NamedDrafter
from decode.systems.parsing import MethodList, Sweep
from decode.systems.registry import COMBINED, DRAFTER, LOOKUP, PLAIN, GivenDrafter
from specalign.common.schema import JsonObject
from specalign.suites.long import CONTEXT
from specalign.suites.registry import SUITES, resolve

DEFAULT_METHODS = (PLAIN, LOOKUP, DRAFTER, COMBINED)
DEFAULT_SUITE, LONG = "builtin", "long"
OWN = 128  # length limit of answers to a user's own prompts
TUNING_SUITE = "builtin"  # the suite on which options are tuned: built-in prompts, not a benchmark
TUNING_PROMPTS = 12


@dataclass(frozen=True)
class EvalConfig:
    """The options of `decode.eval` (see its --help), and the results of tuning.

    max_new_tokens: None = as published for each suite.
    batch_sizes: prompts that are decoded together; the first size is that of the main tables.
    tuning: this run chooses options and is no measurement. tuned: a line for each method whose
        options were tuned.
    """

    suite: str | None = None
    prompts: Path | None = None
    prompts_column: str | None = None
    data_dir: Path | None = None
    target: str | None = None
    drafters: tuple[NamedDrafter, ...] = ()
    drafter_tokenizer: str | None = None
    training_data: Path | None = None
    methods: MethodList | None = None
    sweep: Sweep = Sweep()
    tune: int | None = None
    drafting: GivenDrafter = GivenDrafter()
    sampling: Sampling = Sampling(seed=0)
    limit: int | None = None
    max_new_tokens: int | None = None
    batch_sizes: tuple[int, ...] = (1,)
    first_turn: bool = False
    documents: Path | None = None
    context: int = CONTEXT
    execute_code: bool = False
    server: str | None = None
    baseline_server: str | None = None
    concurrency: tuple[int, ...] = (1, 8, 32)
    reproduce: str | None = None
    scale: str = "full"
    repeats: int = 1
    warmup: int = 1
    engine: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    out: Path | None = None
    resume: bool = True
    no_hf_check: bool = False
    trust_remote_code: bool = False
    template_kwargs: JsonObject = field(default_factory=dict)
    system: str | None = None
    tuning: bool = False
    tuned: list[str] | None = None

    @property
    def suite_names(self) -> list[str]:
        """The suites that are asked for; none for a file of prompts."""
        chosen = [] if self.prompts else resolve(self.suite or DEFAULT_SUITE)
        return [suite.name for suite in chosen]

    def limit_of(self, suite: str) -> int:
        """The length limit of a suite's outputs."""
        published = SUITES[suite].max_new_tokens if suite in SUITES and not self.prompts else OWN
        return self.max_new_tokens or published

    @property
    def recorded(self) -> JsonObject:
        """The options that run.json records as they were typed."""
        own = ("limit", "repeats", "warmup", "drafter_tokenizer", "tune", "system")
        drafting = ("draft_tokens", "tree_nodes", "steps", "order")
        limits = {name: self.limit_of(name) for name in self.suite_names} or {"": self.limit_of("")}
        same = len({*limits.values()}) == 1
        return {
            "max_new_tokens": next(iter(limits.values())) if same else limits,
            "batch_sizes": list(self.batch_sizes),
            "engine": self.engine,
            "first_turn": self.first_turn or None,
            "execute_code": self.execute_code or None,
            "context": self.context if LONG in limits else None,
            **{key: getattr(self, key) for key in own},
            **{key: getattr(self.sampling, key) for key in ("temperature", "top_p", "top_k")},
            **{key: getattr(self.drafting, key) for key in drafting},
            "seed": self.sampling.fixed_seed,
            "verifier": self.drafting.verifier_name,
            "trust_remote_code": self.trust_remote_code or None,
            "template_kwargs": self.template_kwargs or None,
        }
