"""Preparing a loader for this process: the kind that its settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterableDataset

from .. import world as worlds
from ..random import run_seed
from ..settings import DataLoaderConfiguration, RNGType
from ..world import World
from .dispatcher import DataLoaderDispatcher
from .loader import DataLoaderShard
from .loader import prepare_data_loader as prepare


def prepare_loader(
    dataloader: Any,
    *,
    world: World,
    config: DataLoaderConfiguration | None = None,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    **options: Any,
) -> DataLoaderShard:
    """A loader of this rank's share; one that rank 0 reads where the settings ask for that. Options: see `loader`."""
    config = config or DataLoaderConfiguration()
    dispatch = config.dispatch_batches
    if dispatch is None:
        dispatch = _dispatches_by_default(dataloader, config, put_on_device=options.get("put_on_device", True))
    kind = DataLoaderDispatcher if dispatch or slice_fn_for_dispatch is not None else DataLoaderShard
    prepared = prepare(dataloader, world=world, config=config, kind=kind, **options)
    if isinstance(prepared, DataLoaderDispatcher) and slice_fn_for_dispatch is not None:
        prepared.slice_fn = slice_fn_for_dispatch
    return prepared


def prepare_data_loader(
    dataloader: Any,
    device: torch.device | str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    world: World | None = None,
    config: DataLoaderConfiguration | None = None,
    gradient_state: Any = None,
) -> DataLoaderShard:
    """A loader that gives this process its share of every batch, on `device` with `put_on_device`.

    `num_processes` and `process_index` may stand for other processes than there are: to look at another rank's share.
    `torch_device_mesh` tells them by its dimensions that begin with "dp", of whose ranks each sees other samples.
    `config` (drivetrain's) takes the place of the settings one by one. Order and augmentation are functions of seed
    and epoch on all ranks, so that `rng_types` has nothing to do.

    Raises:
        TypeError, ValueError: it is no loader, it is empty, or settings exclude each other.
    """
    world = world or worlds.current()
    if torch_device_mesh is not None:
        num_processes, process_index = _of_mesh(torch_device_mesh, num_processes, process_index)
    if (num_processes, process_index) != (None, None):
        world = _seat(world, num_processes, process_index)
    config = config or DataLoaderConfiguration(
        split_batches=split_batches, dispatch_batches=dispatch_batches, even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler, data_seed=data_seed, non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
    )  # fmt: skip
    seed = config.data_seed if config.data_seed is not None else world.broadcast_object(run_seed())
    return prepare_loader(
        dataloader, world=world, config=config, device=device, put_on_device=put_on_device, seed=seed,
        gradient_state=gradient_state, non_blocking=non_blocking, slice_fn_for_dispatch=slice_fn_for_dispatch,
    )  # fmt: skip


def _of_mesh(mesh: Any, num_processes: int | None, process_index: int | None) -> tuple[int, int]:
    """How many processes see different samples, and the place of this one among them."""
    if (num_processes, process_index) != (None, None):
        raise ValueError(
            f"Expected a mesh, or processes. Received: torch_device_mesh and num_processes={num_processes}, "
            f"process_index={process_index}. Give one of both."
        )
    size, rank = 1, 0
    for name in mesh.mesh_dim_names or ():
        if name.startswith("dp") or name == "ep":
            size, rank = size * mesh[name].size(), rank * mesh[name].size() + mesh.get_local_rank(name)
    return size, rank


def _dispatches_by_default(dataloader: Any, config: DataLoaderConfiguration, *, put_on_device: bool) -> bool:
    """Iterable data, as in Accelerate; not where a short last batch is shared out, which ranks do by themselves."""
    iterable = isinstance(getattr(dataloader, "dataset", None), IterableDataset)
    return iterable and put_on_device and config.shard and not config.split_last_batch


def _seat(world: World, num_processes: int | None, process_index: int | None) -> World:
    """The present world, or one process that reads another rank's share of the data."""
    size = world.size if num_processes is None else num_processes
    rank = world.rank if process_index is None else process_index
    if not 0 <= rank < size:
        raise ValueError(f"Expected a process from 0 to {size - 1}. Received: process_index={rank}. Correct one.")
    if (rank, size) == (world.rank, world.size):
        return world
    seat = World(world.device)
    seat.rank, seat.size = rank, size
    return seat
