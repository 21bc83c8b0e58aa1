"""What a module and a data module have in common: where loaders come from, and how a batch comes to the device."""

from __future__ import annotations

from typing import Any

import torch


class DataHooks:
    """The hooks around data; override what you need."""

    def prepare_data(self) -> None:
        """Download or preprocess; called on the main process of each node only, so keep no state."""

    def train_dataloader(self) -> Any:
        """Return the loader to train on."""

    def val_dataloader(self) -> Any:
        """Return the loader, or several in a list, tuple or dict, to validate on."""

    def test_dataloader(self) -> Any:
        """Return the loader, or several in a list, tuple or dict, to test on."""

    def predict_dataloader(self) -> Any:
        """Return the loader, or several in a list, tuple or dict, to predict on."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device; override for types that have no ``.to``."""
        from ..strategies.collectives import send_to_device

        return send_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch after it has come to the device."""
        return batch
