"""Help pages that need no torch: the Trainer's arguments are read from its source, not from the imported class."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

KEYS = {
    "config": "a YAML file with these keys; several are merged in order",
    "seed_everything": "seeds Python, NumPy and torch before anything is built; false: no seed (default: 0)",
    "trainer": "arguments of the Trainer, below",
    "model": "class_path and init_args of a TrainModule",
    "data": "class_path and init_args of a DataModule, where the model does not bring its own data",
    "optimizer": "class_path and init_args of an optimizer, for a model without configure_optimizers",
    "lr_scheduler": "class_path and init_args of a learning rate scheduler for that optimizer",
    "lr_scheduler_config": "when it steps: interval (epoch or step), frequency, monitor, strict, name",
    "ckpt_path": "checkpoint to start from: a path, last or best",
    "resume": "fit only: checkpoint to go on from, or last: the newest one here, else a fresh start",
}
SCHEDULER_KEYS = ("interval", "frequency", "monitor", "strict", "name")


@dataclass(frozen=True)
class Argument:
    """One argument of the Trainer as its source says it."""

    name: str
    type: str
    default: str
    doc: str


def page(command: str, description: str) -> str:
    """Return what `drivetrain COMMAND --help` prints before the arguments of classes that are named with it."""
    usage = f"usage: drivetrain {command} [--config FILE] [--KEY=VALUE ...]"
    lines = [usage, "", f"{description.capitalize()}.", "", "keys:"]
    for key, text in KEYS.items():
        lines += _row(f"--{key}", text)
    lines += _row("--print-config", "show every resolved value with its source, and stop")
    lines += ["", "arguments of the Trainer:"]
    for argument in trainer_arguments():
        lines += _row(f"--trainer.{argument.name}", f"{argument.doc} ({argument.type}, default: {argument.default})")
    lines += [
        "",
        f"The arguments of a class: drivetrain {command} --model.class_path my.Net --help",
        "Command line > config files > environment (DRIVETRAIN_TRAINER__MAX_EPOCHS) > default config of the machine.",
    ]
    return "\n".join(lines) + "\n"


def keys() -> set[str]:
    """Return all dotted keys of a run that exist before a class is named."""
    trainer = {f"trainer.{argument.name}" for argument in trainer_arguments()}
    return {*KEYS, *trainer, *(f"lr_scheduler_config.{name}" for name in SCHEDULER_KEYS)}


@lru_cache
def trainer_arguments() -> tuple[Argument, ...]:
    """Return the keyword arguments of the Trainer, in their order."""
    tree = ast.parse((Path(__file__).parents[1] / "trainer.py").read_text(encoding="utf-8"))
    trainer = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Trainer")
    init = next(node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    docs = dict(_documented(f"{ast.get_docstring(trainer) or ''}\n\n{ast.get_docstring(init) or ''}"))
    return tuple(
        Argument(
            name=argument.arg,
            type=ast.unparse(argument.annotation).strip("'\"") if argument.annotation else "any",
            default=ast.unparse(default).strip("'\"") if default else "none",
            doc=docs.get(argument.arg, ""),
        )
        for argument, default in zip(init.args.kwonlyargs, init.args.kw_defaults)
    )


def _documented(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield (argument, first sentence about it) from lines like ``name: text``, continued on deeper ones."""
    lines = docstring.splitlines()
    for index, line in enumerate(lines):
        if not (match := re.match(r"(\s*)(?:- )?`*(\w+)`*(?: \(.*\))?: (.+)", line)):
            continue
        text = match[3]
        for following in lines[index + 1 :]:
            if not following.startswith(f"{match[1]} ") or not following.strip():
                break
            text += f" {following.strip()}"
        yield match[2], re.split(r"(?<=[a-z0-9)`])\. ", text.replace("``", ""))[0].rstrip(".")


def _row(option: str, text: str) -> list[str]:
    """Return an option and its text in two columns, as argparse does."""
    wrapped = textwrap.wrap(text.strip(), 94) or [""]
    if len(option) > 22:
        return [f"  {option}", *(f"{'':26}{line}" for line in wrapped)]
    return [f"  {option:<24}{wrapped[0]}", *(f"{'':26}{line}" for line in wrapped[1:])]
