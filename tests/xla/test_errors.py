"""What XLA refuses, and what it takes into account while models are placed."""

from __future__ import annotations

import weakref

import pytest
import torch
from drivetrain import (
    Accelerator,
    DistributedType,
    ParallelismConfig,
    TorchTensorParallelConfig,
    XLAStrategy,
    set_seed,
)
from drivetrain.strategies import random
from drivetrain.strategies.availability import is_bf16_available, is_torch_xla_available
from drivetrain.tests.xla import cases
from drivetrain.tests.xla.running import run

pytestmark = pytest.mark.timeout(300)

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29577", "TORCHELASTIC_RUN_ID": "xla"}  # fmt: skip


def test_processes_of_torchrun_that_would_train_alone_are_refused():
    def work():
        for strategy, what in (("xla", "Expected one process for XLA on the CPU"), ("xla_spmd", "for all devices")):
            with pytest.raises(ValueError, match=f"{what}.*Received: 2 processes, started by torchrun"):
                Accelerator(strategy=strategy)

    run(work, env=LAUNCHED)


def test_devices_and_settings_that_do_not_fit_are_refused():
    def work():
        with pytest.raises(ValueError, match="Received: device='cuda', where torch_xla has CPU"):
            Accelerator(strategy="xla", device="cuda")
        with pytest.raises(ValueError, match="Received: dynamo_backend='inductor'. XLA compiles every step anyway"):
            Accelerator(strategy="xla", dynamo_backend="inductor").prepare(cases.Net())
        accelerator = Accelerator(strategy="xla", cpu=True)
        assert (accelerator.device, accelerator.distributed_type) == (torch.device("xla", 0), DistributedType.XLA)
        assert accelerator.num_processes == 1 and accelerator.state.backend is None
        assert is_torch_xla_available() and not is_torch_xla_available(check_is_tpu=True) and is_bf16_available()

    run(work)


def test_a_backward_pass_before_the_device_is_an_error_that_says_so():
    def work():
        torch.ones(1, requires_grad=True).sum().backward()
        accelerator = Accelerator(strategy="xla")
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        with pytest.raises(RuntimeError, match="Call torch_xla.device.. at the top of the script"):
            accelerator.backward(model(torch.ones(1, device=accelerator.device)).sum())

    run(work)


def test_sharing_out_refuses_what_the_devices_cannot_do():
    def work():
        cases.started_spmd()

        def prepared(sizes, plan, model):
            config = ParallelismConfig(**sizes, tp_handler=TorchTensorParallelConfig(plan=plan))
            return Accelerator(strategy=XLAStrategy(parallelism=config)).prepare(model)

        with pytest.raises(ValueError, match="Received: tp_size=3 for 2 devices"):
            prepared({"tp_size": 3}, {"up": "colwise"}, cases.Net())
        with pytest.raises(ValueError, match="Received: down .colwise. with 5 of dimension 0 of .*tp_size=2"):
            prepared({"tp_size": 2}, {"down": "colwise"}, torch.nn.ModuleDict({"down": torch.nn.Linear(4, 5)}))
        tied = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8, bias=False)})
        tied["head"].weight = tied["embed"].weight
        with pytest.raises(ValueError, match="layers that share a weight to be divided alike. Received: head: 'colwise'"):
            prepared({"tp_size": 2}, {"embed": "colwise", "head": "colwise"}, tied)
        with pytest.raises(ValueError, match="Leave out pp_size, or use another engine"):
            prepared({"pp_size": 2}, None, cases.Net())

    run(work, devices=2)


def test_parameters_that_must_be_replaced_are_followed_by_optimizers_and_stay_shared():
    """Torch keeps the objects unless somebody holds weak references to them."""

    def work():
        accelerator = Accelerator(strategy="xla")
        model = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 2), "other": torch.nn.Linear(2, 2)})
        model["other"].weight = model["one"].weight
        before, optimizer = model["one"].weight, torch.optim.SGD(model.parameters(), lr=1.0)
        held = weakref.ref(before)
        model, optimizer = accelerator.prepare(model, optimizer)
        after = model["one"].weight
        assert held() is before and after is not before and after.device.type == "xla"
        assert model["other"].weight is after and optimizer.param_groups[0]["params"][0] is after

    run(work)


def test_seeds_and_states_include_the_device_and_reading_values_changes_nothing_that_is_drawn():
    def work():
        accelerator = Accelerator(strategy="xla")
        device = accelerator.device

        def drawn(read):
            values = []
            for _ in range(3):
                values.append(torch.rand(2, device=device))
                if read:
                    accelerator.strategy.flush()
            return torch.cat(values).tolist()

        set_seed(5)
        first = drawn(False)
        set_seed(5)
        assert drawn(True) == first
        with random.preserved(device):
            inside = drawn(False)
        assert drawn(False) == inside != first
        kept = random.capture(device)
        again = drawn(False)
        random.restore(kept, device)
        assert drawn(False) == again

    run(work)
