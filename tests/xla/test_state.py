"""Checkpoints of XLA runs: resumed bit for bit, and taken over by plain torch and by other shapes of devices."""

from __future__ import annotations

import pytest
import torch
from drivetrain import Accelerator
from drivetrain.tests.xla import cases
from drivetrain.tests.xla.running import run
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(300)

SHAPES = {"one": (1, "xla", {}), "rows": (2, "xla_spmd", {}), "fsdp+tp": (4, "xla", {"dp_shard_size": 2, "tp_size": 2}),
          "torch": (1, "single", {})}  # fmt: skip
OPTIONS = {"batch": 8, "count": 160, "seed": 7, "shuffle": True}


def loop(shape, **options):
    """Return a loop on devices of a shape, in a process of its own."""
    devices, strategy, sizes = SHAPES[shape]
    (cases.started_spmd if devices > 1 else cases.started)()
    config = {"parallelism_config": cases.degrees(**sizes)} if sizes else {}
    return cases.Loop(strategy, **{**OPTIONS, **options}, **config)


def saved(shape, folder, *, most=10, **options):
    """Train an epoch and save after `most` batches; return what was saved and the end."""

    def work():
        running, then = loop(shape, **options), []

        def after(number):
            if number + 1 == most:
                running.accelerator.save_state(folder)
                then.extend([running.result()["weights"], running.optimizer_state()])

        running.run(after=after)
        return then, running.result(), running.optimizer_state()

    return run(work, devices=SHAPES[shape][0])


def resumed(shape, folder, **options):
    """Load into fresh objects of other weights and moments; return what was loaded and the end of the epoch."""

    def work():
        running = loop(shape, **options)
        for parameter in running.model.parameters():
            torch.nn.init.constant_(parameter, 0.25)
        running.accelerator.load_state(folder)
        then = running.result()["weights"], running.optimizer_state()
        return then, running.run().result(), running.optimizer_state()

    return run(work, devices=SHAPES[shape][0])


def same(one, other):
    """Whether nested dicts of tensors are equal bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) and one.dtype == other.dtype


@pytest.mark.parametrize("shape", ["one", "fsdp+tp"])
def test_a_run_goes_on_bit_for_bit_with_dropout_and_accumulation(shape, tmp_path):
    options = {"dropout": 0.4, "accumulate": 2}
    then, end, moments = saved(shape, str(tmp_path / "kept"), **options)
    back, after, others = resumed(shape, str(tmp_path / "kept"), **options)
    assert same(back[0], then[0]) and same(back[1], then[1])
    assert after["losses"] == end["losses"][10:] and after["norms"] == end["norms"][5:]
    assert same(after["weights"], end["weights"]) and same(others, moments)


@pytest.mark.parametrize(("source", "target"), [("one", "torch"), ("torch", "one"), ("fsdp+tp", "torch"),
                                                ("torch", "fsdp+tp"), ("fsdp+tp", "rows"), ("rows", "one")])  # fmt: skip
def test_checkpoints_go_to_other_shapes_with_weights_and_moments(source, target, tmp_path):
    then, end, _ = saved(source, str(tmp_path / "kept"))
    back, after, _ = resumed(target, str(tmp_path / "kept"))
    assert same(back[0], then[0]) and same(back[1], then[1])
    rest = {**end, "losses": end["losses"][10:], "norms": end["norms"][10:]}
    assert cases.far(after, rest) <= 1e-5


class Tied(torch.nn.Module):
    """An embedding and a head of one weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("shape", ["one", "rows"])
def test_shared_weights_stay_shared_on_the_device_and_in_files(shape, tmp_path):
    def work():
        (cases.started_spmd if SHAPES[shape][0] > 1 else cases.started)()
        accelerator = Accelerator(strategy=SHAPES[shape][1])
        model = Tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.embed.weight
        model, optimizer = accelerator.prepare(model, optimizer)
        assert model.head.weight is model.embed.weight is before and before.device.type == "xla"
        assert optimizer.param_groups[0]["params"] == [before]
        accelerator.save_model(model, tmp_path / "model")
        state = accelerator.get_state_dict(model)
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        return state["embed.weight"].clone()

    weight = run(work, devices=SHAPES[shape][0])
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert list(stored) == ["embed.weight"] and torch.equal(stored["embed.weight"], weight)
