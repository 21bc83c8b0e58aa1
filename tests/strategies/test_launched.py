"""DDP's options and the process group's, by a launch: joined with a script's own, and in force on real ranks."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from drivetrain import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs, Trainer
from drivetrain.strategies import environment
from drivetrain.strategies.launched import ddp_options, process_group
from drivetrain.strategies.settings import DDPCommunicationHookType
from drivetrain.tests.distributed import run

SAID = {"DRIVETRAIN_DDP_BUCKET_CAP_MB": "7", "DRIVETRAIN_DDP_FIND_UNUSED_PARAMETERS": "true", "DRIVETRAIN_DDP_TIMEOUT": "90.0",
        "DRIVETRAIN_DDP_BACKEND": "gloo", "DRIVETRAIN_DDP_COMM_HOOK": "bf16"}  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    for name, value in SAID.items():
        monkeypatch.setenv(name, value)
    sources = {name: f"{name.removeprefix('DRIVETRAIN_').lower()} in two.yaml" for name in SAID}
    monkeypatch.setenv(environment.SOURCES, json.dumps(sources))


def test_without_a_launch_nothing_changes():
    given = DistributedDataParallelKwargs(bucket_cap_mb=3)
    assert ddp_options(given) is given
    assert process_group(None, None) == (None, None) and process_group("gloo", 5) == ("gloo", timedelta(seconds=5))


def test_what_a_script_leaves_at_its_default_follows_the_launch(launched):
    found = ddp_options(DistributedDataParallelKwargs(gradient_as_bucket_view=True, bucket_cap_mb=7))
    assert (found.bucket_cap_mb, found.find_unused_parameters, found.gradient_as_bucket_view) == (7, True, True)
    assert found.comm_hook is DDPCommunicationHookType.BF16 and found.static_graph is False
    assert process_group(None, None) == ("gloo", timedelta(seconds=90)) == process_group("gloo", 90.0)


def test_F1_another_value_is_an_error_that_shows_both(launched):
    with pytest.raises(ValueError, match=r"bucket_cap_mb=3, DRIVETRAIN_DDP_BUCKET_CAP_MB=7 \(ddp_bucket_cap_mb in two.yaml\)"):
        ddp_options(DistributedDataParallelKwargs(bucket_cap_mb=3))
    with pytest.raises(ValueError, match="find_unused_parameters=False, .*=True"):
        ddp_options(DistributedDataParallelKwargs(find_unused_parameters=False), frozenset({"find_unused_parameters"}))
    with pytest.raises(ValueError, match=r"backend='nccl', DRIVETRAIN_DDP_BACKEND='gloo' \(ddp_backend in two.yaml\)"):
        process_group("nccl", None)
    with pytest.raises(ValueError, match="timeout=datetime.timedelta.seconds=60., .*seconds=90"):
        process_group(None, timedelta(minutes=1))


def test_both_interfaces_follow_on_real_ranks(launched):
    def found(rank: int) -> tuple:
        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        limit = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
        trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        return model.find_unused_parameters, model.bucket_bytes_cap, limit, trainer.strategy.settings.bucket_cap_mb

    assert run(found, group=False) == [(True, 7 * 2**20, timedelta(seconds=90), 7)] * 2


def test_F1_both_interfaces_show_both_values(launched):
    def message(make) -> str:
        with pytest.raises(ValueError) as error:
            make()
        return str(error.value)

    def refused(rank: int) -> tuple[str, str, str]:
        handlers = [DistributedDataParallelKwargs(bucket_cap_mb=3)], [InitProcessGroupKwargs(timeout=timedelta(seconds=1))]
        return (*(message(lambda one=one: Accelerator(kwargs_handlers=one)) for one in handlers),
                message(lambda: Trainer(accelerator="cpu", strategy="ddp_find_unused_parameters_false")))  # fmt: skip

    for bucket, timeout, unused in run(refused, group=False):
        assert "bucket_cap_mb=3, DRIVETRAIN_DDP_BUCKET_CAP_MB=7 (ddp_bucket_cap_mb in two.yaml). Set it in one" in bucket
        assert "DRIVETRAIN_DDP_TIMEOUT=datetime.timedelta(seconds=90) (ddp_timeout in two.yaml)" in timeout
        assert "find_unused_parameters=False, DRIVETRAIN_DDP_FIND_UNUSED_PARAMETERS=True" in unused
