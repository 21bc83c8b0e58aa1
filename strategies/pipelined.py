"""One training step through a pipeline, by torch's schedules, in the place of a step that the user has written.

The user's step stays as it is: it calls the part that is cut once, with tensors whose dimension 0 is the batch. On the
rank of the first stage the step runs until that call, which gives the pipeline its inputs. On the rank of the last
stage it runs once for each micro-batch, and gets that part's output from the call. Gradients of the mean of its losses
(by their weights, if it gives some) are ready afterwards, and are scaled once `backward` tells by what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from .nested import find_batch_size, recursively_apply
from .sharding import WholeForPass, holders
from .world import World

_KINDS = {
    "GPipe": "ScheduleGPipe", "1F1B": "Schedule1F1B", "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "LoopedBFS": "ScheduleLoopedBFS", "InterleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "ZBVZeroBubble": "ScheduleZBVZeroBubble", "DualPipeV": "ScheduleDualPipeV",
}  # fmt: skip
_FOLDED = ("ZBVZeroBubble", "DualPipeV")  # the ranks hold stages there and back again


def places(schedule: str, ranks: int, per_rank: int) -> list[int]:
    """Returns the rank of each stage."""
    there = list(range(ranks))
    if schedule in _FOLDED:
        return there + there[::-1]
    return there * per_rank


class Stage(PipelineStage):
    """A stage that finds out shapes without a trace: in its buffers, or in the user's step."""

    inferring = False

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        before = [buffer.clone() for buffer in self.submod.buffers()]
        try:
            return super()._forward_metadata_inference(*args, **kwargs)
        finally:
            for buffer, value in zip(self.submod.buffers(), before):
                buffer.copy_(value)

    def _backward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        self.inferring = True
        try:
            return super()._backward_metadata_inference(*args, **kwargs)
        finally:
            self.inferring = False


class _Called(BaseException):
    """Leaves the user's step at its call of the part."""


class Pipeline:
    """The stages of one part on this rank, and the way through them.

    Args:
        part: the part that is cut; its forward is replaced.
        own: this rank's stages by their numbers.
        ranks: the rank of every stage.
        world: the ranks of the pipeline.
        group: their process group.
        schedule: its name; short batches go by GPipe.
        microbatches: parts of a batch; fewer where they do not divide it.
        computing: makes the context that a stage and the step compute in.
    """

    def __init__(
        self,
        part: nn.Module,
        own: dict[int, nn.Module],
        ranks: list[int],
        *,
        world: World,
        group: Any,
        schedule: str,
        microbatches: int,
        computing: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.part, self.own, self.ranks, self.world, self.group = part, own, ranks, world, group
        self.schedule, self.microbatches, self.computing = schedule, microbatches, computing
        self.part.forward = self._forward  # type: ignore[method-assign]
        self._training = False
        self._outputs: Tensor | None = None  # what the part is to return to the user's step
        self._inputs: tuple[Any, Any] | None = None
        self._ready: dict[Any, Any] = {}
        self._job: _Job | None = None
        self._shards = WholeForPass(())
        self.pending: _Gradients | None = None

    def follow_shards(self) -> None:
        """Learns which of its stages are sharded, once they are."""
        self._shards = WholeForPass(self.own.values())

    @property
    def last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.ranks[-1] == self.world.rank

    # The part's forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._training and torch.is_grad_enabled() and self.part.training:
            raise RuntimeError(
                "Expected a training step through the pipeline. Received: a call of the part that is cut into stages, "
                "with gradients. Train with Trainer, or call what accelerator.entry(model, 'training_step') returns."
            )
        if not self._training:
            return self._through(*args, **kwargs)
        if self._inputs is not None:
            raise ValueError("Expected one call of the part that is cut into stages in a step. Received: a second one.")
        self._inputs = (args, kwargs)
        if self._outputs is None:
            raise _Called
        return self._outputs

    def _through(self, *args: Any, **kwargs: Any) -> Any:
        """One forward after the other, whose results all ranks get: for evaluation, without gradients."""
        value: Any = args
        with torch.no_grad(), self.computing():
            for stage, rank in enumerate(self.ranks):
                if rank == self.world.rank:
                    value = self.own[stage](*value, **(kwargs if stage == 0 else {}))
                value = self._handed_on(value, rank)
        return value if len(value) > 1 else value[0]

    def _handed_on(self, value: Any, rank: int) -> tuple[Tensor, ...]:
        mine = rank == self.world.rank
        tensors = (value if isinstance(value, tuple) else (value,)) if mine else ()
        shapes = self.world.broadcast_object([(tuple(one.shape), one.dtype) for one in tensors], src=rank)
        device = self.world.device
        given = tensors or tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)
        return tuple(self.world.broadcast(one.contiguous(), src=rank) for one in given)

    # A training step

    def run(self, step: Callable[..., Any], batch: Any, *rest: Any, recorder: Recorder) -> Any:
        """Runs forward and backward of one batch; returns what the step returns for all of it, on every rank.

        Raises:
            TypeError, ValueError: the step does not return a loss, or does not call the part as it has to.
        """
        size = find_batch_size(batch)
        if not size:
            raise ValueError("Expected a batch with tensors. Received: none. A pipeline cuts them along dimension 0.")
        job = self._job = _Job(step, batch, rest, size, recorder)
        schedule = self._schedule(size)
        args, kwargs = self._captured(job) if self.ranks[0] == self.world.rank else ((), {})
        held = _Gradients(holders(self.own.values()))
        indices = torch.arange(size, device=self.world.device)
        with torch.autocast(self.world.device.type, enabled=False), torch.enable_grad(), self._shards:
            schedule.step(*args, **kwargs, **({"target": indices} if self.last else {}), return_outputs=False)
        found: Any = self.world.broadcast_object(job.result() if self.last else None, src=self.ranks[-1])
        self._job = None
        recorder.replay(found["logged"])
        held.factor = found["factor"]
        self.pending = held
        loss = torch.tensor(found["loss"], dtype=found["dtype"], device=self.world.device)
        loss = Deferred.apply(loss.requires_grad_(), held)
        return loss if found["weight"] is None else {"loss": loss, "weight": found["weight"]}

    def reduce(self) -> None:
        """Makes gradients of stages that ranks share those of all their samples (collective)."""
        self._shards.reduce()

    def _captured(self, job: _Job) -> tuple[Any, Any]:
        """The inputs of the first stage: what the step calls the part with."""
        with self._in_step(None), job.recorder.silent():
            try:
                with torch.no_grad(), self.computing():
                    job.step(job.batch, *job.rest)
            except _Called:
                pass
            if self._inputs is None:
                raise ValueError(
                    "Expected a step that calls the part that is cut into stages. Received: one that never does. Call "
                    "it once, or name the part that it calls: PipelineConfig(module=...)."
                )
            args, kwargs = self._inputs
        wrong = [one for one in (*args, *kwargs.values()) if not isinstance(one, Tensor) or len(one) != job.size]
        if wrong:
            raise ValueError(
                "Expected tensors with the batch as dimension 0 for the part that is cut into stages. Received: "
                f"{type(wrong[0]).__name__}, and {job.size} samples. Pass such tensors only."
            )
        return args, kwargs

    @contextmanager
    def _in_step(self, outputs: Tensor | None) -> Iterator[None]:
        self._training, self._outputs, self._inputs = True, outputs, None
        try:
            yield
        finally:
            self._training, self._outputs = False, None

    def _loss(self, output: Any, indices: Tensor) -> Tensor:
        """What the schedule differentiates on the last rank, for one micro-batch."""
        stage: Any = self._last_stage
        job = self._job
        assert job is not None
        if stage.inferring:
            return output.float().sum()
        with self._in_step(output), self.computing():
            return job.micro_step(indices)

    def _schedule(self, size: int) -> Any:
        """The schedule for batches of a size; the stages learn their shapes anew for each."""
        count = next(number for number in range(min(self.microbatches, size), 0, -1) if size % number == 0)
        if (size, count) not in self._ready:
            stages = [
                Stage(_Computing(module, self.computing), index, len(self.ranks), self.world.device, group=self.group)
                for index, module in self.own.items()
            ]
            self._last_stage = next((stage for stage in stages if stage.is_last), None)
            self._ready[size, count] = (self._made(stages, count), self._last_stage)
        schedule, self._last_stage = self._ready[size, count]
        return schedule

    def _made(self, stages: list[Any], count: int) -> Any:
        name = self.schedule if _fits(self.schedule, count, self.world.size, len(self.ranks)) else None
        if name is None:  # a short batch: any schedule gives the same gradients
            name = "GPipe" if len(stages) == 1 else "LoopedBFS"
            if self.schedule in _FOLDED:
                name = self.schedule
        kind = getattr(schedules, _KINDS[name])
        loss = self._loss if self.last else _no_loss
        return kind(stages[0] if len(stages) == 1 else stages, count, loss_fn=loss, scale_grads=False)


def _no_loss(*args: Any) -> Tensor:
    raise RuntimeError("Only the last stage has a loss.")


def _fits(schedule: str, count: int, ranks: int, stages: int) -> bool:
    """Whether a schedule can work with so many micro-batches."""
    if schedule in ("GPipe", "LoopedBFS"):
        return True
    if schedule == "1F1B":
        return count >= stages
    return count % ranks == 0 and count >= (2 * ranks if schedule in _FOLDED else ranks)


class _Computing(nn.Module):
    """A stage in the precision of the run; its parameters are the stage's own."""

    def __init__(self, module: nn.Module, computing: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.module, self._computing = module, computing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._computing():
            return self.module(*args, **kwargs)


class _Job:
    """One batch on its way: what the last rank finds out about it."""

    def __init__(self, step: Callable[..., Any], batch: Any, rest: Any, size: int, recorder: Recorder) -> None:
        self.step, self.batch, self.rest, self.size, self.recorder = step, batch, rest, size, recorder
        self.losses: list[Tensor] = []
        self.weights: list[float | None] = []
        self.dtype = torch.float32

    def micro_step(self, indices: Tensor) -> Tensor:
        """Runs the user's step on some samples; returns what is differentiated."""
        first, last = int(indices[0]), int(indices[-1]) + 1

        def rows(tensor: Tensor) -> Tensor:
            return tensor[first:last] if tensor.ndim and len(tensor) == self.size else tensor

        with self.recorder.recording():
            outputs = self.step(recursively_apply(rows, self.batch), *self.rest)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                "Expected a step that returns a loss of one number, or a dict with 'loss', in a pipeline. Received: "
                f"{type(outputs).__name__}. Return it for every batch."
            )
        weight = outputs.get("weight") if isinstance(outputs, Mapping) else None
        self.losses.append(loss.detach())
        self.weights.append(None if weight is None else float(weight))
        return loss if weight is None else loss * float(weight)

    def result(self) -> dict[str, Any]:
        """The loss of the whole batch, what gradients are to be multiplied by, and what was logged."""
        losses = [float(loss) for loss in self.losses]
        dtype = self.losses[0].dtype
        if any((weight is None) != (self.weights[0] is None) for weight in self.weights):
            raise ValueError("Expected a weight with every loss of a batch or with none. Received: both. Give each.")
        weights = [1.0 if weight is None else weight for weight in self.weights]
        total = math.fsum(weights)
        factor = 1 / total if total else 0.0
        loss = math.fsum(one * weight for one, weight in zip(losses, weights)) * factor
        weight = None if self.weights[0] is None else total
        return {"loss": loss, "weight": weight, "factor": factor, "dtype": dtype, "logged": self.recorder.taken()}


class _Gradients:
    """What one run of a schedule adds to the gradients of this rank, until its scale is known."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        self.before = [parameter.grad for parameter in parameters]
        self.factor = 1.0
        for parameter in parameters:
            parameter.grad = None

    def settle(self, scale: Tensor) -> None:
        """Scales what came in, and adds it to what was there."""
        for parameter, before in zip(self.parameters, self.before):
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.device) * self.factor)
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


class Deferred(torch.autograd.Function):
    """The loss of a batch whose gradients are there already: its backward scales them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: _Gradients) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> Any:
        ctx.gradients.settle(scales[0])
        return None, None


class Recorder:
    """What the user's step logs on the last rank, told to all ranks: `log` of a module, for a while."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._calls: dict[str, list[tuple[float, Any, Any]]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keeps what is logged in the block."""
        with self._instead(self._keep):
            yield

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Drops what is logged in the block."""
        with self._instead(lambda *args, **kwargs: None):
            yield

    @contextmanager
    def _instead(self, log: Callable[..., None]) -> Iterator[None]:
        vars(self.module)["log"] = log
        try:
            yield
        finally:
            del vars(self.module)["log"]

    def _keep(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, Tensor) and value.numel() != 1 or not isinstance(value, (Tensor, int, float)):
            raise ValueError(
                f"Expected one number under {name!r} in a step of a pipeline. Received: {type(value).__name__}, which "
                "only the rank of the last stage has. Log numbers there, metric objects in validation."
            )
        number = float(value.detach() if isinstance(value, Tensor) else value)
        self._calls.setdefault(name, []).append((number, args, kwargs))

    def taken(self) -> list[tuple[str, float, Any, Any]]:
        """Returns what was logged, each name once: the values of all micro-batches in one."""
        calls, self._calls = self._calls, {}
        return [
            (name, _combined([value for value, _, _ in found], found[0][2]), *found[0][1:])
            for name, found in calls.items()
        ]

    def replay(self, logged: list[tuple[str, float, Any, Any]]) -> None:
        """Logs it on this rank."""
        log: Any = getattr(self.module, "log", None)
        for name, value, args, kwargs in logged:
            log(name, value, *args, **kwargs)


def _combined(values: list[float], options: Mapping[str, Any]) -> float:
    reduction = options.get("reduce_fx", "mean")
    word = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "mean")
    if word in ("min", "max"):
        return min(values) if word == "min" else max(values)
    if word == "sum":
        return math.fsum(values)
    return math.fsum(values) / len(values)
