"""The settings of a run whose objects are built only when they are asked for."""

from __future__ import annotations

from typing import Any

import torch
from jsonargparse import Namespace

from ..loaders import LoaderSource, checked
from .optimizers import provide_optimizer
from .parser import construct
from .sources import UsageError
from .train_cli import TrainCLI


class Unbuilt(TrainCLI):
    """A command line that builds nothing by itself: the model may be larger than this machine."""

    def make_module(self) -> Any:
        """Build the model, with the config's optimizer."""
        config = self.config
        module = construct(self.parser, Namespace(model=config.model)).model
        optimizer, scheduler = config.get("optimizer"), config.get("lr_scheduler")
        provide_optimizer(module, optimizer, scheduler, config.lr_scheduler_config, required=True)
        return module

    def first_batch(self) -> Any:
        """Return the first micro-batch of the run's own training data; raises UsageError where there is none."""
        with torch.device("meta"):
            module = self.make_module()
        data = self.config.get("data")
        datamodule = None if data is None else construct(self.parser, Namespace(data=data)).data
        for owner in (module, datamodule):
            for hook, arguments in (("prepare_data", ()), ("setup", ("fit",))):
                if owner is not None:
                    getattr(owner, hook)(*arguments)
        source = LoaderSource(module, {"train": None}, datamodule)
        if not source.has("train"):
            raise UsageError(
                "Expected training data in the config. Received: none. Add data, or a train_dataloader to the model."
            )
        return next(iter(checked(source.loaders("train"), "train")))

    def _instantiate(self) -> None:
        """Build nothing yet."""
