"""Accelerate's train steps for Megatron: how its schedule gets a micro-batch, runs a chunk and computes a loss.

A subclass of AbstractTrainStep, given as `custom_train_step_class`, takes the place of those of the model's kind; so do
`custom_get_batch_function(data_iterator)` and `custom_loss_function(loss_mask, output)` of parts of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor


class AbstractTrainStep(ABC):
    """What a training step by Megatron's schedule consists of."""

    architecture: Any = None  # that of the model, once there is one

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Returns `f(data_iterator)`, which takes the next micro-batch."""

    @abstractmethod
    def get_forward_step_func(self) -> Callable[..., Any]:
        """Returns `f(data_iterator, chunk)`, which returns the chunk's output and a function of it: the loss and a dict
        of what is reported."""

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Returns what computes the loss."""


class _ModelStep(AbstractTrainStep):
    """The step of a model as its architecture takes batches; `args` are the options (a MegatronLMPlugin)."""

    kind = "gpt"

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__(f"{self.kind}_train_step")
        self.accelerator, self.args = accelerator, args
        self.model_output_class: Any = None

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        own: Callable[..., Any] | None = getattr(self.args, "custom_get_batch_function", None)
        return own or next

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        own = getattr(self.args, "custom_loss_function", None)

        def loss(batch: Any, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
            if own is not None:
                found: tuple[Tensor, dict[str, Tensor]] = own(batch.mask, output)
                return found
            total, count = batch.loss(output)
            mean = total / count.clamp(min=1)
            return mean, {"lm loss": mean.detach().clone()}

        return loss

    def get_forward_step_func(self) -> Callable[..., Any]:
        take = self.get_batch_func(self.accelerator, bool(getattr(self.args, "megatron_dataset_flag", False)))
        loss = self.get_loss_func(self.accelerator)

        def step(iterator: Any, chunk: Any) -> tuple[Any, Callable[..., Any]]:
            batch = self.architecture.batch(_named(take(iterator)))
            return batch.run(chunk), partial(loss, batch)

        return step


_GPT = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def _named(data: Any) -> Any:
    """A micro-batch by names: of GPT's, Megatron's functions return a tuple."""
    return dict(zip(_GPT, data)) if isinstance(data, (tuple, list)) and len(data) == len(_GPT) else data


class GPTTrainStep(_ModelStep):
    """The step of a GPT: each token is to be predicted from those before it."""


class BertTrainStep(_ModelStep):
    """The step of a BERT: masked tokens are to be predicted, and where it has a head for it the next sentence."""

    kind = "bert"


class T5TrainStep(_ModelStep):
    """The step of a T5: masked spans are to be predicted from the encoder's side."""

    kind = "t5"
