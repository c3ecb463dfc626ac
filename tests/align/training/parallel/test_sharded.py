"""Two CPU processes: under FSDP2 every kind of drafter trains as in one, and one file goes on under any number of them; with the target in
parts too."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from align.training.strategies import Sharded, shard_target
from specalign.common.errors import UserError
from tests.builders import read_metric, same_drafter
from tests.forks import train_in_forks
from tests.target_models import tiny_target


def train(output: Path, recipe: str, processes: int, *words: str) -> list[float]:
    own = [f"recipe={recipe}", f"output={output}", "target.device=cpu"]
    words = (*own, f"launch.devices={processes}", *words)
    done = train_in_forks(words, output.parent, processes)
    assert done.returncode == 0, done.stderr
    return read_metric(output)


KINDS = {
    "debug_taps": ["drafter.convolution=true"],
    "debug_mdlm": ["trainer.accumulate=2", "trainer.batch_size=4"],
    "debug_confidence": [],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "strategy"), [*((kind, "fsdp") for kind in KINDS), ("debug_mdlm", "deepspeed_3")]
)
def test_kinds_train_like_one(tmp_path: Path, debug_data: Path, recipe: str, strategy: str) -> None:
    words = [*KINDS[recipe], "trainer.max_steps=4", f"data.path={debug_data}", "trainer.ema=0.9"]
    alone = train(tmp_path / "one", recipe, 1, *words)
    two = train(tmp_path / "two", recipe, 2, *words, f"launch.strategy={strategy}")
    assert two == pytest.approx(alone, rel=1e-5)
    assert same_drafter(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["debug_confidence", "debug_mdlm"])
def test_mixed_precision_trains_like_one(tmp_path: Path, debug_data: Path, recipe: str) -> None:
    """Weights are gathered in bf16, as autocast rounds them, and summed in fp32."""
    words = ["trainer.precision=bf16", "trainer.max_steps=4", f"data.path={debug_data}"]
    alone = train(tmp_path / "one", recipe, 1, *words)
    two = train(tmp_path / "two", recipe, 2, *words, "launch.strategy=fsdp")
    assert two == pytest.approx(alone, rel=2e-2, abs=2e-3)


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.dtype, self.weight.dtype
        return super().forward(x)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(4, 4), Layer(4, 4)])

    def training_step(self) -> None: ...

    def validation_step(self) -> None: ...


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_weights_are_gathered_in_the_precision_of_the_products(precision: str) -> None:
    """Those of a shard, and their gradients, stay in fp32."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = TwoLayers()
        plugin = SimpleNamespace(precision=precision)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
        Sharded.shard(SimpleNamespace(device_mesh=mesh, precision_plugin=plugin), module)  # type: ignore[arg-type]
        layer = module.layers[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            layer(torch.ones(2, 4)).float().sum().backward()
        half = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
        assert layer.seen == (torch.float32, half)
        assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_another_number_of_processes_goes_on(tmp_path: Path, debug_data: Path) -> None:
    words = ["launch.strategy=fsdp", "trainer.min_learning_rate_ratio=1"]
    words += ["trainer.checkpoint_every=3", "trainer.ema=0.9", "trainer.warmup_steps=1"]
    words.append(f"data.path={debug_data}")
    whole_run = train(tmp_path / "one", "debug_block", 1, *words, "trainer.max_steps=6")
    train(tmp_path / "two", "debug_block", 2, *words, "trainer.max_steps=3")
    rest = train(tmp_path / "two", "debug_block", 1, *words, "trainer.max_steps=6")
    assert rest == pytest.approx(whole_run, rel=1e-5)
    assert same_drafter(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["deepspeed_3", "fsdp"])
def test_a_sharded_target_is_the_same(tmp_path: Path, debug_data: Path, strategy: str) -> None:
    """Of three held-out rows one process runs two: what is stored in one of them alone is asked for by both."""
    common = ["trainer.max_steps=4", "trainer.validation_rows=3", f"data.path={debug_data}"]
    common.append("trainer.features_dtype=fp32")
    alone = train(tmp_path / "one", "debug_block", 1, *common)
    words = ["target.parallel=fsdp", f"launch.strategy={strategy}", "trainer.features_gb=1"]
    two = train(tmp_path / "two", "debug_block", 2, *common, *words)
    assert two == pytest.approx(alone, rel=1e-5, abs=1e-7)
    assert same_drafter(tmp_path / "two", tmp_path / "one")


def test_a_target_whose_texts_run_one_by_one_is_refused() -> None:
    """Processes would run its layers another number of times, and wait for each other."""
    with pytest.raises(UserError, match="'bart' has absolute positions, so texts run one by one"):
        shard_target(tiny_target("bart"), torch.device("cpu"))
