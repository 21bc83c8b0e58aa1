"""Accelerate's loop with Megatron: whole steps by calling the model, with the numbers of a plain loop."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator, DistributedType, MegatronLMDummyScheduler, MegatronLMPlugin
from drivetrain.tests.distributed import run

pytest.importorskip("megatron.core")

from drivetrain import (  # noqa: E402
    AbstractTrainStep,
    MegatronEngine,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
    MegatronModel,
    avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups,
)
from drivetrain.tests.strategies import megatron_gpt as tiny  # noqa: E402
from drivetrain.tests.strategies import megatron_runs as runs  # noqa: E402
from drivetrain.tests.strategies.megatron_cpu import OnCPU  # noqa: E402

pytestmark = pytest.mark.timeout(400)
BATCH, SAMPLES, STEPS = 8, 32, 4
RATES = [0.0, 0.005, 0.01, 0.01 * 7 / 8]  # two steps of warming up to 0.01, then linear to 0 in step 10


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    runs.preload()


@cache
def expected(parts: int = 1):
    """Losses of a plain loop; each of `parts` of a batch counts the same, whatever its tokens, or (0) each token."""
    return run(lambda rank: _plain(parts), 1)[0]


def _plain(parts):
    from megatron.core import parallel_state, tensor_parallel

    with OnCPU():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        model = tiny.Tiny().build(tiny.config(), pre_process=True, post_process=True, vp_stage=None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for rate, batch in zip(RATES, tiny.tokens(SAMPLES).split(BATCH)):
            sums = [tiny.Batch(part).loss(model(**tiny.inputs(part))) for part in batch.chunk(parts or 1)]
            loss = torch.stack([total / count for total, count in sums]).mean()
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        with torch.no_grad():
            total, count = tiny.Batch(tiny.tokens(BATCH, 9)).loss(model(**tiny.inputs(tiny.tokens(BATCH, 9))))
        return losses, float(total / count)


def loop(rank, options, *, model=None):
    with OnCPU():
        plugin = MegatronLMPlugin(gradient_clipping=0.0, **options)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        assert accelerator.distributed_type == DistributedType.MEGATRON_LM
        each = BATCH // accelerator.strategy.data_world.size
        own = MegatronModel(tiny.Tiny())
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
        schedule = MegatronLMDummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
        loader = DataLoader(tiny.tokens(SAMPLES), batch_size=each)
        model, optimizer, loader, schedule = accelerator.prepare(own, optimizer, loader, schedule)
        assert type(model) is MegatronEngine and type(optimizer) is MegatronLMOptimizerWrapper
        assert type(schedule) is MegatronLMSchedulerWrapper and plugin.global_batch_size == BATCH
        losses, rates = [], []
        model.train()
        for batch in loader:
            rates += schedule.get_last_lr()
            loss = model(batch)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        assert rates == pytest.approx(RATES)
        model.eval()
        held = tiny.tokens(BATCH, 9).chunk(accelerator.strategy.data_world.size)
        return losses, float(model(held[accelerator.strategy.data_world.rank])), model.iteration


CASES = {
    "tensor parallel": ({"tp_degree": 2}, 1),
    "stages, micro-batches": ({"pp_degree": 2, "num_micro_batches": 4}, 4),
    "replicas, micro-batches": ({"num_micro_batches": 2, "use_distributed_optimizer": True}, 4),
    "tokens": ({"num_micro_batches": 2, "calculate_per_token_loss": True}, 0),
}


@pytest.mark.parametrize(("options", "parts"), CASES.values(), ids=CASES)
def test_a_call_is_a_step(options, parts):
    losses, validation = expected(parts)
    for found in run(loop, 2, options, group=False):
        assert found == (pytest.approx(losses, rel=1e-5), pytest.approx(validation, rel=1e-5), STEPS)


class Doubled(AbstractTrainStep):
    """A step of the script's own: twice the loss."""

    def __init__(self, accelerator, args, factor=1):
        super().__init__("doubled")
        self.factor = factor

    def get_batch_func(self, accelerator, megatron_dataset_flag):
        return next

    def get_loss_func(self, accelerator):
        def loss(batch, output):
            total, count = tiny.Batch(batch).loss(output)
            return self.factor * total / count, {"own loss": (self.factor * total / count).detach()}

        return loss

    def get_forward_step_func(self):
        take, loss = self.get_batch_func(None, False), self.get_loss_func(None)

        def step(iterator, chunk):
            batch = take(iterator)
            return chunk(**tiny.inputs(batch)), partial(loss, batch)

        return step


@pytest.mark.parametrize("options", [{"tp_degree": 2}, {"pp_degree": 2, "num_micro_batches": 4}], ids=str)
def test_a_step_of_the_scripts_own(options):
    """Adam does not mind the factor."""
    own = {"custom_train_step_class": Doubled, "custom_train_step_kwargs": {"factor": 2}}
    losses, validation = expected(options.get("num_micro_batches", 1))
    for found in run(loop, 2, {**options, **own}, group=False):
        assert found[0] == pytest.approx([2 * loss for loss in losses], rel=1e-4)
        if "num_micro_batches" not in options:
            assert found[1] == pytest.approx(2 * validation, rel=1e-4)


def test_losses_and_batches_of_the_scripts_own():
    def named(iterator):
        tokens = next(iterator)
        return {"tokens": tokens}

    class Named(tiny.Tiny):
        def batch(self, data):
            return tiny.Batch(data["tokens"] if isinstance(data, dict) else data)

    def work(rank):
        with OnCPU():
            plugin = MegatronLMPlugin(tp_degree=2, custom_get_batch_function=named,
                                      custom_loss_function=lambda mask, output: (output.mean(), {"mean": output.mean()}))
            accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
            own = MegatronModel(Named())
            model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.0))
            losses, skipped, norm, zeros = model.train_step(tiny.tokens(4))
            return list(losses), float(losses["mean"]), skipped, norm > 0

    with_mean = run(lambda rank: _mean(), 1)[0]
    for found in run(work, 2, group=False):
        assert found == (["mean"], pytest.approx(with_mean, rel=1e-5), False, True)


def _mean():
    from megatron.core import parallel_state, tensor_parallel

    with OnCPU():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        model = tiny.Tiny().build(tiny.config(), pre_process=True, post_process=True, vp_stage=None)
        return float(model(**tiny.inputs(tiny.tokens(4))).mean())


def test_values_of_ranks_with_other_data():
    def work(rank):
        with OnCPU():
            Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
            mean = avg_losses_across_data_parallel_group([torch.tensor(float(rank)), torch.tensor(2.0)])
            gathered = gather_across_data_parallel_groups({"x": torch.tensor([rank]), "y": torch.tensor(rank)})
            return mean.tolist(), gathered["x"].tolist(), gathered["y"].tolist()

    found = run(work, 4, group=False)
    assert found == [([1.0, 2.0], [0, 2], [0, 2]), ([2.0, 2.0], [1, 3], [1, 3])] * 2


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=40, n_positions=16, resid_pdrop=0.0,
                                     embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def hugging_face(rank, options):
    tokens = torch.randint(0, 40, (16, 12), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    model, losses = gpt2(), []
    if options is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for batch in tokens.split(8):
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        with torch.no_grad():
            return losses, model(input_ids=tokens[:8]).logits
    with OnCPU():
        plugin = MegatronLMPlugin(gradient_clipping=0.0, return_logits=True, **options)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
        for batch in loader:
            losses.append(float(model(**batch)))
        model.eval()
        return losses, model(input_ids=tokens[:8], labels=tokens[:8])["logits"]


@pytest.mark.parametrize("options", [{"tp_degree": 2}, {"pp_degree": 2, "num_micro_batches": 2}], ids=str)
def test_a_model_of_transformers_trains_as_it_would_by_itself(options):
    (expected,) = run(hugging_face, 1, None)
    for losses, logits in run(hugging_face, 2, options, group=False):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        torch.testing.assert_close(logits, expected[1], rtol=1e-3, atol=1e-4)
