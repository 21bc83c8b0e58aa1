"""Saving and loading beside safetensors: `python tests/benchmarks/checkpoint.py [--rounds 9] [--megabytes 400]`

The state is a transformer's weights and its two Adam moments. Each contender runs in a process of its own, one torch
thread each, and they take turns. Shown are medians with quartiles of wall and CPU time, each ratio taken within a turn,
and how far the resident memory rose above what the state itself takes. Saves in the background are timed until they
return ("blocked"), beside a copy of the state into memory that is ready for it; their memory is taken until the
checkpoint is durable, once into memory that is ready ("blocked") and once with a new one ("blocked_new"). Nothing is
asserted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WIDTH = 768
CONTENDERS = (
    *("save_file", "save", "save_file_sync", "save_sync"),
    *("load_file", "load", "load_one_by_one", "load_file_into", "load_into"),
    *("copy", "blocked", "blocked_new"),
)
RATIOS = [
    ("save with hashes / save_file (bar 1.15)", "save", "save_file"),
    ("the same, both with fsync (bar 1.1)", "save_sync", "save_file_sync"),
    ("load verified / load_file, all read (bar 1.5)", "load", "load_file"),
    ("the same, one file after the other", "load_one_by_one", "load_file"),
    ("load verified / load_file, into a model (bar 1.5)", "load_into", "load_file_into"),
    ("blocked by a save / copy into ready memory (bar 1.3)", "blocked", "copy"),
    ("the same, by the first save", "blocked_new", "copy"),
]


def state(megabytes: float) -> dict[str, dict[str, object]]:
    """Return {"model", "optimizer"}: tensors of about so many MB in all, a third of them weights."""
    import torch

    torch.manual_seed(0)
    layers = max(1, round(megabytes * 1e6 / 3 / (12 * WIDTH**2 * 4)))
    shapes = {
        "attention": (3 * WIDTH, WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (4 * WIDTH, WIDTH),
        "down": (WIDTH, 4 * WIDTH),
        "norm": (WIDTH,),
    }
    model = {f"layers.{i}.{name}.weight": torch.randn(shape) for i in range(layers) for name, shape in shapes.items()}
    moments = {
        f"{key}.{name}": torch.randn_like(value) for key, value in model.items() for name in ("exp_avg", "exp_avg_sq")
    }
    steps = {f"{key}.step": torch.tensor(100.0) for key in model}
    return {"model": model, "optimizer": {**moments, **steps}}


def contender(name: str, folder: Path, megabytes: float) -> Callable[[], object]:
    """Return what one turn of a contender does; the files that it reads are there."""
    from safetensors.torch import load_file, save_file

    from drivetrain.strategies.checkpoint import Checkpoint, Writer
    from drivetrain.strategies.checkpoint.snapshot import Saves
    from drivetrain.strategies.world import World

    parts, ours, theirs = state(megabytes), folder / "ours", folder / "theirs"
    ready = {stem: {} for stem in parts}
    saves = Saves(World())

    def save_theirs(sync: bool) -> None:
        shutil.rmtree(theirs, ignore_errors=True)
        theirs.mkdir()
        for stem, tensors in parts.items():
            save_file(tensors, theirs / f"{stem}.safetensors")
            if sync:
                with open(theirs / f"{stem}.safetensors") as file:
                    os.fsync(file.fileno())

    def save_ours(sync: bool) -> None:
        shutil.rmtree(ours, ignore_errors=True)
        with Writer(ours, sync=sync) as writer:
            for stem, tensors in parts.items():
                writer.tensors(f"{stem}.safetensors", tensors)
            writer.commit({"step": 1})

    def load_theirs(into: bool) -> object:
        loaded = {stem: load_file(theirs / f"{stem}.safetensors") for stem in parts}
        if into:
            return [parts[stem][key].copy_(value) for stem in parts for key, value in loaded[stem].items()]
        return [
            value.clone() for tensors in loaded.values() for value in tensors.values()
        ]  # it maps: nothing is read yet

    def load_ours(into: bool, together: bool = True) -> object:
        """As `Accelerator.load_state` does it: everything is read and verified before anything is touched."""
        checkpoint = Checkpoint.open(ours, verify=False)
        if together:
            checkpoint.fetch(checkpoint.files)
        return [checkpoint.tensors(f"{stem}.safetensors", into=parts[stem] if into else None) for stem in parts]

    def copy() -> None:
        for stem, tensors in parts.items():
            for key, value in tensors.items():
                ready[stem].setdefault(key, value.clone()).copy_(value)

    def fill(writer: Writer) -> None:
        for stem, tensors in parts.items():
            writer.tensors(f"{stem}.safetensors", tensors)

    def begin(anew: bool) -> Callable[[], None]:
        saves.save(ours, fill, metadata={"step": 1}, background=True)
        return saves.release if anew else saves.wait

    save_theirs(False)
    save_ours(False)
    return {
        "copy": copy, "blocked": lambda: begin(False), "blocked_new": lambda: begin(True),
        "save_file": lambda: save_theirs(False), "save_file_sync": lambda: save_theirs(True),
        "save": lambda: save_ours(False), "save_sync": lambda: save_ours(True),
        "load_file": lambda: load_theirs(False), "load_file_into": lambda: load_theirs(True),
        "load": lambda: load_ours(False), "load_into": lambda: load_ours(True),
        "load_one_by_one": lambda: load_ours(False, together=False),
    }[name]  # fmt: skip


def serve(name: str, folder: Path, megabytes: float) -> None:
    """Run one turn for each line on standard input; answer with wall and CPU seconds and the peak of memory (bytes)."""
    import torch

    torch.set_num_threads(1)
    act = contender(name, folder, megabytes)
    result = act()  # warm
    finish(result)
    for _ in sys.stdin:
        del result
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        wall, cpu = time.perf_counter(), time.process_time()
        result = act()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        finish(result)
        print(wall, cpu, resident("VmHWM") - before, flush=True)


def finish(result: object) -> None:
    """Wait for what goes on in the background after a turn's time was taken."""
    if callable(result):
        result()


def resident(field: str) -> int:
    """Return a field of this process's memory status, bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure(folder: Path, megabytes: float, rounds: int) -> dict[str, list[tuple[float, float, float]]]:
    """Let the contenders take turns; return (wall s, CPU s, memory bytes) of each turn."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = {}
    for name in CONTENDERS:
        (folder / name).mkdir()
        command = [
            sys.executable,
            __file__,
            "--serve",
            name,
            "--folder",
            str(folder / name),
            "--megabytes",
            str(megabytes),
        ]
        processes[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
    turns: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, process in processes.items():
            process.stdin.write("\n")
            process.stdin.flush()
            wall, cpu, memory = map(float, process.stdout.readline().split())
            turns[name].append((wall, cpu, memory))
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return turns


def report(turns: dict[str, list[tuple[float, float, float]]], megabytes: float) -> None:
    """Print the table."""
    for name, values in turns.items():
        wall, cpu, memory = (statistics.median(column) for column in zip(*values, strict=True))
        print(
            f"{name:15s} wall {wall * 1e3:7.1f} ms   CPU {cpu * 1e3:7.1f} ms   "
            f"memory +{memory / megabytes / 1e4:5.1f} %"
        )
    for title, ours, theirs in RATIOS:
        for kind, column in (("wall", 0), ("CPU", 1)):
            ratios = [a[column] / b[column] for a, b in zip(turns[ours], turns[theirs], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"{title:50s} {kind:4s} {middle:.3f}  ({low:.3f} to {high:.3f})")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.folder, options.megabytes)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report(measure(Path(folder), options.megabytes, options.rounds), options.megabytes)


if __name__ == "__main__":
    main()
