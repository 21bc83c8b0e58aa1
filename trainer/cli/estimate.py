"""`drivetrain estimate-memory`: what a model takes by type, optimizer and strategy, with no weight made or loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .sources import COMMAND_LINE, Layer, UsageError, plain_errors

BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
STATES = {"sgd": 0, "sgd-momentum": 1, "adagrad": 1, "rmsprop": 1, "lion": 1, "adam": 2, "adamw": 2}
"""Optimizer → how many numbers it keeps for each parameter."""

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Sizes:
    """Counts of a model's numbers: all parameters, those that train, buffers, the largest layer's parameters."""

    parameters: int
    trained: int
    buffers: int
    largest: int


def main(command: str, args: Sequence[str]) -> int:
    """Run `drivetrain estimate-memory MODEL`."""
    prog = f"drivetrain {command}"
    taken = _parser(prog).parse_args(list(args))
    with plain_errors(prog):
        model = _model(taken.model, trust=taken.trust_remote_code)
        sizes = count(model)
        print(f"{taken.model}: {sizes.parameters:,} parameters, {sizes.trained:,} of them train.\n")
        options = {"optimizer": taken.optimizer, "processes": taken.num_processes, "strategies": taken.strategies}
        print(table(sizes, taken.dtypes, **options))
        print("\nPer process, without activations, which grow with the batch, and without the framework's own memory.")
    return 0


def count(model: Any) -> Sizes:
    """Count a model's numbers; a weight that is used twice counts once, and meta tensors count too."""
    layers = [sum(p.numel() for p in layer.parameters(recurse=False)) for layer in model.modules()]
    repeated = [sum(p.numel() for p in item.parameters()) for holder in _lists(model) for item in holder.children()]
    parameters = list(model.parameters())
    return Sizes(
        parameters=sum(parameter.numel() for parameter in parameters),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        buffers=sum(buffer.numel() for buffer in model.buffers()),
        largest=max([*layers, *repeated], default=0),
    )


def table(
    sizes: Sizes,
    dtypes: Sequence[str],
    *,
    optimizer: str = "adam",
    processes: int = 2,
    strategies: Sequence[str] = STRATEGIES,
) -> str:
    """Return the estimates as a text table, one row for each type."""
    head = ["dtype", "largest layer", "weights"]
    head += [f"{optimizer}, {name}{'' if name == 'single' else f' × {processes}'}" for name in strategies]
    rows = [head]
    for dtype in dtypes:
        training = [_text(training_bytes(sizes, dtype, optimizer, name, processes)) for name in strategies]
        rows.append([dtype, _text(sizes.largest * BITS[dtype] / 8), _text(weight_bytes(sizes, dtype)), *training])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def weight_bytes(sizes: Sizes, dtype: str) -> float:
    """Return the bytes of a model's weights and buffers."""
    return (sizes.parameters + sizes.buffers) * BITS[dtype] / 8


def training_bytes(sizes: Sizes, dtype: str, optimizer: str, strategy: str, processes: int) -> float | None:
    """Return the bytes that weights, gradients and optimizer state take in each process; None for whole numbers.

    single: weights + gradients + states, all in `dtype`. ddp: the same, and buckets as large as the gradients.
    zero1 divides the states by the processes, zero2 the gradients too. fsdp and zero3 divide all of it, and hold two
    largest layers gathered.
    """
    if dtype.startswith("int"):
        return None
    weights, gradients = weight_bytes(sizes, dtype), sizes.trained * BITS[dtype] / 8
    states, layer = gradients * STATES[optimizer], sizes.largest * BITS[dtype] / 8
    return {
        "single": weights + gradients + states,
        "ddp": weights + 2 * gradients + states,
        "zero1": weights + gradients + states / processes,
        "zero2": weights + (gradients + states) / processes,
        "zero3": (weights + gradients + states) / processes + 2 * layer,
        "fsdp": (weights + gradients + states) / processes + 2 * layer,
    }[strategy]


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("model", help="a Hugging Face config.json, a folder with one, or a run's YAML file")
    parser.add_argument("--dtypes", nargs="+", choices=BITS, default=["float32", "float16", "int8", "int4"])
    parser.add_argument("--optimizer", choices=STATES, default="adam")
    parser.add_argument("--num_processes", "--num-processes", type=int, default=2, help="for all but single")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), help="default: all")
    parser.add_argument("--library_name", "--library-name", choices=("transformers",), default="transformers")
    parser.add_argument("--trust_remote_code", "--trust-remote-code", action="store_true", help="run the folder's code")
    return parser


def _model(named: str, *, trust: bool) -> Any:
    """Return the model on the meta device, where no tensor has memory."""
    path = Path(named)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise UsageError(
            f"Expected a config.json, a folder with one, or a run's YAML file. Received: {named}, which is not here. "
            "Nothing is downloaded: fetch the config first."
        )
    return _transformers_model(path, trust=trust) if path.suffix == ".json" else _train_module(path)


def _transformers_model(path: Path, *, trust: bool) -> Any:
    import torch

    try:
        import transformers
    except ImportError:
        raise UsageError(
            f"Expected transformers to build the model of {path}. Received: it is not installed. Install transformers."
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(path.parent), trust_remote_code=trust)
        kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
        with torch.device("meta"):
            if kind is not None:
                return kind(config)
            return transformers.AutoModel.from_config(config, trust_remote_code=trust)
    except (ValueError, OSError, KeyError) as error:
        raise UsageError(f"Expected a config of transformers. Received: {path}: {error}") from None


def _train_module(path: Path) -> Any:
    import torch

    from ..module import TrainModule
    from . import document
    from .parser import RunParser, construct
    from .run import import_from_here

    written = document.read(path.read_text(encoding="utf-8"))
    if not isinstance(written, dict) or "model" not in written:
        raise UsageError(f"Expected a run file with a model. Received: {path}. See drivetrain fit --help.")
    import_from_here()
    parser = RunParser()
    parser.add_class("model", TrainModule, by_path=True, required=True)
    layer = Layer(COMMAND_LINE, {"model": written["model"]}, (f"--model={json.dumps(written['model'])}",))
    config = parser.read([layer])
    with torch.device("meta"):
        return construct(parser, config).model


def _lists(model: Any) -> list[Any]:
    """Return the containers of repeated blocks: a block is gathered as one."""
    import torch

    return [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]


def _text(size: float | None) -> str:
    if size is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return ""
