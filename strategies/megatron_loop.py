"""Accelerate's documented loop with Megatron: an engine that trains and evaluates by one call each.

    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, num_micro_batches=4))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        loss = model(**batch)          # forward, backward, the optimizer's and the scheduler's step
        accelerator.backward(loss)     # these four do nothing, so that a loop for other engines need not change
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from . import subgroup
from .megatron_engine import Engine
from .megatron_model import MegatronModel, find
from .megatron_train_steps import BertTrainStep, GPTTrainStep, T5TrainStep
from .nested import recursively_apply
from .pipelined import Recorder
from .world import World

_HANDLERS: dict[str, Any] = {"gpt": GPTTrainStep, "bert": BertTrainStep, "t5": T5TrainStep}


class MegatronEngine(nn.Module):
    """A prepared model of Megatron: calling it in training mode is a whole step, in evaluation mode gives the loss.

    Args:
        accelerator: the Accelerator (or its strategy) that prepared the model.
        model: a MegatronModel.
        optimizer, scheduler: the prepared ones; None for those that are prepared with the model.
    """

    def __init__(self, accelerator: Any, model: Any, optimizer: Any = None, scheduler: Any = None) -> None:
        super().__init__()
        found: Any = model.module if isinstance(model, MegatronEngine) else model
        if not isinstance(found, MegatronModel):
            raise TypeError(
                f"Expected a MegatronModel. Received: {type(model).__name__}. Let accelerator.prepare make the engine."
            )
        self.module: MegatronModel = found
        self.__dict__["strategy"] = getattr(accelerator, "strategy", accelerator)
        self.optimizer, self.scheduler = optimizer, scheduler
        self.iteration = 0
        self.total_loss_dict: dict[str, Tensor] = {}
        self.handler: Any = None
        self.config = getattr(found.architecture, "hugging_face", None)

    @property
    def engine(self) -> Engine:
        """The model's engine.

        Raises:
            RuntimeError: the model is not prepared.
        """
        found: Engine | None = self.strategy.engine_of(self.module)
        if found is None:
            raise RuntimeError("Expected a prepared model. Received: none. Pass it to accelerator.prepare.")
        return found

    def forward(self, data: Any = None, **batch: Any) -> Any:
        """Trains on a batch, or evaluates it; returns the mean loss over micro-batches and ranks.

        With `return_logits` an evaluation returns a dict with "loss" and "logits".
        """
        if not self.training:
            found = self.eval_step(data, **batch)
        else:
            found, *_ = self.train_step(data, **batch)
            self.iteration += 1
        losses = [value for value in found.values() if value.ndim == 0]
        loss = torch.stack(losses).sum()
        return {"loss": loss, "logits": found["logits"]} if "logits" in found else loss

    def train_step(self, data: Any = None, **batch: Any) -> tuple[dict[str, Tensor], bool, Any, int]:
        """Trains on a batch; returns its losses by name, whether the step was skipped, the norm, and 0.

        Raises:
            ValueError: the model was prepared without an optimizer.
        """
        engine, stepper = self.engine, self.strategy.stepper_of(self.engine)
        data = batch if data is None else data
        losses = self._natively(data) if self._has_own_step() else self._by_architecture(data)
        engine.finish()
        norm = stepper.total_norm()
        skipped = stepper.step()
        if self.scheduler is not None and not skipped:
            self.scheduler.advance()
        return losses, skipped, None if skipped else float(norm), 0

    def eval_step(self, data: Any = None, **batch: Any) -> dict[str, Tensor]:
        """Returns the losses of a batch by name, as means over ranks with other data; with `return_logits` "logits"."""
        data = batch if data is None else data
        if self._has_own_step():
            found = self._evaluated(data)
        else:
            total, count = self.module.batch(data).loss(self.engine.evaluate(data))
            found = {"lm loss": _mean(total, count, self.strategy.loss_world)}
        if self._plugin.return_logits:
            inputs = {name: value for name, value in data.items() if name != "labels"}
            found["logits"] = self.engine.evaluate(inputs)
        return found

    def log_eval_results(self) -> None:
        """Notes nothing: trackers log (see `accelerator.log`)."""

    # How a batch is trained

    @property
    def _plugin(self) -> Any:
        return self.strategy.plugin

    def _has_own_step(self) -> bool:
        said = ("custom_train_step_class", "custom_get_batch_function", "custom_loss_function")
        return any(getattr(self._plugin, name) is not None for name in said)

    def _by_architecture(self, data: Any) -> dict[str, Tensor]:
        """Trains as the model's own batches say, each micro-batch's mean counting the same, or by tokens if so told."""
        by_tokens, module = self._plugin.calculate_per_token_loss, self.module

        def step(part: Any) -> Any:
            found = module.loss(part)
            return found if by_tokens else found["loss"]

        found = self.engine.run(step, data, recorder=Recorder(module))
        if not by_tokens:
            self.engine.settle(None)
            return {"lm loss": _mean(found.detach(), torch.ones((), device=found.device), self.strategy.loss_world)}
        world, weight = self.strategy.loss_world, torch.as_tensor(found["weight"], dtype=torch.float64)
        total = _summed(weight.to(world.device).clone(), world)
        self.engine.settle((weight.to(world.device) * world.size / total.clamp(min=1)).float())
        return {"lm loss": _mean(found["loss"].detach() * weight.float(), weight, world)}

    def _natively(self, data: Any) -> dict[str, Tensor]:
        """Trains by the forward step of an AbstractTrainStep, as Megatron's schedule calls it."""
        return _averaged(self.engine.native(self._forward_step(), data, forward_only=False), self.engine)

    def _evaluated(self, data: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            return _averaged(self.engine.native(self._forward_step(), data, forward_only=True), self.engine)

    def _forward_step(self) -> Callable[..., Any]:
        if self.handler is None:
            kind = self._plugin.custom_train_step_class or _HANDLERS[getattr(self.module.architecture, "kind", "gpt")]
            options = self._plugin.custom_train_step_kwargs or {}
            self.handler = kind(self.strategy, self._plugin, **options)
            self.handler.architecture = self.module.architecture
        step: Callable[..., Any] = self.handler.get_forward_step_func()
        return step


def _mean(total: Tensor, count: Tensor, world: World) -> Tensor:
    """Returns the mean over ranks, of sums and the numbers that they are of."""
    both = _summed(torch.stack([total.detach().double(), count.to(total.device).double()]), world)
    return (both[0] / both[1].clamp(min=1)).float()


def _summed(values: Tensor, world: World) -> Tensor:
    return values if world.size == 1 else world.all_reduce(values)


def _averaged(reports: list[Any], engine: Engine) -> dict[str, Tensor]:
    """The mean of what the last stage reported for each micro-batch, on every rank."""
    found = None
    if engine.last:
        found = {name: float(torch.stack([report[name].float() for report in reports]).mean()) for name in reports[0]}
    pipeline = engine.pipeline
    if pipeline.size > 1:
        found = pipeline.broadcast_object(found, src=pipeline.size - 1)
    assert found is not None
    return {name: torch.tensor(value, device=pipeline.device) for name, value in found.items()}


def avg_losses_across_data_parallel_group(losses: list[Tensor]) -> Tensor:
    """Returns the mean of each of several losses over the ranks with other data."""
    values = torch.cat([loss.detach().clone().view(1) for loss in losses])
    world = subgroup.data()
    return values if world.size == 1 else world.all_reduce(values) / world.size


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Returns nested data with that of all ranks with other data, one behind the other along dimension 0."""
    world = subgroup.data()

    def gathered(one: Tensor) -> Tensor:
        one = one.reshape(1) if one.ndim == 0 else one
        return torch.cat(world.all_gather(one.contiguous())) if world.size > 1 else one

    return recursively_apply(gathered, tensor)


def loop_model(strategy: Any, model: nn.Module) -> nn.Module:
    """Returns what a loop of the user's own gets for a model: an engine, for one of Megatron or of transformers.

    The latter's architecture and weights go into a MegatronModel. Modules that hold a MegatronModel stay as they are.
    """
    if isinstance(model, MegatronModel):
        return MegatronEngine(strategy, model)
    config = getattr(model, "config", None)
    if find(model) is not None or not hasattr(config, "model_type"):
        return model
    made = MegatronModel(config)
    import_module(".megatron_weights", __package__).load(made.architecture, made.chunks, model.state_dict())
    return MegatronEngine(strategy, made)
