"""How the processes of a run are arranged: `ParallelismConfig` gives the degrees, `Layout` what follows from them.

The dimensions of the mesh, outermost first, with the ranks next to each other in the last one:

    pp            stages of the model, one behind the other              same samples
    dp_replicate  replicas                                               other samples
    dp_shard      shards of one replica's weights (FSDP)                 other samples
    ep            shards of the experts                                  other samples
    cp            parts of each sequence, keys and values gathered       same samples, other tokens
    sp            parts of each sequence, heads exchanged (Ulysses)      same samples, other tokens
    tp            parts of each layer                                    same samples

Only dimensions of more than one rank are in the mesh.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from . import environment
from .parallel_options import (
    DeepSpeedSequenceParallelConfig,
    PipelineConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from .subgroup import subworld
from .world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .base import Strategy

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "sp", "tp")
DATA = ("dp_replicate", "dp_shard", "ep")
LOSS = (*DATA, "cp", "sp")
_FLAT = {"dp": ("dp_replicate", "dp_shard"), "dp_shard_cp": ("dp_shard", "cp"), "dp_cp": (*DATA[:2], "cp")}


@dataclass
class ParallelismConfig:
    """How many ranks share what; the product of the degrees is the number of processes.

    Names and defaults are those of Accelerate 1.15; None stands for what PARALLELISM_CONFIG_… of a launch says, else 1.
    Drivetrain's: -1 for one of them, which is then whatever the number of processes leaves; `pp_size` with
    `pp_handler`, `ep_size`, and `sp_backend="torch"` (the default without DeepSpeed).

    Args:
        dp_replicate_size: replicas of the model, each on other samples.
        dp_shard_size: ranks that share the weights of one replica (FSDP), each on other samples.
        tp_size: ranks that share each layer (tensor parallel).
        cp_size: ranks that share each sequence, keys and values gathered (context parallel).
        sp_size: ranks that share each sequence, heads exchanged (Ulysses).
        pp_size: ranks that hold one or more stages each (pipeline parallel).
        ep_size: ranks that share the experts, each on other samples (expert parallel).

    Raises:
        ValueError: a degree is no number, or degrees cannot be combined; the message shows the degrees.
    """

    slot: ClassVar[str] = "parallelism_config"

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_size: int | None = None
    pp_handler: PipelineConfig | None = None
    ep_size: int | None = None

    def __post_init__(self) -> None:
        launched = environment.group("PARALLELISM_CONFIG_")
        for name in DIMENSIONS:
            size = getattr(self, f"{name}_size")
            size = launched.agreed(f"{name}_size", size, launched.integer(f"{name}_size", 1))
            setattr(self, f"{name}_size", size)
        self.cp_backend = launched.agreed("cp_backend", self.cp_backend, "torch")
        if self.sp_backend is None and launched.source("sp_backend") is not None:
            self.sp_backend = launched.text("sp_backend")
        self._check()
        self.tp_handler = self.tp_handler or (TorchTensorParallelConfig() if self.tp_enabled else None)
        divided = self.cp_enabled or self.sp_enabled
        self.cp_handler = self.cp_handler or (TorchContextParallelConfig() if divided else None)
        if self.sp_handler is None and self.sp_enabled and self.sp_backend == "deepspeed":
            self.sp_handler = DeepSpeedSequenceParallelConfig()
        self.pp_handler = self.pp_handler or (PipelineConfig() if self.pp_size != 1 else None)

    @property
    def sizes(self) -> dict[str, int]:
        """The degree of every dimension, outermost first."""
        return {name: getattr(self, f"{name}_size") for name in DIMENSIONS}

    def resolved(self, processes: int) -> ParallelismConfig:
        """Returns these degrees for so many processes, with -1 replaced by what is left.

        Raises:
            ValueError: they do not make up that number.
        """
        known = math.prod(size for size in self.sizes.values() if size != -1)
        config = copy.copy(self)
        for name, size in self.sizes.items():
            if size == -1 and processes % known == 0:
                setattr(config, f"{name}_size", processes // known)
        if config.total_size != processes:
            raise ValueError(
                f"Expected degrees whose product is the number of processes. Received: {_shown(self.sizes)} for "
                f"{processes} processes. Start {known} processes{' or a multiple of that' if -1 in self else ''}, or "
                "change a degree (-1 is what the others leave)."
            )
        return config

    def strategy(self, plugin: Any = None) -> Strategy:
        """Returns the engine for these degrees; `plugin` are the options of FSDP, where weights are sharded.

        Raises:
            ValueError: the degrees need DeepSpeed, whose options then have to be given.
        """
        module = import_module(".parallel_engines", __package__)  # which imports this one
        engine: Strategy = module.engine_for(self, plugin)
        return engine

    def _check(self) -> None:
        for name, size in self.sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1 and size != -1:
                raise ValueError(
                    f"Expected {name}_size of 1 or more, or -1 for what the others leave. Received: "
                    f"{name}_size={size!r}. Give a number."
                )
        active = [name for name, size in self.sizes.items() if size != 1]
        if sum(size == -1 for size in self.sizes.values()) > 1:
            self._refuse("one degree of -1 at most", "Give the others as numbers")
        if {"cp", "sp"} <= set(active):
            self._refuse("sequences divided in one way", "Set cp_size=1 or sp_size=1")
        if self.cp_backend != "torch":
            raise ValueError(f"Expected cp_backend='torch'. Received: cp_backend={self.cp_backend!r}. Leave it out.")
        if self.sp_backend not in (None, "torch", "deepspeed"):
            raise ValueError(
                f"Expected sp_backend to be 'torch' or 'deepspeed'. Received: sp_backend={self.sp_backend!r}. "
                "Choose one of these."
            )

    def _refuse(self, expected: str, advice: str) -> None:
        raise ValueError(f"Expected {expected}. Received: {_shown(self.sizes)}. {advice}.")

    def __contains__(self, size: int) -> bool:
        return size in self.sizes.values()

    def to_json(self) -> str:
        """Returns the degrees and the options of each kind as JSON; functions by their names."""
        return json.dumps(asdict(self), default=lambda value: getattr(value, "__qualname__", str(value)))

    # As Accelerate names them

    @property
    def total_size(self) -> int:
        """The number of processes."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """The number of processes that see different samples."""
        return math.prod(self.sizes[name] for name in DATA)

    @property
    def non_data_parallel_size(self) -> int:
        """The number of processes that see the same samples."""
        return self.total_size // self.data_parallel_size

    @property
    def active_mesh_dims(self) -> list[str]:
        """The dimensions of the mesh: those of more than one rank."""
        return [name for name, size in self.sizes.items() if size != 1]

    def _active(self, *names: str) -> list[str]:
        return [name for name in names if self.sizes[name] != 1]

    dp_dim_names = property(lambda self: self._active("dp_replicate", "dp_shard"))
    non_dp_dim_names = property(lambda self: self._active("tp", "cp", "sp", "pp", "ep"))
    dp_shard_cp_dim_names = property(lambda self: self._active("dp_shard", "cp"))
    dp_cp_dim_names = property(lambda self: self._active("dp_replicate", "dp_shard", "cp"))
    fsdp_dim_names = property(lambda self: [*self._active("dp_replicate"), "dp_shard_cp"])
    dp_replicate_enabled = property(lambda self: self.dp_replicate_size != 1)
    dp_shard_enabled = property(lambda self: self.dp_shard_size != 1)
    tp_enabled = property(lambda self: self.tp_size != 1)
    cp_enabled = property(lambda self: self.cp_size != 1)
    sp_enabled = property(lambda self: self.sp_size != 1)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Returns the mesh of all processes (collective); None where every degree is 1.

        It also has "dp", "dp_shard_cp" and "dp_cp", each the ranks of several dimensions as one.
        """
        from torch.distributed.device_mesh import init_device_mesh

        processes = dist.get_world_size() if dist.is_initialized() else 1
        config = self.resolved(processes)
        names = config.active_mesh_dims
        if not names:
            return None
        mesh = init_device_mesh(device_type, tuple(config.sizes[n] for n in names), mesh_dim_names=tuple(names))
        for flat, parts in _FLAT.items():
            found = config._active(*parts)
            if found:
                mesh[tuple(found)]._flatten(flat) if len(found) > 1 or found[0] != flat else None
        self._mesh = mesh
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Returns the mesh, which is built at the first call, for which the kind of device is needed."""
        if getattr(self, "_mesh", None) is None:
            if device_type is None:
                raise ValueError("Expected device_type for a mesh that is not built yet. Received: None. Give it.")
            self.build_device_mesh(device_type)
        return self._mesh


class Layout:
    """The ranks of a run on their mesh: which share samples, which share sequences, and which hold what.

    `data`: the world of those that see other samples than this one. `loss`: of those whose losses are parts of the
    whole, which are the former and those with other tokens of the same samples. Both are collective when made.
    """

    def __init__(self, config: ParallelismConfig, mesh: DeviceMesh | None, whole: World) -> None:
        self.config, self.mesh, self.whole = config, mesh, whole
        self.data = self.world(*DATA)
        self.loss = self.world(*LOSS)

    def world(self, *dimensions: str) -> World:
        """Returns the world of the ranks along these dimensions, which this one is in (collective)."""
        names = self.config._active(*dimensions)
        if self.mesh is None or not names:
            return World(self.whole.device)
        return subworld(self.whole, self.submesh(*names).get_group())

    def shards(self, *, of_experts: bool = False) -> Any:
        """Returns the mesh over which FSDP shards: one dimension, or replicas and shards; None without shards.

        Experts have other ranks already, and are sharded among those that hold the same ones.
        """
        names = self.config._active("dp_shard", *(() if of_experts else ("ep",)), "cp", "sp")
        if self.mesh is None or not names:
            return None
        shards = self.submesh(*names)
        if not self.config.dp_replicate_enabled:
            return shards
        return self.mesh["dp_replicate", shards.mesh_dim_names[0]]

    def submesh(self, *dimensions: str) -> Any:
        """Returns the mesh of the ranks along these dimensions, as one dimension."""
        assert self.mesh is not None
        names = self.config._active(*dimensions)
        part = self.mesh[tuple(names)]
        return part._flatten("_".join(names)) if len(names) > 1 else part


def _shown(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}_size={size}" for name, size in sizes.items() if size != 1) or "all degrees 1"
