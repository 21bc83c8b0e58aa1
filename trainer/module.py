"""The user's side: a module that holds a model and says what a training, validation, test or prediction step is."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .data_hooks import DataHooks
from .hyperparameters import Hyperparameters
from .metrics import Metrics, Series, check_scalar, is_metric
from .module_hooks import ModuleHooks

if TYPE_CHECKING:
    from .trainer import Trainer

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class TrainModule(Hyperparameters, ModuleHooks, DataHooks, nn.Module):
    """A model and what to do with it; override ``training_step`` and ``configure_optimizers``, and what else you need.

    A step gets ``(batch, batch_idx)``, evaluation steps also ``dataloader_idx`` where there are several loaders;
    arguments that a step does not take are not passed. ``training_step`` returns the loss (a 0-dim tensor), or a dict
    with "loss" and, for losses that are means over a varying number of items (tokens), "weight": that number. Every
    hook of ``Callback`` can be a method here, without the arguments ``trainer`` and ``module``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = True
        self.strict_loading = True
        self.example_input_array: Any = None
        self._trainer: Trainer | None = None
        self._metrics: Metrics | None = None
        self._series: dict[str, Series] | None = None

    # To override

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of a batch: a 0-dim tensor, a dict with "loss" (and "weight"), or None to skip the batch."""
        raise NotImplementedError(f"Expected {type(self).__name__} to have a training_step. Received: none. Write one.")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Evaluate a validation batch, usually with ``self.log``."""

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Evaluate a test batch, usually with ``self.log``."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return predictions for a batch; by default the model's output."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Return an optimizer, a list of them, a pair of lists (optimizers, schedulers), a dict with "optimizer" and
        "lr_scheduler", or None to train without."""
        raise NotImplementedError(
            f"Expected {type(self).__name__} to have configure_optimizers. Received: none. Write one."
        )

    def configure_model(self) -> None:
        """Build parts of the model under the strategy's ``init_context``: directly on its device, or sharded."""

    def configure_callbacks(self) -> Any:
        """Return callbacks that this module brings along; they replace the trainer's of the same class."""
        return []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of ``loss``; override to do it in another way."""
        loss.backward(*args, **kwargs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Any = None) -> None:
        """Do an optimizer step; an override has to call ``optimizer.step(closure=optimizer_closure)``."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Set the gradients to zero."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler; ``metric`` is what it monitors, or None."""
        scheduler.step() if metric is None else scheduler.step(metric)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients before a step; an override replaces what the trainer's arguments say."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    # Logging

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool | None = None,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a number, a 0-dim tensor or a torchmetrics object under ``name``.

        In training batches the value of the current step is logged every ``log_every_n_steps`` steps (``on_step``); in
        evaluation, and in hooks that are not about one batch, the mean over the epoch (``on_epoch``), weighted by
        ``batch_size`` (by default the number of samples that the loader put into the batch). Values are reduced over
        all ranks; ``sync_dist=False`` takes rank 0's. Raises ValueError for anything that is not one number.
        """
        series = self._series.get(name) if self._series is not None else None
        options = (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, rank_zero_only)
        if series is None or series.options != options:
            series = self._new_series(name, value, options, add_dataloader_idx)
            if series is None:
                return
        if type(value) is Tensor:  # a copy: the caller may go on changing the tensor in place
            value = value.detach() if value.requires_grad else value.clone()
        elif series.metric is not None:
            series.metric = value
        weight = self._metrics.samples if batch_size is None else batch_size  # type: ignore[union-attr]
        if weight is None:
            weight = _unknown_weight(series)
        if series.on_epoch or series.metric is not None:
            series.add(value, weight)
        else:
            series.last, series.last_weight, series.fresh = value, weight, True

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Record several values, or the metrics of a ``MetricCollection``; arguments are those of ``log``."""
        if is_metric(dictionary, "MetricCollection"):
            dictionary = dict(dictionary.items(keep_base=False, copy_state=False))  # type: ignore[call-arg]
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    def _new_series(self, name: str, value: Any, options: tuple, add_dataloader_idx: bool) -> Series | None:
        if self._metrics is None or self._series is None:
            warnings.warn(
                f"Expected a run to log {name!r} to. Received: none, or one without further rows. It is not logged.",
                stacklevel=3,
            )
            return None
        if not isinstance(name, str):
            raise TypeError(f"Expected a name to log under. Received: {name!r}. Write self.log('loss', loss).")
        if not is_metric(value):
            check_scalar(name, value)
        series = self._metrics.series(name, options, add_dataloader_idx)
        series.metric = value if is_metric(value) else None
        return series

    # What a run provides

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs this module."""
        if self._trainer is None:
            raise RuntimeError(
                f"Expected {type(self).__name__} to be in a run. Received: no trainer. Call Trainer().fit(module)."
            )
        return self._trainer

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's parameters."""
        return next((p.dtype for p in self.parameters()), torch.get_default_dtype())

    @property
    def current_epoch(self) -> int:
        """Number of finished epochs."""
        return self._trainer.current_epoch if self._trainer else 0

    @property
    def global_step(self) -> int:
        """Number of optimizer steps done."""
        return self._trainer.global_step if self._trainer else 0

    @property
    def global_rank(self) -> int:
        """Rank of this process among all."""
        return self._trainer.global_rank if self._trainer else 0

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self._trainer.local_rank if self._trainer else 0

    @property
    def on_gpu(self) -> bool:
        """Whether the parameters are on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def logger(self) -> Any:
        """The first tracker of the run, or None."""
        return self.loggers[0] if self.loggers else None

    @property
    def loggers(self) -> list[Any]:
        """The trackers of the run."""
        return self._trainer.trackers if self._trainer else []

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process, without breaking a progress bar."""
        self.trainer.print(*args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return tensors of all ranks, with a new first dimension of the world's size."""
        return self.trainer.all_gather(data, sync_grads=sync_grads)

    # Manual optimization

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list where there are several."""
        optimizers = (
            self.trainer.manual_optimizers if use_pl_optimizer else [o.optimizer for o in self.trainer.optimizers]
        )
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """Return the scheduler, a list where there are several, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return schedulers[0] if len(schedulers) == 1 else schedulers or None

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients with the run's precision and strategy."""
        self.trainer.accelerator.backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of an optimizer's parameters by "norm" (default) or "value"; unscales them first."""
        if gradient_clip_val is None:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        accelerator = self.trainer.accelerator
        clip = accelerator.clip_grad_value_ if gradient_clip_algorithm == "value" else accelerator.clip_grad_norm_
        clip(parameters, gradient_clip_val)

    @contextlib.contextmanager
    def toggled_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """Let only this optimizer's parameters require gradients."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = [p for o in self.trainer.optimizers for g in o.param_groups for p in g["params"] if id(p) not in mine]
        frozen = [p for p in others if p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Let only this optimizer's parameters require gradients, until ``untoggle_optimizer``."""
        self._toggled = contextlib.ExitStack()
        self._toggled.enter_context(self.toggled_optimizer(optimizer))

    def untoggle_optimizer(self, optimizer: Optimizer) -> None:
        """Undo ``toggle_optimizer``."""
        self._toggled.close()

    # Hyperparameters and weights

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, map_location: Any = None, strict: bool = True, **kwargs: Any
    ) -> Any:
        """Return a module built from a checkpoint's hyperparameters (``kwargs`` win) with the checkpoint's weights.

        Raises CheckpointError where the checkpoint is incomplete or damaged; nothing in it is executed.
        """
        from .checkpoints import read_module

        return read_module(cls, checkpoint_path, map_location, strict, kwargs)

    def freeze(self) -> TrainModule:
        """Stop gradients of all parameters and go to evaluation mode."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> TrainModule:
        """Undo ``freeze``."""
        self.requires_grad_(True)
        return self.train()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None, "_metrics": None, "_series": None}


def _unknown_weight(series: Series) -> int:
    if series.on_epoch and series.reduction == "mean" and series.metric is None:
        raise ValueError(
            f"Expected to know how many samples the mean {series.name!r} is over. Received: a batch that the data set "
            f"made itself (batch_size=None). Do self.log({series.name!r}, value, batch_size=n)."
        )
    return 1


def uncompiled(model: Any) -> Any:
    """Return the module inside of what ``torch.compile`` gave; calling it, as a step does, runs what was compiled."""
    inner = getattr(model, "_orig_mod", None)
    if inner is None or not isinstance(model, nn.Module):
        return model
    if type(inner).forward is nn.Module.forward and "forward" not in vars(inner):
        warnings.warn(
            f"Expected {type(inner).__name__} to have a forward for torch.compile. Received: none, so that nothing of "
            "it is compiled. Compile the parts that its steps call: self.net = torch.compile(net).",
            stacklevel=3,
        )
        return inner
    vars(inner)["_compiled_call_impl"] = model.dynamo_ctx(inner._call_impl)
    return inner
