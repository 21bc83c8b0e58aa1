"""Wrappers around modules, and compiling by repeated blocks."""

from __future__ import annotations

import pickle

import torch
from torch import nn

import drivetrain
from drivetrain import Accelerator, convert_outputs_to_fp32, extract_model_from_parallel
from drivetrain.tests.distributed import run


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.head = nn.Linear(2, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_the_users_module_comes_out_of_ddp():
    def rank(rank):
        model = nn.Linear(1, 1)
        prepared = Accelerator(cpu=True).prepare(model)
        return prepared is not model and extract_model_from_parallel(prepared) is model

    assert run(rank, 2) == [True, True]


def test_compiled_wrappers_stay_unless_told_otherwise():
    model = nn.Linear(1, 1)
    compiled = torch.compile(model)
    assert drivetrain.is_compiled_module(compiled) and not drivetrain.is_compiled_module(model)
    assert extract_model_from_parallel(compiled) is compiled
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    outer = nn.Sequential(nn.DataParallel(model))
    assert extract_model_from_parallel(outer, recursive=True)[0] is model


def test_the_forward_before_mixed_precision():
    model = nn.Linear(1, 1)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert "forward" in vars(prepared)
    assert "forward" not in vars(extract_model_from_parallel(prepared, keep_fp32_wrapper=False))


def test_a_forward_that_was_wrapped_by_hand_is_given_back():
    model = nn.Linear(1, 1)
    model._original_forward = model.forward
    model.forward = convert_outputs_to_fp32(model.forward)
    assert extract_model_from_parallel(model, keep_fp32_wrapper=False) is model
    assert "forward" not in vars(model) and not hasattr(model, "_original_forward")
    pickle.dumps(model)


def test_repeated_blocks_are_compiled_one_by_one():
    model = Blocks()
    regional = drivetrain.compile_regions(model, backend="eager")
    assert drivetrain.has_compiled_regions(regional) and not drivetrain.has_compiled_regions(model)
    assert all(map(drivetrain.is_compiled_module, regional.layers)) and not drivetrain.is_compiled_module(regional)
    assert regional.layers[0].weight is model.layers[0].weight
    x = torch.ones(1, 2)
    assert torch.equal(regional(x), model(x))
    assert drivetrain.is_compiled_module(drivetrain.compile_regions(nn.Linear(1, 1), backend="eager"))
    assert drivetrain.is_repeated_blocks(model.layers) and drivetrain.has_repeated_blocks(model)


def test_modules_from_the_inside_out():
    model = Blocks()
    names = [name for name, _ in drivetrain.get_module_children_bottom_up(model, return_fqns=True)]
    assert names == ["layers.0", "layers.1", "layers.2", "layers", "head", ""]
    assert drivetrain.get_module_children_bottom_up(model)[-1] is model
    assert not drivetrain.model_has_dtensor(model) and not drivetrain.is_peft_model(model)


def test_names_and_dicts():
    assert drivetrain.get_pretty_name(nn.Linear) == drivetrain.get_pretty_name(nn.Linear(1, 1)) == "Linear"
    assert drivetrain.recursive_getattr(Blocks(), "head.out_features") == 1
    target = {"a": {"b": 1, "c": 2}}
    assert drivetrain.merge_dicts({"a": {"b": 3}, "d": 4}, target) is target
    assert target == {"a": {"b": 3, "c": 2}, "d": 4}
