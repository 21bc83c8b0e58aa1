"""One cell of the parity matrix: a small transformer, trained under a strategy, and compared with one process.

The same seed and global batches give the same losses, gradient norms, weights and evaluation metrics, wherever they
are computed. `trained` runs on each rank, `differences` compares two records, `cell` does both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from drivetrain import Accelerator
from drivetrain.tests.distributed import run
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, WIDTH, LENGTH = 17, 16, 6


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).view(rows, length, -1, WIDTH // self.heads).transpose(1, 2)
                   for layer in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).reshape(rows, length, -1))
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.norm2(x))))


class Transformer(nn.Module):
    """Predicts the next token; embedding and head share their weight if `tied`."""

    def __init__(self, layers: int = 2, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclass
class Record:
    """What a run gave: a loss and a gradient norm for each step, whole weights, a metric."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    metric: float = 0.0


def tokens(count: int, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator))


def loss_of(model: Any, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def trained(
    strategy: Any = None,
    *,
    precision: str | None = None,
    accumulate: int = 1,
    steps: int = 50,
    batch: int = 8,
    lr: float = 3e-3,
    model: Callable[[], nn.Module] = Transformer,
    prepared: Callable[[Any], None] = lambda accelerator: None,
    before_step: Callable[[int], None] = lambda step: None,
) -> Record:
    """Train on global batches of `batch` rows for `steps` optimizer steps, evaluate, and return the record.

    `strategy` is what an Accelerator takes, or a function that makes it. The same on every rank.
    """
    accelerator = Accelerator(
        cpu=True, strategy=strategy() if callable(strategy) else strategy, mixed_precision=precision,
        gradient_accumulation_steps=accumulate,
    )  # fmt: skip
    prepared(accelerator)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr)
    ranks = accelerator.strategy.data_world.size
    data = DataLoader(tokens(batch * steps), batch_size=batch // accumulate // ranks)
    network, optimizer, data = accelerator.prepare(network, optimizer, data)
    record, part = Record(), 0.0
    for (rows,) in data:
        before_step(len(record.losses))
        with accelerator.accumulate(network):
            loss = loss_of(network, rows)
            accelerator.backward(loss)
            part += accelerator.strategy.data_world.all_reduce(loss.detach().clone(), "mean").item() / accumulate
            if accelerator.sync_gradients:
                record.norms.append(accelerator.clip_grad_norm_(network.parameters(), 1.0).item())
                record.losses.append(part)
                part = 0.0
            optimizer.step()
            optimizer.zero_grad()
    record.metric = evaluated(accelerator, network)
    record.weights = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(network).items()}
    accelerator.end_training()
    return record


def evaluated(accelerator: Any, model: Any) -> float:
    """Return the mean loss over 12 rows."""
    data = accelerator.prepare(DataLoader(tokens(12, seed=2), batch_size=12 // accelerator.strategy.data_world.size))
    model.eval()
    with torch.no_grad():
        (loss,) = [loss_of(model, rows) for (rows,) in data]
    model.train()
    return accelerator.strategy.data_world.all_reduce(loss.clone(), "mean").item()


def differences(record: Record, reference: Record) -> dict[str, float]:
    """Return the largest relative difference of each kind."""
    weights = [_distance(record.weights[name], value) for name, value in reference.weights.items()]
    return {
        "losses": _largest(record.losses, reference.losses),
        "norms": _largest(record.norms, reference.norms),
        "weights": max(weights),
        "metric": _largest([record.metric], [reference.metric]),
    }


def cell(
    strategy: Any, ranks: int, *, reference: Record, timeout: float = 120, **options: Any
) -> dict[str, float]:
    """Train under a strategy on gloo ranks and return how far it is from the reference."""
    records = run(lambda rank: trained(strategy, **options), ranks, timeout=timeout)
    assert all(record.losses == records[0].losses and record.norms == records[0].norms for record in records)
    return differences(records[0], reference)


def _largest(values: list[float], expected: list[float]) -> float:
    assert len(values) == len(expected)
    return max(abs(value - other) / max(abs(other), 1e-12) for value, other in zip(values, expected))


def _distance(value: Tensor, expected: Tensor) -> float:
    return (torch.linalg.norm((value - expected).double()) / torch.linalg.norm(expected.double()).clamp_min(1e-12)).item()
