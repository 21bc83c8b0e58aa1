"""The `drivetrain` command: finds a subcommand's file, and answers --help and --version without importing torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "fit": ("run", "train a model, with validation"),
    "validate": ("run", "evaluate on the validation data"),
    "test": ("run", "evaluate on the test data; without a config: check this machine"),
    "predict": ("run", "predict"),
    "checkpoint": ("checkpoint", "inspect, verify, diff, convert or prune checkpoints"),
    "runs": ("report", "list runs, or show the curves of one in the terminal"),
    "report": ("report", "write one HTML page that shows runs side by side"),
    "prove-resume": ("prove_resume", "show that an interrupted run ends like one that was not, or where it differs"),
    "replay": ("replay", "hand over to trackers what they did not take while a run went on"),
    "launch": ("launch", "start a script in several processes"),
    "config": ("configure", "write the launch file of this machine"),
    "env": ("environment_report", "describe this machine"),
    "plan": ("plan", "say what a run takes of each device's memory under each strategy, and which to use"),
    "estimate-memory": ("estimate", "say how much memory a model takes, by type, optimizer and strategy"),
    "merge-weights": ("merge_weights", "bring sharded weights into one Hugging Face checkpoint"),
    "to-fsdp2": ("to_fsdp2", "turn a launch file for FSDP 1 into one for FSDP 2"),
    "tpu-config": ("tpu_config", "run commands on a TPU pod"),
}
"""Subcommand → (file in this folder that has a ``main(command, args)``, what it does)."""
RUNS = tuple(name for name, (file, _) in COMMANDS.items() if file == "run")
"""The subcommands that run a Trainer from a config."""


def main(args: Sequence[str] | None = None) -> int:
    """Run `drivetrain ARGS` (default: the process's arguments) and return its exit status: 2 for wrong usage."""
    args = list(sys.argv[1:] if args is None else args)
    command = args.pop(0) if args else "--help"
    if command in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0
    if command == "--version":
        from ... import __version__

        print(f"drivetrain {__version__}")
        return 0
    if command not in COMMANDS:
        return _unknown(command)
    file = COMMANDS[command][0]
    if command == "test" and (not args or args[0].startswith(("--config_file", "--config-file"))):
        file = "self_check"  # no run is named: this machine is tested, as by Accelerate's command of that name
    return import_module(f".{file}", __package__).main(command, args)


def usage() -> str:
    """Return what `drivetrain --help` prints."""
    rows = "".join(f"  {name:<17}{text}\n" for name, (_, text) in COMMANDS.items())
    return (
        "usage: drivetrain COMMAND [--config FILE] [--KEY=VALUE ...]\n\n"
        "Trains PyTorch models from a config file.\n\n"
        f"commands:\n{rows}\n"
        "options:\n"
        "  -h, --help            show this help, or that of a command: drivetrain fit --help\n"
        "  --version             show the version\n\n"
        "A first run: drivetrain fit --config run.yaml --trainer.max_epochs=3\n"
    )


def _unknown(command: str) -> int:
    import difflib

    near = [] if command.startswith("-") else difflib.get_close_matches(command, COMMANDS, n=1)
    advice = f"Did you mean {near[0]}?" if near else "Place the command first: drivetrain fit --config run.yaml."
    print(
        f"drivetrain: error: Expected one of {', '.join(COMMANDS)}. Received: {command!r}. {advice}",
        file=sys.stderr,
    )
    return 2
