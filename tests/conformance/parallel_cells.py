"""Cells of the parity matrix for models that ranks divide: a small language model, and what a strategy made of it.

`cell(name)` trains under the strategy of that name on as many gloo ranks as it needs, `reference(name)` on one
process: the same samples in the same global batches. `compare` tells how far they are apart.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from drivetrain import Callback, Trainer, TrainModule
from drivetrain.tests.distributed import run
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 16, 16, 4


class Tokens(Dataset):
    """Sequences that follow a rule, with the next tokens as labels and their positions."""

    def __init__(self, count: int = 64, *, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(3)
        starts = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
        steps = torch.randint(1, 4, (count, 1), generator=generator)
        self.tokens = (starts + steps * torch.arange(length + 1)) % VOCABULARY
        self.positions = torch.arange(length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"tokens": tokens[:-1], "labels": tokens[1:], "positions": self.positions}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (self._heads(layer(y)) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    @staticmethod
    def _heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position(positions)


class Transformer(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = Embedding()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens, positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Language(TrainModule):
    """The transformer with cross-entropy; logs the loss of each step, and two metrics in validation."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.net = Transformer(layers)

    def loss(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.net(batch["tokens"], batch["positions"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), logits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, _ = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, logits = self.loss(batch)
        self.log("val_loss", loss)
        right = (logits.argmax(-1) == batch["labels"]).sum()
        self.log("right", right, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)  # a gradient far below it is rounding
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Embedded(nn.Module):
    """Tokens with their places, one beside the other, for a model that is cut into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        tokens, positions = both.unbind(-1)
        return self.token(tokens) + self.place[positions]


def placed(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Tokens and their places in one tensor."""
    return torch.stack([batch["tokens"], batch["positions"]], -1)


class Sequence(Language):
    """The same as a sequence of layers, which stages can be made of."""

    def __init__(self, layers: int = 2) -> None:
        TrainModule.__init__(self)
        torch.manual_seed(11)
        blocks = {f"block{index}": Block() for index in range(layers)}
        head = nn.Sequential(OrderedDict(norm=nn.LayerNorm(WIDTH), out=nn.Linear(WIDTH, VOCABULARY)))
        self.net = nn.Sequential(OrderedDict(embed=Embedded(), **blocks, head=head))

    def loss(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.net(placed(batch))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), logits


class Experts(nn.Module):
    """Some feed-forward layers; tokens come sorted by the layer that is to compute them."""

    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.randn(number, WIDTH, 2 * WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(number, 2 * WIDTH, WIDTH) * 0.2)

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = tokens.split(counts.tolist())
        return torch.cat([F.gelu(part @ self.up[i]) @ self.down[i] for i, part in enumerate(parts)])


class Mixture(nn.Module):
    """Sends each token to the expert that a router finds best."""

    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, number), Experts(number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.experts.num_experts)
        found = self.experts(tokens[order], counts)[order.argsort()]
        return x + (found * weight[:, None]).view_as(x)


class Mixed(Language):
    """The transformer with a layer of experts behind it."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__(layers)
        self.net.layers.append(Mixture())


class MixedSequence(Sequence):
    """The same with a layer of experts before the last."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__(layers)
        parts = OrderedDict(self.net._modules)
        head = parts.pop("head")
        self.net = nn.Sequential(OrderedDict(**parts, mixture=Mixture(), head=head))


PLAN = {
    "net.layers.*.q": "colwise", "net.layers.*.k": "colwise", "net.layers.*.v": "colwise", "net.layers.*.o": "rowwise",
    "net.layers.*.up": "colwise", "net.layers.*.down": "rowwise", "net.head": "colwise_gather_output",
    "net.embed.token": "embedding_rowwise",
}  # fmt: skip
STAGES_PLAN = {
    "net.block*.q": "colwise", "net.block*.k": "colwise", "net.block*.v": "colwise", "net.block*.o": "rowwise",
    "net.block*.up": "colwise", "net.block*.down": "rowwise", "net.head.out": "colwise_gather_output",
    "net.embed.token": "embedding_rowwise",
}  # fmt: skip
SEQUENCE_PLAN = {
    "net.embed": "scatter_sequence",
    "net.layers.*.norm1": "sequence_parallel", "net.layers.*.norm2": "sequence_parallel",
    "net.layers.*.q": "colwise_from_sequence", "net.layers.*.k": "colwise_from_sequence",
    "net.layers.*.v": "colwise_from_sequence", "net.layers.*.o": "rowwise_to_sequence",
    "net.layers.*.up": "colwise_from_sequence", "net.layers.*.down": "rowwise_to_sequence",
    "net.norm": "sequence_parallel", "net.head": "colwise_gather_output_from_sequence",
}  # fmt: skip


class Recorder(Callback):
    """Keeps each step's loss and gradient norm."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_log(self, trainer: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        if "loss" in metrics:
            self.losses.append(metrics["loss"])

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        norm = trainer.accelerator.strategy.norm(list(module.parameters()))
        self.norms.append(float(norm))


def train(
    strategy: Any = "auto",
    *,
    steps: int = 50,
    batch: int = 8,
    accumulate: int = 1,
    precision: str = "32",
    data: Dataset | None = None,
    module: TrainModule | None = None,
    validate: bool = True,
    accelerator: Any = "cpu",
    ckpt: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains for so many steps with a global batch of `batch` samples; returns losses, norms, metrics and weights."""
    data, module, recorder = data or Tokens(), module or Language(), Recorder()
    options = {"callbacks": [], "enable_checkpointing": False, "num_sanity_val_steps": 0, **options}
    trainer = Trainer(
        accelerator=accelerator, strategy=strategy, precision=precision, seed=5, max_steps=steps,
        accumulate_grad_batches=accumulate, log_every_n_steps=1, gradient_clip_val=1.0, logger=False,
        enable_progress_bar=False, enable_model_summary=False, check_val_every_n_epoch=1,
        **{**options, "callbacks": [recorder, *options["callbacks"]]},
    )  # fmt: skip
    share = batch // trainer.accelerator.strategy.data_world.size
    loader = DataLoader(data, batch_size=share, shuffle=True)
    checks = DataLoader(data, batch_size=5) if validate else None
    trainer.fit(module, loader, checks, ckpt_path=ckpt)
    weights = trainer.accelerator.get_state_dict(trainer.session.model)
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "metrics": {name: value for name, value in trainer.callback_metrics.items() if name in ("val_loss", "right")},
        "weights": {name: value.detach().clone() for name, value in weights.items()},
    }


def _config(*, schedule: str = "1F1B", **sizes: Any) -> Callable[[], Any]:
    def make() -> Any:
        from drivetrain import ParallelismConfig, PipelineConfig, TorchTensorParallelConfig

        plan, handlers = STAGES_PLAN if "pp_size" in sizes else PLAN, {}
        if "tp_size" in sizes:
            handlers["tp_handler"] = TorchTensorParallelConfig(plan=plan)
        if "pp_size" in sizes:
            handlers["pp_handler"] = PipelineConfig(schedule=schedule, microbatches=4 if schedule == "1F1B" else None)
        return ParallelismConfig(**sizes, **handlers)

    return make


def _divided(plan: Mapping[str, str]) -> Callable[[], Any]:
    def make() -> Any:
        from drivetrain import TensorParallelStrategy

        return TensorParallelStrategy(2, plan)

    return make


def _staged(schedule: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        from drivetrain import PipelineStrategy

        return PipelineStrategy(2, schedule=schedule, microbatches=4, **more)

    return make


def _ring() -> Any:
    from drivetrain import ContextParallelStrategy

    return ContextParallelStrategy(cp_comm_strategy="alltoall")


# name -> ranks, what makes the strategy, the module, and further arguments of `train`. DTensors find out how each shape
# is computed, which takes longer in inference mode.
_PLAIN: dict[str, Any] = {"inference_mode": False}
CELLS: dict[str, tuple[int, Callable[[], Any], type[TrainModule], dict[str, Any]]] = {
    "single": (1, lambda: "auto", Language, {}),
    "fsdp": (2, lambda: "fsdp", Language, {}),
    "fsdp1": (2, lambda: "fsdp1", Language, {}),
    "hsdp": (4, lambda: "hsdp", Language, {}),
    "tp": (2, _divided(PLAN), Language, _PLAIN),
    "tp+sequence": (2, _divided(SEQUENCE_PLAN), Language, _PLAIN),
    "dp+tp": (4, _config(dp_replicate_size=2, tp_size=2), Language, _PLAIN),
    "fsdp+tp": (4, _config(dp_shard_size=2, tp_size=2), Language, _PLAIN),
    "cp": (2, lambda: "cp", Language, {}),
    "ring": (2, _ring, Language, {}),
    "sp": (2, lambda: "ulysses", Language, {}),
    "dp+cp": (4, _config(dp_replicate_size=2, cp_size=2), Language, {}),
    "cp+tp": (4, _config(cp_size=2, tp_size=2), Language, _PLAIN),
    "fsdp+cp": (4, _config(dp_shard_size=2, cp_size=2), Language, {}),
    "ep": (2, lambda: "ep", Mixed, {}),
    "dp+ep": (4, _config(dp_replicate_size=2, ep_size=2), Mixed, {}),
    "ep+tp": (4, _config(ep_size=2, tp_size=2), Mixed, _PLAIN),
    "ep+cp": (4, _config(ep_size=2, cp_size=2), Mixed, {}),
    "fsdp+ep": (4, _config(dp_shard_size=2, ep_size=2), Mixed, {}),
    "dp+pp": (4, _config(dp_replicate_size=2, pp_size=2), Sequence, {}),
    "fsdp+pp": (4, _config(dp_shard_size=2, pp_size=2), Sequence, {}),
    "fsdp+pp-Interleaved1F1B": (4, _config(dp_shard_size=2, pp_size=2, schedule="Interleaved1F1B"), Sequence, {}),
    "fsdp+pp-ZBVZeroBubble": (4, _config(dp_shard_size=2, pp_size=2, schedule="ZBVZeroBubble"), Sequence, {}),
    "pp+tp": (4, _config(pp_size=2, tp_size=2), Sequence, _PLAIN),
    "pp+cp": (4, _config(pp_size=2, cp_size=2), Sequence, {}),
    "pp+sp": (4, _config(pp_size=2, sp_size=2), Sequence, {}),
    "pp+ep": (4, _config(pp_size=2, ep_size=2), MixedSequence, {}),
    **{
        f"pp-{schedule}": (2, _staged(schedule), Sequence, {})
        for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
                         "DualPipeV")
    },
}  # fmt: skip


def cell(name: str, **options: Any) -> dict[str, Any]:
    """Trains under the strategy of a name; returns what the first rank has, after a look that all agree."""
    ranks, make, module, more = CELLS[name]
    found = run(lambda rank: train(make(), module=module(), **more, **options), ranks, group=ranks > 1, timeout=240)
    for other in found[1:]:
        assert other["losses"] == found[0]["losses"] and other["norms"] == found[0]["norms"]
        assert other["metrics"] == found[0]["metrics"]
    return found[0]


@functools.cache
def _reference(kind: type[TrainModule], options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    (found,) = run(lambda rank: train(module=kind(), **dict(options)), 1, group=False, timeout=240)
    return found


def reference(name: str, **options: Any) -> dict[str, Any]:
    """The same on one process; computed once for the same module and options."""
    return _reference(CELLS[name][2], tuple(sorted(options.items())))


def compare(found: Mapping[str, Any], expected: Mapping[str, Any], *, tolerance: float = 1e-5) -> dict[str, float]:
    """Returns the largest relative difference of each kind; raises AssertionError above the tolerance."""
    assert len(found["losses"]) == len(expected["losses"]) and len(found["norms"]) == len(expected["norms"])
    assert set(found["weights"]) == set(expected["weights"])
    pairs = {
        "losses": (found["losses"], expected["losses"]),
        "norms": (found["norms"], expected["norms"]),
        "metrics": ([found["metrics"][name] for name in expected["metrics"]], list(expected["metrics"].values())),
    }
    differences = {kind: _difference(torch.tensor(a), torch.tensor(b)) for kind, (a, b) in pairs.items() if len(b)}
    weights = [_difference(found["weights"][name], value) for name, value in expected["weights"].items()]
    differences["weights"] = max(weights)
    assert max(differences.values()) <= tolerance, differences
    return differences


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.double().abs().max().clamp(min=1e-12)
    return float((found.double() - expected.double()).abs().max() / scale)
