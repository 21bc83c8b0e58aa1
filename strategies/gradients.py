"""What a process knows of gradient accumulation: whether gradients are complete now, and which loader is iterated."""

from __future__ import annotations

from typing import Any, ClassVar

from .settings import GradientAccumulationPlugin


class GradientState:
    """What optimizers, schedulers and loaders of this process need to know of the window; all instances share it.

    A loader calls `enter(self)` when an iteration begins and `leave(self)` when it ends; iterations may nest. The
    loader that was entered last is the active one: only its end closes a window early.
    """

    _shared: ClassVar[dict[str, Any]] = {}

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared
        if not self._shared:
            self.sync_gradients = True
            self.active_dataloader: Any = None
            self.dataloader_references: list[Any] = []
            gradient_accumulation_plugin = gradient_accumulation_plugin or GradientAccumulationPlugin()
        if gradient_accumulation_plugin is not None:
            self.sync_gradients = True  # a new run does not begin inside of a window that an earlier one left
            self.plugin = gradient_accumulation_plugin
            self.num_steps = gradient_accumulation_plugin.num_steps or 1
            self.adjust_scheduler = gradient_accumulation_plugin.adjust_scheduler
            self.sync_with_dataloader = gradient_accumulation_plugin.sync_with_dataloader
            self.sync_each_batch = gradient_accumulation_plugin.sync_each_batch
            self.scale_last_window = gradient_accumulation_plugin.scale_last_window

    def enter(self, loader: Any) -> None:
        """Makes a loader whose iteration begins the active one."""
        self.dataloader_references.append(loader)
        self.active_dataloader = loader

    def leave(self, loader: Any) -> None:
        """Forgets a loader whose iteration ended; the one around it becomes active again."""
        for index in range(len(self.dataloader_references) - 1, -1, -1):
            if self.dataloader_references[index] is loader:
                del self.dataloader_references[index]
                break
        self.active_dataloader = self.dataloader_references[-1] if self.dataloader_references else None

    @property
    def initialized(self) -> bool:
        """Whether any instance was made in this process."""
        return bool(self._shared)

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader yielded its last batch."""
        return self.active_dataloader is not None and self.active_dataloader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples in the last global batch of the active loader; -1 when there is none or it is full."""
        return -1 if self.active_dataloader is None else self.active_dataloader.remainder

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The accumulation settings in force."""
        return {**self.plugin.to_kwargs(), "num_steps": self.num_steps}

    @property
    def is_xla_gradients_synced(self) -> bool:
        """True: only XLA leaves gradients unreduced until the optimizer steps."""
        return True

    def _set_sync_gradients(self, sync_gradients: bool) -> None:  # transformers.Trainer calls it
        self.sync_gradients = sync_gradients

    @classmethod
    def _reset_state(cls) -> None:
        cls._shared.clear()
