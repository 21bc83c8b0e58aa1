"""What the script holds of a DeepSpeed engine: its optimizer and scheduler, and stand-ins for those of its config."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any

import torch

from . import deepspeed_builds
from .optimizer import AcceleratedOptimizer
from .scheduler import AcceleratedScheduler

_STANDS_IN = "Expected DeepSpeed. Received: {name}, which stands for the {what} of its configuration. Use {use}."


class DummyOptim(torch.optim.Optimizer):
    """Stands for the optimizer that DeepSpeed makes from its configuration; its options fill "auto" values there.

    A learning rate or weight decay other than the default counts as said by the script.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = list(params)
        self._given = [dict(one) if isinstance(one, dict) else one for one in self.params]
        self.lr, self.weight_decay, self.kwargs = lr, weight_decay, kwargs
        super().__init__(self.params, {"lr": lr, "weight_decay": weight_decay, **kwargs})

    def copies(self) -> list[Any]:
        """The parameters or groups as they were given, without the defaults of this class."""
        return [dict(one) if isinstance(one, dict) else one for one in self._given]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(_STANDS_IN.format(name="DummyOptim", what="optimizer", use="an optimizer of torch"))


class DummyScheduler:
    """Stands for the scheduler that DeepSpeed makes from its configuration, or by `lr_scheduler_callable(optimizer)`.

    `total_num_steps` and `warmup_num_steps` fill "auto" values there.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Any = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Only an engine of DeepSpeed has something to step."""
        raise RuntimeError(_STANDS_IN.format(name="DummyScheduler", what="scheduler", use="a scheduler of torch"))

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the engine's scheduler has a state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes nothing."""


class Group(MutableMapping[str, Any]):
    """A parameter group of the engine's optimizer that shows the model's parameters, not the engine's flat ones."""

    def __init__(self, base: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
        self._base, self._parameters = base, parameters

    def __getitem__(self, key: str) -> Any:
        return self._parameters if key == "params" else self._base[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._base[key] = value

    def __delitem__(self, key: str) -> None:
        del self._base[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


class EngineOptimizer(torch.optim.Optimizer):
    """An engine's optimizer over the model's own parameters; it steps by the engine.

    Until `attach` it shows the script's optimizer.
    """

    def __init__(self, given: torch.optim.Optimizer) -> None:
        # The base class is not initialised: groups and options are the engine's.
        self.given: Any = given
        self.engine: Any = None
        self.parameters = [list(group["params"]) for group in given.param_groups]
        self.state: Any = {}
        self.shown: Any = None  # the state as it was gathered (see deepspeed_state)
        self._groups: list[Any] | None = None

    def attach(self, engine: Any, present: dict[str, Any], names: dict[int, str]) -> None:
        """Shows the optimizer of an engine from now on; `present` are its parameters by the `names` of those before."""
        self.engine = engine
        self.parameters = [[present.get(names.get(id(one), ""), one) for one in own] for own in self.parameters]
        self._groups = None

    @property
    def basic(self) -> Any:
        """The optimizer that computes the updates."""
        return self.given if self.engine is None else self.engine.basic_optimizer or self.engine.optimizer

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]
        """The groups with their live options, and the model's own parameters."""
        if self.engine is None:
            groups: list[Any] = self.given.param_groups
            return groups
        if self._groups is None or len(self._groups) != len(self.basic.param_groups):
            parameters = [own for own in self.parameters if own]
            self._groups = [Group(base, own) for base, own in zip(self.basic.param_groups, parameters, strict=True)]
        return self._groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The options of a group that says nothing else."""
        defaults: dict[str, Any] = self.basic.defaults
        return defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.engine is not None:
            raise ValueError(
                "Expected all parameters when a DeepSpeed engine is made. Received: add_param_group() afterwards. Give "
                "the optimizer all groups before prepare(), or use strategy='fsdp'."
            )
        self.given.add_param_group(param_group)
        self.parameters.append(list(self.given.param_groups[-1]["params"]))

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state with parameters by number; all ranks have to call it."""
        if self.engine is None:
            return dict(self.given.state_dict())
        return dict(self.shown or import_module(".deepspeed_state", __package__).state_dict(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a whole state; all ranks have to call it with the same."""
        if self.engine is None:
            self.given.load_state_dict(state_dict)
        else:
            import_module(".deepspeed_state", __package__).load_state_dict(self, state_dict)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            "Expected the prepared optimizer to be stepped. Received: step() of what is inside of it. Call the "
            "optimizer that prepare() returned."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.given.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        if name in ("given", "engine"):
            raise AttributeError(name)
        return getattr(self.basic, name)

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.basic!r})"


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """A prepared optimizer that an engine of DeepSpeed steps; the engine clears gradients itself as it does."""

    def __init__(self, optimizer: Any, **options: Any) -> None:
        inner = optimizer if isinstance(optimizer, EngineOptimizer) else EngineOptimizer(optimizer)
        super().__init__(inner, False, **options)
        self.drop: Any = None  # what forgets gradients that are not stepped with

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forgets gradients that no step has used."""
        if self.drop is not None and self.gradient_state.sync_gradients:
            self.drop()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A prepared scheduler: one of the script's steps when called, one of DeepSpeed's when its engine does."""

    def __init__(self, scheduler: Any, optimizers: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(scheduler, optimizers, *args, **kwargs)
        self.by_engine = isinstance(scheduler, DummyScheduler)
        self.spread = 1  # processes in whose batches the length of a schedule is counted

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps the scheduler where it is due; the engine's own was stepped with the optimizer."""
        if not self.by_engine:
            super().step(*args, **kwargs)


def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
    """Returns DeepSpeed's optimizer for the CPU with the same groups and options, for Adam, AdamW, Adagrad and Lion.

    Others come back as they are. The first use builds an extension in C++.
    """
    found = _on_cpu(optimizer)
    if found is None:
        return optimizer
    deepspeed_builds.clear_left_locks()
    name, options = found
    module, _, kind = name.rpartition(".")
    made = getattr(import_module(module), kind)(optimizer.param_groups, **options)
    return made


def _on_cpu(optimizer: Any) -> tuple[str, dict[str, Any]] | None:
    """The class of DeepSpeed that computes on the CPU what an optimizer does, and its arguments."""
    defaults = optimizer.defaults
    taken = {name: defaults[name] for name in ("lr", "weight_decay", "betas", "eps") if name in defaults}
    if isinstance(optimizer, torch.optim.AdamW):  # a subclass of Adam by now
        return "deepspeed.ops.adam.DeepSpeedCPUAdam", {**taken, "adamw_mode": True}
    if isinstance(optimizer, torch.optim.Adam):
        decoupled = bool(defaults.get("decoupled_weight_decay", False))
        return "deepspeed.ops.adam.DeepSpeedCPUAdam", {**taken, "adamw_mode": decoupled}
    if isinstance(optimizer, torch.optim.Adagrad):
        return "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad", taken
    if type(optimizer).__name__ == "Lion":
        return "deepspeed.ops.lion.DeepSpeedCPULion", {k: v for k, v in taken.items() if k != "eps"}
    return None
