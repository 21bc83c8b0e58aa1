"""Tensor parallel: the ranks of one dimension of the mesh share each layer, as a plan of names and words says.

    colwise               Linear: outputs are shared out; Embedding: features are
    rowwise               Linear: inputs are shared out, and the partial results summed
    colwise_gather_output colwise, and outputs put together again (also colwise_rep)
    colwise_loss_parallel colwise, and outputs left as a DTensor for a loss under loss_parallel
    rowwise_split_input   rowwise for inputs that are whole (also rowwise_rep)
    embedding_rowwise     Embedding: the vocabulary is shared out
    replicated_with_grad_allreduce   whole, where each rank sees a part of what it works on (norms of single heads)

Between layers, sequences may be shared out instead of being whole on each rank (dimension 1):

    sequence_parallel     norms and the like that work on each token alone
    colwise_from_sequence, rowwise_to_sequence   the two around it
    colwise_gather_output_from_sequence          at the end
    embedding_to_sequence Embedding whose vocabulary and results are shared out
    scatter_sequence      a module whose whole result is shared out from here on
    gather_sequence       a module that gets whole sequences again

Words are Hugging Face's where it has them. An entry may also be one of torch's parallel styles.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from .parallel_options import TorchTensorParallelConfig


class SummedReplica(ParallelStyle):
    """A whole module each of whose replicas works on a part (such as some heads): their gradients are summed."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                whole = distribute_tensor(parameter.data, device_mesh, [Replicate()])
                part.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        forward = module.forward

        @functools.wraps(forward)
        def on_local_values(*args: Any, **kwargs: Any) -> Any:
            names = dict(module.named_parameters())
            values = {name: _with_partial_gradient(parameter) for name, parameter in names.items()}
            module.forward = forward  # type: ignore[method-assign]
            try:
                return torch.func.functional_call(module, values, args, kwargs)
            finally:
                module.forward = on_local_values  # type: ignore[method-assign]

        module.forward = on_local_values  # type: ignore[method-assign]
        return module


def _with_partial_gradient(parameter: Any) -> torch.Tensor:
    return parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_loss_parallel": lambda: ColwiseParallel(use_local_output=False),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": SummedReplica,
    "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
    "colwise_from_sequence": lambda: ColwiseParallel(input_layouts=Shard(1)),
    "rowwise_to_sequence": lambda: RowwiseParallel(output_layouts=Shard(1)),
    "colwise_gather_output_from_sequence": lambda: ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Replicate()
    ),
    "embedding_to_sequence": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "scatter_sequence": lambda: PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=True
    ),
    "gather_sequence": lambda: PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
    ),
}  # fmt: skip
_DIVIDED = {name: 1 if name.startswith("rowwise") else 0 for name in _STYLES if name.startswith(("colwise", "rowwise"))}
_HEADS = ("num_attention_heads", "num_key_value_heads")


def parallelize(module: nn.Module, mesh: Any, handler: TorchTensorParallelConfig) -> None:
    """Shares a module's layers out over a mesh of one dimension, in place; its parameters become DTensors there.

    Weights are those of the first rank. Parameters that no entry of the plan covers stay whole on each rank.

    Raises:
        ValueError: there is no plan, an entry names no module, or a size does not divide; the message shows which.
    """
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return  # it was divided before, by an earlier run or by who has loaded it
    if handler.enable_async_tp:
        overlap(mesh)
    styles = resolve(module, handler)
    size = mesh.size()
    _check_sizes(module, styles, size)
    tied = _shared_parameters(module)
    for name, (_, style) in styles.items():
        parallelize_module(module.get_submodule(name), mesh, style)
    _tie_again(module, tied, mesh)


@contextmanager
def losses_on_parts() -> Iterator[None]:
    """Lets cross-entropy take outputs whose vocabulary is divided, and return a plain loss; around a backward, too."""
    before = nn.functional.cross_entropy

    def whole(*args: Any, **kwargs: Any) -> Any:
        found = before(*args, **kwargs)
        return found.full_tensor() if isinstance(found, DTensor) else found

    with loss_parallel():
        nn.functional.cross_entropy = whole  # type: ignore[assignment]
        try:
            yield
        finally:
            nn.functional.cross_entropy = before


def overlap(mesh: Any) -> None:
    """Lets torch's compiler overlap the communication of divided layers with their products.

    Raises:
        ValueError: the mesh is not one of CUDA devices.
    """
    if mesh.device_type != "cuda":
        raise ValueError(
            f"Expected CUDA devices for enable_async_tp=True. Received: {mesh.device_type!r}. Leave it out."
        )
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def resolve(module: nn.Module, handler: TorchTensorParallelConfig) -> dict[str, tuple[str, ParallelStyle]]:
    """Returns for each module of a plan its word (or its style's class) and its style."""
    given: Any = handler.plan(module) if callable(handler.plan) else handler.plan
    plan, own = (given, True) if given is not None else (carried_plan(module), False)
    if not plan:
        raise ValueError(
            f"Expected a plan for tensor parallel. Received: {'an empty one' if own else 'none'} for "
            f"{type(module).__name__}, and no part of it carries a _tp_plan. Pass "
            'TorchTensorParallelConfig(plan={"net.layers.*.up": "colwise", …}).'
        )
    names = [name for name, _ in module.named_modules() if name]
    styles: dict[str, tuple[str, ParallelStyle]] = {}
    for pattern, entry in plan.items():
        found = [name for name in names if _matches(name, pattern)]
        if not found and own:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
            raise ValueError(
                f"Expected plan entries that name modules of {type(module).__name__}. Received: {pattern!r}, which "
                f"matches none. {'Nearest: ' + ', '.join(near) if near else 'Its modules: ' + ', '.join(names[:8])}."
            )
        for name in found:
            styles[name] = _style(name, entry)
    if not styles:
        raise ValueError(
            f"Expected a plan that names modules of {type(module).__name__}. Received: {sorted(plan)}, which match "
            "none. Pass a plan of your own."
        )
    return styles


def carried_plan(module: nn.Module) -> dict[str, Any]:
    """Returns the plan that a module or its parts carry as `_tp_plan` (Hugging Face's models), by whole names."""
    own = _plan_on(module)
    if own:
        return dict(own)
    plan: dict[str, Any] = {}
    for name, child in module.named_children():
        plan |= {f"{name}.{pattern}": entry for pattern, entry in carried_plan(child).items()}
    return plan


def _plan_on(module: nn.Module) -> Mapping[str, Any]:
    plan = vars(module).get("_tp_plan")  # an instance's is complete, a class's only what the class adds
    plan = getattr(type(module), "_tp_plan", None) if plan is None and not list(module.children()) else plan
    return plan if isinstance(plan, Mapping) else {}


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _style(name: str, entry: Any) -> tuple[str, ParallelStyle]:
    if isinstance(entry, ParallelStyle):
        return type(entry).__name__, entry
    if entry not in _STYLES:
        raise ValueError(
            f"Expected an entry of a tensor parallel plan to be one of {', '.join(_STYLES)}, or a ParallelStyle of "
            f"torch. Received: {name}: {entry!r}. Choose one of these (experts: ep_size)."
        )
    return entry, _STYLES[entry]()


def _check_sizes(module: nn.Module, styles: Mapping[str, tuple[str, ParallelStyle]], size: int) -> None:
    for name, (word, _) in styles.items():
        part = module.get_submodule(name)
        weight = getattr(part, "weight", None)
        if word not in _DIVIDED or not isinstance(weight, torch.Tensor):
            continue
        dim = _DIVIDED[word] if isinstance(part, nn.Linear) else 1
        if weight.shape[dim] % size:
            raise ValueError(
                f"Expected sizes that tp_size divides. Received: {name} ({word}) with {weight.shape[dim]} of dimension "
                f"{dim} of its weight {list(weight.shape)}, tp_size={size}. Change one, or leave it out of the plan."
            )
    check_heads(module, size, "tp_size", only=_HEADS if styles else ())


def check_heads(module: nn.Module, size: int, what: str, *, only: tuple[str, ...] = _HEADS) -> None:
    """Raises ValueError where a degree does not divide the heads that a model's `config` tells of."""
    for part in module.modules():
        config = getattr(part, "config", None)
        for name in only:
            heads = getattr(config, name, None)
            if isinstance(heads, int) and heads % size:
                raise ValueError(
                    f"Expected {name} that {what} divides. Received: {name}={heads} of {type(part).__name__}, "
                    f"{what}={size}. Use a degree that divides it."
                )


def _shared_parameters(module: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie_again(module: nn.Module, tied: list[list[str]], mesh: Any) -> None:
    """Lets names that shared one parameter share it again: an embedding follows the layer that was divided."""
    for group in tied:
        divided = [name for name in group if isinstance(module.get_parameter(name), DTensor)]
        if not divided:
            continue
        kept = module.get_parameter(divided[0])
        for name in group:
            owner, _, own = name.rpartition(".")
            part = module.get_submodule(owner)
            if name not in divided and isinstance(part, nn.Embedding):
                parallelize_module(part, mesh, _STYLES["embedding_rowwise"]())
            parameter: Any = getattr(part, own)
            if not isinstance(parameter, DTensor) or parameter.placements != kept.placements:
                raise ValueError(
                    f"Expected layers that share a weight to be divided alike. Received: {' and '.join(group)}. "
                    "Give both a word that divides the same dimension, such as embedding_rowwise and colwise."
                )
            setattr(part, own, kept)
