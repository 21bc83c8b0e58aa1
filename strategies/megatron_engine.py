"""One model of Megatron on this rank: its chunks, the schedule that runs them, and the gradients of a window.

megatron-core keeps gradients in buffers of its DDP (`main_grad`). A run of the schedule adds those of a batch; after
the last one of a window `finish` reduces them, and the optimizer may step. Nothing here patches torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .megatron_model import MegatronModel
from .megatron_steps import Job, MicroBatches, Stage, as_numbers
from .nested import recursively_apply
from .pipelined import Deferred, Recorder
from .world import World


class Engine:
    """A model of Megatron between the calls of a training loop.

    Args:
        model: the model, whose calls it answers.
        chunks: the model's chunks as they are called: in Megatron's DDP where they are trained.
        pipeline: the ranks with the stages of one replica.
        micro_batches: into so many a batch is cut.
        trains: there is something to differentiate.
    """

    def __init__(
        self, model: MegatronModel, chunks: list[nn.Module], *, pipeline: World, micro_batches: int, trains: bool
    ) -> None:
        self.model, self.chunks, self.config = model, chunks, model.config
        self.pipeline, self.micro_batches, self.trains = pipeline, micro_batches, trains
        self.optimizer: Any = None  # Megatron's, once there is one
        self.given: Any = None  # the script's
        self.last = pipeline.rank == pipeline.size - 1
        self.fresh = True  # no gradients are kept
        self.pending: Tensor | None = None  # the loss whose gradients were added last
        self.complete = False  # gradients of a whole window are reduced
        self._aside: list[Tensor] | None = None
        self._lengths: dict[Any, dict[str, int]] = {}
        self._job: Job | None = None
        self._chunk: Any = None  # the one that the schedule runs
        model.run = self.answer
        self.parts = self.config.context_parallel_size  # of each sequence
        if self.parts > 1:
            model.part = own_part

    # What the model's calls get

    def answer(self, data: Any) -> Any:
        """Returns the output of the model for a batch.

        In a training step that is for the chunk under way, and ends the step where that is not the last one.
        """
        if self._job is None:
            if torch.is_grad_enabled() and self.model.training:
                raise RuntimeError(
                    "Expected a training step through Megatron's schedule. Received: a call of its model with "
                    "gradients. Train with Trainer, call what accelerator.entry(model, 'training_step') returns, or "
                    "evaluate in torch.no_grad()."
                )
            return self.evaluate(data)
        if self._chunk is None:
            raise ValueError("Expected one call of Megatron's model in a step. Received: a second one.")
        chunk, self._chunk = self._chunk, None
        batch = self.model.batch(data)
        output = batch.run(chunk)
        if self.last and chunk is self.chunks[-1]:
            return self._whole(batch, output)
        raise Stage(output)

    def evaluate(self, data: Any) -> Any:
        """Returns the output of the last chunk on every rank of the pipeline, without gradients."""

        def forward(part: Any, chunk: Any) -> tuple[Any, Callable[..., Any]]:
            batch = self.model.batch(part)
            return batch.run(chunk), lambda output, non_loss_data=True: self._whole(batch, output)

        with torch.no_grad():
            if self.pipeline.size == 1:
                output, whole = forward(data, self.chunks[0])
                return whole(output)
            parts = MicroBatches(data, max(self.micro_batches, self.pipeline.size), self._fits)
            outputs = self._schedule(parts, forward, forward_only=True)
            return _from_last(_joined(outputs[: parts.real]) if self.last else None, self.pipeline)

    def _whole(self, batch: Any, output: Any) -> Any:
        """The output with logits of the whole vocabulary, of which each of the ranks that share a layer has some."""
        if any(batch.inputs.get(name) is not None for name in ("labels", "lm_labels")):
            return output
        logits, *rest = output if isinstance(output, tuple) else (output,)
        if self.config.tensor_model_parallel_size > 1:
            logits = import_module("megatron.core.tensor_parallel").gather_from_tensor_model_parallel_region(logits)
        logits = logits[..., : getattr(self.model.architecture, "vocab_size", None)]  # what is beyond is padding
        return (logits, *rest) if rest else logits

    # A training step

    def run(self, step: Callable[..., Any], batch: Any, *rest: Any, recorder: Recorder) -> Any:
        """Adds the gradients of a batch; returns what the step returns for all of it, on every rank.

        Raises:
            TypeError, ValueError: the step does not return a loss, or does not call the model as it has to.
        """
        parts = MicroBatches(batch, self.micro_batches, self._fits)
        several = parts.count > 1 or self.pipeline.size > 1
        self._set_aside()
        job = self._job = Job(step, rest, recorder if several else None, share=1 / self.parts)
        try:
            with torch.enable_grad():
                self._schedule(parts, self._training, forward_only=False)
        finally:
            self._job = self._chunk = None
        found = job.result() if self.last else None
        if several:
            found = self._told(found, recorder)
        assert found is not None
        return self._deferred(found)

    def native(self, forward_step: Callable[..., Any], batch: Any, *, forward_only: bool) -> list[Any]:
        """Runs a forward step as megatron-core defines it; returns what it reported, where the last chunk is.

        Raises:
            ValueError: the schedule cannot work with so many micro-batches.
        """
        parts = MicroBatches(batch, self.micro_batches, self._fits)
        if parts.count != parts.real:
            raise ValueError(
                f"Expected micro-batches for interleaved stages. Received: {parts.size} samples, num_micro_batches="
                f"{self.micro_batches}. Let the number of stages divide both."
            )
        if not forward_only:
            self._set_aside()

        def forward(part: Any, chunk: Any) -> Any:
            return forward_step(iter([part]), chunk)

        return self._schedule(parts, forward, forward_only=forward_only, collect=False)

    def _training(self, part: Any, chunk: Any, real: bool = True) -> tuple[Tensor, Any]:
        """What the schedule calls for a micro-batch and a chunk."""
        assert self._job is not None
        self._chunk = chunk
        try:
            loss = self._job(part, real=real)
        except Stage as stage:
            return stage.output, None
        if self._chunk is not None:
            raise ValueError("Expected a step that calls Megatron's model once. Received: one that never does.")
        return loss, _as_it_is

    def _schedule(
        self, parts: MicroBatches, forward: Callable[..., Any], *, forward_only: bool, collect: bool | None = None
    ) -> list[Any]:
        schedules = import_module("megatron.core.pipeline_parallel.schedules")
        config = self.config
        virtual = config.virtual_pipeline_model_parallel_size
        iterators: list[Iterator[Any]] = [iter(parts) for _ in self.chunks]

        def step(iterator: Iterator[Any], chunk: Any) -> Any:
            part, real = next(iterator)
            return forward(part, chunk) if real or forward_only else forward(part, chunk, real)

        run = schedules.get_forward_backward_func(pp_size=self.pipeline.size, vp_size=virtual)
        found: list[Any] = run(
            forward_step_func=step, data_iterator=iterators if virtual else iterators[0], model=self.chunks,
            num_microbatches=parts.count, micro_batch_size=parts.samples, forward_only=forward_only,
            collect_non_loss_data=forward_only if collect is None else collect, **self._lengths_of(parts),
        )  # fmt: skip
        return found

    def _lengths_of(self, parts: MicroBatches) -> dict[str, int]:
        """The lengths of sequences, from which stages know the shapes of what they get."""
        if self.pipeline.size == 1:
            return {"seq_length": 1}
        key = parts.shapes
        if key not in self._lengths:
            inputs = self.model.architecture.batch(parts.part(0)).inputs
            tokens = inputs.get("input_ids", inputs.get("encoder_input_ids"))
            found = {"seq_length": int(tokens.shape[1])}
            if "decoder_input_ids" in inputs:
                found["decoder_seq_length"] = int(inputs["decoder_input_ids"].shape[1])
            self._lengths[key] = found
        return self._lengths[key]

    def _fits(self, count: int) -> bool:
        """Whether the schedule can work with so many micro-batches; interleaved ones come in groups."""
        if self.config.virtual_pipeline_model_parallel_size is None:
            return True
        group = self.config.microbatch_group_size_per_vp_stage
        return bool(count >= group and (count % group == 0 or count % group >= self.pipeline.size))

    def _told(self, found: dict[str, Any] | None, recorder: Recorder) -> dict[str, Any]:
        """Lets all ranks of the pipeline know the result and what was logged."""
        logged = recorder.taken() if self.last else None
        if self.pipeline.size > 1:
            told = None if found is None else as_numbers(found)
            found, logged = self.pipeline.broadcast_object((told, logged), src=self.pipeline.size - 1)
        recorder.replay(logged or [])
        assert found is not None
        return found

    def _deferred(self, found: dict[str, Any]) -> Any:
        if found["factor"] is not None:
            self._scale(found["factor"])
        loss = torch.as_tensor(found["loss"], device=self.pipeline.device).detach().clone().requires_grad_()
        self.pending = Deferred.apply(loss, self)
        return self.pending if found["weight"] is None else {"loss": self.pending, "weight": found["weight"]}

    # Gradients of a window

    def buffers(self) -> list[Any]:
        """Returns the buffers of all chunks, each with its `grad_data`."""
        chunks: list[Any] = self.chunks
        return [one for chunk in chunks for one in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def holders(self) -> list[Any]:
        """Returns what holds the gradients that a window has so far, each as its `grad`."""
        if self.pending is not None:  # those of the last run are not settled yet
            return [SimpleNamespace(grad=one) for one in self._aside or []]
        return [] if self.fresh or not self.trains else [SimpleNamespace(grad=one.grad_data) for one in self.buffers()]

    def forget(self) -> None:
        """Drops gradients; the next run begins with none."""
        self.fresh, self.complete, self.pending = True, False, None

    def _set_aside(self) -> None:
        """Begins with empty buffers, where a window has gradients already these are kept until `settle`."""
        if self.complete:
            raise RuntimeError(
                "Expected optimizer.step() between two windows. Received: a second backward pass in one. Wrap "
                "micro-batches in accelerator.accumulate(model), or set num_micro_batches."
            )
        if self.pending is not None:  # a loss that nobody has differentiated
            kept, self.pending = self._aside, None
        else:
            kept = None if self.fresh else [buffer.grad_data.clone() for buffer in self.buffers()]
        self._aside = kept
        for chunk in self.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.fresh = False
        self.config.no_sync_func = [chunk.no_sync for chunk in self.chunks]
        if len(self.chunks) == 1:
            self.config.no_sync_func = self.config.no_sync_func[0]

    def settle(self, scale: Any) -> None:
        """Scales the gradients of the last run, and adds those that were there before."""
        if scale is not None:
            self._scale(scale)
        for buffer, before in zip(self.buffers(), self._aside or []):
            buffer.grad_data.add_(before)
        self._aside = self.pending = None

    def _scale(self, factor: Any) -> None:
        for buffer in self.buffers():
            buffer.grad_data.mul_(factor if not isinstance(factor, Tensor) else factor.to(buffer.grad_data.device))

    def finish(self) -> None:
        """Reduces the gradients of a window over the ranks (collective)."""
        finalize = import_module("megatron.core.distributed").finalize_model_grads
        finalize(self.chunks)
        self.complete = True


def own_part(batch: Any) -> Any:
    """Cuts a batch to the tokens of each sequence that this rank has, as Megatron's context parallel does.

    Raises:
        ValueError: it is no batch of a GPT, or its sequences cannot be cut equally.
    """
    size = 2 * import_module("megatron.core.parallel_state").get_context_parallel_world_size()
    tokens = batch.inputs.get("input_ids")
    if tokens is None or "tokentype_ids" in batch.inputs or tokens.shape[1] % size:
        raise ValueError(
            f"Expected samples of a GPT whose lengths {size} divides, with context_parallel_size. Received: "
            f"{'other inputs' if tokens is None else tuple(tokens.shape)}. Pad them, or leave it at 1."
        )
    cut = import_module("megatron.core.utils").get_batch_on_this_cp_rank
    given = {**batch.inputs, "mask": batch.mask}
    mine = cut({name: value if value is None else value.contiguous() for name, value in given.items()})
    batch.mask = mine.pop("mask")
    batch.inputs = mine
    return batch


def _as_it_is(loss: Tensor) -> tuple[Tensor, None]:
    return loss, None


def _joined(outputs: list[Any]) -> Any:
    """The outputs of all micro-batches as one, along dimension 0."""
    if len(outputs) == 1:
        return outputs[0]
    leaves = [pytree.tree_flatten(output)[0] for output in outputs]
    whole = [torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(whole, pytree.tree_structure(outputs[0]))


def _from_last(value: Any, world: World) -> Any:
    """What the last rank has, on all of them."""
    last = world.size - 1
    mine = world.rank == last

    def shape(tensor: Tensor) -> Any:
        return _Shape(tuple(tensor.shape), tensor.dtype)

    told = world.broadcast_object(recursively_apply(shape, value) if mine else None, src=last)
    leaves, structure = pytree.tree_flatten(told)
    own = pytree.tree_flatten(value)[0] if mine else [None] * len(leaves)
    found = []
    for leaf, tensor in zip(leaves, own, strict=True):
        if isinstance(leaf, _Shape):
            tensor = tensor if mine else torch.empty(leaf.shape, dtype=leaf.dtype, device=world.device)
            leaf = world.broadcast(tensor.contiguous(), src=last)
        found.append(leaf)
    return pytree.tree_unflatten(found, structure)


class _Shape:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
