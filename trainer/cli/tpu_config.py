"""`drivetrain tpu-config`: run commands on all workers of a TPU pod, or show how."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import launch_file
from .launch_commands import on_pod
from .sources import UsageError, plain_errors


def main(command: str, args: Sequence[str]) -> int:
    """Run `drivetrain tpu-config`; the exit code is gcloud's."""
    prog = f"drivetrain {command}"
    parser = argparse.ArgumentParser(prog, description=__doc__, allow_abbrev=False)
    parser.add_argument("--config_file", "--config-file", help="launch file (default: the one in force)")
    parser.add_argument("--tpu_name", "--tpu-name", help="name of the pod")
    parser.add_argument("--tpu_zone", "--tpu-zone", help="its zone")
    parser.add_argument("--use_alpha", "--use-alpha", action="store_true", help="gcloud alpha")
    parser.add_argument("--command_file", "--command-file", help="file of commands, one a line")
    parser.add_argument("--command", action="append", help="a command; may be given several times")
    parser.add_argument("--install_accelerate", action="store_true", help="first install accelerate there")
    parser.add_argument("--accelerate_version", default="latest", help="which")
    parser.add_argument("--debug", action="store_true", help="only show the command")
    taken = parser.parse_args(list(args))
    with plain_errors(prog):
        words = _words(taken)
    if taken.debug:
        print(shlex.join(words))
        return 0
    try:
        return subprocess.run(words, check=False).returncode
    except FileNotFoundError:
        parser.error(f"Expected gcloud. Received: none on the PATH. Run it elsewhere: {shlex.join(words)}")


def _words(taken: Any) -> list[str]:
    file = launch_file.load(taken.config_file)
    known = file.values if file else {}
    name, zone = taken.tpu_name or known.get("tpu_name"), taken.tpu_zone or known.get("tpu_zone")
    listed, commands = taken.command_file or known.get("command_file"), taken.command or known.get("commands") or []
    if not name:
        raise UsageError("Expected a TPU pod. Received: no name. Write --tpu_name, or tpu_name in the launch file.")
    if listed and not taken.command:
        if not Path(listed).is_file():
            raise UsageError(f"Expected a file of commands. Received: {listed}, and there is no such file.")
        commands = [line for line in Path(listed).read_text(encoding="utf-8").splitlines() if line.strip()]
    if taken.install_accelerate:
        version = "" if taken.accelerate_version == "latest" else f"=={taken.accelerate_version}"
        commands = [f"pip install accelerate{version}", *commands]
    if not commands:
        raise UsageError("Expected commands. Received: none. Write --command or --command_file.")
    return on_pod(name, zone, ["cd /usr/share", *commands], alpha=taken.use_alpha)
