"""What of XLA needs no torch_xla: how it is chosen, its options, its errors, and its collectives by a stand-in."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest
import torch
from drivetrain import Accelerator, ParallelismConfig, TorchTensorParallelConfig, Trainer, XLAPlugin, XLAStrategy
from drivetrain.strategies import create, registry, xla_runtime, xla_world
from drivetrain.strategies.availability import has_package
from drivetrain.strategies.environment import Placement
from drivetrain.strategies.xla_sharding import arrange
from drivetrain.tests.distributed import run

without = pytest.mark.skipif(has_package("torch_xla"), reason="torch_xla is here")


@pytest.mark.parametrize("word", ["xla", "tpu", "xla_spmd", "xla_fsdp"])
def test_words_choose_the_engine_with_its_options(word):
    engine = create(word)
    assert type(engine) is XLAStrategy and word in registry()
    assert engine.plugin == {"xla_spmd": XLAPlugin(spmd=True), "xla_fsdp": XLAPlugin(fsdp=True)}.get(word, XLAPlugin())
    assert engine.spmd == (word in ("xla_spmd", "xla_fsdp"))


def test_a_parallelism_config_beside_the_word_shares_out_over_devices():
    config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    for engine in (create("xla", parallelism=config), create(XLAPlugin(), parallelism=config)):
        assert type(engine) is XLAStrategy and engine.parallelism is config and engine.spmd
    assert create("xla_fsdp", parallelism=config).plugin == XLAPlugin(fsdp=True)
    assert type(create(None, parallelism=config)) is not XLAStrategy


def test_a_launch_chooses_the_engine(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_XLA", "true")
    assert type(create()) is XLAStrategy and type(create("tpu")) is XLAStrategy
    with pytest.raises(ValueError, match="Expected the engine of the launch. Received: strategy='ddp', and ACCELERATE_"):
        create("ddp")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    for engine in (create(), create("xla")):
        assert type(engine) is XLAStrategy and engine.parallelism.tp_size == 2 and engine.spmd


def test_options_that_contradict_each_other_are_shown():
    with pytest.raises(ValueError, match="Received: spmd=False, fsdp=True. Leave spmd out"):
        XLAPlugin(spmd=False, fsdp=True)
    with pytest.raises(ValueError, match="Expected spmd=True for a ParallelismConfig"):
        XLAStrategy(spmd=False, parallelism=ParallelismConfig(tp_size=2))
    with pytest.raises(ValueError, match=r"Expected XLA's options once. Received: plugin and \['spmd'\]"):
        XLAStrategy(XLAPlugin(), spmd=True)


def test_degrees_make_up_the_number_of_devices():
    assert arrange(None, 4).dp_replicate_size == 4
    assert arrange(ParallelismConfig(dp_shard_size=-1, tp_size=2), 8).dp_shard_size == 4
    with pytest.raises(ValueError, match="Received: tp_size=3 for 4 devices. Change a degree"):
        arrange(ParallelismConfig(tp_size=3, tp_handler=TorchTensorParallelConfig()), 4)
    with pytest.raises(ValueError, match=r"Received: cp_size=2, tp_size=2. Leave out cp_size, or use another engine"):
        arrange(ParallelismConfig(cp_size=2, tp_size=2), 4)


@without
def test_a_missing_package_is_an_error_that_names_the_extra():
    for make in (lambda: Accelerator(strategy="xla"), lambda: Trainer(strategy="tpu"), lambda: Trainer(accelerator="tpu")):
        with pytest.raises(ImportError, match=r"it is not installed. Run `pip install 'drivetrain\[xla\]'`"):
            make()


@without
def test_a_package_made_for_another_torch_is_an_error_that_names_it_by_a_stand_in(tmp_path, monkeypatch):
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN5torch8autograd')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(xla_runtime, "has_package", lambda name: True)
    with pytest.raises(ImportError, match=f"that torch_xla was made for. Received: torch {torch.__version__[:4]}"):
        xla_runtime.package()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.0")
    with pytest.raises(ImportError, match=r"Expected torch 2.9 for torch_xla 2.9.0.*Received: torch 2.*torch==2.9.\*"):
        xla_runtime.package()
    assert "torch_xla" not in sys.modules


def test_an_accelerators_word_that_only_xla_has_refuses_other_engines():
    with pytest.raises(ValueError, match="Expected strategy='xla' for accelerator='tpu'. Received: strategy='ddp'"):
        Trainer(accelerator="tpu", strategy="ddp")


class Collectives:
    """Stands in for torch_xla's functions, by the gloo group of the process, and counts them."""

    def __init__(self):
        self.calls = []

    def all_reduce(self, kind, tensor, *, scale, pin_layout):
        self.calls.append(kind)
        kinds = {"sum": "SUM", "max": "MAX", "min": "MIN", "mul": "PRODUCT"}
        out = tensor.clone()
        torch.distributed.all_reduce(out, getattr(torch.distributed.ReduceOp, kinds[kind]))
        return out * scale

    def all_gather(self, tensor, *, dim, pin_layout):
        self.calls.append("gather")
        found = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(found, tensor)
        return torch.cat(found, dim)


class OnDevice(torch.Tensor):
    """A tensor that says it is on an XLA device."""

    device = torch.device("xla", 0)


def test_collectives_of_several_processes_by_a_stand_in_for_torch_xlas():
    def work(rank):
        world = xla_world.XLAWorld(Placement(rank=rank, size=2, local_rank=rank, local_size=2), torch.device("xla", 0))
        own = Collectives()
        xla_runtime.part = lambda name: own
        found = {}
        for op in ("sum", "mean", "max", "min", "product"):
            tensor = torch.tensor([1.0 + rank, 4.0]).as_subclass(OnDevice)
            assert world.all_reduce(tensor, op) is tensor
            found[op] = tensor.as_subclass(torch.Tensor).tolist()
        flags = world.all_reduce(torch.tensor([rank == 1, False]).as_subclass(OnDevice))
        halves = world.all_reduce(torch.tensor([40000.0], dtype=torch.float16).as_subclass(OnDevice), "mean")
        gathered = world.all_gather(torch.tensor([rank]).as_subclass(OnDevice))
        sent = world.broadcast(torch.tensor([rank + 5]).as_subclass(OnDevice), src=1)
        calls = list(own.calls)
        objects = world.gather_object({"rank": rank}), world.agree(rank == 1), world.all_reduce(torch.tensor([rank]))
        assert own.calls == calls  # those went by the group of CPU tensors
        return found, flags.tolist(), halves.tolist(), [int(one) for one in gathered], sent.tolist(), objects

    for found, flags, halves, gathered, sent, objects in run(work):
        assert found == {"sum": [3, 8], "mean": [1.5, 4], "max": [2, 4], "min": [1, 4], "product": [2, 16]}
        assert flags == [True, False] and halves == [40000.0]
        assert gathered == [0, 1] and sent == [6]
        assert objects[0] == [{"rank": 0}, {"rank": 1}] and objects[1] and objects[2].tolist() == [1]
