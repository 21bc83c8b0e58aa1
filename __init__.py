"""drivetrain: PyTorch training that is exact, durable, thin and plain.

All public names live here and load on first use: `import drivetrain` alone imports no torch.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_SUBPACKAGES = ("callbacks", "strategies", "trainer")

_EXPORTS: dict[str, str] = {
    # The three ways in
    "Trainer": "trainer.trainer",
    "TrainModule": "trainer.module",
    "DataModule": "trainer.datamodule",
    "Accelerator": "trainer.accelerator",
    "TrainCLI": "trainer.cli.train_cli",
    # Callbacks
    "Callback": "callbacks.base",
    "LambdaCallback": "callbacks.base",
    "EarlyStopping": "callbacks.early_stopping",
    "GradientAccumulation": "callbacks.accumulation",
    "GradientClipping": "callbacks.clipping",
    "LearningRateMonitor": "callbacks.lr_monitor",
    "ModelCheckpoint": "callbacks.checkpoint",
    "ModelSummary": "callbacks.summary",
    "OnExceptionCheckpoint": "callbacks.checkpoint",
    "Profiler": "callbacks.profiler",
    "Progress": "callbacks.progress",
    "Timer": "callbacks.timer",
    "Tracking": "callbacks.tracking.callback",
    # Trackers
    "CSVTracker": "callbacks.tracking.csv",
    "GeneralTracker": "callbacks.tracking.base",
    "JSONLinesTracker": "callbacks.tracking.jsonl",
    "TensorBoardTracker": "callbacks.tracking.tensorboard",
    "register_tracker_class": "callbacks.tracking.base",
    # Strategies
    "DDPStrategy": "strategies.ddp",
    "SingleDeviceStrategy": "strategies.base",
    "Strategy": "strategies.base",
    # Settings
    "AutocastKwargs": "strategies.settings",
    "DDPCommunicationHookType": "strategies.settings",
    "DataLoaderConfiguration": "strategies.settings",
    "DistributedDataParallelKwargs": "strategies.settings",
    "DistributedType": "strategies.settings",
    "DynamoBackend": "strategies.settings",
    "GradScalerKwargs": "strategies.settings",
    "GradientAccumulationPlugin": "strategies.settings",
    "InitProcessGroupKwargs": "strategies.settings",
    "LoggerType": "strategies.settings",
    "PrecisionType": "strategies.settings",
    "ProfileKwargs": "strategies.settings",
    "ProjectConfiguration": "strategies.settings",
    "RNGType": "strategies.settings",
    "TorchDynamoPlugin": "strategies.settings",
    # State of this process
    "AcceleratorState": "strategies.state",
    "GradientState": "strategies.gradients",
    "PartialState": "strategies.state",
    # Functions
    "prepare_data_loader": "strategies.data.loader",
    "set_seed": "strategies.random",
    "skip_first_batches": "strategies.data.loader",
}
"""Name → the module that defines it."""

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:  # the same names for editors and type checkers; a test compares both
    from .callbacks.accumulation import GradientAccumulation as GradientAccumulation
    from .callbacks.base import Callback as Callback
    from .callbacks.base import LambdaCallback as LambdaCallback
    from .callbacks.checkpoint import ModelCheckpoint as ModelCheckpoint
    from .callbacks.checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from .callbacks.clipping import GradientClipping as GradientClipping
    from .callbacks.early_stopping import EarlyStopping as EarlyStopping
    from .callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from .callbacks.profiler import Profiler as Profiler
    from .callbacks.progress import Progress as Progress
    from .callbacks.summary import ModelSummary as ModelSummary
    from .callbacks.timer import Timer as Timer
    from .callbacks.tracking.base import GeneralTracker as GeneralTracker
    from .callbacks.tracking.base import register_tracker_class as register_tracker_class
    from .callbacks.tracking.callback import Tracking as Tracking
    from .callbacks.tracking.csv import CSVTracker as CSVTracker
    from .callbacks.tracking.jsonl import JSONLinesTracker as JSONLinesTracker
    from .callbacks.tracking.tensorboard import TensorBoardTracker as TensorBoardTracker
    from .strategies.base import SingleDeviceStrategy as SingleDeviceStrategy
    from .strategies.base import Strategy as Strategy
    from .strategies.data.loader import prepare_data_loader as prepare_data_loader
    from .strategies.data.loader import skip_first_batches as skip_first_batches
    from .strategies.ddp import DDPStrategy as DDPStrategy
    from .strategies.gradients import GradientState as GradientState
    from .strategies.random import set_seed as set_seed
    from .strategies.settings import AutocastKwargs as AutocastKwargs
    from .strategies.settings import DDPCommunicationHookType as DDPCommunicationHookType
    from .strategies.settings import DataLoaderConfiguration as DataLoaderConfiguration
    from .strategies.settings import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from .strategies.settings import DistributedType as DistributedType
    from .strategies.settings import DynamoBackend as DynamoBackend
    from .strategies.settings import GradScalerKwargs as GradScalerKwargs
    from .strategies.settings import GradientAccumulationPlugin as GradientAccumulationPlugin
    from .strategies.settings import InitProcessGroupKwargs as InitProcessGroupKwargs
    from .strategies.settings import LoggerType as LoggerType
    from .strategies.settings import PrecisionType as PrecisionType
    from .strategies.settings import ProfileKwargs as ProfileKwargs
    from .strategies.settings import ProjectConfiguration as ProjectConfiguration
    from .strategies.settings import RNGType as RNGType
    from .strategies.settings import TorchDynamoPlugin as TorchDynamoPlugin
    from .strategies.state import AcceleratorState as AcceleratorState
    from .strategies.state import PartialState as PartialState
    from .trainer.accelerator import Accelerator as Accelerator
    from .trainer.cli.train_cli import TrainCLI as TrainCLI
    from .trainer.datamodule import DataModule as DataModule
    from .trainer.module import TrainModule as TrainModule
    from .trainer.trainer import Trainer as Trainer


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f".{name}", __name__)
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_imported(_EXPORTS[name]), name)
    return value


def _imported(module: str) -> Any:
    """Import a module without collecting garbage meanwhile: all that an import makes stays, and torch makes a lot."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return import_module(f".{module}", __name__)
    finally:
        if collecting:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
