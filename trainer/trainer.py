"""The Trainer: owns time, and calls the hooks of a module and of callbacks on a public Accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import torch

from ..callbacks.base import Callback
from ..callbacks.durations import DurationLike
from ..strategies.collectives import recursively_apply
from ..strategies.environment import detect
from .arguments import resolve
from .checkpoints import RunState, metadata
from .evaluation import evaluate
from .launching import Launcher, make_accelerator
from .loaders import LoaderSource
from .loop import FitLoop
from .metrics import Metrics
from .module import TrainModule, uncompiled
from .numerics import numerics
from .optimization import LRSchedulerConfig
from .progress import Progress
from .run_folder import RunFolder
from .session import Session
from .state import TrainerState


class Trainer(TrainerState):
    """Trains, validates, tests and predicts with a ``TrainModule``.

    Args:
        accelerator: "auto", "cpu", "gpu" or a kind of device; or an ``Accelerator``: it decides where and how to run.
        strategy: "auto", "ddp", another word of the registry, or a strategy object.
        deepspeed: train by DeepSpeed with its own configuration: a JSON file or a dict; or a ``DeepSpeedPlugin``.
        devices: how many devices (processes) on this machine, a list of their indices, or "auto".
        num_nodes: how many machines.
        precision: "32", "bf16-mixed", "16-mixed", "fp8-mixed", "bf16-true", "16-true" or "64-true".
        seed: seeds torch, numpy and random on every rank, and the order of data; None leaves them alone.
        logger: True (TensorBoard and CSV), False, names of trackers, trackers, or a ``Tracking`` callback.
        callbacks: one or several callbacks.
        fast_dev_run: run that many batches of everything once (True: one), without checkpoints and trackers.
        max_epochs: stop after that many epochs, or a duration ("10ep", "2h", ...); -1 for no limit.
        min_epochs: go on for at least that long, whoever wants to stop.
        max_steps: stop after that many optimizer steps, or a duration; -1 for no limit.
        min_steps: go on for at least that long, whoever wants to stop.
        max_time: stop after a time ("2h", "00:12:00:00", a timedelta).
        limit_train_batches: use so many batches (int) or that fraction (float) of an epoch.
        limit_val_batches: the same for validation.
        limit_test_batches: the same for tests.
        limit_predict_batches: the same for prediction.
        overfit_batches: train and validate on the same few training batches, in order.
        val_check_interval: validate after that fraction of an epoch (float), batches (int) or duration.
        check_val_every_n_epoch: validate in every n-th epoch; None counts ``val_check_interval`` over epochs.
        num_sanity_val_steps: validation batches to try before training; -1 for all.
        log_every_n_steps: optimizer steps between two rows of ``self.log`` values.
        enable_checkpointing: False for no ``ModelCheckpoint``.
        enable_progress_bar: False for no ``Progress``.
        enable_model_summary: False for no ``ModelSummary``.
        accumulate_grad_batches: micro-batches per optimizer step; the same as ``GradientAccumulation``.
        gradient_clip_val: clip gradients before a step; the same as ``GradientClipping``.
        gradient_clip_algorithm: "norm" or "value".
        deterministic: ask torch for deterministic algorithms ("warn": warn where there is none).
        benchmark: let cuDNN try algorithms.
        inference_mode: evaluate under ``torch.inference_mode`` rather than ``no_grad`` alone.
        use_distributed_sampler: False when each rank's loaders already hold its own share.
        profiler: "simple", "torch", "cprofile" or a ``Profiler``.
        detect_anomaly: let autograd look for the operation that made a NaN.
        barebones: nothing optional at all.
        sync_batchnorm: batch normalization over all ranks.
        reload_dataloaders_every_n_epochs: ask for new loaders every n epochs.
        default_root_dir: where runs are kept; None for the current folder.

    Raises ValueError or TypeError, before anything is started, for arguments that make no sense.
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        deepspeed: Any = None,
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | None = "32",
        seed: int | None = None,
        logger: Any = True,
        callbacks: Callback | list[Callback] | None = None,
        fast_dev_run: bool | int = False,
        max_epochs: DurationLike | None = None,
        min_epochs: DurationLike | None = None,
        max_steps: DurationLike = -1,
        min_steps: DurationLike | None = None,
        max_time: DurationLike | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: DurationLike | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int = 2,
        log_every_n_steps: int = 50,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Any = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        placement = detect()
        self.plan = plan = resolve(given, placement)
        self.callbacks, self.schedule, self.limits = plan.callbacks, plan.schedule, plan.limits
        self.log_every_n_steps = plan.log_every_n_steps
        self.max_epochs, self.min_epochs, self.max_steps, self.min_steps = max_epochs, min_epochs, max_steps, min_steps
        self.overfit_batches, self.inference_mode = overfit_batches, inference_mode
        self.reload_dataloaders_every_n_epochs = reload_dataloaders_every_n_epochs
        self.deterministic, self.benchmark, self.detect_anomaly = deterministic, benchmark, detect_anomaly
        self.default_root_dir = str(default_root_dir if default_root_dir is not None else Path.cwd())
        self.run_folder = RunFolder(self.default_root_dir)
        self.session: Session | None = None
        self.module: TrainModule | None = None
        self.run_state = RunState(self)
        self._accelerator: Any = None
        self._reset()
        self.launcher = Launcher(plan, placement)
        if not self.launcher.later:
            self.accelerator  # noqa: B018  joins the other processes now

    def _reset(self) -> None:
        self.progress = Progress()
        self.metrics: Metrics | None = None
        self.stage: str | None = None
        self.should_stop = self.interrupted = False
        self.stop_reason: str | None = None
        self.optimizers: list[Any] = []
        self.manual_optimizers: list[Any] = []
        self.lr_scheduler_configs: list[LRSchedulerConfig] = []
        self.return_predictions = True

    @property
    def accelerator(self) -> Any:
        """The Accelerator that everything runs on; made at its first use."""
        if self._accelerator is None:
            self._accelerator = make_accelerator(self.plan, alone=self.launcher.later)
        return self._accelerator

    def release_accelerator(self) -> None:
        """Let go of the Accelerator; the next use makes another one."""
        self._accelerator = None

    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        resume: str | Path | None = None,
    ) -> None:
        """Train ``model`` on loaders or a data module (which may stand in the place of the loaders).

        ``ckpt_path`` (or ``resume``, the same) goes on from a checkpoint: a path, or "last" for the newest complete one
        of this place, or the beginning where there is none yet. Raises CheckpointError for a damaged one.
        """
        if ckpt_path is not None and resume is not None and ckpt_path != resume:
            raise ValueError(
                f"Expected one checkpoint. Received: ckpt_path={ckpt_path!r} and resume={resume!r}. Pass one of them."
            )
        model = uncompiled(model)
        source = LoaderSource(model, {"train": train_dataloaders, "validate": val_dataloaders}, datamodule)
        path = ckpt_path if ckpt_path is not None else resume
        if self.launcher.later:
            return self.launcher.call(self, "fit", model, source, ckpt_path=path)
        self._check_idle("fit")
        self._reset()
        if self.plan.unnamed and self.world_size > 1:
            from .suiting import suit_strategy  # here, as most runs need none of it

            suit_strategy(self, model)
        with self._numerics(), Session(self, "fit", model, source, path) as session:
            self._sanity_check(session)
            session.loop = FitLoop(session)
            session.loop.run()
            session.hooks.fire("on_fit_end")

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
    ) -> list[dict[str, float]]:
        """Run the validation loop once and return one dict of metrics per loader."""
        return self._evaluate("validate", model, dataloaders, datamodule, ckpt_path, {"verbose": verbose})

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
    ) -> list[dict[str, float]]:
        """Run the test loop and return one dict of metrics per loader."""
        return self._evaluate("test", model, dataloaders, datamodule, ckpt_path, {"verbose": verbose})

    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
    ) -> list[Any] | None:
        """Return what ``predict_step`` returned for each batch: a list, or one list per loader where there are several.

        On several ranks each gets its own part. ``return_predictions=False`` keeps nothing; write in a callback then.
        """
        self.return_predictions = return_predictions is not False
        options = {"return_predictions": return_predictions}
        return self._evaluate("predict", model, dataloaders, datamodule, ckpt_path, options)

    def _evaluate(
        self, stage: str, model: Any, loaders: Any, datamodule: Any, path: Any, options: dict[str, Any]
    ) -> Any:
        model = uncompiled(model) if model is not None else self.module
        if model is None:
            raise ValueError(f"Expected a module to {stage}. Received: none, and nothing was fitted. Pass a module.")
        if datamodule is None and loaders is None:
            datamodule = self.datamodule
        source = LoaderSource(model, {stage: loaders}, datamodule)
        if self.launcher.later:
            return self.launcher.call(self, stage, model, source, ckpt_path=path, **options)
        self._check_idle(stage)
        with self._numerics(), Session(self, stage, model, source, path) as session:
            rows = evaluate(session, stage)
        if stage == "predict":
            found = session.predictions
            return (found[0] if len(found) == 1 else found) if self.return_predictions else None
        if options["verbose"] and self.is_global_zero:
            self._show(stage, rows)
        return rows

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool = False,
        storage_options: Any = None,
        then: Callable[[], None] | None = None,
        asynchronous: bool | None = False,
    ) -> bool:
        """Save the whole run (or its weights alone) as the folder ``filepath``; every rank has to call it.

        True is returned when the checkpoint is durable and ``then`` was called. Inside an accumulation window the save
        waits for the window's edge, and during training ``asynchronous`` (None: where the state takes 64 MiB or more)
        has a copy of the state written beside it: then False is returned, and at the edge of a later step ``then`` is
        called or the error is raised with which the save failed. ``fit`` does not end before.
        """
        if self.session is None or not self.session.prepared:
            raise RuntimeError(
                "Expected a run to save. Received: none that has begun. Call save_checkpoint during or after fit."
            )
        loop = self.session.loop
        if loop is not None and not loop.at_edge and not self.session.failed:
            loop.requests.append(lambda: self._write(filepath, weights_only, then, asynchronous))
            return False
        self._write(filepath, weights_only, then, asynchronous)
        return not self.accelerator.saves.pending

    def _write(
        self, path: str | Path, weights_only: bool, then: Callable[[], None] | None, asynchronous: bool | None
    ) -> None:
        self.accelerator.wait_for_saves()
        self.run_state.collect()
        training = self.session is not None and self.session.stage == "fit" and not self.session.failed
        self.accelerator.save_state(
            path, metadata=metadata(self), weights_only=weights_only, loaders=False, then=then,
            asynchronous=asynchronous if training and self.stage is not None else False,
        )  # fmt: skip

    def log_dict(self, values: dict[str, float]) -> None:
        """Add numbers that are the same on every rank to the next row; for callbacks."""
        if self.metrics is None:
            raise RuntimeError("Expected a run to log to. Received: none. Call log_dict from a hook.")
        self.metrics.pending.update(values)

    def reduce_metrics(self) -> None:
        """Reduce what was logged in this step now, so that ``callback_metrics`` is fresh; every rank has to call it."""
        if self.session is not None and self.session.loop is not None and self.stage == "train":
            self.session.metrics.reduce_step("train", self.progress.step, keep=True)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process, without breaking a progress bar."""
        bar = self.progress_bar_callback
        if self.is_global_zero:
            bar.write(*args, **kwargs) if bar is not None else print(*args, **kwargs)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Return tensors of all ranks in nested ``data``, with a new first dimension of the world's size."""
        if sync_grads:
            raise NotImplementedError(
                "Expected sync_grads=False. Received: True. Use torch.distributed.nn.functional.all_gather."
            )
        return recursively_apply(lambda tensor: torch.stack(self.accelerator.world.all_gather(tensor)), data)

    def _check_idle(self, wanted: str) -> None:
        if self.stage is not None:
            raise RuntimeError(
                f"Expected one run at a time. Received: {wanted} in a hook of stage {self.stage!r}. "
                "Pass validation loaders to fit, or use a Trainer of its own."
            )

    def _sanity_check(self, session: Session) -> None:
        count = self.plan.sanity_batches
        if not count or not session.loaders["validate"] or session.checkpoint is not None:
            return
        session.loaders["sanity_check"] = loaders = session.loaders["validate"]
        limits = [loader.limit for loader in loaders]
        for loader in loaders if count > 0 else ():
            loader.limit = min(count, loader.limit or count)
        session.hooks.fire("on_sanity_check_start")
        evaluate(session, "sanity_check")
        session.hooks.fire("on_sanity_check_end")
        for loader, limit in zip(loaders, limits):
            loader.limit = limit

    def _numerics(self) -> Any:
        """Return a context with the switches of torch that the arguments ask for."""
        return numerics(self.deterministic, self.benchmark, self.detect_anomaly)

    def _show(self, stage: str, rows: list[dict[str, float]]) -> None:
        names = sorted({name for row in rows for name in row})
        width = max(map(len, names), default=0)
        for name in names:
            self.print(f"{stage}  {name:<{width}}  " + "  ".join(f"{row[name]:.6g}" for row in rows if name in row))
