"""From what the user gave (loaders, a data module, or the module's own) to prepared, limited loaders."""

from __future__ import annotations

import math
import warnings
from typing import Any, Mapping

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from .datamodule import DataModule
from .hooks import overrides
from .module import TrainModule

METHODS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


class LoaderSource:
    """Where the loaders of a run come from; asks once for each and keeps the answer."""

    def __init__(self, module: TrainModule, given: dict[str, Any], datamodule: DataModule | None) -> None:
        self.module, self.given, self.datamodule = module, dict(given), datamodule
        if datamodule is not None and not isinstance(datamodule, DataModule):
            raise TypeError(
                f"Expected a DataModule. Received: datamodule={datamodule!r}. Subclass drivetrain.DataModule, and pass "
                "an object; loaders go into the arguments before it."
            )
        for stage, loaders in given.items():
            if isinstance(loaders, DataModule):
                if self.datamodule is not None:
                    raise ValueError("Expected one data module. Received: two (as loaders or datamodule). Pass one.")
                self.datamodule, self.given[stage] = loaders, None
        if self.datamodule is not None and any(value is not None for value in self.given.values()):
            raise ValueError("Expected loaders or a data module. Received: both. Pass one of them.")

    def has(self, stage: str) -> bool:
        """Tell whether somebody provides loaders for a stage."""
        return self.given.get(stage) is not None or self._owner(stage) is not None

    def loaders(self, stage: str) -> Any:
        """Return the user's loaders of a stage as they are."""
        if self.given.get(stage) is not None:
            return self.given[stage]
        owner = self._owner(stage)
        return getattr(owner, METHODS[stage])() if owner is not None else None

    def transfer_owner(self) -> Any:
        """Return the object whose batch-transfer hooks count, or None where nobody overrides one.

        That is the data module where it overrides one, else the module.
        """
        names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        for thing, base in ((self.datamodule, DataModule), (self.module, TrainModule)):
            if thing is not None and any(overrides(thing, name, base) for name in names):
                return thing
        return None

    def _owner(self, stage: str) -> Any:
        if self.datamodule is not None and overrides(self.datamodule, METHODS[stage], DataModule):
            return self.datamodule
        return self.module if overrides(self.module, METHODS[stage], TrainModule) else None


def flatten(loaders: Any, stage: str) -> list[Any]:
    """Return the loaders of an evaluation stage as a list; raises TypeError for what cannot be iterated."""
    if loaders is None:
        return []
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return [loader for entry in loaders for loader in flatten(entry, stage)]
    return [checked(loaders, stage)]


def checked(loader: Any, stage: str) -> Any:
    """Return ``loader`` if it is one; raises TypeError saying what it is otherwise."""
    if isinstance(loader, (list, tuple, Mapping)):
        raise TypeError(
            f"Expected one loader to train on. Received: a {type(loader).__name__} of loaders. "
            "Join the data sets, e.g. by ConcatDataset."
        )
    if not hasattr(loader, "__iter__") or isinstance(loader, str):
        raise TypeError(
            f"Expected a DataLoader for {stage}. Received: {type(loader).__name__}. Wrap the data set in a DataLoader."
        )
    return loader


def prepared(loader: Any, stage: str, *, accelerator: Any, limit: int | float | None, transfer: Any = None) -> Any:
    """Return a prepared loader that ends after ``limit`` (batches, or a fraction of its length)."""
    training = stage == "train"
    if not training and isinstance(getattr(loader, "sampler", None), RandomSampler):
        warnings.warn(
            f"Expected data in order in {METHODS[stage]}. Received: shuffle=True, which costs time and changes "
            "the order of predictions. Use shuffle=False.",
            stacklevel=2,
        )
    loader = accelerator.prepare_data_loader(loader)
    loader.lockstep = training
    loader.transfer = transfer
    loader.divide = accelerator.strategy.divide_batch
    loader.limit = number_of_batches(loader, limit, stage)
    return loader


def number_of_batches(loader: Any, limit: int | float | None, stage: str) -> int | None:
    """Return how many batches of a loader to use; None for all of them."""
    if limit is None or isinstance(limit, float) and limit == 1.0:
        return None
    if isinstance(limit, int):
        return limit
    total = length(loader)
    if math.isinf(total):
        raise ValueError(
            "Expected a number of batches to limit a loader without a length. "
            f"Received: limit_{'val' if stage == 'validate' else stage}_batches={limit}. Use a whole number."
        )
    return max(1, int(total * limit)) if limit else 0


def length(loader: Any) -> float:
    """Return the number of batches of a loader, or math.inf."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return math.inf


def samples_of(loader: Any) -> tuple[int | None, int | None]:
    """Return the samples of all ranks in a batch and in an epoch of a prepared loader, each None if it is not known."""
    batch = loader.total_batch_size
    try:
        total = len(loader.data)
    except (TypeError, NotImplementedError):
        return batch, None
    if not loader.config.shard or isinstance(loader.sampler, DistributedSampler):  # each rank has samples of its own
        total *= loader.world.size
    return batch, total - total % batch if batch and loader.drop_last else total


def in_order(loader: Any) -> Any:
    """Return the same loader without shuffling, for overfitting on the same few batches."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    if not isinstance(loader.sampler, RandomSampler) or loader.batch_size is None:
        return loader
    warnings.warn("Expected data in order to overfit. Received: shuffle=True. Shuffling is switched off.", stacklevel=2)
    names = ("batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
             "prefetch_factor", "persistent_workers")  # fmt: skip
    return DataLoader(
        loader.dataset, sampler=SequentialSampler(loader.dataset), **{n: getattr(loader, n) for n in names}
    )


def transfer_function(owner: Any, device: Any, loader_index: int) -> Any:
    """Return a function that moves a batch by the owner's hooks, or None where the default does."""
    if owner is None:
        return None

    def transfer(batch: Any) -> Any:
        batch = owner.on_before_batch_transfer(batch, loader_index)
        batch = owner.transfer_batch_to_device(batch, device, loader_index)
        return owner.on_after_batch_transfer(batch, loader_index)

    return transfer
