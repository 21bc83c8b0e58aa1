"""Which ranks of DeepSpeed have data of their own: all of them, unless some share a model (AutoTP) or sequences.

An engine takes the ranks that share sequences (Ulysses) for ranks with other data, among which ZeRO works, too: it
averages gradients over all of them, and each loss counts by its share in the tokens of whole sequences.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .arranged import SharesSequences
from .base import Settings
from .deepspeed_config import HfDeepSpeedConfig, Said, settle
from .deepspeed_plugin import DeepSpeedPlugin
from .environment import Placement
from .mesh import ParallelismConfig
from .world import World

_SIZE = "tensor_parallel.autotp_size"
_OTHERS = {
    "sequence_parallel_size": "ParallelismConfig(sp_size=…)",
    "pipeline.stages": "ParallelismConfig(pp_size=…) without DeepSpeed",
}


class DeepSpeedRanks(SharesSequences):
    """The part of the strategy that knows who shares what."""

    parallelism: Any
    plugins: dict[str, DeepSpeedPlugin]

    def _create_world(self, placement: Placement, device: torch.device, settings: Settings) -> World:
        if self.parallelism is not None:
            self.parallelism = _filled(self.parallelism, placement.size)
        world = super()._create_world(placement, device, settings)
        if self.parallelism is not None:
            self._arrange(self.parallelism, world)
            seed = self.model_world.broadcast_object(torch.initial_seed())
            if seed != torch.initial_seed():
                torch.manual_seed(seed)  # each of them computes the whole's dropout
        return world

    @property
    def model_world(self) -> World:
        """The ranks that hold one model together."""
        return World(self.device) if self._layout is None else self._layout.world("tp")


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
    _check_attention(parallelism)
    size = 1 if parallelism is None else parallelism.tp_size
    for config in configs:
        said = [] if size == 1 else [Said(_SIZE, size, f"ParallelismConfig(tp_size={size})")]
        settle(config, said, complete=False)
    sizes = {config.get_value(_SIZE) or 1 for config in configs}
    if len(sizes) > 1:
        raise ValueError(f"Expected one {_SIZE} in all plugins. Received: {sorted(sizes)}. Make them the same.")
    (size,) = sizes
    if size == 1 and (parallelism is None or not parallelism.sp_enabled):
        return None
    return parallelism or ParallelismConfig(tp_size=size)


def _check_attention(parallelism: Any) -> None:
    """Raises NotImplementedError for attention that does not go through torch, which exchanges no heads."""
    word = getattr(getattr(parallelism, "sp_handler", None), "sp_attn_implementation", "sdpa")
    if word != "sdpa":
        raise NotImplementedError(
            f"Expected sp_attn_implementation='sdpa'. Received: {word!r}, which exchanges no heads. Use 'sdpa', for "
            "which torch takes its own flash kernel where it can."
        )


def _refuse(parallelism: Any, configs: list[HfDeepSpeedConfig]) -> None:
    for key, instead in _OTHERS.items():
        for config in configs:
            value = config.get_value(key)
            if isinstance(value, int) and value > 1:
                raise NotImplementedError(
                    f"Expected DeepSpeed with ZeRO and AutoTP. Received: {key}={value} in {config.source}, which "
                    f"drivetrain does not arrange. Use {instead}."
                )
    others = ("cp_size", "pp_size", "ep_size", "dp_shard_size")
    sizes = {} if parallelism is None else {name: getattr(parallelism, name, None) for name in others}
    given = [f"{name}={size}" for name, size in sizes.items() if size not in (None, 1)]
    if given:
        raise NotImplementedError(
            "Expected DeepSpeed with data, tensor and sequence parallelism, of which zero_stage says the rest. "
            f"Received: {', '.join(given)} in the ParallelismConfig. Leave that out, or DeepSpeed."
        )
