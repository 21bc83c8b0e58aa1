"""Context parallel of Megatron without its attention, which needs Transformer Engine: batches, losses and gradients.

A stand-in for the check of that package lets a model run here whose tokens do not look at each other.
"""

from __future__ import annotations

import pytest
import torch

from drivetrain.tests.distributed import run

pytest.importorskip("megatron.core")

from drivetrain.strategies import megatron_groups
from drivetrain.tests.strategies import megatron_gpt as tiny
from drivetrain.tests.strategies import megatron_runs as runs

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()


class Alone(tiny.Tiny):
    """Each token is to be predicted from the one before it and its place."""

    def build(self, config, *, pre_process, post_process, vp_stage):
        from megatron.core.enums import ModelType
        from megatron.core.transformer.module import MegatronModule

        class Chunk(MegatronModule):
            def __init__(self):
                super().__init__(config)
                self.model_type = ModelType.encoder_or_decoder
                generator = torch.Generator().manual_seed(3)
                self.words = torch.nn.Embedding(tiny.VOCABULARY, 16)
                self.places = torch.nn.Embedding(tiny.SEQUENCE, 16)
                self.head = torch.nn.Linear(16, tiny.VOCABULARY)
                for parameter in self.parameters():
                    parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3

            def set_input_tensor(self, tensor):
                pass

            def forward(self, input_ids, position_ids, attention_mask, labels):
                logits = self.head(torch.tanh(self.words(input_ids) + self.places(position_ids)))
                return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")

        return Chunk()


def test_parts_of_sequences_are_the_whole(monkeypatch):
    monkeypatch.setattr(megatron_groups, "has_package", lambda name: True)
    monkeypatch.setattr(tiny, "Tiny", Alone)
    monkeypatch.setattr(tiny, "inputs", _without_mask)
    (expected,) = run(lambda rank: runs.fit({}), 1, group=False)
    found = run(lambda rank: runs.fit({"context_parallel_size": 2}), 2, group=False)
    assert found[0] == found[1]
    assert found[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert found[0].norms == pytest.approx(expected.norms, rel=1e-4)
    assert found[0].validation == pytest.approx(expected.validation, rel=1e-5)


def _without_mask(batch):
    return {
        "input_ids": batch[:, :-1].contiguous(), "labels": batch[:, 1:].contiguous(), "attention_mask": None,
        "position_ids": torch.arange(batch.shape[1] - 1).expand(len(batch), -1).contiguous(),
    }  # fmt: skip
