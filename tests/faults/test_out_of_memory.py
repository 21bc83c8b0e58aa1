"""Memory that does not suffice: the error stays what it is, and says where it was and what helps."""

from __future__ import annotations

import resource

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback, OutOfMemory, Trainer
from drivetrain.callbacks.out_of_memory import described, exhausted
from drivetrain.tests import distributed
from drivetrain.tests.faults.toy import Falling, loader, trainer

ROOM = 256 * 1024 * 1024  # bytes that a rank may allocate beyond what it has


class Hungry(Falling):
    """Allocates more than there is, in batch 2 of a stage."""

    def __init__(self, stage: str, how: str = "torch") -> None:
        super().__init__()
        self.stage, self.how = stage, how

    def eat(self, stage, index):
        if (stage, index) == (self.stage, 2):
            if self.how == "numpy":
                numpy.ones(4 * ROOM, dtype=numpy.uint8)
            elif self.how == "Python":
                bytearray(4 * ROOM)
            torch.ones(4 * ROOM, dtype=torch.uint8)

    def training_step(self, batch, batch_idx):
        self.eat("fit", batch_idx)
        return self.weight * batch["x"].mean()

    def validation_step(self, batch, batch_idx):
        self.eat("validate", batch_idx)

    def predict_step(self, batch, batch_idx):
        self.eat("predict", batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def data(size: int = 4) -> DataLoader:
    return DataLoader([{"x": torch.ones(3, 2), "y": index} for index in range(24)], batch_size=size)


def notes(stage: str, how: str = "torch", *, call: str = "fit", size: int = 4, **options):
    """Return the class, the text and the notes of the error with which a run ends that has little room."""

    def work(rank):
        run, module, given = trainer(".", **options), Hungry(stage, how), data(size)
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, resource.RLIM_INFINITY))
        loaders = (given, given) if call == "fit" else (given,)
        try:
            getattr(run, call)(module, *loaders)
        except (RuntimeError, MemoryError) as error:
            return type(error).__name__, str(error), "\n".join(getattr(error, "__notes__", [str(error)]))
        return None

    return distributed.run(work, 1)[0]


@pytest.mark.parametrize("how, kind, said", [
    ("torch", "RuntimeError", "allocate"), ("numpy", "MemoryError", "allocate"), ("Python", "MemoryError", ""),
])  # fmt: skip
def test_a_real_failure_names_step_shapes_and_what_helps(how, kind, said):
    found, text, note = notes("fit", how)
    assert found.endswith(kind.removeprefix("_")) and said in text
    lines = note.splitlines()
    assert lines[0] == "Out of memory on cpu (rank 0) in step 2, epoch 0, batch 2."
    assert lines[1] == "The batch: {x: float32[4, 3, 2], y: int64[4]}."
    assert lines[2] == "Held by this process: weights 4 B, gradients 0 B, optimizer states 12 B."
    assert "batch_size=2 and accumulate_grad_batches=2 in the place of 4 and 1" in note
    assert 'precision="bf16-mixed"' in note and 'strategy="fsdp"' in note


def test_the_advice_is_that_of_the_run():
    note = notes("fit", size=1, accumulate_grad_batches=2, precision="bf16-mixed")[2]
    assert "in step 1, epoch 0, batch 2." in note
    assert "accumulate_grad_batches" not in note and "bf16" not in note and "Smaller or shorter samples" in note


def test_in_evaluations():
    note = notes("validate")[2]
    assert "in validation, after step 6, epoch 0, batch 2." in note and "{x: float32[4, 3, 2], y: int64[4]}" in note
    note = notes("predict", call="predict")[2]
    assert "in prediction, after step 0, epoch 0, batch 2." in note and "return_predictions=False" in note


def test_other_errors_are_left_alone():
    class Broken(Falling):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="^broken$") as caught:
        trainer(".").fit(Broken(), loader())
    assert not getattr(caught.value, "__notes__", [])


def test_memory_of_a_device(caplog):
    class Full(Falling):
        def training_step(self, batch, batch_idx):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    policy = OutOfMemory(snapshot=True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(".", callbacks=[policy]).fit(Full(), loader())
    assert "The batch: float32[1]." in "".join(getattr(caught.value, "__notes__", [str(caught.value)]))
    assert "Memory is recorded on CUDA only, not on cpu" in caplog.text


def test_it_is_part_of_every_run_once():
    def kinds(**options):
        return [type(c) for c in Trainer(logger=False, **options).callbacks].count(OutOfMemory)

    assert (kinds(), kinds(callbacks=[OutOfMemory(entries=5)]), kinds(barebones=True)) == (1, 1, 0)
    with pytest.raises(ValueError, match="entries=0"):
        OutOfMemory(entries=0)
    assert issubclass(OutOfMemory, Callback)


def test_what_is_exhausted_and_how_a_batch_is_described():
    assert exhausted(MemoryError()) and exhausted(torch.OutOfMemoryError("x"))
    assert not exhausted(RuntimeError("shape")) and not exhausted(KeyboardInterrupt())
    nested = ([torch.zeros(2), {"a": torch.zeros(3, 1, dtype=torch.bool)}], "text", *range(9))
    assert described(nested) == "((float32[2], {a: bool[3, 1]}), str, int, int, int, int, int, int, …)"
