"""Settings: names and defaults, and what they refuse."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from drivetrain.strategies import settings
from drivetrain.strategies.settings import (
    AutocastKwargs,
    BaseEnum,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    LoggerType,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
)


def test_to_kwargs_holds_what_differs_from_the_defaults():
    assert GradScalerKwargs(init_scale=1024.0).to_kwargs() == {"init_scale": 1024.0}
    assert AutocastKwargs().to_kwargs() == {}
    assert InitProcessGroupKwargs(timeout=timedelta(seconds=5)).to_kwargs() == {"timeout": timedelta(seconds=5)}


def test_enumerations_know_their_values():
    assert "fp16" in PrecisionType and "fp17" not in PrecisionType
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]
    assert str(LoggerType.TENSORBOARD) == "tensorboard"
    assert DistributedType.MULTI_CPU == "MULTI_CPU"
    assert RNGType("generator") is RNGType.GENERATOR
    assert issubclass(DynamoBackend, BaseEnum) and DynamoBackend.INDUCTOR.value == "INDUCTOR"


def test_defaults_are_accelerates():
    loader = DataLoaderConfiguration()
    assert (loader.split_batches, loader.dispatch_batches, loader.even_batches) == (False, None, True)
    assert (loader.use_seedable_sampler, loader.data_seed, loader.use_stateful_dataloader) == (False, None, False)
    assert (loader.split_last_batch, loader.shard) == (False, True)
    plugin = GradientAccumulationPlugin()
    assert (plugin.num_steps, plugin.adjust_scheduler, plugin.sync_with_dataloader) == (None, True, True)
    assert (plugin.sync_each_batch, plugin.scale_last_window) == (False, False)
    ddp = DistributedDataParallelKwargs()
    assert (ddp.bucket_cap_mb, ddp.find_unused_parameters, ddp.broadcast_buffers) == (25, False, True)
    assert ddp.comm_hook is DDPCommunicationHookType.NO


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradScalerKwargs(init_scale=0), "Received: init_scale=0"),
        (lambda: GradScalerKwargs(growth_factor=1.0), "above 1"),
        (lambda: GradScalerKwargs(backoff_factor=1.0), "between 0 and 1"),
        (lambda: GradScalerKwargs(growth_interval=0), "growth_interval=0"),
        (lambda: InitProcessGroupKwargs(timeout=30), "timedelta"),
        (lambda: DistributedDataParallelKwargs(comm_hook="fp17"), "no, fp16, bf16, power_sgd"),
        (lambda: DistributedDataParallelKwargs(comm_wrapper="power_sgd"), "comm_wrapper"),
        (lambda: DistributedDataParallelKwargs(static_graph=True, find_unused_parameters=True), "static_graph"),
        (lambda: GradientAccumulationPlugin(num_steps=0), "gradient_accumulation_steps=0"),
        (lambda: GradientAccumulationPlugin(num_steps=2.5), "whole number"),
        (lambda: GradientAccumulationPlugin(num_steps=True), "whole number"),
        (lambda: ProjectConfiguration(total_limit=0), "total_limit=0"),
        (lambda: TorchDynamoPlugin(backend="inductr"), "INDUCTOR"),
        (lambda: ProfileKwargs(activities=["gpu"]).build(), "cuda"),
    ],
)
def test_wrong_values_are_refused_with_what_was_expected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_project_folder_is_the_logs_folder_unless_another_is_set():
    assert ProjectConfiguration(project_dir="here").logging_dir == "here"
    assert ProjectConfiguration(project_dir="here", logging_dir="there").logging_dir == "there"


def test_compiler_settings_become_arguments_of_torch_compile():
    plugin = TorchDynamoPlugin(backend="inductor", mode="reduce-overhead", dynamic=True)
    assert plugin.active
    assert plugin.to_kwargs() == {"backend": "inductor", "mode": "reduce-overhead", "dynamic": True}
    assert not TorchDynamoPlugin().active and TorchDynamoPlugin().to_kwargs() == {}


def test_profile_settings_build_a_profiler():
    profiler = ProfileKwargs(activities=["cpu"], schedule_option={"wait": 1, "warmup": 1, "active": 2}).build()
    assert isinstance(profiler, torch.profiler.profile)
    assert profiler.activities == {torch.profiler.ProfilerActivity.CPU}
