"""Which ranks of DeepSpeed have data of their own: all of them, unless AutoTP shares a model out among some."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .base import Settings
from .deepspeed_config import HfDeepSpeedConfig, Said, settle
from .deepspeed_plugin import DeepSpeedPlugin
from .environment import Placement
from .mesh import Layout, ParallelismConfig
from .process_group import ProcessGroupStrategy
from .world import World

_SIZE = "tensor_parallel.autotp_size"
_OTHERS = {
    "sequence_parallel_size": "ParallelismConfig(sp_size=…), which exchanges heads as Ulysses does, without DeepSpeed",
    "pipeline.stages": "ParallelismConfig(pp_size=…) without DeepSpeed",
}


class DeepSpeedRanks(ProcessGroupStrategy):
    """The part of the strategy that knows who shares what."""

    parallelism: Any
    plugins: dict[str, DeepSpeedPlugin]
    _layout: Layout | None = None

    def _create_world(self, placement: Placement, device: torch.device, settings: Settings) -> World:
        if self.parallelism is not None:
            self.parallelism = _filled(self.parallelism, placement.size)
        world = super()._create_world(placement, device, settings)
        if self.parallelism is not None:
            self.mesh = self.parallelism.build_device_mesh(world.device.type)
            self._layout = Layout(self.parallelism, self.mesh, world)
            seed = self.model_world.broadcast_object(torch.initial_seed())
            if seed != torch.initial_seed():
                torch.manual_seed(seed)  # each of them computes the whole's dropout
        return world

    @property
    def model_world(self) -> World:
        """The ranks that hold one model together."""
        return World(self.device) if self._layout is None else self._layout.world("tp")

    @property
    def data_world(self) -> World:
        return self.world if self._layout is None else self._layout.data


def _filled(parallelism: ParallelismConfig, processes: int) -> ParallelismConfig:
    """Degrees in which data parallelism takes all processes that nothing else does: ZeRO works among those."""
    if parallelism.dp_replicate_size == 1:
        parallelism = dataclasses.replace(parallelism, dp_replicate_size=-1)
    return parallelism.resolved(processes)


def arranged(parallelism: Any, configs: list[HfDeepSpeedConfig]) -> ParallelismConfig | None:
    """Returns the degrees of a run, from its ParallelismConfig and the configurations, which are filled from it.

    Raises:
        NotImplementedError: ranks would be arranged in a way that DeepSpeed's engine has not, or that cannot be saved.
        ValueError: the two say different sizes.
    """
    _refuse(parallelism, configs)
    size = 1 if parallelism is None else parallelism.tp_size
    for config in configs:
        said = [] if size == 1 else [Said(_SIZE, size, f"ParallelismConfig(tp_size={size})")]
        settle(config, said, complete=False)
    sizes = {config.get_value(_SIZE) or 1 for config in configs}
    if len(sizes) > 1:
        raise ValueError(f"Expected one {_SIZE} in all plugins. Received: {sorted(sizes)}. Make them the same.")
    (size,) = sizes
    if size == 1:
        return None
    return parallelism or ParallelismConfig(tp_size=size)


def _refuse(parallelism: Any, configs: list[HfDeepSpeedConfig]) -> None:
    for key, instead in _OTHERS.items():
        for config in configs:
            value = config.get_value(key)
            if isinstance(value, int) and value > 1:
                raise NotImplementedError(
                    f"Expected DeepSpeed with ZeRO and AutoTP. Received: {key}={value} in {config.source}, which "
                    f"drivetrain does not arrange. Use {instead}."
                )
    others = ("cp_size", "sp_size", "pp_size", "ep_size", "dp_shard_size")
    sizes = {} if parallelism is None else {name: getattr(parallelism, name, None) for name in others}
    given = [f"{name}={size}" for name, size in sizes.items() if size not in (None, 1)]
    if given:
        raise NotImplementedError(
            "Expected DeepSpeed with data and tensor parallelism, of which zero_stage says the rest. Received: "
            f"{', '.join(given)} in the ParallelismConfig. Leave that out, or DeepSpeed (with sp_backend='torch')."
        )
