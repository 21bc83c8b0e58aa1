"""Seeds, derived seeds, and random states that are captured, restored, preserved and kept apart."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from drivetrain.strategies.random import (
    Stream,
    capture,
    derive,
    mix,
    preserved,
    restore,
    run_seed,
    seed_all,
    set_seed,
)
from drivetrain.tests.distributed import run


def draws() -> tuple:
    """One draw of every kind that has a state of its own, the second halves of normal pairs included."""
    return (
        torch.rand(3).tolist(), torch.randn(()).item(), np.random.rand(2).tolist(), np.random.standard_normal(),
        random.random(), random.gauss(0, 1), np.random.default_rng(np.random.randint(99)).random(),
    )  # fmt: skip


def test_set_seed_seeds_everything():
    set_seed(42)
    first = draws()
    set_seed(42)
    assert draws() == first
    set_seed(43)
    assert draws() != first
    assert run_seed() == 43 and torch.initial_seed() == 43
    set_seed(2**40)  # numpy alone takes 32 bits
    set_seed(np.int64(7))
    assert run_seed() == 7


def test_set_seed_by_rank():
    def rank_has(rank):
        set_seed(10, device_specific=True)
        return torch.initial_seed(), run_seed(), draws()

    (own, shared, first), (other, same, second) = run(rank_has)
    assert (own, other, shared, same) == (10, 11, 10, 10) and first != second


def test_set_seed_deterministic():
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("seed", "error"), [("1", TypeError), (1.0, TypeError), (True, TypeError), (None, TypeError),
                                             (-1, ValueError), (2**63, ValueError)])  # fmt: skip
def test_what_is_no_seed(seed, error):
    with pytest.raises(error, match="Expected"):
        set_seed(seed)


def test_without_a_seed_each_process_has_another():
    code = "from drivetrain.strategies.random import run_seed; print(run_seed())"
    found = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(found) == 2


def test_derived_seeds_are_numbers_of_64_bits_without_collisions():
    seeds = {derive(seed, epoch, place) for seed in range(20) for epoch in range(20) for place in range(50)}
    assert len(seeds) == 20 * 20 * 50 and all(0 <= seed < 2**64 for seed in seeds)
    low = {seed & 0xFFFFFFFF for seed in seeds}
    assert len(low) > 19_990  # numpy and torch use the low half alone
    ones = sum(bin(seed).count("1") for seed in seeds) / len(seeds)
    assert 31.5 < ones < 32.5
    assert mix(0, 0) == 0xE220A8397B1DCDAF  # the first number that splitmix64 gives from state 0
    assert derive(1, 2, 3) == mix(mix(1, 2), 3) != derive(1, 3, 2)


def test_seed_all():
    seed_all(2**63 + 5)
    first = draws()
    torch.manual_seed(0)
    seed_all(2**63 + 5)
    assert draws() == first


@pytest.mark.parametrize("spent", [0, 1, 700])
def test_captured_state_goes_through_json_and_tensors(spent):
    seed_all(3)
    for _ in range(spent):
        np.random.standard_normal(), random.gauss(0, 1), torch.rand(1)
    state = capture()
    tensors = [state["torch"], state["numpy"].pop("key"), state["python"].pop("words")]
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    rest = json.loads(json.dumps({key: value for key, value in state.items() if key != "torch"}))
    expected = draws()
    seed_all(4)
    back = {"torch": tensors[0], **rest}
    back["numpy"]["key"], back["python"]["words"] = tensors[1:]
    restore(back)
    assert draws() == expected


def test_state_of_another_device_is_told(caplog):
    restore({**capture(), "device": {"type": "cuda", "state": torch.zeros(16, dtype=torch.uint8)}})
    assert "cuda is left out" in caplog.text


def test_another_generator_of_numpys_is_an_error():
    bits = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        with pytest.raises(ValueError, match="Received: PCG64"):
            capture()
        with preserved():
            np.random.rand()
    finally:
        np.random.set_bit_generator(bits)


def test_preserved():
    seed_all(5)
    expected = draws()
    seed_all(5)
    with preserved():
        set_seed(9)
        draws()
    assert draws() == expected
    seed_all(5)
    with pytest.raises(KeyError), preserved():
        draws()
        raise KeyError
    assert draws() == expected


def test_stream_goes_on_where_it_was():
    seed_all(8)
    expected = [draws(), draws()]
    stream = Stream(8)
    seed_all(1)
    outside = [draws(), draws(), draws()]
    seed_all(1)
    found = [draws()]
    with stream:
        inside = [draws()]
    found.append(draws())
    with stream:
        inside.append(draws())
    found.append(draws())
    assert inside == expected and found == outside


def test_global_generators_are_those_of_the_user():
    """`random` inside the package is Python's own."""
    from drivetrain.strategies import random as module

    assert module.random is random
