"""One process, many XLA devices (SPMD): how batches and weights are shared out over them.

Tensors carry a note of how they are shared out, and the compiler divides the work: whatever the notes say, the numbers
are those of one device. The mesh has three dimensions, outermost first:

    dp_replicate, dp_shard    rows of a batch; weights too along dp_shard (FSDP)
    tp                        parts of each layer, by the words of a plan (see tensor_parallel.py)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import xla_runtime
from .mesh import ParallelismConfig
from .nested import recursively_apply

Spec = tuple[Any, ...]
AXES = ("dp_replicate", "dp_shard", "tp")
# Words of a plan that say how sequences (dimension 1) leave a module.
_ON_PARTS = ("sequence_parallel", "rowwise_to_sequence", "embedding_to_sequence", "scatter_sequence")


def arrange(parallelism: ParallelismConfig | None, devices: int) -> ParallelismConfig:
    """Returns the degrees for so many devices; without any the rows of each batch are shared out over all.

    Raises:
        ValueError: they do not make up that number, or need ranks that are processes.
    """
    config = parallelism or ParallelismConfig(dp_replicate_size=-1)
    sizes = {name: size for name, size in config.sizes.items() if size != 1}
    shown = ", ".join(f"{name}_size={size}" for name, size in sizes.items()) or "all degrees 1"
    other = set(sizes) - set(AXES)
    if other:
        raise ValueError(
            f"Expected {', '.join(f'{axis}_size' for axis in AXES)} for XLA. Received: {shown}. Leave out "
            f"{', '.join(f'{axis}_size' for axis in sorted(other))}, or use another engine (strategy='cp', 'pp', …)."
        )
    try:
        return config.resolved(devices)
    except ValueError:
        raise ValueError(
            f"Expected degrees whose product is the number of XLA devices. Received: {shown} for {devices} devices. "
            "Change a degree (-1 is what the others leave); on the CPU CPU_NUM_DEVICES says how many devices there are."
        ) from None


class Sharding:
    """The devices as a mesh, and notes on tensors of how they are shared out over it."""

    def __init__(self, config: ParallelismConfig) -> None:
        self.config = config
        self._spmd = xla_runtime.part("distributed.spmd")
        axes = tuple(axis for axis in AXES if config.sizes[axis] != 1) or AXES[:1]
        shape = tuple(config.sizes[axis] for axis in axes)
        self.mesh = self._spmd.Mesh(np.arange(config.total_size), shape, axes)
        self.rows = tuple(axis for axis in axes if axis != "tp")

    def note(self, tensor: Tensor, spec: Spec) -> Tensor:
        """Notes how an XLA tensor is shared out: for each dimension an axis, several, or None."""
        self._spmd.mark_sharding(tensor, self.mesh, spec)
        return tensor

    def like(self, value: Any, parameter: Tensor) -> Any:
        """Returns a tensor of a parameter's shape on its device, shared out as it is; anything else as it is."""
        spec = getattr(parameter, "_xla_spec", None)
        if spec is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        return self.note(value.to(parameter.device), spec)

    def place(self, model: nn.Module, move: Callable[[Callable[[Tensor], Tensor]], None]) -> None:
        """Moves a model's tensors by `move(function)`, each shared out as it comes to the device."""
        specs = self._specs(model)

        def placed(tensor: Tensor) -> Tensor:
            moved = tensor.detach().to("xla")
            spec = specs.get(id(tensor))
            return moved if spec is None or getattr(tensor, "_xla_spec", None) == spec else self.note(moved, spec)

        owned = {id(parameter): parameter for parameter in model.parameters()}
        move(placed)
        for parameter in model.parameters():
            if id(parameter) in owned and id(parameter) in specs:
                parameter._xla_spec = specs[id(parameter)]  # type: ignore[attr-defined]
        self._guide(model)

    # How weights are shared out

    def _specs(self, model: nn.Module) -> dict[int, Spec]:
        """How each parameter is shared out, by its id."""
        specs = self._plan_specs(model) if self.config.tp_enabled else {}
        for parameter in model.parameters():
            spec = list(specs.get(id(parameter), [None] * parameter.dim()))
            free = [dim for dim in range(parameter.dim())
                    if spec[dim] is None and parameter.shape[dim] % self.config.sizes["dp_shard"] == 0]  # fmt: skip
            if self.config.dp_shard_enabled and free:
                spec[max(free, key=lambda dim: parameter.shape[dim])] = "dp_shard"
            if any(axis is not None for axis in spec):
                specs[id(parameter)] = tuple(spec)
        return specs

    def _plan_specs(self, model: nn.Module) -> dict[int, Spec]:
        specs: dict[int, Spec] = {}
        for name, word in self._words(model).items():
            part = model.get_submodule(name)
            for own, parameter in part.named_parameters(recurse=False):
                dim = _divided(word, part, own)
                spec = tuple("tp" if index == dim else None for index in range(parameter.dim()))
                _check_size(name, word, parameter, dim, self.config.sizes["tp"])
                if specs.setdefault(id(parameter), spec) != spec:
                    raise ValueError(
                        f"Expected layers that share a weight to be divided alike. Received: {name}: {word!r}. Give "
                        "both a word that divides the same dimension, such as embedding_rowwise and colwise."
                    )
        return specs

    def _words(self, model: nn.Module) -> dict[str, str]:
        from .tensor_parallel import resolve

        words = {}
        for name, (word, _) in resolve(model, _handler(self.config)).items():
            word = {"ColwiseParallel": "colwise", "RowwiseParallel": "rowwise"}.get(word, word)
            if word[0].isupper():
                raise ValueError(
                    f"Expected a word, ColwiseParallel or RowwiseParallel in a plan for XLA. Received: {name}: {word}. "
                    "Use a word such as 'colwise'."
                )
            words[name] = word
        return words

    # How results are shared out

    def _guide(self, model: nn.Module) -> None:
        """Notes on the results of repeated blocks how they are shared out, so that weights are gathered for each."""
        if vars(model).get("_xla_guided"):
            return
        model.__dict__["_xla_guided"] = True
        blocks = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
        for block in blocks if self.config.dp_shard_enabled else ():
            block.register_forward_hook(lambda module, inputs, outputs: self._results(outputs))
            self._spmd.xla_sharding.apply_backward_optimization_barrier(block)
        for name, word in self._words(model).items() if self.config.tp_enabled else ():
            if word in _ON_PARTS:
                part = model.get_submodule(name)
                part.register_forward_hook(lambda module, inputs, outputs: self._results(outputs, "tp"))

    def _results(self, outputs: Any, sequence: str | None = None) -> Any:
        def noted(tensor: Tensor) -> Tensor:
            if tensor.dim() < 2 or not tensor.is_floating_point():
                return tensor
            return self.note(tensor, (self.rows or None, sequence, *[None] * (tensor.dim() - 2)))

        return recursively_apply(noted, outputs)


def _handler(config: ParallelismConfig) -> Any:
    from .parallel_options import TorchTensorParallelConfig

    return config.tp_handler or TorchTensorParallelConfig()


def _divided(word: str, part: nn.Module, own: str) -> int | None:
    """The dimension of a module's own parameter that a word divides."""
    if isinstance(part, nn.Embedding):
        return 1 if word.startswith("colwise") else 0 if word.startswith(("rowwise", "embedding")) else None
    if not isinstance(part, nn.Linear) or not word.startswith(("colwise", "rowwise")):
        return None
    if own == "bias":
        return 0 if word.startswith("colwise") else None
    return 0 if word.startswith("colwise") else 1


def _check_size(name: str, word: str, parameter: torch.Tensor, dim: int | None, size: int) -> None:
    if dim is not None and parameter.shape[dim] % size:
        raise ValueError(
            f"Expected sizes that tp_size divides. Received: {name} ({word}) with {parameter.shape[dim]} of dimension "
            f"{dim} of {list(parameter.shape)}, tp_size={size}. Change one, or leave it out of the plan."
        )
