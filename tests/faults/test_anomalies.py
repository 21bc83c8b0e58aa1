"""A loss that is not finite, or far too large: the step is never made, on no rank, and the policy decides what follows."""

from __future__ import annotations

import math

import pytest
import torch

from drivetrain import AnomalyError, AnomalyPolicy, ModelCheckpoint
from drivetrain.tests import distributed
from drivetrain.tests.faults.toy import STEPS, Falling, loader, trainer, weight_in

BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Bad(Falling):
    """The loss is 1 + weight - weight (gradient 1) but ``value`` in some batches."""

    def __init__(self, at=(), value=math.nan, optimizer=torch.optim.SGD, **options) -> None:
        super().__init__()
        self.at, self.value, self.optimizer, self.options = at, value, optimizer, options

    def training_step(self, batch, batch_idx):
        self.seen.append(int(batch[0]))
        loss = self.weight - self.weight.detach() + 1 + 0.01 * (batch_idx % 3)
        return loss * self.value if batch_idx in self.at else loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=1.0, **self.options)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 2.0}])
def test_stop_names_rank_step_and_value_before_the_step_is_made(value, options, tmp_path):
    module = Bad(at=(5,), value=BAD[value])
    with pytest.raises(AnomalyError, match=rf"Received: {value} on rank 0, at step \d, batch 5 of epoch 0\."):
        trainer(tmp_path, callbacks=[AnomalyPolicy()], **options).fit(module, loader())
    assert float(module.weight.detach()) == (-2 if "accumulate_grad_batches" in options else -5)


@pytest.mark.parametrize("optimizer, options", [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"weight_decay": 0.1})])
def test_skip_leaves_no_trace_of_the_step(optimizer, options, tmp_path):
    def final(at, batches):
        module = Bad(at=at, optimizer=optimizer, **options)
        run = trainer(tmp_path, callbacks=[AnomalyPolicy("skip")], gradient_clip_val=0.5, limit_train_batches=batches)
        run.fit(module, loader())
        return float(module.weight.detach()), run.global_step

    assert final((4,), 9) == final((), 8) == (final((), 8)[0], 8)


def test_skip_counts_no_step_and_steps_no_scheduler(tmp_path):
    class Scheduled(Bad):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [{"scheduler": self.scheduler, "interval": "step"}]

    run, module = trainer(tmp_path, callbacks=[AnomalyPolicy("skip")]), Scheduled(at=(0, 3, 7))
    run.fit(module, loader())
    assert run.global_step == STEPS - 3 and module.scheduler.get_last_lr() == [0.5 ** (STEPS - 3)]
    assert float(module.weight.detach()) == -sum(0.5**step for step in range(STEPS - 3))


@pytest.mark.parametrize("bad", [0, 1])
def test_skip_is_agreed_by_all_ranks(bad, tmp_path):
    def fit(rank):
        module = Bad(at=(2, 5) if rank == bad else ())
        run = trainer(tmp_path, callbacks=[AnomalyPolicy("skip")])
        run.fit(module, loader(ranks=2))
        return float(module.weight.detach()), run.global_step

    assert distributed.run(fit, 2) == [(-(STEPS - 2), STEPS - 2)] * 2


def test_stop_on_two_ranks_names_the_one(tmp_path):
    def fit(rank):
        with pytest.raises(AnomalyError) as caught:
            trainer(tmp_path, callbacks=[AnomalyPolicy()]).fit(Bad(at=(3,) if rank == 1 else ()), loader(ranks=2))
        return str(caught.value)

    first, second = distributed.run(fit, 2)
    assert first == second and "Received: nan on rank 1, at step 3, batch 3" in first


def test_more_than_the_patience_in_a_row_ends_the_run(tmp_path):
    run = trainer(tmp_path, callbacks=[AnomalyPolicy("skip", patience=2)])
    run.fit(Bad(at=(2, 3, 5, 6)), loader())
    assert run.global_step == STEPS - 4
    with pytest.raises(AnomalyError, match="bad loss number 3; 2 are borne"):
        trainer(tmp_path, callbacks=[AnomalyPolicy("skip", patience=2)]).fit(Bad(at=(2, 3, 4)), loader())


@pytest.mark.parametrize("spike, skipped", [(6.0, 1), (1e6, 0), (None, 0)])
def test_a_spike_is_measured_in_deviations(spike, skipped, tmp_path):
    run = trainer(tmp_path, callbacks=[AnomalyPolicy("skip", spike=spike)])
    run.fit(Bad(at=(11,), value=50.0), loader())
    assert run.global_step == STEPS - skipped


def test_rollback_returns_to_weights_that_were_good_with_a_lower_rate(tmp_path):
    keep = ModelCheckpoint(every_n_train_steps=1, save_top_k=3)
    run, module = trainer(tmp_path, callbacks=[AnomalyPolicy("rollback"), keep], max_steps=9), Bad(at=(6,))
    run.fit(module, loader())
    # 6 steps of 1; the loss after step 6 is bad, so the newest proven weights are those of step 5: -5. Then 3 of 0.5.
    assert module.seen == list(range(10)) and run.global_step == 9
    assert float(module.weight.detach()) == -5 - 3 * 0.5
    assert run.optimizers[0].param_groups[0]["lr"] == 0.5
    assert weight_in(keep.best_model_path) == -6.5


def test_rollback_restores_the_optimizer_and_lowers_a_schedules_rates(tmp_path):
    class Scheduled(Bad):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            return [optimizer], [{"scheduler": self.scheduler, "interval": "step"}]

    keep = ModelCheckpoint(every_n_train_steps=2, save_top_k=3)
    run = trainer(tmp_path, callbacks=[AnomalyPolicy("rollback", lr_factor=0.25), keep], max_steps=7)
    module = Scheduled(at=(5,), momentum=1.0)
    run.fit(module, loader())
    # Momentum 1: step n moves by n. Bad at 5 steps: back to step 4 (-10, momentum 4), then steps of 5/4 and 6/4.
    assert float(module.weight.detach()) == -10 - 5 / 4 - 6 / 4
    assert module.scheduler.get_last_lr() == [0.25]


def test_rollback_on_two_ranks(tmp_path):
    def fit(rank):
        keep = ModelCheckpoint(every_n_train_steps=1, save_top_k=3)
        module = Bad(at=(4,) if rank == 1 else ())
        trainer(tmp_path, callbacks=[AnomalyPolicy("rollback"), keep], max_steps=6).fit(module, loader(ranks=2))
        return float(module.weight.detach())

    assert distributed.run(fit, 2) == [-3 - 2 * 0.5] * 2


def test_rollback_without_anything_to_go_back_to(tmp_path):
    with pytest.raises(AnomalyError, match="Expected a checkpoint that a good loss has followed. Received: none"):
        trainer(tmp_path, callbacks=[AnomalyPolicy("rollback")]).fit(Bad(at=(3,)), loader())


def test_the_policy_goes_on_after_an_interruption(tmp_path):
    options = {"spike": 6.0}
    keep = {"every_n_train_steps": 1}
    first = trainer(tmp_path, callbacks=[AnomalyPolicy("skip", **options), ModelCheckpoint(**keep)], max_steps=11)
    first.fit(Bad(), loader())
    second = trainer(tmp_path, callbacks=[AnomalyPolicy("skip", **options), ModelCheckpoint(**keep)])
    second.fit(Bad(at=(11,), value=50.0), loader(), resume="last")
    assert second.global_step == 11


@pytest.mark.parametrize("value", [math.nan, 50.0])
def test_skip_beside_a_loss_scaler(value, tmp_path):
    module = Bad(at=(11,), value=value)
    policy = AnomalyPolicy("skip", spike=6.0)
    run = trainer(tmp_path, callbacks=[policy], precision="16-mixed", gradient_clip_val=5.0, max_epochs=2)
    run.fit(module, loader())
    assert run.global_step == 2 * (STEPS - 1) and float(module.weight.detach()) == -2 * (STEPS - 1)


def test_manual_optimization_is_refused(tmp_path):
    module = Bad()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="Expected automatic optimization"):
        trainer(tmp_path, callbacks=[AnomalyPolicy()]).fit(module, loader())


def test_bad_arguments():
    for wrong in ({"action": "wait"}, {"spike": 0.0}, {"lr_factor": 0.0}, {"window": 5}, {"patience": -1}):
        with pytest.raises((ValueError, TypeError)):
            AnomalyPolicy(**wrong)
