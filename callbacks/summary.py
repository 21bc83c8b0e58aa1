"""A table of a model's parts and their parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..strategies.random import preserved
from .base import Callback
from .checks import check_whole


class ModelSummary(Callback):
    """Print a table of the model's parts at the start of a fit: ``max_depth`` levels, -1 all, 0 only the totals.

    Where the module has an ``example_input_array`` the sizes of each part's input and output are shown too, for which
    the model runs once, in evaluation mode, without gradients and without a trace in random states. Raises ValueError
    for a bad depth.
    """

    def __init__(self, max_depth: int = 1) -> None:
        check_whole("max_depth", max_depth, least=-1)
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        example = getattr(module, "example_input_array", None)
        summary = summarize(module, self.max_depth, example_input=example)  # on every rank: sharded models run together
        trainer.print(summary)


@dataclass
class Row:
    """One part of a model; numbers count each parameter once."""

    name: str
    type: str
    parameters: int
    trainable: int
    size: int  # bytes
    in_size: str = ""
    out_size: str = ""


@dataclass
class Summary:
    """The parts of a model and its totals, in which a shared parameter counts once; sizes are in bytes."""

    rows: list[Row]
    total_parameters: int
    trainable_parameters: int
    total_size: int
    lazy: bool = field(default=False)  # some parameters have no shape yet and count nothing

    def __str__(self) -> str:
        sized = any(row.in_size or row.out_size for row in self.rows)
        head = ["Name", "Type", "Params", "Trainable", "Size (MB)", *(["In", "Out"] if sized else [])]
        lines = []
        for r in self.rows:
            line = [r.name, r.type, f"{r.parameters:,}", f"{r.trainable:,}", _megabytes(r.size)]
            lines.append([*line, r.in_size, r.out_size] if sized else line)
        frozen = self.total_parameters - self.trainable_parameters
        totals = (
            f"{self.total_parameters:,} parameters ({self.trainable_parameters:,} trainable, {frozen:,} frozen), "
            f"{_megabytes(self.total_size)} MB"
        )
        note = "\nParameters that get their shape at the first forward pass are not counted." if self.lazy else ""
        return (_table(head, lines) + "\n" if lines else "") + totals + note


def summarize(model: nn.Module, max_depth: int = 1, *, example_input: Any = None) -> Summary:
    """Return the summary of ``model`` down to ``max_depth`` levels (-1: all).

    ``example_input`` (a tensor, a tuple of arguments or a dict of named ones) is run through the model once to learn
    sizes.
    """
    deepest = math.inf if max_depth == -1 else max_depth
    parts = [(name, part) for name, part in model.named_modules() if name and name.count(".") < deepest]
    sizes = {} if example_input is None else _observed_sizes(model, [part for _, part in parts], example_input)
    rows = [Row(name, type(part).__name__, *_counts(part), *sizes.get(id(part), ("", ""))) for name, part in parts]
    own = _counts_of(p for p in model.parameters(recurse=False))
    if own[0] and max_depth:
        rows.append(Row("(own)", "Parameter", *own))
    return Summary(rows, *_counts(model), lazy=any(is_lazy(p) for p in model.parameters()))


def _counts(module: nn.Module) -> tuple[int, int, int]:
    return _counts_of(module.parameters())


def _counts_of(parameters: Any) -> tuple[int, int, int]:
    """Return (parameters, trainable ones, bytes); what has no shape yet counts nothing."""
    known = [p for p in parameters if not is_lazy(p)]
    return (
        sum(p.numel() for p in known),
        sum(p.numel() for p in known if p.requires_grad),
        sum(p.numel() * p.element_size() for p in known),
    )


def _observed_sizes(model: nn.Module, parts: list[nn.Module], example: Any) -> dict[int, tuple[str, str]]:
    """Return id(part) → (input size, output size) of one forward pass that leaves no trace."""
    sizes: dict[int, tuple[str, str]] = {}

    def look(part: nn.Module, inputs: Any, outputs: Any) -> None:
        sizes.setdefault(id(part), (_shape(inputs), _shape(outputs)))

    modes = [(module, module.training) for module in model.modules()]
    handles = [part.register_forward_hook(look) for part in parts]
    example = _moved(example, next((p.device for p in model.parameters()), torch.device("cpu")))
    try:
        with preserved(), torch.no_grad():
            model.eval()
            if isinstance(example, dict):
                model(**example)
            else:
                model(*(example if isinstance(example, tuple) else (example,)))
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    return sizes


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _moved(part, device) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(part, device) for part in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "×".join(map(str, value.shape)) or "scalar"
    parts = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, (list, tuple)) else []
    return ", ".join(_shape(part) for part in parts) or "?"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.3f}"


def _table(head: list[str], lines: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [head, *lines]) for column in range(len(head))]
    numeric = range(2, 5)

    def line(cells: list[str]) -> str:
        padded = [c.rjust(w) if i in numeric else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths))]
        return "  ".join(padded).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, lines)])
