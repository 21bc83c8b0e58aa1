"""`drivetrain test` without a run: a real distributed check of this machine and its launch file.

The checks run through `drivetrain launch`, in the processes that the launch file asks for (where nothing asks for a
number, in two on the CPU, or one per accelerator); the first process says in plain words what passed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from .launch import check_engines, complete, start
from .launch_arguments import parse, resolve
from .launch_exports import used_engines
from .reporting import log_to_stderr
from .sources import plain_errors


def main(command: str, args: Sequence[str]) -> int:
    """Run the check in its processes and return their exit code."""
    prog = f"drivetrain {command}"
    parser = argparse.ArgumentParser(prog, description="Check this machine.", allow_abbrev=False)
    parser.add_argument("--config_file", "--config-file", help="launch file (default: the one in force)")
    taken = parser.parse_args(list(args))
    named = ["--config_file", taken.config_file] if taken.config_file else []
    with plain_errors(prog):
        launch = resolve(parse([*named, "-m", __spec__.name]))
        asked = launch.given("num_processes")
        launch = complete(launch)
        if not asked and launch["num_processes"] == 1 and "TPU (XLA)" not in used_engines(launch):
            launch = complete(launch.with_value("cpu", True, prog).with_value("num_processes", 2, prog))
        check_engines(launch)
        log_to_stderr()
        print(f"Processes to check: {launch['num_processes']}, machines: {launch['num_machines']}.", flush=True)
        return start(launch)


def check() -> int:
    """Run every check in this process, one of several; returns 0 when all hold in all of them."""
    from ..accelerator import Accelerator

    accelerator = Accelerator()
    accelerator.print(f"They run on {accelerator.device.type} in precision {accelerator.precision.name}.")
    failed = 0
    for text, holds in _CHECKS:
        try:
            fine, reason = holds(accelerator), ""
        except Exception as error:
            fine, reason = False, f" ({type(error).__name__}: {error})"
        fine = accelerator.world.agree(fine, how="all")
        failed += not fine
        accelerator.print(f"{'passed' if fine else 'FAILED'}: {text}{reason}")
    accelerator.print("Everything passed." if not failed else f"{failed} of {len(_CHECKS)} checks failed.")
    accelerator.end_training()
    return min(failed, 1)


def _counted(accelerator: Any) -> bool:
    ranks = accelerator.world.gather_object(accelerator.process_index)
    return ranks == list(range(accelerator.num_processes))


def _summed(accelerator: Any) -> bool:
    import torch

    size = accelerator.num_processes
    mine = torch.full((1000,), float(accelerator.process_index), device=accelerator.device)
    return bool((accelerator.world.all_reduce(mine) == size * (size - 1) / 2).all())


def _shared_out(accelerator: Any) -> bool:
    """Whether each sample is seen once, and in the order that one process would see."""
    import torch
    from torch.utils.data import DataLoader

    numbers = torch.arange(37.0)
    loader = accelerator.prepare(DataLoader(numbers.unbind(), batch_size=4))  # type: ignore[arg-type]
    seen = torch.cat([accelerator.gather_for_metrics(batch).cpu() for batch in loader])
    return torch.equal(seen, numbers)


def _trained_alike(accelerator: Any) -> bool:
    """Whether three steps on all processes give the weights that one process gets from the same samples."""
    import torch

    size = accelerator.num_processes
    data = torch.randn(3, size, 8, 5, generator=torch.Generator().manual_seed(0), device="cpu")

    def train(model: Any, optimizer: Any, batch: Callable[[torch.Tensor], torch.Tensor], backward: Callable) -> None:
        for samples in data.to(accelerator.device):
            backward(model(batch(samples)).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()

    one = _model().to(accelerator.device)
    many, optimizer = accelerator.prepare(*_with_optimizer(_model()))
    with accelerator.autocast():
        train(*_with_optimizer(one), lambda samples: samples.flatten(0, 1), lambda loss: loss.backward())
    train(many, optimizer, lambda samples: samples[accelerator.process_index], accelerator.backward)
    tolerance = 1e-5 if accelerator.mixed_precision == "no" else 2e-2
    found = _weights(accelerator, many)
    return bool(found or accelerator.process_index) and _close(found, one.state_dict(), tolerance)


def _saved(accelerator: Any) -> bool:
    """Whether a checkpoint brings back what was saved."""
    import torch

    model, _ = accelerator.prepare(*_with_optimizer(_model()))
    before = _weights(accelerator, model)
    with tempfile.TemporaryDirectory() as mine:
        place = accelerator.world.broadcast_object(mine)
        accelerator.save_state(place)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(place)
        accelerator.wait_for_everyone()
    return _close(_weights(accelerator, model), before, 0.0)


def _weights(accelerator: Any, model: Any) -> dict[str, Any]:
    """Return the whole weights; engines that shard give them to the first process only."""
    return {name: value.detach().float().cpu().clone() for name, value in accelerator.get_state_dict(model).items()}


def _close(found: dict[str, Any], right: dict[str, Any], tolerance: float) -> bool:
    import torch

    return all(torch.allclose(value, right[name].float().cpu(), atol=tolerance, rtol=tolerance)
               for name, value in found.items())  # fmt: skip


def _with_optimizer(model: Any) -> tuple[Any, Any]:
    import torch

    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _model() -> Any:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))


_CHECKS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("all processes are there and know their numbers", _counted),
    ("a sum over all processes is right", _summed),
    ("every sample of a dataset is seen exactly once", _shared_out),
    ("training on all processes gives the weights that one process gets", _trained_alike),
    ("a checkpoint brings back the weights that were saved", _saved),
)

if __name__ == "__main__":
    sys.exit(check())
