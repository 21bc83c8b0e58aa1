"""Modules for models of Megatron: a config, and the rest is here.

    Trainer(strategy=MegatronStrategy(tp_degree=2), devices=2).fit(MegatronGPT(LlamaConfig(...)), loader)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..strategies import megatron_weights
from ..strategies.megatron_data import MegatronLMDummyDataLoader
from ..strategies.megatron_model import MegatronModel
from .datamodule import DataModule
from .module import TrainModule

_ANSWERS = ("labels", "loss_mask", "next_sentence_label", "is_random")


class MegatronModule(TrainModule):
    """A model of megatron-core that is trained on its own loss by AdamW; override what is to be otherwise.

    Logs "train_loss", "val_loss" and "test_loss", means over tokens. `predict_step` returns logits.

    Args:
        config: fields of megatron-core's TransformerConfig with `vocab_size` and `sequence_length`; a config, a model
            or a folder of transformers, or a dict with its `model_type`.
        weights: a model of transformers, a dict of its tensors, or a folder with safetensors. Each rank reads its part.
        lr, betas, eps, weight_decay: of AdamW.
        options: further fields of the architecture (`tied`, `positions`, `vocab_multiple`, …).

    Raises:
        ValueError: a key of the config is unknown, or says what Megatron's model does not compute exactly.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        config: Any,
        *,
        weights: Any = None,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **options: Any,
    ) -> None:
        super().__init__()
        self.model: MegatronModel | None = None
        self.options = options
        self.__dict__.update(source=config, weights=weights)  # not parts of this module, where they are models
        self.adam = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}

    @classmethod
    def from_pretrained(cls, source: Any, **options: Any) -> Any:
        """Returns a module with the config and the weights of a folder or a model of transformers."""
        return cls(source, weights=source, **options)

    def configure_model(self) -> None:
        """Makes this rank's chunks, with the weights that were given."""
        if self.model is not None:
            return
        options = self.options
        if isinstance(self.source, Mapping) and "model_type" not in self.source:
            options = {"kind": self.kind, **options}
        self.model = MegatronModel(self.source, **options)
        found = self.model.architecture.kind
        if found != self.kind:
            raise ValueError(
                f"Expected a config of {self.kind!r} for {type(self).__name__}. Received: one of {found!r}. Use "
                f"{_BY_KIND[found]}."
            )
        if self.weights is not None:
            megatron_weights.load(self.model.architecture, self.model.chunks, self.weights)

    def forward(self, batch: Any) -> Any:
        """Returns the losses of tokens where a batch has labels, else logits."""
        return self._made(self.model)(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the mean loss of a batch over its tokens, and their number as its weight."""
        found = self._made(self.model).loss(batch)
        self.log("train_loss", found["loss"])
        return found

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs the loss."""
        self._evaluate("val_loss", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs the loss."""
        self._evaluate("test_loss", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Returns the logits of a batch; with tensor parallel, those of this rank's part of the vocabulary."""
        if isinstance(batch, Mapping):
            batch = {name: value for name, value in batch.items() if name not in _ANSWERS}
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Returns AdamW of all parameters."""
        return torch.optim.AdamW(self.parameters(), **self.adam)  # type: ignore[arg-type]

    def state_of_transformers(self) -> dict[str, torch.Tensor]:
        """Returns the whole weights under the names of transformers, on every rank; every rank calls this."""
        model = self._made(self.model)
        return megatron_weights.weights(model.architecture, model.chunks)

    def save_pretrained(self, folder: str | Path, *, max_shard_size: int | str = "5GB") -> None:
        """Writes a folder that `from_pretrained` of transformers loads; every rank calls this.

        Raises:
            ValueError: the model is not of a config of transformers.
        """
        model = self._made(self.model)
        megatron_weights.save_pretrained(model.architecture, model.chunks, folder, max_shard_size=max_shard_size)

    def _evaluate(self, name: str, batch: Any) -> None:
        found = self._made(self.model).loss(batch)
        self.log(name, found["loss"], batch_size=found["weight"])  # type: ignore[arg-type]  # as it is on the device

    def _made(self, model: MegatronModel | None) -> MegatronModel:
        if model is None:
            raise RuntimeError(
                f"Expected {type(self).__name__} in a run. Received: no model yet. Call fit of a "
                "Trainer(strategy='megatron')."
            )
        return model


class MegatronGPT(MegatronModule):
    """A GPT: each token is predicted from those before it. Arguments and errors are those of MegatronModule."""

    kind = "gpt"


class MegatronBert(MegatronModule):
    """A BERT: masked tokens are predicted, and with `binary_head` whether a sentence follows. See MegatronModule."""

    kind = "bert"


class MegatronT5(MegatronModule):
    """A T5: what the decoder says is predicted from the encoder's side. See MegatronModule."""

    kind = "t5"


_BY_KIND = {"gpt": "MegatronGPT", "bert": "MegatronBert", "t5": "MegatronT5"}


class MegatronDataModule(DataModule):
    """Megatron's indexed data sets for a Trainer: loaders of training, validation and test data.

    Arguments and errors are those of MegatronLMDummyDataLoader. `num_micro_batches`, `train_iters`, `seq_length` and
    the like of the strategy count.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        super().__init__()
        self.stand_in = MegatronLMDummyDataLoader(**dataset_kwargs)
        self.loaders: list[Any] | None = None

    def setup(self, stage: str) -> None:
        """Builds the data sets, once.

        Raises:
            ValueError: the strategy is not Megatron's.
        """
        if self.loaders is not None:
            return
        assert self.trainer is not None, "setup is called in a run"
        strategy = self.trainer.accelerator.strategy
        if not hasattr(strategy.plugin, "custom_megatron_datasets_provider_function"):
            raise ValueError(
                f"Expected strategy='megatron' for MegatronDataModule. Received: {strategy.name!r}. Use that strategy, "
                "or megatron-core's GPTDataset in a DataLoader."
            )
        self.loaders = self.stand_in.loaders(strategy.plugin, strategy.data_world.size)

    def train_dataloader(self) -> Any:
        """Returns the loader of training data."""
        return self._of(0)

    def val_dataloader(self) -> Any:
        """Returns the loader of validation data."""
        return self._of(1)

    def test_dataloader(self) -> Any:
        """Returns the loader of test data."""
        return self._of(2)

    def _of(self, number: int) -> Any:
        return [] if self.loaders is None or self.loaders[number] is None else self.loaders[number]
