"""PartialState and AcceleratorState: views of this process's world, under the names that Accelerate gives them.

Each attribute is read from the strategy in force and its world when it is asked for; all instances show the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from . import create
from . import world as worlds
from .base import Strategy, choose_device
from .environment import detect, flag, text
from .settings import DistributedType, InitProcessGroupKwargs
from .world import World


_PLUGINS = ("dynamo_plugin", "parallelism_config", "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin",
            "megatron_lm_plugin")  # fmt: skip


class PartialState:
    """Where this process stands, and what only some processes do; sets the world up if nothing has yet."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            placement = detect()
            strategy = create(size=placement.size)
            settings: dict[type, Any] = {InitProcessGroupKwargs: InitProcessGroupKwargs(**kwargs)}
            cpu = cpu or flag("USE_CPU")
            strategy.setup(placement, device=None if cpu else text("TORCH_DEVICE"), cpu=cpu, settings=settings)
            self.establish(strategy)

    @classmethod
    def establish(cls, strategy: Strategy) -> None:
        """Makes a strategy that is set up the one that all instances show."""
        cls._shared_state["strategy"] = strategy

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = True) -> None:
        PartialState._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Whether a world is set up."""
        return "strategy" in self._shared_state

    @property
    def world(self) -> World:
        """This process's world."""
        return worlds.current()

    @property
    def distributed_type(self) -> DistributedType:
        """A label for what kind of distribution runs."""
        return DistributedType(self._shared_state["strategy"].distributed_type)

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.world.device

    @property
    def default_device(self) -> torch.device:
        """The device that this machine offers."""
        return choose_device()

    @property
    def backend(self) -> str | None:
        """The backend of the process group; None for one process."""
        return self.world.backend or None

    @property
    def debug(self) -> bool:
        """Whether ACCELERATE_DEBUG_MODE is set. Ranks compare what they bring to a collective in any case."""
        return flag("DEBUG_MODE")

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
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world.size > 1

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

    def set_device(self) -> None:
        """Makes this process's device the current one of its kind."""
        if self.device.index is not None and self.device.type != "xla":  # which has but one in a process
            torch.accelerator.set_device_index(self.device.index)

    def wait_for_everyone(self) -> None:
        """Waits until every process has come here."""
        self.world.barrier("wait_for_everyone")

    def destroy_process_group(self, group: Any = None) -> None:
        """Leaves the process group (or the given one)."""
        if group is not None:
            torch.distributed.destroy_process_group(group)
        else:
            self._shared_state["strategy"].teardown()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Gives this process its share of a list, tuple, tensor, or dict of these.

        Shares are contiguous; the first processes get one item more where it does not divide. `apply_padding` repeats
        the last item of the inputs until all shares are of one length, which a later `gather` needs.
        """
        yield share(inputs, self.world, apply_padding)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Lets the first process run the block before all others do."""
        with _first(self.is_main_process, self.world, "main_process_first"):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Lets the first process of each machine run the block before the machine's others do."""
        with _first(self.is_local_main_process, self.world, "local_main_process_first"):
            yield

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Returns a function that runs on the first process only and gives None on the others."""
        return self._only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Returns a function that runs on the first process of each machine only."""
        return self._only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs on the last process only."""
        return self._only(lambda: self.is_last_process, function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Returns a function that runs on the process of this rank only, or on the only one; else a decorator."""
        return self._only(lambda: not self.use_distributed or self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Returns a function that runs on each machine's process of this rank, or on the only one; else a decorator."""
        return self._only(lambda: not self.use_distributed or self.local_process_index == local_process_index, function)

    def _only(self, here: Callable[[], bool], function: Callable[..., Any] | None) -> Callable[..., Any]:
        if function is None:
            return functools.partial(self._only, here)

        @functools.wraps(function)
        def run_here(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if here() else None

        return run_here

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the first process of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def __repr__(self) -> str:
        world = self.world
        return f"{type(self).__name__}({self.distributed_type.value}, {world.rank} of {world.size}, '{world.device}')"


class AcceleratorState(PartialState):
    """PartialState, and the settings of the Accelerator that was made last."""

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **settings: Any) -> None:
        kwargs = {name: settings.pop(name) for name in ("backend", "init_method", "timeout") if name in settings}
        super().__init__(cpu, **kwargs)
        if mixed_precision is not None or "_mixed_precision" not in self._shared_state:
            self._shared_state["_mixed_precision"] = mixed_precision or "no"
        for name in _PLUGINS:
            if name in settings or name not in self._shared_state:
                self._shared_state[name] = settings.get(name)

    @property
    def mixed_precision(self) -> str:
        """Accelerate's word for the precision: "no", "fp16" or "bf16"."""
        return str(self._shared_state["_mixed_precision"])

    deepspeed_plugin: Any

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Returns one of several DeepSpeedPlugins by its name."""
        return self._shared_state["strategy"].options(name)

    def select_deepspeed_plugin(self, name: str) -> None:
        """Puts one of several DeepSpeedPlugins in force, for models that are prepared from now on."""
        strategy = self._shared_state["strategy"]
        strategy.select(name)
        self._shared_state["deepspeed_plugin"] = strategy.plugin

    fork_launched = False

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by `fully_shard`."""
        return self._shared_state["strategy"].name in ("fsdp", "hsdp")


def share(inputs: Any, world: World, apply_padding: bool = False) -> Any:
    """Returns one process's share of a list, tuple, tensor, or dict of these (see `split_between_processes`).

    Raises:
        TypeError: the inputs are of another type.
        ValueError: the values of a dict differ in length.
    """
    if world.size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"Expected values of one length. Received: lengths {lengths}. Cut or pad them first.")
        kind: Any = type(inputs)
        return kind({key: share(value, world, apply_padding) for key, value in inputs.items()})
    if not isinstance(inputs, (list, tuple, torch.Tensor)) and not hasattr(inputs, "select"):
        raise TypeError(f"Expected a list, tuple, tensor or dict. Received: {type(inputs).__name__}. Make a list.")
    quotient, more = divmod(len(inputs), world.size)
    start = world.rank * quotient + min(world.rank, more)
    end = start + quotient + (world.rank < more)
    missing = quotient + (more > 0) - (end - start) if apply_padding else 0
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):  # a table of the datasets library
        return inputs.select([*range(start, end), *[len(inputs) - 1] * missing])
    if not missing or not len(inputs):
        return inputs[start:end]
    if isinstance(inputs, torch.Tensor):
        return torch.cat([inputs[start:end], *[inputs[-1:]] * missing])
    return inputs[start:end] + inputs[-1:] * missing


@contextmanager
def _first(leads: bool, world: World, name: str) -> Iterator[None]:
    if not leads:
        world.barrier(name)
    try:
        yield
    finally:
        if leads:
            world.barrier(name)
