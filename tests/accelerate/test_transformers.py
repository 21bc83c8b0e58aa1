"""transformers.Trainer runs on drivetrain in Accelerate's place: trains, evaluates, predicts, saves, resumes.

Each run is a forked rank, so that the alias and transformers are in no other test's process. The right weights come
from a plain torch loop over the same global batches.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import Dataset

from drivetrain.tests.accelerate import alias
from drivetrain.tests.distributed import run

STEPS, RATE = 4, 0.01


class Sequences(Dataset):
    """Each sequence counts up from another number."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        ids = (torch.arange(8) + index) % 16
        labels = ids.clone()
        labels[0] = -100  # nothing predicts the first token; transformers counts the labels that are left
        return {"input_ids": ids, "labels": labels}


def make_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, **none))


def make_trainer(folder, length, **options):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=os.fspath(folder / "out"), use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=RATE,
        per_device_eval_batch_size=2, logging_steps=1, seed=1, **options,
    )  # fmt: skip
    return Trainer(make_model(), arguments, train_dataset=Sequences(length), eval_dataset=Sequences(7))


def weights(model):
    """All but the keys' bias: softmax cancels it, so that its gradient is rounding noise, which Adam makes large."""
    found = {name: value.detach().clone() for name, value in model.named_parameters()}
    found["transformer.h.0.attn.c_attn.bias"][8:16] = 0
    return found


def plain_loop():
    """AdamW, the rate falling linearly to 0, gradients clipped at 1: all eight sequences in each step."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    batch = torch.stack([Sequences(8)[index]["input_ids"] for index in range(8)])
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (STEPS - step) / STEPS
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return weights(model), losses


@pytest.mark.parametrize("ranks, accumulated", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_trains_as_a_plain_loop_does(ranks, accumulated, tmp_path):
    def rank(rank):
        alias.install(tmp_path / f"alias{rank}")
        size = 8 // ranks // accumulated
        trainer = make_trainer(tmp_path, 8, max_steps=STEPS, per_device_train_batch_size=size, save_strategy="no",
                               gradient_accumulation_steps=accumulated)  # fmt: skip
        expected, losses = plain_loop()
        trainer.train()
        from drivetrain import Accelerator

        assert type(trainer.accelerator) is Accelerator and trainer.accelerator.num_processes == ranks
        for name, value in weights(trainer.accelerator.unwrap_model(trainer.model)).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
        logged = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
        assert logged == pytest.approx(losses, rel=1e-3)

    run(rank, ranks, timeout=240)


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluates_each_sequence_once(ranks, tmp_path):
    def rank(rank):
        alias.install(tmp_path / f"alias{rank}")
        trainer = make_trainer(tmp_path, 8)
        found = trainer.predict(Sequences(7))
        metrics = trainer.evaluate()
        with torch.no_grad():
            batch = torch.stack([Sequences(7)[index]["input_ids"] for index in range(7)])
            logits = make_model()(input_ids=batch).logits
        assert found.label_ids[:, 1:].tolist() == batch[:, 1:].tolist()
        torch.testing.assert_close(torch.tensor(found.predictions), logits)
        assert metrics["eval_loss"] == pytest.approx(found.metrics["test_loss"])

    run(rank, ranks, timeout=240)


def test_resumes_bit_for_bit(tmp_path):
    def rank(rank):
        alias.install(tmp_path / "alias")
        options = {"max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_steps": 4}
        whole = make_trainer(tmp_path, 13, **options)
        whole.train()
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-4", "checkpoint-6"]
        second = make_trainer(tmp_path, 13, **options)
        second.train(resume_from_checkpoint=os.fspath(tmp_path / "out" / "checkpoint-4"))
        assert second.state.global_step == 6
        for name, value in weights(second.model).items():
            assert torch.equal(value, weights(whole.model)[name]), name

    run(rank, 1, timeout=240)
