"""Letting go of memory, and batch sizes that fit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from drivetrain import clear_device_cache, find_executable_batch_size, release_memory, should_reduce_batch_size

FULL = "CUDA out of memory."


def test_sizes_become_smaller_until_one_fits():
    tried = []

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size, name, *, scale=1):
        tried.append(batch_size)
        if batch_size > 100:
            raise torch.OutOfMemoryError(FULL)
        return name, batch_size * scale

    assert train("run", scale=2) == ("run", 184)
    assert tried == [128, 115, 103, 92]  # nine tenths each time, rounded down
    assert train("again") == ("again", 92)  # what has fitted is tried first


def test_sizes_as_a_function_says():
    sizes = iter([64, 8])
    tried = []

    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    find_executable_batch_size(train, starting_batch_size=99, reduce_batch_size_fn=lambda: next(sizes))()
    assert tried == [99, 64, 8]


def test_other_errors_go_through_and_nothing_fitting_is_one():
    @find_executable_batch_size
    def broken(batch_size):
        raise ValueError(f"wrong at {batch_size}")

    with pytest.raises(ValueError, match="wrong at 128"):
        broken()

    @find_executable_batch_size(starting_batch_size=4)
    def hungry(batch_size):
        raise torch.OutOfMemoryError(FULL)

    with pytest.raises(RuntimeError, match="hungry exhausted it with every one from 4 down to 1"):
        hungry()


def test_the_size_is_not_given_by_the_caller():
    @find_executable_batch_size
    def train(batch_size, rate):
        pass

    with pytest.raises(TypeError, match=r"Call train\(rate=0.1\)"):
        train(128, 0.1)


def test_memory_is_free_before_the_next_try():
    held = []

    class Big:
        pass

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        assert not [reference for reference in held if reference() is not None]
        big = Big()
        held.append(weakref.ref(big))
        if batch_size == 2:
            raise torch.OutOfMemoryError(FULL)

    train()
    assert len(held) == 2


def test_released_objects_are_gone():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    gone = weakref.ref(model)
    model, other = release_memory(model, other)
    assert (model, other) == (None, None)
    gc.collect()
    assert gone() is None
    clear_device_cache(garbage_collection=True)


@pytest.mark.parametrize("error, expected", [
    (torch.OutOfMemoryError(FULL), True), (RuntimeError(FULL), True),
    (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True), (RuntimeError("shapes differ"), False),
    (ValueError(FULL), False),
])  # fmt: skip
def test_which_errors_mean_memory(error, expected):
    assert should_reduce_batch_size(error) is expected
