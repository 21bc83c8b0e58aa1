"""Where an Accelerator's process stands and which settings are in force: views, of which one can be set."""

from __future__ import annotations

from typing import Any

import torch

from ..strategies.base import Strategy
from ..strategies.precision import Precision
from ..strategies.settings import (
    DataLoaderConfiguration,
    DistributedType,
    FP8BackendType,
    ProjectConfiguration,
)
from ..strategies.state import AcceleratorState
from ..strategies.world import World
from .expected import check


class Standing:
    """The properties of an Accelerator; each is read from what the Accelerator is composed of."""

    strategy: Strategy
    precision: Precision
    world: World
    state: AcceleratorState
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration

    # Where this process stands

    @property
    def distributed_type(self) -> DistributedType:
        """A label for what kind of distribution runs."""
        return self.strategy.distributed_type

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self.world.size

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self.world.local_rank

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.world.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all processes."""
        return self.world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all processes."""
        return self.world.rank == self.world.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world.size > 1

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each on an accelerator of its own."""
        return self.world.size > 1 and self.world.device.type != "cpu"

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes the model: the first one."""
        return self.world.rank == 0

    # Settings in force

    @property
    def mixed_precision(self) -> str:
        """Accelerate's word for the precision: "no", "fp16", "bf16" or "fp8"; `precision.name` says it in full."""
        return self.precision.mixed_precision

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The scaler of float16 losses; None in every other precision."""
        scaler: torch.amp.GradScaler | None = self.precision.scaler
        return scaler

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the first process reads the data for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether samples are repeated so that all processes have equally many batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        check(even_batches=value)
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """As given; the order of samples is a function of seed and epoch in any case."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether `load_state` puts loaders back to their position within the epoch."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """The project's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder of the project's logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint under automatic naming."""
        return self.project_configuration.iteration

    # The engine's options and the places of this process in its mesh

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in 8-bit floats; NO in every other precision."""
        return self.precision.fp8_backend

    @property
    def deepspeed_plugin(self) -> Any:
        """The options of DeepSpeed in force; None under another engine."""
        return self.state.deepspeed_plugin

    @property
    def parallelism_config(self) -> Any:
        """The degrees of parallelism in force; None where none were given."""
        return self.strategy.parallelism

    @property
    def torch_device_mesh(self) -> Any:
        """The DeviceMesh of all processes; None where the engine has none."""
        return self.strategy.mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by `fully_shard`."""
        return self.strategy.name.partition("+")[0] in ("fsdp", "hsdp")

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether the engine can be combined with tensor, context and other parallelism."""
        return self.is_fsdp2 or self.parallelism_config is not None

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's place among those that share each layer; RuntimeError without such a mesh, as below."""
        return self.strategy.rank_in("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This process's place among the stages of the model."""
        return self.strategy.rank_in("pp")

    @property
    def context_parallel_rank(self) -> int:
        """This process's place among those that share each sequence."""
        return self.strategy.rank_in("cp")

    @property
    def data_parallel_rank(self) -> int:
        """This process's rank among the replicas of the model: among those that see different data."""
        return self.strategy.data_world.rank

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process's place among those that share one replica's weights."""
        return self.strategy.rank_in("dp_shard")
