"""Cells of the parity matrix for Megatron: a GPT of megatron-core, and the same model by torch alone as the reference.

Both have the same names and weights. Megatron runs on the CPU by a layer that only tests have (megatron_cpu.py), which
says nothing about streams or kernels.
"""

from __future__ import annotations

import functools
import importlib
import warnings
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from drivetrain.tests.conformance import parallel_cells
from drivetrain.tests.conformance.parallel_cells import HEADS, LENGTH, VOCABULARY, WIDTH, Language
from drivetrain.tests.distributed import run
from drivetrain.tests.strategies.megatron_cpu import OnCPU
from torch import nn
from torch.nn import functional as F

LAYERS = 4
FIELDS: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS, "ffn_hidden_size": 2 * WIDTH,
    "vocab_size": VOCABULARY, "sequence_length": LENGTH, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "use_cpu_initialization": True, "bias_activation_fusion": False, "bias_dropout_fusion": False,
    "masked_softmax_fusion": False, "persist_layer_norm": False, "attention_softmax_in_fp32": True,
}  # fmt: skip


def value(name: str, shape: Any) -> torch.Tensor:
    """Return a weight's first value, which depends on its name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator) * 0.1 + ("norm.weight" in name)


class Attention(nn.Module):
    """Megatron's attention: query, key and value of a head lie beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv, self.linear_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.linear_qkv(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attention = Attention()
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(WIDTH, 2 * WIDTH), "linear_fc2": nn.Linear(2 * WIDTH, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp["linear_fc2"](F.gelu(self.mlp["linear_fc1"](self.pre_mlp_layernorm(x))))


class PlainGPT(nn.Module):
    """A GPT by torch alone, under the names of Megatron's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict(
            {"word_embeddings": nn.Embedding(VOCABULARY, WIDTH), "position_embeddings": nn.Embedding(LENGTH, WIDTH)}
        )
        layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.decoder = nn.ModuleDict({"layers": layers, "final_layernorm": nn.LayerNorm(WIDTH)})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words = self.embedding["word_embeddings"]
        x = words(tokens) + self.embedding["position_embeddings"].weight[: tokens.shape[1]]
        for layer in self.decoder["layers"]:
            x = layer(x)
        return self.decoder["final_layernorm"](x) @ words.weight.T


class Plain(Language):
    """The reference: plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PlainGPT()
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                parameter.copy_(value(name, parameter.shape))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.loss(batch)
        self.log("loss", loss)
        return {"loss": loss, "weight": (batch["labels"] >= 0).sum()}

    def loss(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.net(batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten()), logits

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch)[0])


class Megatron(Language):
    """The same by megatron-core; `fields` change its architecture."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.fields = {**FIELDS, **fields}
        del self.net

    def configure_model(self) -> None:
        from drivetrain.strategies.megatron_model import MegatronModel

        if not hasattr(self, "net"):
            self.net = MegatronModel(self.fields)
            fill(self.net.chunks)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net.loss(batch)
        self.log("loss", outputs["loss"])
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net.loss(batch)["loss"])


def fill(chunks: Any) -> None:
    """Give weights their first values by the names of the whole model."""
    from drivetrain.strategies.megatron_state_parts import Whole, locals_of

    for local in locals_of(chunks):
        local.fill(local.tensor.detach(), Whole({local.name: value(local.name, local.shape)}))


def strategy(**options: Any) -> Any:
    """Return Megatron's strategy."""
    from drivetrain.strategies.megatron import MegatronStrategy

    return MegatronStrategy(**options)


# name -> ranks, options of the strategy, fields of the model
CELLS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "megatron": (1, {}, {}),
    "megatron-tp": (2, {"tp_degree": 2}, {}),
    "megatron-tp+sequence": (2, {"tp_degree": 2, "sequence_parallelism": True}, {}),
    "megatron-pp": (2, {"pp_degree": 2, "num_micro_batches": 2}, {}),
    "megatron-pp-interleaved": (
        2, {"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1}, {},
    ),
    "megatron-dp": (2, {"use_distributed_optimizer": True}, {}),
    "megatron-tp+pp": (4, {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2}, {}),
}  # fmt: skip


def train(name: str, *, dropout: float = 0.0, **options: Any) -> dict[str, Any]:
    """Train on this rank under Megatron."""
    _, engine, fields = CELLS[name]
    drops = {"hidden_dropout": dropout, "attention_dropout": dropout}
    with OnCPU():
        return parallel_cells.train(strategy(**engine), module=Megatron(**drops, **fields), **options)


def cell(name: str, *, timeout: float = 280, **options: Any) -> dict[str, Any]:
    """Train under a cell's arrangement; return what the first rank has, after a look that all agree."""
    preload()
    ranks = CELLS[name][0]
    found = run(lambda rank: train(name, **options), ranks, group=ranks > 1, timeout=timeout)
    for other in found[1:]:
        assert other["losses"] == found[0]["losses"] and other["norms"] == found[0]["norms"]
        assert other["metrics"] == found[0]["metrics"]
    return found[0]


def plain(**options: Any) -> dict[str, Any]:
    """The same on one process by torch alone."""
    return run(lambda rank: parallel_cells.train(module=Plain(), **options), 1, group=False, timeout=280)[0]


@functools.cache
def _reference(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return plain(**dict(options))


def reference(**options: Any) -> dict[str, Any]:
    """What `plain` returns, computed once for the same options."""
    return _reference(tuple(sorted(options.items())))


def preload() -> None:
    """Import megatron-core once, in the parent of all ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells what else could be installed
        for name in ("models.bert.bert_model", "models.gpt", "models.T5", "optimizer", "pipeline_parallel.schedules"):
            importlib.import_module(f"megatron.core.{name}")
