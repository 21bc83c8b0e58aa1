"""Starting XLA's processes: what needs no torch_xla, and several processes by a stand-in for its launcher.

With torch_xla itself, in one process: tests/xla/test_launch.py.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from drivetrain import notebook_launcher
from drivetrain.strategies import xla_launch, xla_runtime
from drivetrain.trainer.cli.launch import complete
from drivetrain.trainer.cli.launch_arguments import parse, resolve


@pytest.fixture
def two_devices(monkeypatch):
    """A torch_xla whose launcher calls the function once for each of two devices, the second first."""
    calls = []

    def launch(function, args, *, start_method, debug_single_process):
        calls.append((start_method, debug_single_process, os.environ.get("ACCELERATE_MIXED_PRECISION")))
        for index in (1, 0):
            function(index, *args)

    monkeypatch.setattr(xla_runtime, "package", lambda: SimpleNamespace(launch=launch))
    monkeypatch.setattr(xla_runtime, "kind", lambda: "TPU")
    monkeypatch.setattr(xla_runtime, "part", lambda name: SimpleNamespace(world_size=lambda: 2))
    monkeypatch.setattr(xla_launch, "has_package", lambda name: True)
    return calls


def test_results_come_in_rank_order_by_a_stand_in_for_torch_xlas_launcher(two_devices, monkeypatch):
    answers = iter(["of the second", "of the first"])
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    found = notebook_launcher(lambda one: (one, next(answers)), (7,), num_processes=2, mixed_precision="bf16")
    assert found == [(7, "of the first"), (7, "of the second")]
    assert two_devices == [("fork", False, "bf16")]
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_another_number_than_devices_is_refused_before_anything_runs_by_a_stand_in(two_devices):
    with pytest.raises(ValueError, match="as many processes as XLA devices. Received: num_processes=8, and 2 devices"):
        xla_launch.call(pytest.fail, processes=8)


@pytest.mark.parametrize(
    ("variables", "asked"),
    [({}, False), ({"PJRT_DEVICE": "TPU"}, True), ({"TPU_NAME": "pod"}, True), ({"ACCELERATE_USE_XLA": "true"}, True),
     ({"ACCELERATE_USE_XLA": "false"}, False)],
)  # fmt: skip
def test_variables_ask_for_xla_where_it_is_installed(monkeypatch, variables, asked):
    for name in ("PJRT_DEVICE", "TPU_NAME", "ACCELERATE_USE_XLA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(xla_launch, "has_package", lambda name: True)
    assert xla_launch.is_asked_for() is asked
    monkeypatch.setattr(xla_launch, "has_package", lambda name: False)
    assert not xla_launch.is_asked_for()


def test_a_mesh_of_devices_is_one_process_a_machine():
    launch = complete(resolve(parse(["--tpu", "--parallelism_config_dp_shard_size", "4", "script.py"])))
    assert launch["num_processes"] == 1 and "SPMD" in launch.sources["num_processes"]
