"""AutoTP: DeepSpeed shares each layer out among ranks; losses, norms and whole checkpoints are those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import Accelerator, DeepSpeedPlugin, DeepSpeedStrategy, ParallelismConfig
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.state import PartialState
from drivetrain.tests.distributed import run
from drivetrain.tests.strategies import deepspeed_runs as runs

pytestmark = pytest.mark.timeout(900)  # seconds on a machine of its own, minutes on a loaded one
SPECS = [
    {"patterns": [".*0\\.weight$"], "partition_type": "column"},
    {"patterns": [".*2\\.weight$"], "partition_type": "row"},
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def accelerator(stage, strategy=None, **options):
    GradientState._reset_state()
    PartialState._reset_state()
    if strategy:
        return Accelerator(cpu=True, strategy=strategy)
    content = {"zero_optimization": {"stage": stage}, "tensor_parallel": {
        "partition_config": {"use_default_specs": False, "layer_specs": SPECS}}}  # fmt: skip
    plugin = DeepSpeedPlugin(hf_ds_config=content)
    return Accelerator(cpu=True, deepspeed_plugin=plugin, parallelism_config=ParallelismConfig(tp_size=2, **options))


def trained(stage, batch, folder, strategy=None, load=None, shift=0):
    """Ten steps with clipping; from a checkpoint, where one is to be loaded into other weights."""
    made = accelerator(stage, strategy)
    model = mlp()
    if load:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.3)
    elif shift:
        model[0].weight.data += shift  # ranks that share a model begin with the first one's weights
    data = torch.utils.data.Subset(runs.data(160), range(80, 160) if load else range(80))
    model, optimizer, loader = made.prepare(model, runs.adamw(model), DataLoader(data, batch_size=batch))
    if load:
        made.load_state(load)
    losses, norms = [], []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        made.backward(loss)
        norms.append(float(made.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(made.reduce(loss.detach(), "mean")))
    if folder:
        made.save_state(folder)
    held = sum(parameter.numel() for parameter in made.unwrap_model(model).parameters())
    return {"losses": losses, "norms": norms, "weights": runs.vector(made.get_state_dict(model)), "held": held}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parity_and_checkpoints_to_plain_torch_and_back(stage, tmp_path):
    """2 ranks share one model; the checkpoint of each side goes on at the other, and at home bit for bit."""
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")

    def work(rank):
        whole = trained(stage, 8, ours, shift=0.0 if rank == 0 else 1.0)
        return whole, trained(stage, 8, None, load=ours), trained(stage, 8, None, load=theirs)

    (expected,) = run(lambda rank: trained(0, 8, theirs, "single"), 1, timeout=300, group=False)
    ranks = run(work, 2, timeout=600)
    ((after,), (from_ours,)) = (
        run(lambda rank, path=path: trained(0, 8, None, "single", load=path), 1, timeout=300, group=False)
        for path in (theirs, ours)
    )
    for found, resumed, back in ranks:
        assert runs.far(found["weights"], expected["weights"]) <= 1e-5
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert stage == 3 or found["held"] == 6 * 8 + 8 + 8 * 3 + 3  # half of each weight, all of the last bias
        for one in (resumed, back):
            assert runs.far(one["weights"], after["weights"]) <= 1e-5
    assert runs.far(from_ours["weights"], after["weights"]) <= 1e-5


def test_tensor_parallel_beside_zero(tmp_path):
    """Four ranks: two share a model, two models see different data; the product is filled by data parallelism."""
    def work(rank):
        found = trained(1, 4, str(tmp_path / "four"))
        return found

    (expected,) = run(lambda rank: trained(0, 8, None, "single"), 1, timeout=300, group=False)
    for found in run(work, 4, timeout=600):
        assert runs.far(found["weights"], expected["weights"]) <= 1e-5
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def test_sizes_that_two_say_differently_and_ways_that_are_not_there_are_refused():
    config = {"tensor_parallel": {"autotp_size": 4}}
    with pytest.raises(ValueError, match="autotp_size: 4 in the configuration, 2 in ParallelismConfig.tp_size=2."):
        DeepSpeedStrategy(config=config, parallelism=ParallelismConfig(tp_size=2))
    assert DeepSpeedStrategy(config=config).parallelism.tp_size == 4
    assert DeepSpeedStrategy(parallelism=ParallelismConfig(tp_size=2)).plugin.get_value("tensor_parallel.autotp_size") == 2
    with pytest.raises(NotImplementedError, match="pipeline.stages=2 .*Use ParallelismConfig.pp_size"):
        DeepSpeedStrategy(config={"pipeline": {"stages": 2}})
