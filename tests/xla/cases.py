"""What the tests here share: a small model and its data, trained under a strategy, and what that cost the runtime."""

from __future__ import annotations

import functools
from typing import Any

import torch
from drivetrain import Accelerator, DataLoaderConfiguration, ParallelismConfig, TorchTensorParallelConfig
from drivetrain.tests.xla.running import run
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

PLAN = {"up": "colwise", "down": "rowwise"}


def started() -> None:
    """Start the XLA runtime: torch counts its devices at the first backward pass, which may be the reference's."""
    import torch_xla

    torch_xla.device()


def started_spmd() -> None:
    """The same for a process whose devices are used as one."""
    import torch_xla.runtime as runtime

    runtime.use_spmd()
    started()


def counted() -> dict[str, int]:
    """Return how often graphs were compiled, run, and values read, since the process began."""
    import torch_xla.core.xla_model as xla
    import torch_xla.debug.metrics as metrics

    xla.wait_device_ops()  # what was handed over is counted when it is done
    names = {"compiled": ["CompileTime"], "ran": ["ExecuteTime", "ExecuteReplicatedTime"],
             "read": ["TransferFromDeviceTime"]}  # fmt: skip
    return {name: sum((metrics.metric_data(one) or [0])[0] for one in found) for name, found in names.items()}


class Net(torch.nn.Module):
    """Two layers and a norm; the same weights wherever it is made."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.drop = torch.nn.LayerNorm(8), torch.nn.Dropout(dropout)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(F.gelu(self.up(self.norm(x)))))


def rows(count: int = 400, seed: int = 1) -> TensorDataset:
    """Return samples with labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (count,), generator=generator))


def degrees(**sizes: int) -> ParallelismConfig:
    """Return a ParallelismConfig, with a plan where layers are divided."""
    handler = {"tp_handler": TorchTensorParallelConfig(plan=PLAN)} if "tp_size" in sizes else {}
    return ParallelismConfig(**sizes, **handler)


class Loop:
    """A loop by an Accelerator: AdamW, a schedule, clipping, and what came of it."""

    def __init__(self, strategy: Any, *, steps: int = 50, batch: int = 8, accumulate: int = 1, count: int | None = None,
                 dropout: float = 0.0, seed: int | None = None, shuffle: bool = False, precision: str | None = None,
                 **options: Any) -> None:  # fmt: skip
        self.accelerator = Accelerator(
            strategy=strategy, gradient_accumulation_steps=accumulate, mixed_precision=precision, seed=seed,
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True), **options,
        )  # fmt: skip
        model = Net(dropout=dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)  # a gradient far below it is rounding
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
        loader = DataLoader(rows(count or batch * steps), batch_size=batch, shuffle=shuffle)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []

    def run(self, most: int | None = None, each: Any = None, after: Any = None) -> Loop:
        """Train an epoch or what is left of it, `most` batches at most.

        `each(number)` is called before each batch is trained, `after(number)` when it was.
        """
        accelerator = self.accelerator
        for number, (x, y) in enumerate(self.loader):
            if number == most:
                break
            if each is not None:
                each(number)
            with accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(x).float(), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    self.norms.append(accelerator.clip_grad_norm_(self.model.parameters(), 1.0))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.detach())
            if after is not None:
                after(number)
        return self

    def result(self) -> dict[str, Any]:
        """Return losses, norms and weights as numbers of this process."""
        weights = {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}
        return {"losses": [loss.item() for loss in self.losses], "norms": [float(norm) for norm in self.norms],
                "weights": weights}  # fmt: skip

    def optimizer_state(self) -> dict[str, Any]:
        """Return Adam's moments by parameter names."""
        names = {id(parameter): name for name, parameter in self.accelerator.unwrap_model(self.model).named_parameters()}
        state = self.accelerator.strategy.optimizer_state(self.optimizer, names)["state"]
        return {name: {key: value.clone() for key, value in values.items()} for name, values in state.items()}


def trained(strategy: Any, *, devices: int = 1, most: int | None = None, **options: Any) -> dict[str, Any]:
    """Return what a loop comes to in a process of its own; `strategy` may be a function that makes it there."""

    def work() -> dict[str, Any]:
        started()
        made = strategy() if callable(strategy) else strategy
        return Loop(made, **options).run(most).result()

    return run(work, devices=devices)


@functools.cache
def expected(**options: Any) -> dict[str, Any]:
    """Return what plain torch comes to on the CPU."""
    return trained("single", **options)


def far(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference of losses, norms and weights, each against the largest value."""
    pairs = [(torch.tensor(found[kind]), torch.tensor(expected[kind])) for kind in ("losses", "norms")]
    pairs += [(found["weights"][name], value) for name, value in expected["weights"].items()]
    assert all(one.shape == other.shape for one, other in pairs)
    return max(float((one - other).abs().max() / other.abs().max().clamp_min(1e-12)) for one, other in pairs)
