"""One engine of DeepSpeed: the package, what a run says to it, and the engine's own loop calls.

DeepSpeed reads DS_ACCELERATOR when it is imported and LOCAL_RANK when an engine is made. Both are exported for just
these calls, so that nothing of this process's environment stays changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch

from . import deepspeed_builds, environment
from . import deepspeed_gradients as gradients
from .deepspeed_config import HfDeepSpeedConfig, Said, of_batches, of_hidden_size, of_precision, settle
from .deepspeed_optimizer import DummyOptim, DummyScheduler, EngineOptimizer, map_pytorch_optim_to_deepspeed
from .world import World

logger = logging.getLogger(__name__)
_DUMMY_LR = 0.001  # DummyOptim's default, which says nothing


def package(device: torch.device) -> Any:
    """Returns the package, imported for this kind of device.

    Raises:
        ImportError: it is not installed.
        ValueError: somebody has imported it for another kind.
    """
    variables = {"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {}
    try:
        with environment.exported(environment.child_environment(variables)):
            deepspeed = import_module("deepspeed")
            kind = import_module("deepspeed.accelerator").get_accelerator().device_name()
    except ImportError as error:
        raise ImportError(
            f"Expected the package deepspeed. Received: {error}. Install it: pip install 'drivetrain[deepspeed]'."
        ) from error
    if kind != device.type:
        raise ValueError(
            f"Expected DeepSpeed on {device.type}. Received: the package imported for {kind!r} before. Set "
            f"DS_ACCELERATOR={device.type}, or import it after the Accelerator."
        )
    if kind == "cpu":
        # Its collective through shared memory serves inference alone; training needs no compiler without it.
        import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


# What a run says


def settled(
    config: HfDeepSpeedConfig,
    model: torch.nn.Module,
    *,
    optimizer: Any,
    scheduler: Any,
    samples: int | None,
    micro_batches: int,
    ranks: int,
    precision: str,
    processes: int | None = None,
    spread: int = 1,
) -> None:
    """Fills a configuration in place from the run; `spread` divides a schedule's length (see DummyScheduler).

    `ranks` are those that see other samples, `processes` all of them.

    Raises:
        ValueError: the configuration and the script say different things, or something is still open.
    """
    _check_parts(config, optimizer, scheduler)
    present = config.get_value("gradient_accumulation_steps")
    steps = present if isinstance(present, int) else micro_batches
    script = f"Accelerator(gradient_accumulation_steps={micro_batches})"
    said = [Said("gradient_accumulation_steps", micro_batches, script, firm=micro_batches != 1, adds=True)]
    said += of_precision(precision, f"precision={precision!r}") + of_hidden_size(model)
    said += of_batches(samples, steps, ranks) + _defaults(optimizer)
    said += _of_optimizer(config, optimizer) + _of_scheduler(config, scheduler, optimizer, spread)
    if samples is None and config.is_auto("train_batch_size"):
        config.del_config_sub_tree("train_batch_size")
    whole = config.get_value("train_batch_size")
    if samples is None and isinstance(whole, int):
        own = max(1, whole // (steps * ranks))
        said.append(Said("train_micro_batch_size_per_gpu", own, "train_batch_size", firm=False, adds=True))
    said.append(Said("train_micro_batch_size_per_gpu", 1, "nobody yet", firm=False, adds=whole is None))
    for part in ("optimizer", "param"):
        if config.get_value(f"zero_optimization.offload_{part}.device") in ("none", "auto"):
            config.del_config_sub_tree(f"zero_optimization.offload_{part}")
    settle(config, said)
    if processes not in (None, ranks):
        config.del_config_sub_tree("train_batch_size")  # for which DeepSpeed counts all processes


def _check_parts(config: HfDeepSpeedConfig, optimizer: Any, scheduler: Any) -> None:
    """An optimizer and a scheduler come from the configuration or from the script."""
    for what, stand_in, given in (("optimizer", DummyOptim, optimizer), ("scheduler", DummyScheduler, scheduler)):
        there, dummy = config.get_value(what) is not None, isinstance(given, stand_in)
        if getattr(given, "lr_scheduler_callable", None) is not None:
            there = not there
        if given is not None and there != dummy:
            received = f"{what} in {config.source}" if there else f"none in {config.source}"
            raise ValueError(
                f"Expected one {what}. Received: {received}, and {type(given).__name__} from the script. Prepare a "
                f"{stand_in.__name__} for that of the configuration, or take it out there."
            )


def _defaults(optimizer: Any) -> list[Said]:
    own = optimizer is not None and not isinstance(optimizer, DummyOptim)
    gather = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    # DeepSpeed itself would clip to a norm of 1 where nobody has said anything.
    said = [Said("gradient_clipping", 0.0, "the default", firm=False, adds=True)]
    said.append(Said(gather, True, "the default", firm=False))
    if own:
        said.append(Said("zero_allow_untested_optimizer", True, "the script", firm=False, adds=True))
    return said


def _of_optimizer(config: HfDeepSpeedConfig, optimizer: Any) -> list[Said]:
    if not isinstance(optimizer, DummyOptim):
        return []
    who = "DummyOptim"
    said = [
        Said("optimizer.params.lr", optimizer.lr, who, firm=optimizer.lr != _DUMMY_LR, adds=True),
        Said("optimizer.params.weight_decay", optimizer.weight_decay, who, firm=optimizer.weight_decay != 0),
    ]
    said += [Said(f"optimizer.params.{key}", value, who) for key, value in optimizer.kwargs.items()]
    for key, value in {"betas": [0.9, 0.999], "eps": 1e-8}.items():
        said.append(Said(f"optimizer.params.{key}", value, "the default", firm=False))
    return said


def _of_scheduler(config: HfDeepSpeedConfig, scheduler: Any, optimizer: Any, spread: int) -> list[Said]:
    if not isinstance(scheduler, DummyScheduler) or scheduler.lr_scheduler_callable is not None:
        return []
    lr = config.get_value("optimizer.params.lr", "auto")
    if lr == "auto":
        lr = optimizer.defaults.get("lr") if optimizer is not None else None
    who, warmup = "DummyScheduler", scheduler.warmup_num_steps
    said = [
        Said("scheduler.params.warmup_min_lr", 0, who, firm=False),
        Said("scheduler.params.warmup_max_lr", lr, who, firm=False),
        Said("scheduler.params.warmup_num_steps", warmup, who, firm=bool(warmup)),
    ]
    if scheduler.total_num_steps is not None:
        total = math.ceil(scheduler.total_num_steps / spread)
        said.append(Said("scheduler.params.total_num_steps", total, who))
    return [one for one in said if one.value is not None]


# The engine


def create_engine(
    model: torch.nn.Module,
    config: HfDeepSpeedConfig,
    *,
    optimizer: EngineOptimizer | None = None,
    scheduler: Any = None,
    world: World,
    **options: Any,
) -> Any:
    """Returns the engine of a model, which takes the optimizer over."""
    deepspeed = package(world.device)
    _check_disk(config)
    deepspeed_builds.clear_left_locks()
    arguments: dict[str, Any] = {"model": model, "config": config.config, **options}
    if optimizer is not None and isinstance(optimizer.given, DummyOptim):
        arguments["model_parameters"] = optimizer.given.copies()
    elif optimizer is not None:
        if _wants_own_optimizer(config):
            optimizer.given = map_pytorch_optim_to_deepspeed(optimizer.given)
        arguments["optimizer"] = optimizer.given
    made_by = getattr(scheduler, "lr_scheduler_callable", None)
    if made_by is not None:
        arguments["lr_scheduler"] = made_by
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with environment.exported(environment.child_environment({"LOCAL_RANK": str(world.local_rank)})):
        engine = deepspeed.initialize(**arguments)[0]
    if optimizer is not None:
        optimizer.attach(engine, dict(model.named_parameters()), names)
    return engine


def _check_disk(config: HfDeepSpeedConfig) -> None:
    """Offloading to NVMe needs asynchronous input and output, for which DeepSpeed builds an extension."""
    devices = [config.get_value(f"zero_optimization.offload_{part}.device") for part in ("optimizer", "param")]
    if "nvme" in devices and not import_module("deepspeed.ops").__compatible_ops__.get("async_io"):
        raise RuntimeError(
            "Expected libaio, with which DeepSpeed offloads to NVMe. Received: a machine on which its extension "
            "async_io cannot be built. Install libaio-dev (libaio-devel) and a C++ compiler, or offload to 'cpu'."
        )


def _wants_own_optimizer(config: HfDeepSpeedConfig) -> bool:
    """Whether DeepSpeed steps states in the host's memory, where it accepts its own optimizers."""
    device = config.get_value("zero_optimization.offload_optimizer.device")
    return device in ("cpu", "nvme") and not config.is_false("zero_force_ds_cpu_optimizer")


class DeepSpeedEngineWrapper:
    """An engine between a loop's calls: backward passes of a window, and one step at its end."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.held = 0  # contexts in which gradients stay unreduced
        self.pending = False  # gradients of a whole window wait for a step
        self.config: Any = None  # as it was before the run filled it
        self.told_batch = False  # the size of a micro-batch is known to be right
        self.trained = {id(parameter) for parameter in engine.module.parameters() if parameter.requires_grad}
        self._through = False
        engine.register_forward_pre_hook(self._forward)

    def _forward(self, *args: Any) -> None:
        self._through = True  # the engine prepares the backward of its own outputs

    @property
    def trains(self) -> bool:
        """Whether the engine has an optimizer."""
        return self.engine.basic_optimizer is not None

    def backward(
        self, loss: torch.Tensor, sync_gradients: bool = True, *, via: Any = None, retain_graph: bool = False
    ) -> None:
        """Differentiates a loss, already scaled for its window; `sync_gradients` says that it is the window's last.

        Raises:
            RuntimeError: the window before has not been stepped with.
        """
        engine, through = self.engine, self._through
        self._through = False
        if engine.managed_gradient_accumulation():
            if self.pending:
                raise RuntimeError(
                    "Expected optimizer.step() between two windows. Received: a second backward pass in one. Wrap "
                    "micro-batches in accelerator.accumulate(model), or set \"managed_gradient_accumulation\": false "
                    "in DeepSpeed's configuration."
                )
            engine.set_gradient_accumulation_boundary(sync_gradients)
        if hasattr(engine.optimizer, "clear_backward_seen_flag"):
            engine.optimizer.clear_backward_seen_flag()
        if not through or via is not None:
            self._announce(loss)
        if via is None:
            engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)
        else:
            via(engine.scale(loss))
        self.pending = sync_gradients or not engine.managed_gradient_accumulation()

    def _announce(self, loss: torch.Tensor) -> None:
        """Prepares the engine for a loss that a method of the module has computed, not its forward."""
        hook = import_module("deepspeed.runtime.utils").register_output_backward_hooks
        hook(loss, preprocess_once_fn=self.engine._backward_prologue)

    def step(self) -> bool:
        """Steps with the gradients of a window, if there are any; returns whether an overflow skipped that."""
        if not self.pending:
            return False
        self.pending = False
        optimizer = self.engine.optimizer
        try:
            self.engine.step()
        finally:
            if hasattr(optimizer, "clip_grad"):
                optimizer.clip_grad = self.engine.gradient_clipping()
        return bool(getattr(optimizer, "overflow", False))

    def clip(self, max_norm: float) -> torch.Tensor:
        """Lets the next step clip to a norm, and returns the norm as it is now."""
        configured = self.engine.gradient_clipping()
        if configured and math.isfinite(max_norm) and not math.isclose(configured, max_norm):
            raise ValueError(
                f"Expected one value for the largest norm of the gradients. Received: gradient_clipping={configured} "
                f"in DeepSpeed's configuration, max_norm={max_norm} in the script. Set it in one place."
            )
        optimizer = self.engine.optimizer
        if not self.pending:
            return torch.zeros(())
        norm = gradients.total_norm(self.engine)
        if not configured and math.isfinite(max_norm):
            if hasattr(optimizer, "clip_grad"):
                optimizer.clip_grad = float(max_norm)
            else:
                torch.nn.utils.clip_grads_with_norm_(self.engine.module.parameters(), max_norm, norm)
        return norm

    def forget(self) -> None:
        """Drops gradients that nobody steps with."""
        if self.pending:
            self.pending = False
            gradients.forget(self.engine)

    def release(self) -> None:
        """Takes the engine's hooks off its module."""
        for hook in (self.engine.module_forward_pre_hook, self.engine.module_forward_post_hook):
            hook.remove()
        self.engine.destroy()

    def get_global_grad_norm(self) -> Any:
        """Returns the norm of the gradients of the last step, as it was before clipping."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm


def samples_of(loaders: Iterable[Any], ranks: int, *, smallest: bool) -> int | None:
    """Returns how many samples of a rank the loaders have in a batch: the smallest or the largest; None for unknown."""
    sizes = [loader.total_batch_size // ranks for loader in loaders if getattr(loader, "total_batch_size", None)]
    return (min if smallest else max)(sizes) if sizes else None
