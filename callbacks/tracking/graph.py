"""A model's graph for trackers that show it, without a trace in the training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .feed import QueuedTracker


def log_graph(trackers: Sequence[QueuedTracker], module: Any) -> None:
    """Give the graph of `module`, run on its `example_input_array`, to the trackers that take one.

    What cannot be drawn is warned about. Neither the random numbers nor the mode or the buffers of the module change.
    """
    takers = [tracker for tracker in trackers if hasattr(tracker.wrapped, "log_graph")]
    if not takers:
        return
    example = getattr(module, "example_input_array", None)
    if example is None:
        warnings.warn(
            f"Expected {type(module).__name__} to have an example_input_array for log_graph. Received: none. "
            "Set it in the module's constructor.",
            stacklevel=2,
        )
        return
    try:
        graph = drawn_graph(module, example)
    except Exception as error:
        name = type(module).__name__
        warnings.warn(f"The graph of {name} could not be drawn: {error}. The run goes on.", stacklevel=2)
        return
    for tracker in takers:
        tracker.log_graph(graph)


def drawn_graph(module: Any, example: Any) -> bytes:
    """Return the graph of a module as TensorBoard's GraphDef, serialized."""
    from torch.utils.tensorboard._pytorch_graph import graph  # what SummaryWriter.add_graph calls

    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    inputs = _moved(example, device)
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the tracer: that it is old, and that it sees one input only
            definition, _ = graph(module, inputs if isinstance(inputs, tuple) else (inputs,), use_strict_trace=False)
    finally:
        for part, mode in modes:
            part.training = mode
        for buffer, value in buffers:
            buffer.copy_(value)
    return definition.SerializeToString()


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _moved(item, device) for name, item in value.items()}
    return tuple(_moved(item, device) for item in value) if isinstance(value, (list, tuple)) else value
