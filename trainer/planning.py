"""Says what a training step takes of each process's memory under a strategy, without taking it.

The user's own module, optimizer and step run twice under the strategy itself, but on tensors that have shapes and no
data (torch's FakeTensorMode), as one rank of processes that are not there (torch's "fake" backend). What is alive at
each operator is added up. What kernels take inside of themselves, and a framework's own memory, are not part of it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from ..strategies import create, environment
from ..strategies import world as worlds
from ..strategies.gradient_mean import GradientMean
from ..strategies.world import World
from .optimization import configured

STRATEGIES = ("single", "ddp", "hsdp", "fsdp", "tp", "cp", "sp")
"""What is planned for, in the order of preference: what communicates least comes first, what asks something of a model
last: a plan for its layers, or sequences and attention that can be divided."""
_SUITED = ("tp", "cp", "sp")
MARGIN = 0.1
"""The share of a device's memory that a plan leaves free: for fragments, kernels and the framework."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of one process: what stays (weights, gradients, optimizer), the step's own, and the most at any time.

    `problem` says why there are no numbers.
    """

    strategy: str
    devices: int
    checkpointing: bool = False  # activations are recomputed in the backward pass
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    peak: int = 0
    problem: str | None = None

    @property
    def name(self) -> str:
        """The strategy, and whether it recomputes activations."""
        return self.strategy + (" + activation checkpointing" if self.checkpointing else "")


@dataclass(frozen=True)
class Plan:
    """Footprints by strategy, and the one that was chosen (None: nothing fits) with the reason."""

    footprints: list[Footprint]
    memory: float | None
    choice: Footprint | None
    reason: str

    def fits(self, footprint: Footprint) -> bool:
        """Tell whether a process's memory suffices, with the margin."""
        limit = float("inf") if self.memory is None else self.memory * (1 - MARGIN)
        return footprint.problem is None and footprint.peak <= limit


def plan(
    make_module: Callable[[], Any],
    batch: Any,
    *,
    devices: int = 1,
    memory: float | None = None,
    precision: str = "32",
    strategies: Sequence[str] | None = None,
) -> Plan:
    """Return what one step takes under each strategy, and which to use.

    ``make_module`` makes the TrainModule; it is called under a mode in which its weights take no memory. ``batch`` is
    one micro-batch of one process. ``memory`` are the bytes of one device. By default one device is planned "single",
    several "ddp", "hsdp", "fsdp", "fsdp" with activation checkpointing, and "tp", "cp" and "sp" where the model allows.

    Raises:
        RuntimeError: a process group exists already: plan before training, in a process of its own.
    """
    if dist.is_initialized():
        raise RuntimeError("Expected no process group while planning. Received: one. Plan in a process of its own.")
    names = strategies or (("single",) if devices == 1 else STRATEGIES[1:])
    kinds = [(name, again) for name in names for again in ((False, True) if name == "fsdp" else (False,))]
    options: dict[str, Any] = {"devices": devices, "precision": precision}
    found = [measure(make_module, batch, name, checkpointing=again, **options) for name, again in kinds]
    asked = strategies is not None
    return choose([one for one in found if asked or one.problem is None or one.strategy not in _SUITED], memory)


def choose(found: list[Footprint], memory: float | None) -> Plan:
    """Return the plan that takes the first of these footprints that fits, with the reason."""
    undecided = Plan(found, memory, None, "")
    fitting = [one for one in found if undecided.fits(one)]
    if not fitting:
        measured = [one for one in found if one.problem is None]
        if not measured:
            return dataclasses.replace(undecided, reason="No step could be measured.")
        least = min(measured, key=lambda one: one.peak)
        reason = (
            f"Nothing fits: {least.name} takes least. Use more devices, a smaller micro-batch with accumulation, or "
            "16-bit numbers."
        )
        return dataclasses.replace(undecided, reason=reason)
    choice = fitting[0]
    why = {
        "single": "there is one device", "ddp": "it fits, and exchanges gradients only",
        "hsdp": "replicas do not fit one device, and shared by few it exchanges less than shared by all",
        "fsdp": "only shared by all devices it fits", "tp": "it fits only with its layers shared out",
        "cp": "it fits only with its sequences shared out", "sp": "it fits only with its sequences shared out",
    }[choice.strategy]  # fmt: skip
    if choice.checkpointing:
        why += ", and only with activations recomputed, which costs about a third of a step"
    return dataclasses.replace(undecided, choice=choice, reason=f"{choice.name}: {why}.")


def measure(
    make_module: Callable[[], Any],
    batch: Any,
    strategy: str,
    *,
    devices: int = 1,
    precision: str = "32",
    checkpointing: bool = False,
) -> Footprint:
    """Return what one step takes under a strategy; a step that cannot run without data gives a `problem`."""
    base = Footprint(strategy, devices, checkpointing)
    try:
        with _as_one_of(devices, strategy, checkpointing) as engine, warnings.catch_warnings(), _unlogged():
            warnings.simplefilter("ignore")  # that there is no run to log to, and the like
            return _measured(make_module, batch, engine, base, precision)
    except Exception as error:  # the user's module may do anything
        text = str(error).strip().splitlines()
        return dataclasses.replace(base, problem=f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": "))


def _measured(make_module: Any, batch: Any, engine: Any, base: Footprint, precision: str) -> Footprint:
    mode, meter = FakeTensorMode(allow_non_fake_inputs=True), Meter()
    numbers = engine.precision("bf16-mixed" if precision == "16-mixed" else precision)  # a scaler reads values
    if engine.divide_batch is not None:
        batch, _ = engine.divide_batch(batch)
    batch = tree_map_only(torch.Tensor, mode.from_tensor, batch)
    with mode, meter:
        module = make_module()
        if getattr(module, "configure_model", None) is not None:
            module.configure_model()
        model = engine.prepare_model(module, numbers, place=False)
        optimizers = [engine.prepare_optimizer(one, numbers) for one in configured(module)[0]]
        step = engine.entry(model, "training_step", numbers)
        weights = meter.now
        meter.peak = weights
        for _ in range(2):  # the first step makes the optimizer's state
            before = meter.now
            with numbers.autocast(None):
                outputs = step(batch, 0)
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs
            activations = meter.now - before
            engine.backward(loss, numbers)
            del loss, outputs
            gradients = sum(_bytes(p.grad) for p in module.parameters() if p.grad is not None)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            kept = meter.now
        buckets = gradients if base.strategy == "ddp" and not engine.settings.gradient_as_bucket_view else 0
        return dataclasses.replace(
            base, weights=weights, gradients=gradients + buckets, optimizer=kept - weights, activations=activations,
            peak=meter.peak + buckets,
        )  # fmt: skip


def device_memory(device: torch.device | str | None = None, *, ranks: int = 1) -> int:
    """Return the bytes of an accelerator's memory, or of this machine's shared by so many ranks."""
    here = torch.accelerator.current_accelerator(check_available=True)
    device = here if device is None else torch.device(device)
    if device is not None and device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def least_bytes(module: torch.nn.Module) -> int:
    """Return what weights, gradients, their buckets and two states of each take on a process that has all of them."""
    tensors = [*module.parameters(), *module.buffers()]
    held = sum(_bytes(tensor) for tensor in tensors)
    return held + 4 * sum(_bytes(parameter) for parameter in module.parameters() if parameter.requires_grad)


class Meter(TorchDispatchMode):
    """Counts the bytes of storages that operators have made and that still live; `peak` is the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, tuple[weakref.ref, int]] = {}

    def __enter__(self) -> Meter:
        self._resize = torch.UntypedStorage.resize_
        meter, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:  # as FSDP lets go of gathered weights
            result = resize(storage, size)
            if id(storage) in meter._live:
                meter._set(storage, size)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._see(getattr(value, "_local_tensor", value))
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self._live:
            self._set(storage, storage.nbytes())

    def _set(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)
        known = self._live.get(key)
        reference = known[0] if known else weakref.ref(storage, lambda _: self._gone(key))
        self.now += size - (known[1] if known else 0)
        self.peak = max(self.peak, self.now)
        self._live[key] = (reference, size)

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key)[1]


class _Imagined(World):
    """Several processes of which only the first is there: the others bring what it brings."""

    def __init__(self, size: int) -> None:
        super().__init__("cpu")
        self.size = self.local_size = size

    def gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.detach().clone() for _ in range(self.size)]

    all_gather_uneven = all_gather


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep torch from logging operators that do not fit, which is found out and told here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class _Means(GradientMean):
    """Means over ranks that have used the same parameters."""

    def _of_any_rank(self, places: set[int], count: int) -> list[int]:
        return sorted(places)


@contextmanager
def _as_one_of(devices: int, strategy: str, checkpointing: bool) -> Iterator[Any]:
    """Give an engine that is set up as the first of so many processes; afterwards there is no trace of it."""
    before = worlds.current()
    if strategy in ("single", "ddp") or devices == 1:  # buckets apart, a replica is a model on one device
        engine = create("single")
        engine.settings = create("ddp").settings  # type: ignore[attr-defined]
        yield engine
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    placement = dataclasses.replace(
        environment.detect({}), rank=0, local_rank=0, size=devices, local_size=devices, launched=True
    )
    dist.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
    try:
        engine = create(strategy)
        if checkpointing:
            engine.plugin.activation_checkpointing = True
        engine.setup(placement, device="cpu")
        engine.world = _Imagined(devices)
        if hasattr(engine, "gradients"):
            engine.gradients = _Means(_Imagined(devices if engine.loss_world.size > 1 else 1))
        yield engine
    finally:
        dist.destroy_process_group()
        worlds.set_current(before)


def _bytes(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()
