"""Prepared schedulers: in step with the optimizer as Accelerate does it, or exactly when called."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

from drivetrain.strategies import world as worlds
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.optimizer import AcceleratedOptimizer
from drivetrain.strategies.scheduler import AcceleratedScheduler, unwrap_scheduler
from drivetrain.strategies.world import World


class FourRanks(World):
    size = 4


@pytest.fixture(autouse=True)
def _fresh():
    GradientState._reset_state()
    yield
    GradientState._reset_state()
    worlds.set_current(World())


def made(step_with_optimizer=True, split_batches=False, schedule=None):
    raw = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer = AcceleratedOptimizer(raw)
    scheduler = schedule(raw) if schedule else torch.optim.lr_scheduler.StepLR(raw, 1, gamma=0.5)
    return optimizer, AcceleratedScheduler(scheduler, optimizer, step_with_optimizer, split_batches)


def test_steps_once_on_one_process():
    optimizer, scheduler = made()
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def test_G7_steps_once_per_process_as_in_accelerate_and_says_so_once(caplog):
    worlds.set_current(FourRanks())
    optimizer, scheduler = made()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            optimizer.step()
            scheduler.step()
    assert scheduler.get_last_lr() == [0.5**8]
    assert len(caplog.records) == 1 and "step_scheduler_with_optimizer=False" in caplog.text


def test_split_batches_and_the_switch_step_once_on_any_number_of_processes(caplog):
    worlds.set_current(FourRanks())
    for options in ({"split_batches": True}, {"step_with_optimizer": False}):
        optimizer, scheduler = made(**options)
        optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [0.5]
    assert not caplog.records


def test_inside_a_window_it_waits_and_torch_does_not_warn():
    optimizer, scheduler = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sync in (False, False, True, False, True):
            GradientState().sync_gradients = sync
            optimizer.step()
            scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


def test_skipped_optimizer_step_is_no_step():
    optimizer, scheduler = made()
    optimizer.step_was_skipped = True
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]


def test_switched_off_it_steps_exactly_when_called():
    optimizer, scheduler = made(step_with_optimizer=False)
    optimizer.step()
    GradientState().sync_gradients = False
    optimizer.step_was_skipped = True
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def test_one_cycle_does_not_run_over_its_end():
    worlds.set_current(FourRanks())
    optimizer, scheduler = made(schedule=lambda raw: torch.optim.lr_scheduler.OneCycleLR(raw, 1.0, total_steps=6))
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert scheduler.scheduler.last_epoch == 6


def test_plateau_gets_its_metric():
    optimizer, scheduler = made(
        schedule=lambda raw: torch.optim.lr_scheduler.ReduceLROnPlateau(raw, factor=0.1, patience=0)
    )
    for metric in (1.0, 2.0):
        optimizer.step()
        scheduler.step(metric)
    assert scheduler.get_last_lr() == [pytest.approx(0.1)]


def test_state_and_attributes_are_the_wrapped_schedulers():
    _, scheduler = made()
    raw = scheduler.scheduler
    assert scheduler.state_dict() == raw.state_dict() and scheduler.last_epoch == raw.last_epoch
    scheduler.load_state_dict({**raw.state_dict(), "last_epoch": 7})
    assert raw.last_epoch == 7
    assert unwrap_scheduler(scheduler) is raw is unwrap_scheduler(raw)
    with pytest.raises(AttributeError):
        scheduler.nothing_of_that_name
