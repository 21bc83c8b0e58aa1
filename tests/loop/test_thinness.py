"""A step costs what a hand-written loop costs: counted, not timed."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.tests.benchmarks.counting import (
    Small,
    calls_by_function,
    frames_to_training_step,
    small_loader,
    small_trainer,
)

FRAMES = 4
CALLS = 45


def test_few_frames_from_fit_to_training_step():
    assert frames_to_training_step() <= FRAMES


def test_few_own_calls_in_a_bare_step():
    calls = calls_by_function("bare")
    assert sum(calls.values()) <= CALLS, calls


def test_few_own_calls_in_a_step_with_everything_on():
    calls = calls_by_function("everything")
    assert sum(calls.values()) <= CALLS, calls


def test_few_own_calls_with_accumulation_and_clipping():
    calls = calls_by_function("everything", accumulate_grad_batches=4, gradient_clip_val=1.0)
    assert sum(calls.values()) <= CALLS, calls


READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__"}


class Reads(TorchFunctionMode):
    """Notes the step in which a tensor's value was read by Python."""

    def __init__(self, step) -> None:
        super().__init__()
        self.step, self.seen = step, []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in READS:
            self.seen.append((self.step(), function.__name__))
        return function(*args, **(kwargs or {}))


class ScalarReads(TorchDispatchMode):
    """The same one level lower: what every read of one value comes to, however it was spelled."""

    def __init__(self, step) -> None:
        super().__init__()
        self.step, self.seen = step, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(function):
            self.seen.append((self.step(), str(function)))
        return function(*args, **(kwargs or {}))


def test_L8_no_value_is_read_between_log_points():
    trainer = small_trainer("everything", log_every_n_steps=50)
    now = {"batch": 0}

    def step() -> int:
        return now["batch"]

    class Counted(Small):
        def training_step(self, batch, batch_idx):
            now["batch"] = batch_idx + 1
            return super().training_step(batch, batch_idx)

    module = Counted(3)
    with Reads(step) as reads, ScalarReads(step) as scalars:
        trainer.fit(module, small_loader(120))
    seen = {batch for batch, _ in reads.seen + scalars.seen}
    assert seen <= {0, 50, 100, 120}, reads.seen + scalars.seen
    assert {50, 100} <= seen  # the test does see reads
