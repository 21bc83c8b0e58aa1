"""One call of ``fit``, ``validate``, ``test`` or ``predict``: what is set up before it, and undone after it."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..callbacks.base import AFTER_MODULE, Callback
from ..callbacks.checkpoint import ModelCheckpoint
from ..callbacks.clipping import GradientClipping
from ..callbacks.profiler import Profiler
from ..callbacks.tracking import Tracking
from .checkpoints import HeldGradients, check_hyperparameters, find_checkpoint, restore, run_of
from .datamodule import DataModule
from .hooks import Hooks, fitting, overrides
from .loaders import METHODS, LoaderSource, checked, flatten, in_order, length, prepared, transfer_function
from .metrics import Metrics
from .misspelled import warn_about_misspelled
from .module import TrainModule
from .optimization import LRSchedulerConfig, configured
from .restarts import Attempt

if TYPE_CHECKING:
    from .loop import FitLoop
    from .trainer import Trainer

logger = logging.getLogger(__name__)

_STEP = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}


class Session:
    """Everything that one run of a trainer works with; a context manager around the run."""

    def __init__(self, trainer: Trainer, stage: str, module: TrainModule, source: LoaderSource, ckpt_path: Any) -> None:
        check_module(module, stage, source)
        self.trainer, self.stage, self.module, self.source = trainer, stage, module, source
        self.datamodule = source.datamodule
        self.model: Any = module
        self.callbacks: list[Callback] = list(trainer.callbacks)
        self.loaders: dict[str, list[Any]] = {}
        self.predictions: list[list[Any]] = []
        self.loop: FitLoop | None = None
        self.attempt = Attempt() if stage == "fit" else None
        self.checkpoint = find_checkpoint(trainer, ckpt_path, self.attempt)
        self.siblings: Any = None  # the other ranks, once somebody has asked for them
        self.failed = self.abandoned = False  # abandoned: an evaluation was left before its end
        self.prepared = False  # there is something to save
        self._train_loader: Any = None
        self._given: Any = None  # the training loader as the user gave it
        self._entries: dict[str, Any] = {}

    def __enter__(self) -> Session:
        trainer, module = self.trainer, self.module
        trainer.session, trainer.stage = self, "train" if self.stage == "fit" else self.stage
        trainer.interrupted = False
        run_id = run_of(self.checkpoint) if self.stage == "fit" else None
        trainer.run_folder.claim(
            trainer.accelerator.world, run_id=run_id, anew=self.stage == "fit", create=self._writes()
        )
        try:
            trainer.accelerator.release()  # what the run before has prepared; until now it could be saved
            self._attach()
            self._prepare_data()
            self._fire_setup()
            check_hyperparameters(self)
            self._prepare_model()
            self.prepared = True
            self._prepare_loaders()
            self.hooks = Hooks(trainer, module, self._callbacks_in_force())
            trainer.progress.start()
            if self.stage == "fit":
                self.hooks.fire("on_fit_start")
            restore(self)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        trainer = self.trainer
        try:
            if error is not None:
                self._tell(error)
            elif self.stage == "fit":
                trainer.accelerator.saves.release()
        finally:
            try:
                self._fire_teardown()
            finally:
                trainer.progress.stop()
                trainer.stage = None

    @property
    def train_loader(self) -> Any:
        """The prepared training loader, made at its first use."""
        if self._train_loader is None:
            self._num_training_batches: float | None = None
            self._train_loader = self._prepared(self._training_data(), "train")
        return self._train_loader

    @property
    def num_training_batches(self) -> float:
        """Batches of an epoch on each rank; math.inf where the loader has no length."""
        loader = self.train_loader
        if self._num_training_batches is None:
            self._num_training_batches = length(loader)
        return self._num_training_batches

    def loader_of_epoch(self, epoch: int) -> Any:
        """Return the training loader, a new one where ``reload_dataloaders_every_n_epochs`` says so."""
        every = self.trainer.reload_dataloaders_every_n_epochs
        if every and epoch and epoch % every == 0:
            self._train_loader = self._given = None
            self.trainer.schedule.set_batches(self.num_training_batches)
            self.loaders["validate"] = self._evaluation_loaders("validate")
        return self.train_loader

    def entry(self, step: str, *, manual: bool = False) -> Any:
        """Return the module's step, routed through the strategy's engine where it has one; resolved once."""
        if step not in self._entries:
            self._entries[step] = fitting(self.trainer.accelerator.entry(self.model, step, manual=manual), step)
        return self._entries[step]

    def step_schedulers(self, interval: str, count: int, *, plateau: bool = False) -> None:
        """Step the schedulers of an interval that are due at ``count``; at epochs, plateau schedulers come apart."""
        for config in self.trainer.lr_scheduler_configs if self.module.automatic_optimization else ():
            if config.interval != interval or count % config.frequency:
                continue
            if interval == "epoch" and config.reduce_on_plateau is not plateau:
                continue
            if config.reduce_on_plateau and interval == "step":
                self.trainer.reduce_metrics()
            metric = self._monitored(config) if config.reduce_on_plateau else None
            if metric is not None or not config.reduce_on_plateau:
                self.module.lr_scheduler_step(config.scheduler, metric)

    def _monitored(self, config: LRSchedulerConfig) -> float | None:
        values = self.trainer.callback_metrics
        if config.monitor in values:
            return values[config.monitor]
        if config.strict:
            raise ValueError(
                f"Expected the metric that a scheduler watches to be logged. Received: monitor={config.monitor!r}, "
                f"logged {sorted(values)}. Log it, name a logged one, or set strict=False."
            )
        return None

    # Setting up

    def _writes(self) -> bool:
        """Tell whether something of this run goes into its folder."""
        kinds = (Tracking, ModelCheckpoint, Profiler) if self.stage == "fit" else (Tracking, Profiler)
        return any(isinstance(callback, kinds) for callback in self.trainer.callbacks)

    def _attach(self) -> None:
        trainer, module = self.trainer, self.module
        warn_about_misspelled(module, TrainModule)
        trainer.module = module
        self.metrics = trainer.metrics = Metrics(trainer.accelerator.strategy.loss_world, module)
        module.__dict__["_trainer"], module.__dict__["_metrics"] = trainer, self.metrics
        self.metrics.begin("train", batchwise=False) if self.stage == "fit" else self.metrics.close()
        if self.datamodule is not None:
            self.datamodule.trainer = trainer
            warn_about_misspelled(self.datamodule, DataModule)
        brought = module.configure_callbacks()
        brought = [brought] if isinstance(brought, Callback) else list(brought)
        kinds = tuple(type(callback) for callback in brought)
        self.callbacks = [c for c in trainer.callbacks if not isinstance(c, kinds)] + brought
        for callback in self.callbacks:
            warn_about_misspelled(callback, Callback)

    def _prepare_data(self) -> None:
        with self.trainer.accelerator.local_main_process_first():
            if self.trainer.accelerator.is_local_main_process:
                if self.datamodule is not None:
                    self.datamodule.prepare_data()
                self.module.prepare_data()

    def _fire_setup(self) -> None:
        if self.datamodule is not None:
            self.datamodule.setup(self.stage)
        self._tell_all("setup", self.stage)

    def _prepare_model(self) -> None:
        trainer, module = self.trainer, self.module
        accelerator = trainer.accelerator
        with accelerator.strategy.init_context():
            module.configure_model()
        if self.stage != "fit":
            self.model = accelerator.prepare_model(module, evaluation_mode=True)
            return
        accelerator.register_for_checkpointing(trainer.run_state)
        if not module.automatic_optimization:
            accelerator.register_for_checkpointing(HeldGradients(module))
        optimizers, configs = configured(module)
        prepared_ones = accelerator.prepare(module, *optimizers, *[config.scheduler for config in configs])
        self.model, *rest = prepared_ones if isinstance(prepared_ones, tuple) else (prepared_ones,)
        trainer.optimizers = trainer.manual_optimizers = rest[: len(optimizers)]
        for config, scheduler in zip(configs, rest[len(optimizers) :]):
            config.scheduler = scheduler
        trainer.lr_scheduler_configs = configs

    def _prepare_loaders(self) -> None:
        trainer = self.trainer
        self.metrics.within(trainer.accelerator.world)
        if self.stage != "fit":
            self.loaders[self.stage] = self._evaluation_loaders(self.stage)
            self.predictions = [[] for _ in self.loaders[self.stage]]
            return
        self.loaders["validate"] = self._evaluation_loaders("validate")
        trainer.schedule.validates = bool(self.loaders["validate"])
        trainer.schedule.set_batches(self.num_training_batches)
        trainer.schedule.warn_without_limit()

    def _evaluation_loaders(self, stage: str) -> list[Any]:
        step = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[stage]
        if self.trainer.limit(stage) == 0 or not self.source.has(stage):
            return []
        if stage == "validate" and not overrides(self.module, step, TrainModule):
            warn_about_unused(self.module)
            return []
        if stage == "validate" and self.trainer.overfit_batches:
            loaders = [self._training_data()]
        else:
            loaders = flatten(self.source.loaders(stage), stage)
        return [self._prepared(loader, stage, index) for index, loader in enumerate(loaders)]

    def _training_data(self) -> Any:
        """Return the user's training loader, asked for once; in order where a run overfits."""
        if self._given is None:
            given = checked(self.source.loaders("train"), "training")
            self._given = in_order(given) if self.trainer.overfit_batches else given
        return self._given

    def _prepared(self, loader: Any, stage: str, index: int = 0) -> Any:
        accelerator = self.trainer.accelerator
        transfer = transfer_function(self.source.transfer_owner(), accelerator.device, index)
        return prepared(loader, stage, accelerator=accelerator, limit=self.trainer.limit(stage), transfer=transfer)

    def _callbacks_in_force(self) -> list[Callback]:
        """Return the callbacks; the module's own way of clipping replaces the callback that clips."""
        module = self.module
        if not overrides(module, "configure_gradient_clipping", TrainModule):
            return self.callbacks
        clipping = next((c for c in self.callbacks if isinstance(c, GradientClipping)), None)
        return [c for c in self.callbacks if c is not clipping] + [ModuleClipping(clipping)]

    def _tell_all(self, event: str, argument: Any) -> None:
        """Fire an event that may come before the hooks are compiled, in their order."""
        for function in self._listeners(event):
            function(argument)

    def _listeners(self, event: str) -> list[Any]:
        ordered = sorted(self.callbacks, key=lambda callback: callback.priority)
        early = [callback for callback in ordered if callback.priority < AFTER_MODULE]
        late = ordered[len(early) :]
        bound = [[partial(getattr(c, event), self.trainer, self.module) for c in part] for part in (early, late)]
        return [*bound[0], getattr(self.module, event), *bound[1]]

    # The end

    def _fire_teardown(self) -> None:
        data = [self.datamodule.teardown] if self.datamodule is not None else []
        call_each([*self._listeners("teardown"), *data], self.stage)

    def _end_saves(self) -> None:
        """Wait for the checkpoint that is being written; that it fails is not what this run failed by."""
        try:
            self.trainer.accelerator.saves.release()
        except Exception as error:
            logger.error("The last checkpoint was not saved: %s", error)

    def _tell(self, error: BaseException) -> None:
        self.failed = True
        self._end_saves()
        self.trainer.interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
        data = [self.datamodule.on_exception] if self.datamodule is not None else []
        call_each([*self._listeners("on_exception"), *data], error)


def call_each(functions: list[Any], argument: Any) -> None:
    """Call all functions: an error in one of them is raised once the others had their turn."""
    for position, function in enumerate(functions):
        try:
            function(argument)
        except BaseException:
            call_each(functions[position + 1 :], argument)
            raise


class ModuleClipping(Callback):
    """Lets the module clip in its own way, with the values that ``GradientClipping`` would have used."""

    def __init__(self, clipping: GradientClipping | None) -> None:
        self.value = clipping.value if clipping is not None else None
        self.algorithm = clipping.algorithm if clipping is not None else None

    def on_before_optimizer_step(self, trainer: Any, module: TrainModule, optimizer: Any) -> None:
        module.configure_gradient_clipping(optimizer, self.value, self.algorithm)


def warn_about_unused(module: TrainModule) -> None:
    """Say that there are validation data, which nothing looks at."""
    warnings.warn(
        f"Expected {type(module).__name__} to have a validation_step for the validation data. Received: none. "
        "Nothing is validated. Write the method, or leave the data out.",
        stacklevel=2,
    )


def check_module(module: Any, stage: str, source: LoaderSource) -> None:
    """Raise, before anything is set up, for a module or data that the stage cannot work with."""
    if not isinstance(module, TrainModule):
        raise TypeError(
            f"Expected a TrainModule. Received: {type(module).__name__}. "
            "Subclass drivetrain.TrainModule, or use Accelerator in your own loop."
        )
    step = _STEP.get(stage)
    if step is not None and not overrides(module, step, TrainModule):
        raise TypeError(
            f"Expected {type(module).__name__} to have {step} for {stage}. Received: none. Write the method."
        )
    if stage == "fit" and not overrides(module, "configure_optimizers", TrainModule):
        raise TypeError(
            f"Expected {type(module).__name__} to have configure_optimizers. Received: none. "
            "Write it; None trains without."
        )
    data = "train" if stage == "fit" else stage
    if not source.has(data):
        raise ValueError(
            f"Expected data for {stage}. Received: no loader. "
            f"Pass a DataLoader or a DataModule, or give the module a {METHODS[data]}."
        )
