"""TrainCLI: `TrainCLI(MyModule, MyData)` makes a script a command line; the `drivetrain` commands are one too."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from ... import __version__
from ...callbacks.base import Callback
from ...callbacks.tracking.base import GeneralTracker
from ...strategies.base import Strategy
from ...strategies.deepspeed_plugin import DeepSpeedPlugin
from ...strategies.random import set_seed
from ..accelerator import Accelerator
from ..datamodule import DataModule
from ..module import TrainModule
from ..trainer import Trainer
from . import document
from .classes import class_pages, shortened
from .main import RUNS
from .optimizers import provide_optimizer
from .parser import RunParser, build_named, construct
from .sources import DEFAULT, UsageError, check, collect, outside, plain_errors, source_of
from .written import SaveConfig

_log = logging.getLogger(__name__)
_KINDS: dict[str, tuple[type, ...]] = {
    "logger": (GeneralTracker, Callback), "profiler": (Callback,), "strategy": (Strategy,),
    "accelerator": (Accelerator,), "deepspeed": (DeepSpeedPlugin,),
}  # fmt: skip
"""Arguments of the Trainer that take many things → the classes that a config may name there."""


class TrainCLI:
    """Reads the settings of a run from the command line and config files, builds its objects, and runs it.

    ``TrainCLI(MyModule, MyData)`` in ``train.py`` makes ``python train.py fit --config run.yaml --model.lr=0.1`` work.
    Without a class, or with ``subclass_mode_model``/``subclass_mode_data``, the config names one by class_path and
    init_args. ``run=False`` takes no subcommand and only builds ``trainer``, ``model`` and ``datamodule``.
    Override ``add_arguments_to_parser`` for keys and links of your own; ``before_<command>`` and ``after_<command>``
    are called where they are defined. Wrong usage ends the process with status 2, a constructor that raises with 1.
    """

    def __init__(
        self,
        model_class: type[TrainModule] | None = None,
        datamodule_class: type[DataModule] | None = None,
        *,
        trainer_class: type[Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int | None = True,
        save_config_callback: Callable[[str], Callback] | None = SaveConfig,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        auto_configure_optimizers: bool = True,
        parser_kwargs: dict[str, Any] | None = None,
        args: Sequence[str] | None = None,
        run: bool = True,
    ) -> None:
        self.model_class, self.datamodule_class, self.trainer_class = model_class, datamodule_class, trainer_class
        self.by_path = {
            "model": subclass_mode_model or model_class is None,
            "data": subclass_mode_data or datamodule_class is None,
        }
        self.save_config_callback = save_config_callback
        self.auto_configure_optimizers = auto_configure_optimizers
        options = {"prog": Path(sys.argv[0]).name, **(parser_kwargs or {})}
        with plain_errors(options["prog"]):
            self.subcommand, args = _command(args, run)
            self.parser = RunParser(**options)
            self._add_keys(seed_everything_default, trainer_defaults)
            self._read(args)
            self._instantiate()
        if self.subcommand:
            self.run(self.subcommand)

    def add_arguments_to_parser(self, parser: RunParser) -> None:
        """Add arguments, defaults and links of your own; by default none."""

    def run(self, command: str) -> Any:
        """Call the trainer's ``command``: fit, validate, test or predict."""
        options: dict[str, Any] = {"datamodule": self.datamodule, "ckpt_path": self.config.get("ckpt_path")}
        if command == "fit":
            options["resume"] = self.config.get("resume")
        elif self.config.get("resume") is not None:
            _log.warning("resume=%s has no meaning in %s. Use ckpt_path.", self.config.resume, command)
        if command == "predict":  # a command line has nobody to hand them to: callbacks take them as they come
            options["return_predictions"] = False
        getattr(self, f"before_{command}", _nothing)()
        result = getattr(self.trainer, command)(self.model, **options)
        getattr(self, f"after_{command}", _nothing)()
        return result

    def print_config(self) -> str:
        """Return every resolved value with its source as a comment; the text is a config file itself."""
        return document.write(self.parser.resolved(self.config), self._source)

    def _add_keys(self, seed: bool | int | None, trainer_defaults: dict[str, Any] | None) -> None:
        parser = self.parser
        parser.add_files()
        parser.add_seed(0 if seed is True else seed)
        parser.add_class_arguments(self.trainer_class, "trainer", fail_untyped=False, instantiate=False)
        parser.add_class("model", self.model_class or TrainModule, by_path=self.by_path["model"], required=True)
        parser.add_class("data", self.datamodule_class or DataModule, by_path=self.by_path["data"], required=False)
        if self.auto_configure_optimizers:
            parser.add_optimizer_keys()
        parser.add_checkpoint_keys()
        self.add_arguments_to_parser(parser)
        parser.set_defaults({f"trainer.{name}": value for name, value in (trainer_defaults or {}).items()})

    def _read(self, args: Sequence[str]) -> None:
        keys = self.parser.keys()
        self._layers = collect(args, keys)
        if {"-h", "--help"} & set(args):
            print(self._help(), end="")
            raise SystemExit(0)
        check(self._layers, keys)
        self.config = self.parser.read(self._layers)
        self._agree_on_seed()
        if {"--print-config", "--print_config"} & set(args):
            print(self.print_config(), end="")
            raise SystemExit(0)

    def _help(self) -> str:
        named = class_pages(self._layers) if any(self.by_path.values()) else []
        return "\n".join([shortened(self.parser.format_help()), *named])

    def _agree_on_seed(self) -> None:
        """Let seed_everything and trainer.seed be one number: the copy of the config then starts the same run."""
        config, self._twin = self.config, {}
        if isinstance(config.seed_everything, bool):
            config.seed_everything = 0 if config.seed_everything else None
        if config.trainer.get("seed") is None:
            return
        given = source_of(("seed_everything",), self._layers)
        if given != DEFAULT and config.seed_everything != config.trainer.seed:
            raise UsageError(
                f"Expected one seed. Received: seed_everything={config.seed_everything} ({given}) and trainer.seed="
                f"{config.trainer.seed} ({source_of(('trainer', 'seed'), self._layers)}). Remove one of them."
            )
        config.seed_everything = config.trainer.seed
        self._twin = {("seed_everything",): ("trainer", "seed")}

    def _source(self, path: tuple) -> str:
        return source_of(self._twin.get(path, path), self._layers)

    def _instantiate(self) -> None:
        """Build the trainer, then the rest: where the trainer starts processes, this one needs no model."""
        seed, settings = self.config.seed_everything, self.print_config()
        if seed is not None:
            set_seed(seed)
        self.trainer = self._trainer(construct(self.parser, Namespace(trainer=self.config.trainer)).trainer, settings)
        self._log_machine_settings()
        if seed is not None:
            set_seed(seed)  # what the trainer has drawn must not show in the model's first weights
        rest = {key: value for key, value in vars(self.config).items() if key != "trainer"}
        self.config_init = construct(self.parser, Namespace(rest))
        self.model: TrainModule = self.config_init.model
        self.datamodule: DataModule | None = self.config_init.get("data")
        if self.auto_configure_optimizers and self.subcommand in ("fit", None):
            optimizer, scheduler = self.config.get("optimizer"), self.config.get("lr_scheduler")
            schedule = self.config.lr_scheduler_config
            provide_optimizer(self.model, optimizer, scheduler, schedule, required=self.subcommand == "fit")

    def _trainer(self, arguments: Namespace, settings: str) -> Trainer:
        options = dict(vars(arguments))
        for name, kinds in _KINDS.items():
            if name in options:
                options[name] = build_named(options[name], kinds, f"trainer.{name}")
        if "seed" in options:
            options["seed"] = self.config.seed_everything
        leaves_files = not (options.get("fast_dev_run") or options.get("barebones"))
        if self.save_config_callback is not None and leaves_files:
            header = f"# drivetrain {__version__}: --config with this file starts the same run again\n"
            given = options.get("callbacks") or []
            given = list(given) if isinstance(given, (list, tuple)) else [given]
            options["callbacks"] = [*given, self.save_config_callback(header + settings)]
        try:
            return self.trainer_class(**options)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error

    def _log_machine_settings(self) -> None:
        """Name what was decided outside this run's own files and command line."""
        if not self.trainer.is_global_zero:
            return
        for source, settings in outside(self.parser.resolved(self.config), self._layers).items():
            _log.info("%s sets %s", source, ", ".join(settings))


def _command(args: Sequence[str] | None, run: bool) -> tuple[str | None, list[str]]:
    arguments = list(sys.argv[1:] if args is None else args)
    if not run:
        return None, arguments
    command = arguments.pop(0) if arguments and arguments[0] in RUNS else None
    if command is None and not {"-h", "--help"} & set(arguments):
        received = arguments[0] if arguments else "nothing"
        raise UsageError(f"Expected one of {', '.join(RUNS)} first. Received: {received}. Add it, or see --help.")
    return command, arguments


def _nothing() -> None:
    """Stand in for a ``before_fit`` and the like that is not defined."""
