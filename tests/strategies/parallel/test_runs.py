"""Runs after each other, manual optimization, and models of Hugging Face, where ranks divide the work."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from drivetrain import ContextParallelStrategy, ParallelismConfig, Trainer, TrainModule
from drivetrain.tests.conformance.parallel_cells import CELLS, Language, Tokens, compare, train
from drivetrain.tests.distributed import run
from torch.utils.data import DataLoader, Dataset


@pytest.fixture(scope="module")
def transformers():
    """Imported once here, instead of in each forked rank."""
    module = importlib.import_module("transformers")
    assert module.LlamaForCausalLM and module.MixtralForCausalLM
    return module


def several(kind, strategy):
    """What three stages and a second run give on the first rank."""
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
               "enable_model_summary": False, "num_sanity_val_steps": 0, "seed": 1,
               "inference_mode": False}  # fmt: skip
    module, data, checks = kind(), DataLoader(Tokens(16), batch_size=8), DataLoader(Tokens(13), batch_size=5)
    first = Trainer(strategy=strategy(), max_steps=2, **options)
    first.fit(module, data)
    rows = first.validate(module, checks, verbose=False)
    second = Trainer(strategy=strategy(), max_steps=2, **options)
    second.fit(module, data)
    return rows + second.validate(module, checks, verbose=False)


@pytest.mark.parametrize("name", ["tp", "cp", "pp-1F1B"])
def test_a_module_is_trained_again_and_evaluated(name):
    ranks, strategy, kind, _ = CELLS[name]
    (expected,) = run(lambda rank: several(kind, lambda: "auto"), 1, group=False)
    for found in run(lambda rank: several(kind, strategy), ranks):
        assert [list(row) for row in found] == [list(row) for row in expected]
        for row, wanted in zip(found, expected):
            assert row == pytest.approx(wanted, rel=1e-5)


class Manual(Language):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss, _ = self.loss(batch)
        self.log("loss", loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_manual_optimization():
    options = {"steps": 3, "validate": False}
    (expected,) = run(lambda rank: train(module=Manual(), **options), 1, group=False)
    config = ParallelismConfig(dp_replicate_size=2, cp_size=2)
    compare(run(lambda rank: train(config, module=Manual(), **options), 4)[0], expected)


class Padded(Dataset):
    """Sequences of several lengths, padded at their end."""

    def __init__(self):
        self.tokens = Tokens(32).tokens[:, :16]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        length = 16 - index % 5
        mask = (torch.arange(16) < length).long()
        labels = self.tokens[index].masked_fill(mask == 0, -100)
        return {"input_ids": self.tokens[index], "labels": labels, "attention_mask": mask}


class Hugging(TrainModule):
    """A tiny model as transformers makes it."""

    def __init__(self, kind="Llama", **options):
        super().__init__()
        torch.manual_seed(0)
        transformers = sys.modules["transformers"]
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, **options,
        )  # fmt: skip
        self.model = getattr(transformers, f"{kind}ForCausalLM")(config)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("tp", {"tie_word_embeddings": True}, id="tp"),
        pytest.param("cp", {}, id="cp"),
        pytest.param("ulysses", {}, id="sp"),
        pytest.param("ep", {"kind": "Mixtral", "num_local_experts": 4}, id="ep"),
    ],
)
def test_models_of_hugging_face(strategy, options, transformers):
    """By the plan that they carry, with their own labels, padding and experts."""
    runs = {"steps": 4, "validate": False, "data": Padded()}
    if strategy == "ep":
        runs["data"] = [{"input_ids": tokens, "labels": tokens} for tokens in Padded().tokens]
    (expected,) = run(lambda rank: train(module=Hugging(**options), **runs), 1, group=False)
    compare(run(lambda rank: train(strategy, module=Hugging(**options), **runs), 2)[0], expected)


def test_padding_in_front_and_other_attention_are_refused(transformers):
    class Front(Padded):
        def __getitem__(self, index):
            return {name: value.flip(0) for name, value in super().__getitem__(index).items()}

    def front(rank):
        with pytest.raises(ValueError, match="padded at their end"):
            train(ContextParallelStrategy(), module=Hugging(), steps=1, validate=False, data=Front())

    def eager(rank):
        with pytest.raises(ValueError, match="'eager' in LlamaForCausalLM"):
            module = Hugging(attn_implementation="eager")
            train(ContextParallelStrategy(), module=module, steps=1, validate=False, data=Padded())

    run(front, 2)
    run(eager, 2)
