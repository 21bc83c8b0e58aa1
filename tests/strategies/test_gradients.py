"""Gradient state and accumulation windows: when gradients are complete, and by what each loss is scaled."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from drivetrain.strategies.accumulation import Accumulation, Window, rescale
from drivetrain.strategies.base import Strategy
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.settings import GradientAccumulationPlugin
from drivetrain.strategies.world import World


class Loader:
    """Stands where a prepared loader does: a number of batches, the last one known as such."""

    def __init__(self, length, *, sized=True, weights=None, said=None):
        self.length, self.sized, self.weights, self.said = length, sized, weights or {}, said or length
        self.end_of_dataloader, self.batches, self.remainder, self.weight = False, None, -1, 1.0

    def __iter__(self):
        state = GradientState()
        state.enter(self)
        try:
            for index in range(self.length):
                self.end_of_dataloader = index == self.length - 1
                self.batches = max(self.said - index - 1, 0 if self.end_of_dataloader else 1) if self.sized else None
                self.weight = self.weights.get(index, 1.0)
                yield index
        finally:
            state.leave(self)


@pytest.fixture(autouse=True)
def _fresh_state():
    GradientState._reset_state()
    yield
    GradientState._reset_state()


def window(num_steps=4, world=None, **options):
    state = GradientState(GradientAccumulationPlugin(num_steps=num_steps, **options))
    weight = nn.Parameter(torch.zeros(1))
    made = Window(state, world or World(), lambda: [weight])
    return made, Accumulation(made, Strategy(), (), lambda: [weight]), weight


def gradients(loader, made, context, weight, losses=None, weights=None):
    """The gradient at the end of every window, with the loss of batch i being losses[i] * weight (default 1)."""
    found = []
    for index in loader:
        with context:
            loss = (weight * (1.0 if losses is None else losses[index])).sum()
            made.scale(loss, None if weights is None else weights[index]).backward()
            if made.state.sync_gradients:
                found.append(weight.grad.item())
                weight.grad = None
    return found


def test_all_instances_are_one():
    state = GradientState(GradientAccumulationPlugin(num_steps=3))
    assert GradientState().num_steps == 3
    GradientState().sync_gradients = False
    assert not state.sync_gradients and state.initialized
    GradientState(GradientAccumulationPlugin())
    assert state.num_steps == 1


def test_loaders_nest_and_the_inner_one_is_active():
    state, outer, inner = GradientState(), Loader(2), Loader(1)
    assert not state.in_dataloader and not state.end_of_dataloader and state.remainder == -1
    for _ in outer:
        assert state.active_dataloader is outer
        for _ in inner:
            assert state.active_dataloader is inner and state.end_of_dataloader
        assert state.active_dataloader is outer
    assert not state.in_dataloader and state.dataloader_references == []


def test_leaving_out_of_order_forgets_the_right_loader():
    state, first, second = GradientState(), Loader(1), Loader(1)
    state.enter(first)
    state.enter(second)
    state.leave(first)
    assert state.active_dataloader is second
    state.leave(second)
    state.leave(second)
    assert state.active_dataloader is None


def test_G1_short_last_window_divided_by_the_full_one_as_in_accelerate(caplog):
    with caplog.at_level(logging.WARNING):
        assert gradients(Loader(5), *window()) == [1.0, 0.25]
    assert "holds 1 of 4 micro-batches" in caplog.text and "scale_last_window=True" in caplog.text


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize(("batches", "expected"), [(5, [1.0, 1.0]), (7, [1.0, 1.0]), (3, [1.0]), (8, [1.0, 1.0])])
def test_G1_short_last_window_averaged_over_what_it_holds(batches, expected, sized):
    found = gradients(Loader(batches, sized=sized), *window(scale_last_window=True))
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("sized", [True, False])
def test_short_last_window_is_the_mean_of_its_micro_batches(sized):
    losses = [1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 60.0]
    found = gradients(Loader(7, sized=sized), *window(scale_last_window=True), losses=losses)
    assert found == pytest.approx([2.5, 30.0], rel=1e-6)


@pytest.mark.parametrize("said", [2, 5, 6, 9])
def test_loader_that_says_a_wrong_length_changes_nothing(said):
    losses = [1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 60.0]
    found = gradients(Loader(7, said=said), *window(scale_last_window=True), losses=losses)
    assert found == pytest.approx([2.5, 30.0], rel=1e-6)


def test_windows_go_on_over_the_end_of_a_loader_where_that_is_asked_for():
    made, context, weight = window(num_steps=4, sync_with_dataloader=False)
    assert gradients(Loader(3), made, context, weight) == []
    assert made.count == 3
    assert gradients(Loader(3), made, context, weight) == [1.0]
    assert made.count == 2


def test_only_the_active_loader_ends_a_window():
    made, context, weight = window(num_steps=4)
    ended = []
    for _ in Loader(3):
        for _ in Loader(1):
            pass
        with context:
            ended.append(made.state.sync_gradients)
    assert ended == [False, False, True]


def test_a_new_number_of_steps_holds_from_the_next_window():
    made, context, _ = window(num_steps=2)
    edges = []
    for index in range(8):
        if index == 1:
            made.state.num_steps = 3
        with context:
            edges.append(made.state.sync_gradients)
    assert edges == [False, True, False, False, True, False, False, True]


def test_exception_inside_the_last_micro_batch_leaves_a_usable_window():
    made, context, _ = window(num_steps=2)
    with pytest.raises(KeyError), context:
        raise KeyError
    with context:
        assert made.state.sync_gradients
    assert made.count == 0


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_G2_gradient_is_the_mean_over_all_items_of_the_window(kind):
    """1 item with gradient 10, 9 with gradient 20: the mean over the 10 is 19."""
    made, context, weight = window(num_steps=2)
    found = gradients(Loader(2), made, context, weight, losses=[10.0, 20.0], weights=[kind(1), kind(9)])
    assert found == pytest.approx([19.0], rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"scale_last_window": True}])
@pytest.mark.parametrize("sized", [True, False])
def test_G2_short_weighted_window_of_several_micro_batches(sized, options, caplog):
    made, context, weight = window(num_steps=4, **options)
    found = gradients(Loader(2, sized=sized), made, context, weight, losses=[10.0, 20.0], weights=[1, 9])
    assert found == pytest.approx([19.0], rel=1e-6) and not caplog.records


def test_G2_short_weighted_window_and_the_one_after_it():
    made, context, weight = window(num_steps=2)
    losses, weights = [10.0, 20.0, 5.0], [1, 9, 7]
    assert gradients(Loader(3), made, context, weight, losses, weights) == pytest.approx([19.0, 5.0], rel=1e-6)
    assert gradients(Loader(1), made, context, weight, [3.0], [2]) == pytest.approx([3.0], rel=1e-6)


def test_micro_batch_without_items_counts_for_nothing():
    made, context, weight = window(num_steps=3)
    found = gradients(Loader(3), made, context, weight, losses=[7.0, 10.0, 20.0], weights=[0, 1, 9])
    assert found == pytest.approx([19.0], rel=1e-6)
    assert gradients(Loader(3), made, context, weight, losses=[7.0, 1.0, 2.0], weights=[0, 0, 0]) == [0.0]
    zeros = [torch.tensor(0)] * 3
    assert gradients(Loader(3), made, context, weight, losses=[7.0, 1.0, 2.0], weights=zeros) == [0.0]


def test_two_losses_of_a_micro_batch_share_its_weight():
    made, context, weight = window(num_steps=2)
    for items, slope in ((1, 10.0), (9, 20.0)):
        with context:
            made.scale((weight * slope).sum(), items).backward()
            made.scale((weight * 2 * slope).sum(), items).backward()
    assert weight.grad.item() == pytest.approx(19.0 + 38.0, rel=1e-6)
    with context:
        made.scale(weight.sum(), 3).backward()
        with pytest.raises(ValueError, match="one weight per micro-batch"):
            made.scale(weight.sum(), 4)


def test_weight_outside_of_accumulate_is_a_window_of_its_own():
    made, _, weight = window(num_steps=1)
    made.scale((weight * 5).sum(), 3).backward()
    made.scale((weight * 5).sum(), 8).backward()
    assert weight.grad.item() == pytest.approx(10.0)


def test_weights_for_some_losses_of_a_window_only_are_refused():
    for first, second in ((None, 3), (3, None)):
        made, context, weight = window(num_steps=2)
        with context:
            made.scale(weight.sum(), first)
        with pytest.raises(ValueError, match="a weight for every loss of an accumulation window or for none"), context:
            made.scale(weight.sum(), second)


@pytest.mark.parametrize("bad", [-1, "3", torch.ones(2), True + 1j])
def test_weights_that_are_no_number_of_items_are_refused(bad):
    made, context, weight = window()
    with context, pytest.raises(ValueError, match="one number of items"):
        made.scale(weight.sum(), bad)


def test_loaders_own_weight_scales_its_short_last_batch():
    made, context, weight = window(num_steps=1)
    assert gradients(Loader(2, weights={1: 0.5}), made, context, weight) == [1.0, 0.5]
    assert gradients(Loader(2, weights={1: 0.5}), made, context, weight, weights=[1, 4]) == [1.0, 1.0]


def test_loss_without_accumulation_is_not_touched():
    made, context, weight = window(num_steps=1)
    loss = weight.sum()
    with context:
        assert made.scale(loss) is loss


def test_outside_of_accumulate_losses_are_divided_by_the_number_of_steps():
    made, _, weight = window(num_steps=4)
    assert made.scale(weight.sum() + 8).item() == 2.0


def test_rescale_leaves_missing_gradients_alone():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    first.grad = torch.ones(2)
    rescale([first, second], 0.5)
    assert first.grad.tolist() == [0.5, 0.5] and second.grad is None
    rescale([first], torch.tensor(4.0, dtype=torch.float64))
    assert first.grad.tolist() == [2.0, 2.0] and first.grad.dtype is torch.float32
