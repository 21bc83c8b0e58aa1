"""Seeds and random states: what a run draws is a function of its seed and of the place in the run."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from . import subgroup

log = logging.getLogger(__name__)
_MASK = (1 << 64) - 1
_seed: int | None = None
_outer: list[Any] = []  # states that `preserved` will put back, the outermost first
_generators: dict[str, Any] = {}  # of kinds of devices whose generators torch does not know


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed torch (all devices), numpy and random; with `device_specific` each rank by another number.

    `deterministic` asks torch for deterministic algorithms. Raises TypeError and ValueError for what is no seed.
    """
    global _seed
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"Expected an integer. Received: seed={seed!r}. Pass a number such as 42.")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"Expected a number within 0 and 2**63 - 1. Received: seed={seed}. Pass a smaller one.")
    _seed = int(seed)
    own = _seed + subgroup.data().rank * device_specific
    random.seed(own)
    np.random.seed(own % (1 << 32))
    torch.manual_seed(own)
    for generator in _generators.values():
        generator.manual_seed(own)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def register(kind: str, generator: Any) -> None:
    """Let seeds and states include a kind of device that torch has no module for; it begins with torch's seed.

    `generator` has `manual_seed`, `get_rng_state` and `set_rng_state` as torch's device modules do.
    """
    if kind not in _generators:
        generator.manual_seed(torch.initial_seed())
    _generators[kind] = generator


def registered(kind: str) -> Any:
    """What was registered for a kind of device, or None."""
    return _generators.get(kind)


def run_seed() -> int:
    """The number given to `set_seed` last, or torch's initial seed (random, another in each process) without one."""
    return torch.initial_seed() if _seed is None else _seed


def mix(key: int, value: int) -> int:
    """A 64-bit number from two, near inputs giving unrelated outputs: splitmix64 (Steele, Lea, Flood 2014), 0.3 µs."""
    z = (key + (value + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def derive(seed: int, *parts: int) -> int:
    """A 64-bit seed for one purpose at one place, from the run's seed and integers that name both."""
    for part in parts:
        seed = mix(seed, part)
    return seed


def seed_all(seed: int) -> None:
    """Seed the global CPU generators of torch, numpy and random by a 64-bit number, in 7 µs (`set_seed`: 200)."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def capture(device: torch.device | str | None = None) -> dict[str, Any]:
    """The states of torch, of `device`'s generator where it has one, of numpy and random; JSON values and tensors.

    Inside `preserved` they are those that it will put back. Raises ValueError where numpy's global generator was
    replaced by one that is no MT19937.
    """
    now = _outer[0] if _outer else _Snapshot(device)
    if now.numpy["bit_generator"] != "MT19937":
        raise ValueError(
            f"Expected numpy's global generator to be MT19937. Received: {now.numpy['bit_generator']}. "
            "Put it back with numpy.random.set_bit_generator(numpy.random.MT19937())."
        )
    key, position = now.numpy["state"]["key"], now.numpy["state"]["pos"]
    version, words, second = now.python
    values = {
        "torch": now.torch,
        "numpy": {"key": torch.from_numpy(key.astype(np.int64)), "position": int(position),
                  "has_gauss": int(now.numpy["has_gauss"]), "gauss": float(now.numpy["gauss"])},
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": second},
    }
    return values if now.device is None else {**values, "device": {"type": now.kind, "state": now.device}}


def restore(state: dict[str, Any], device: torch.device | str | None = None) -> None:
    """Put back what `capture` returned; the state of another type of device is left out, with a warning."""
    target, saved = _Snapshot(device), state.get("device")
    if saved is not None and saved["type"] == target.kind:
        target.device = saved["state"]
    elif saved is not None:
        log.warning("The random state of %s is left out: this process runs on %s.", saved["type"], target.kind or "cpu")
    numpy, python = state["numpy"], state["python"]
    target.torch, key = state["torch"].to("cpu", torch.uint8), np.asarray(numpy["key"].tolist(), dtype=np.uint32)
    target.numpy = {"bit_generator": "MT19937", "state": {"key": key, "pos": numpy["position"]},
                    "has_gauss": numpy["has_gauss"], "gauss": numpy["gauss"]}
    target.python = (python["version"], tuple(python["words"].tolist()), python["gauss"])
    target.put_back()


@contextmanager
def preserved(device: torch.device | str | None = None) -> Iterator[None]:
    """Whatever is drawn or seeded inside leaves the generators of torch, `device`, numpy and random as they were."""
    now = _Snapshot(device)
    _outer.append(now)
    try:
        yield
    finally:
        _outer.remove(now)
        now.put_back()


class Stream:
    """Random states of its own for code that draws from the global generators a bit at a time: `with stream: …`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: _Snapshot | None = None

    def __enter__(self) -> None:
        self._outer = _Snapshot()
        seed_all(self._seed) if self._own is None else self._own.put_back()

    def __exit__(self, *error: object) -> None:
        self._own = _Snapshot()
        self._outer.put_back()


class _Snapshot:
    """The states as their libraries give them; 36 µs without a device."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.torch = torch.default_generator.get_state()
        self.numpy: Any = np.random.get_state(legacy=False)
        self.python: Any = random.getstate()
        self.kind, self.device = "", None
        target = torch.device("cpu" if device is None else device)
        module: Any = _generators.get(target.type)
        if module is None and target.type not in ("cpu", "meta", "xla"):
            module = torch.get_device_module(target)
        if hasattr(module, "get_rng_state"):
            self.kind, self._module = target.type, module
            self._where = () if target.type == "mps" else (target,)  # mps has one generator and takes no device
            self.device = module.get_rng_state(*self._where)

    def put_back(self) -> None:
        torch.default_generator.set_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
        if self.device is not None:
            self._module.set_rng_state(self.device.cpu(), *self._where)
