"""One process with several XLA devices (SPMD): batches and weights shared out, with the numbers of one plain process."""

from __future__ import annotations

import pytest
from drivetrain.tests.xla import cases
from drivetrain.tests.xla.running import run

pytestmark = pytest.mark.timeout(300)

WAYS = {
    "rows": (2, {}), "fsdp": (2, {"dp_shard_size": -1}), "tp": (2, {"tp_size": 2}),
    "dp+fsdp": (4, {"dp_replicate_size": 2, "dp_shard_size": 2}), "dp+tp": (4, {"dp_replicate_size": -1, "tp_size": 2}),
    "fsdp+tp": (4, {"dp_shard_size": 2, "tp_size": 2}),
}  # fmt: skip
PARTS = {  # of the weights (16, 8) and (4, 16) and the bias (16) of Net, what each device holds
    "rows": ((16, 8), (4, 16), (16,)), "fsdp": ((8, 8), (4, 8), (8,)), "tp": ((8, 8), (4, 8), (8,)),
    "dp+fsdp": ((8, 8), (4, 8), (8,)), "dp+tp": ((8, 8), (4, 8), (8,)), "fsdp+tp": ((8, 4), (2, 8), (8,)),
}  # fmt: skip


def engine(way):
    """Return the arguments of an Accelerator."""
    sizes = WAYS[way][1]
    return {"strategy": "xla", "parallelism_config": cases.degrees(**sizes)} if sizes else {"strategy": "xla_spmd"}


def parts(tensor):
    """Return the shape of what each device holds of a tensor."""
    import torch_xla.distributed.spmd as spmd

    (shape,) = {tuple(shard.data.shape) for shard in spmd.wrap_if_sharded(tensor).local_shards}
    return shape


@pytest.mark.parametrize("way", WAYS)
def test_fifty_steps_equal_plain_torch_and_each_device_holds_its_part(way):
    def work():
        cases.started_spmd()
        loop = cases.Loop(**engine(way), steps=50)
        seen = []
        loop.run(each=lambda number: seen.append(cases.counted()))
        loop.accelerator.strategy.flush()
        held = [loop.model.up.weight, loop.model.down.weight, loop.model.up.bias]
        shapes = [parts(tensor) for tensor in held]
        moments = [parts(loop.optimizer.state[tensor]["exp_avg"]) for tensor in held]
        return loop.result(), shapes, moments, seen

    found, shapes, moments, seen = run(work, devices=WAYS[way][0])
    assert cases.far(found, cases.expected(steps=50)) <= 1e-5
    assert tuple(shapes) == tuple(moments) == PARTS[way]
    assert seen[49]["compiled"] == seen[5]["compiled"] and seen[49]["read"] == 0
    assert seen[49]["ran"] - seen[5]["ran"] == 44
