"""The schedule that Megatron's options describe: what a MegatronLMDummyScheduler stands for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .megatron_plugin import MegatronLMPlugin
from .optimizer import unwrap_optimizer
from .scheduler import AcceleratedScheduler


class MegatronLMDummyScheduler:
    """Stands for the schedule that Megatron's options describe (`lr_decay_style`, `min_lr`, `end_weight_decay`, …).

    `total_num_steps` and `warmup_num_steps`, in steps of the optimizer, count where the options do not say it.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps, self.warmup_num_steps, self.kwargs = total_num_steps, warmup_num_steps, kwargs

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Only Megatron has something to step."""
        raise RuntimeError(
            "Expected Megatron. Received: MegatronLMDummyScheduler, which stands for the schedule of its options. Use "
            "a scheduler of torch."
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the schedule itself has a state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes nothing."""


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """A prepared schedule of Megatron, which steps as the optimizer does, each step once."""

    def __init__(self, scheduler: Any, optimizers: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(scheduler, optimizers, *args, **kwargs)
        self.by_engine = False  # the engine's train_step has stepped it
        self.increment = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps where it is due and a MegatronEngine has not done so."""
        due = self.gradient_state.sync_gradients or not self.step_with_optimizer
        if due and not self.by_engine and not any(one.step_was_skipped for one in self.optimizers):
            self.advance()

    def advance(self) -> None:
        """Steps once."""
        self.scheduler.step(self.increment)

    def get_last_lr(self) -> list[Any]:
        """Returns the rates set last, one for each parameter group."""
        return [group["lr"] for group in self.optimizers[0].param_groups]


def create(dummy: MegatronLMDummyScheduler, plugin: MegatronLMPlugin, samples: int | None) -> tuple[Any, int]:
    """Returns megatron-core's schedule over the script's optimizer, and by how much it steps for one of the optimizer.

    `samples` are those of a step over all ranks, for schedules that are counted in samples.

    Raises:
        ValueError: nobody says how long it is, or it is counted in samples and no loader is known.
    """
    plugin.set_scheduler_args(dummy)
    by_samples = plugin.train_samples is not None or plugin.lr_decay_samples is not None
    if by_samples and samples is None:
        raise ValueError(
            "Expected a loader beside a schedule that is counted in samples. Received: none. Prepare them together, or "
            "use train_iters."
        )
    decay = plugin.lr_decay_iters or plugin.train_iters
    if by_samples:
        decay = plugin.lr_decay_samples or plugin.train_samples
    if decay is None:
        raise ValueError(
            "Expected the length of the schedule. Received: no total_num_steps, train_iters or lr_decay_iters. Give "
            "MegatronLMDummyScheduler(optimizer, total_num_steps=…)."
        )
    warmup = plugin.lr_warmup_samples if by_samples else plugin.lr_warmup_iters
    if plugin.lr_warmup_fraction is not None:
        warmup = int(plugin.lr_warmup_fraction * decay)
    given: Any = unwrap_optimizer(dummy.optimizer)
    start, end = _weight_decay(given, plugin)
    for group in given.param_groups:
        group["wd_mult"] = 1.0 if group.get("weight_decay") or not end else 0.0
    kind = import_module("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    made = kind(
        given, init_lr=0.0, max_lr=float(given.param_groups[0]["lr"]), min_lr=float(plugin.min_lr),
        lr_warmup_steps=warmup or 0, lr_decay_steps=decay, lr_decay_style=plugin.lr_decay_style, start_wd=start,
        end_wd=end, wd_incr_steps=decay, wd_incr_style=plugin.weight_decay_incr_style, **dummy.kwargs,
    )  # fmt: skip
    return made, samples or 1 if by_samples else 1


def _weight_decay(given: Any, plugin: MegatronLMPlugin) -> tuple[float, float]:
    own = max((float(group.get("weight_decay") or 0.0) for group in given.param_groups), default=0.0)
    start = own if plugin.start_weight_decay is None else plugin.start_weight_decay
    end = start if plugin.end_weight_decay is None else plugin.end_weight_decay
    if plugin.weight_decay_incr_style == "constant" and start != end:
        raise ValueError(
            f"Expected one weight decay for weight_decay_incr_style='constant'. Received: {start} and {end}. Choose "
            "'linear' or 'cosine'."
        )
    return start, end
