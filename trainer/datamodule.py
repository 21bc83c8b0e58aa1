"""A reusable source of loaders: what to download, how to split it, and the loaders of each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterable

import torch
from torch.utils.data import DataLoader, Dataset

from .data_hooks import DataHooks
from .hyperparameters import Hyperparameters

if TYPE_CHECKING:
    from .trainer import Trainer


class DataModule(Hyperparameters, DataHooks):
    """Loaders for ``fit``, ``validate``, ``test`` and ``predict`` in one object; override what you need.

    Order of calls: ``prepare_data`` (main process of each node), ``setup(stage)`` (every process), the loaders,
    ``teardown(stage)``. A ``state_dict`` goes into checkpoints.
    """

    def __init__(self) -> None:
        self.trainer: Trainer | None = None

    def setup(self, stage: str) -> None:
        """Make the data sets of a stage: "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Clean up after a stage."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when a run raises."""

    def state_dict(self) -> dict[str, Any]:
        """Return what has to survive an interruption."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Dataset | Iterable[Dataset] | None = None,
        val_dataset: Dataset | Iterable[Dataset] | None = None,
        test_dataset: Dataset | Iterable[Dataset] | None = None,
        predict_dataset: Dataset | Iterable[Dataset] | None = None,
        *,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> DataModule:
        """Return a data module over data sets; only training data are shuffled (not where they are iterable)."""

        def loaders(datasets: Any, *, shuffle: bool = False) -> Any:
            if isinstance(datasets, (list, tuple)) and all(isinstance(d, Dataset) for d in datasets):
                return [loaders(dataset, shuffle=shuffle) for dataset in datasets]
            shuffle = shuffle and not isinstance(datasets, torch.utils.data.IterableDataset)
            return DataLoader(datasets, batch_size=batch_size, num_workers=num_workers, shuffle=shuffle)

        module = cls(**datamodule_kwargs)
        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for name, datasets in given.items():
            if datasets is not None:
                make = lambda datasets=datasets, name=name: loaders(datasets, shuffle=name == "train")  # noqa: E731
                setattr(module, f"{name}_dataloader", make)
        return module

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, **kwargs: Any) -> Any:
        """Return a data module built from the hyperparameters in a checkpoint; ``kwargs`` win."""
        from .checkpoints import read_hyperparameters

        return cls(**{**read_hyperparameters(cls, checkpoint_path, "datamodule_hparams"), **kwargs})
