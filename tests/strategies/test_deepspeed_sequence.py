"""Ulysses beside ZeRO: ranks share sequences; losses, norms and whole checkpoints are those of one process."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
import torch.utils.checkpoint
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import (
    Accelerator,
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    DeepSpeedStrategy,
    ModelCheckpoint,
    ParallelismConfig,
    Trainer,
)
from drivetrain.strategies import choice
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.state import PartialState
from drivetrain.tests.conformance.parallel_cells import LENGTH, Language, Tokens, compare, train
from drivetrain.tests.distributed import run
from drivetrain.tests.strategies import deepspeed_runs as runs
from drivetrain.tests.strategies.parallel.test_runs import Hugging, Padded

pytestmark = pytest.mark.timeout(900)  # seconds on a machine of its own, minutes on a loaded one


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()
    module = importlib.import_module("transformers")
    assert module.LlamaForCausalLM


def ulysses(stage, **handler):
    """A fresh strategy: two ranks share each sequence, data parallelism takes the others."""
    options = DeepSpeedSequenceParallelConfig(**handler)
    degrees = ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=options)
    return DeepSpeedStrategy(zero_stage=stage, parallelism=degrees)


@functools.cache
def reference(kind, **options):
    data = Padded() if kind is Hugging else Tokens()
    (found,) = run(lambda rank: train(module=kind(), data=data, **options), 1, group=False, timeout=300)
    return found


class Again(Language):
    """Computes activations again in the backward pass, attention with them; looks what it is given."""

    def loss(self, batch):
        divided = self.trainer.accelerator.strategy.divide_batch is not None
        length = LENGTH // 2 if divided else LENGTH
        assert batch["tokens"].shape[1] == batch["labels"].shape[1] == length
        logits = torch.utils.checkpoint.checkpoint(self.net, batch["tokens"], batch["positions"], use_reentrant=False)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), logits


@pytest.mark.parametrize(
    ("stage", "kind", "options"),
    [
        (0, Language, {}),
        (1, Language, {}),
        (2, Language, {"accumulate": 2}),
        (3, Language, {}),
        (1, Again, {"validate": False}),
        (0, Hugging, {"validate": False}),
        (1, Hugging, {"validate": False}),
        (3, Hugging, {"validate": False}),
    ],
)
def test_parity(stage, kind, options):
    """Attention of torch and of Hugging Face. Padded sequences leave the ranks other numbers of labels."""
    expected = reference(kind, steps=6, **options)
    data = Padded() if kind is Hugging else Tokens()
    for found in run(lambda rank: train(ulysses(stage), module=kind(), data=data, steps=6, **options), 2, timeout=600):
        compare(found, expected)


def test_sequences_that_are_shared_beside_data():
    """Four ranks: two share each sequence, and two such pairs see different samples."""
    expected = reference(Language, steps=6)
    for found in run(lambda rank: train(ulysses(1), steps=6), 4, timeout=600):
        compare(found, expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_go_on_in_plain_torch_and_back(stage, tmp_path):
    """Three steps on one side, three on the other, as six on one process."""
    expected = reference(Language, steps=6, validate=False)

    def begun(strategy, folder):
        saves = ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_last=True)
        return train(strategy, steps=3, validate=False, enable_checkpointing=True, callbacks=[saves])

    def ended(strategy, folder):
        return train(strategy, steps=6, validate=False, ckpt=str(folder / "last"))

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run(lambda rank: begun(ulysses(stage), ours), 2, timeout=600)
    run(lambda rank: begun("auto", theirs), 1, group=False, timeout=300)
    found = run(lambda rank: ended("auto", ours), 1, group=False, timeout=300)
    found += run(lambda rank: ended(ulysses(stage), theirs), 2, timeout=600)
    for one in found:
        compare(one, {**expected, "losses": expected["losses"][3:], "norms": expected["norms"][3:]})


def looped(accelerator, *, gathers=False):
    """A loop of one's own, whose losses count by their labels: by `weight`, or by a mean over the ranks' losses."""
    module = Language()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)
    loader = DataLoader(Tokens(32), batch_size=8)
    module, optimizer, loader = accelerator.prepare(module.net, optimizer, loader)
    losses, norms = [], []
    for batch in loader:
        names = ("tokens", "labels", "positions")
        batch["labels"][:, LENGTH - 5 :] = -100  # which are not as many on each rank
        with accelerator.maybe_context_parallel([batch[name] for name in names], [1, 1, 1]):
            labels = batch["labels"].flatten()
            loss = F.cross_entropy(module(batch["tokens"], batch["positions"]).flatten(0, 1), labels)
            count = (labels != -100).sum()
            assert len(labels) == 8 * LENGTH // accelerator.num_processes
            if gathers:  # as scripts do it that were written for DeepSpeed's own Ulysses
                group = accelerator.torch_device_mesh["sp"].get_group()
                losses_of, counts = (all_gather(one, group=group) for one in (loss, count))
                whole = sum(one * number for one, number in zip(losses_of, counts)) / sum(counts)
                accelerator.backward(whole)
            else:
                accelerator.backward(loss, weight=count)
        norms.append(float(accelerator.clip_grad_norm_(module.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        total = accelerator.reduce(torch.stack([loss.detach() * count, count.float()]), "sum")
        losses.append(float(total[0] / total[1]))
    return {"losses": losses, "norms": norms, "metrics": {}, "weights": accelerator.get_state_dict(module)}


def accelerator(**options):
    GradientState._reset_state()
    PartialState._reset_state()
    return Accelerator(cpu=True, **options)


@pytest.mark.parametrize(("stage", "gathers"), [(0, False), (3, False), (1, True)])
def test_a_loop_of_ones_own(stage, gathers):
    def work(rank):
        degrees = ParallelismConfig(sp_size=2, sp_backend="deepspeed")
        made = accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage), parallelism_config=degrees)
        return looped(made, gathers=gathers)

    (expected,) = run(lambda rank: looped(accelerator(strategy="single")), 1, group=False, timeout=300)
    for found in run(work, 2, timeout=600):
        compare(found, expected)


class Checked(Hugging):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_is_only_evaluated(stage):
    """It has no optimizer, and its batches get the places and next labels of whole sequences all the same."""

    def validated(strategy):
        trainer = Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_progress_bar=False,
                          enable_model_summary=False)  # fmt: skip
        return trainer.validate(Checked(), DataLoader(Padded(), batch_size=8), verbose=False)[0]["val_loss"]

    (expected,) = run(lambda rank: validated("auto"), 1, group=False, timeout=300)
    assert run(lambda rank: validated(ulysses(stage)), 2, timeout=300) == pytest.approx([expected] * 2, rel=1e-6)


def test_lengths_and_attention_that_are_not_as_promised_are_refused():
    def work(rank):
        with pytest.raises(ValueError, match="sp_seq_length=8. Received: lengths .'tokens': 16"):
            train(ulysses(1, sp_seq_length=8, sp_seq_length_is_variable=False), steps=1)

    run(work, 2, timeout=300)
    with pytest.raises(NotImplementedError, match="'flash_attention_2', which exchanges no heads"):
        ulysses(1, sp_attn_implementation="flash_attention_2")


def test_the_options_name_the_engine():
    degrees = ParallelismConfig(sp_size=2, sp_backend="deepspeed")
    made = choice.create(plugins=[DeepSpeedPlugin(zero_stage=2)], parallelism=degrees, size=2)
    assert isinstance(made, DeepSpeedStrategy) and made.parallelism.sp_size == 2
    assert made.parallelism.sp_handler == DeepSpeedSequenceParallelConfig()


def test_layers_that_are_shared_too():
    """Four ranks: two share each layer (AutoTP), and two such pairs each sequence."""
    specs = [
        {"patterns": [".*\\.(q|k|v|up)\\.weight$"], "partition_type": "column"},
        {"patterns": [".*\\.(o|down)\\.weight$"], "partition_type": "row"},
    ]  # fmt: skip
    content = {"zero_optimization": {"stage": 1}, "tensor_parallel": {
        "partition_config": {"use_default_specs": False, "layer_specs": specs}}}  # fmt: skip

    def work(rank):
        degrees = ParallelismConfig(sp_size=2, tp_size=2, sp_backend="deepspeed")
        return train(DeepSpeedStrategy(config=content, parallelism=degrees), steps=6)

    expected = reference(Language, steps=6)
    for found in run(work, 4, timeout=600):
        compare(found, expected)
