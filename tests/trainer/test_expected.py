"""Nonsense given to every public method of an Accelerator: what was expected, what came, what to do."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.strategies.gradients import GradientState
from drivetrain.strategies.state import PartialState

MODEL = nn.Linear(1, 1)
LOSS = MODEL(torch.ones(1, 1)).sum()
PARAMETERS = list(MODEL.parameters())
LOADER = DataLoader([1, 2, 3])

# Method → calls that make no sense, as (arguments, options, error, what the message shows of them).
CALLS = {
    "accumulate": [((5,), {}, TypeError, "model=5")],
    "autocast": [((5,), {}, TypeError, "autocast_handler=5")],
    "backward": [((5,), {}, TypeError, "int"), ((LOSS,), {"weight": -1}, ValueError, "weight=-1"),
                 ((torch.ones(()),), {}, ValueError, "no parameter led to"),
                 ((MODEL(torch.ones(2, 1)),), {}, ValueError, r"shape \(2, 1\)")],
    "clear": [],
    "free_memory": [],
    "clip_grad_norm_": [((5, 1.0), {}, TypeError, "parameters=5"), ((MODEL, 1.0), {}, TypeError, "parameters=Linear"),
                        ((PARAMETERS, -1.0), {}, ValueError, "max_norm=-1.0"),
                        ((PARAMETERS, "1"), {}, TypeError, "max_norm='1'"),
                        ((PARAMETERS, float("nan")), {}, ValueError, "max_norm=nan"),
                        ((PARAMETERS, 1.0, "l2"), {}, TypeError, "norm_type='l2'"),
                        ((PARAMETERS, 1.0, 0), {}, ValueError, "norm_type=0"), (([5], 1.0), {}, TypeError, r"\[5\]")],
    "clip_grad_value_": [((5, 1.0), {}, TypeError, "parameters=5"), ((PARAMETERS, -1), {}, ValueError, "clip_value=-1")],
    "deepspeed_ulysses_dl_adapter": [],
    "end_training": [],
    "entry": [((5, "forward"), {}, TypeError, "model=5"), ((MODEL, 5), {}, TypeError, "method=5"),
              ((MODEL, "training_stepp"), {}, AttributeError, "training_stepp")],
    "gather": [],  # one process gives back whatever it gets
    "gather_for_metrics": [],
    "get_state_dict": [((5,), {}, TypeError, "model=5")],
    "get_tracker": [((5,), {}, TypeError, "name=5")],
    "init_trackers": [((5,), {}, TypeError, "project_name=5"), (("a", 5), {}, TypeError, "config=5"),
                      (("a", {1: 2}), {}, ValueError, "config={1: 2}")],
    "join_uneven_inputs": [((5,), {}, TypeError, "joinables=5")],
    "load_state": [(("missing",), {}, ValueError, "input_dir='missing'"), ((5,), {}, TypeError, "input_dir=5"),
                   (("a", 5), {}, TypeError, "load_kwargs=5"), ((), {}, ValueError, "input_dir")],
    "local_main_process_first": [],
    "log": [((5,), {}, TypeError, "values=5"), (({1: 2},), {}, ValueError, "values={1: 2}"),
            (({"a": 1}, 0, 5), {}, TypeError, "log_kwargs=5")],
    "lomo_backward": [((LOSS, "fast"), {}, TypeError, "learning_rate='fast'"), ((LOSS, 0.1), {}, ValueError, "LOMO")],
    "main_process_first": [],
    "maybe_context_parallel": [],
    "no_sync": [((5,), {}, TypeError, "model=5")],
    "on_last_process": [((5,), {}, TypeError, "function=5")],
    "on_local_main_process": [((5,), {}, TypeError, "function=5")],
    "on_local_process": [((5, 0), {}, TypeError, "function=5"), ((print, "a"), {}, TypeError, "local_process_index='a'"),
                         ((print, -1), {}, ValueError, "local_process_index=-1")],
    "on_main_process": [((5,), {}, TypeError, "function=5")],
    "on_process": [((5, 0), {}, TypeError, "function=5"), ((print, "a"), {}, TypeError, "process_index='a'"),
                   ((print,), {}, TypeError, "process_index=None")],
    "pad_across_processes": [((torch.ones(1), "a"), {}, TypeError, "dim='a'")],
    "prepare": [((5,), {"device_placement": [True, False]}, ValueError, "2 values")],
    "prepare_data_loader": [((5,), {}, TypeError, "int")],
    "prepare_model": [((5,), {}, TypeError, "model=5")],
    "prepare_optimizer": [((5,), {}, TypeError, "optimizer=5")],
    "prepare_scheduler": [((5,), {}, TypeError, "scheduler=5")],
    "print": [],
    "profile": [((5,), {}, TypeError, "profile_handler=5")],
    "reduce": [((torch.ones(1), "avg"), {}, ValueError, "reduction='avg'"), (("a",), {}, TypeError, "str"),
               ((torch.ones(1), "sum", "a"), {}, TypeError, "scale='a'")],
    "register_for_checkpointing": [((5,), {}, ValueError, "Item at index 0 .int."),
                                   ((MODEL, LOSS), {}, ValueError, "Item at index 1 .Tensor.")],
    "register_load_state_pre_hook": [((5,), {}, TypeError, "hook=5")],
    "register_save_state_pre_hook": [((5,), {}, TypeError, "hook=5")],
    "save": [((5, 5), {}, TypeError, "f=5"), ((5, "x"), {"safe_serialization": True}, TypeError, "int")],
    "save_model": [((5, "x"), {}, TypeError, "model=5"), ((MODEL, 5), {}, TypeError, "save_directory=5"),
                   ((MODEL, "x", "10 apples"), {}, ValueError, "max_shard_size='10 apples'")],
    "save_state": [((5,), {}, TypeError, "output_dir=5"), ((), {}, ValueError, "output_dir"),
                   (("x",), {"metadata": 5}, TypeError, "metadata=5"), (("x",), {"then": 5}, TypeError, "then=5")],
    "set_trigger": [],
    "check_trigger": [],
    "skip_first_batches": [((5,), {}, TypeError, "dataloader=5"), ((LOADER, -1), {}, ValueError, "num_batches=-1"),
                           ((LOADER, "a"), {}, TypeError, "num_batches='a'")],
    "split_between_processes": [((5,), {}, TypeError, "inputs=5")],
    "trigger_sync_in_backward": [((5,), {}, TypeError, "model=5")],
    "unscale_gradients": [((5,), {}, TypeError, "optimizer=5")],
    "unwrap_model": [((5,), {}, TypeError, "model=5")],
    "verify_device_map": [((5,), {}, TypeError, "model=5")],
    "wait_for_everyone": [],
    "wait_for_saves": [], "release": [], "abandon_window": [],
}  # fmt: skip
EACH = [(name, *call) for name, calls in CALLS.items() for call in calls]


@pytest.fixture(autouse=True)
def _fresh():
    yield
    GradientState._reset_state()
    PartialState._reset_state()


def methods():
    return {name for name, value in inspect.getmembers(Accelerator, inspect.isroutine) if not name.startswith("_")}


def test_every_public_method_is_here():
    assert methods() == set(CALLS)


@pytest.mark.parametrize(("name", "arguments", "options", "error", "shown"), EACH,
                         ids=[f"{entry[0]}-{number}" for number, entry in enumerate(EACH)])  # fmt: skip
def test_a_call_that_makes_no_sense(name, arguments, options, error, shown):
    with pytest.raises(error, match=shown) as caught:
        made = getattr(Accelerator(cpu=True), name)(*arguments, **options)
        with made:  # what a context manager checks it checks when it is entered
            pass
    if error is not AttributeError:
        text = str(caught.value)
        assert re.match(r"Expected .+[.] Received: .+[.?]$", text, re.DOTALL), text
        assert re.search(r"[.?] [A-Z].+", text.split("Received:")[1], re.DOTALL), f"no advice: {text}"


@pytest.mark.parametrize(
    "options",
    [
        {"device_placement": "yes"}, {"cpu": 1}, {"split_batches": 4}, {"dataloader_config": {}}, {"project_dir": 5},
        {"project_config": "a"}, {"gradient_accumulation_plugin": 2}, {"kwargs_handlers": "fast"}, {"dynamo_plugin": "a"},
        {"rng_types": "torch"}, {"step_scheduler_with_optimizer": 2}, {"gradient_accumulation_steps": "two"},
        {"mixed_precision": 5}, {"dynamo_backend": 5}, {"log_with": 5}, {"strategy": 5}, {"seed": "a"}, {"device": 5.5},
        {"kwargs_handlers": [5]}, {"rng_types": [5]}, {"log_with": ["tensorbord"]}, {"fsdp_plugin": 5},
        {"parallelism_config": 5},
    ],
    ids=lambda options: str(options),
)  # fmt: skip
def test_arguments_of_an_accelerator_that_make_no_sense(options):
    with pytest.raises((TypeError, ValueError)) as caught:
        Accelerator(**{"cpu": True, **options})
    text, value = str(caught.value), next(iter(options.values()))
    shown = value[0] if isinstance(value, list) else value
    assert "Expected" in text and "Received" in text and str(shown) in text, text
