"""The table of a model's parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain import ModelSummary
from drivetrain.callbacks.summary import summarize
from drivetrain.tests.callbacks.toy import Line, loader, quiet


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2, bias=False), nn.ReLU()))


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(0, []), (1, ["0", "1"]), (2, ["0", "1", "1.0", "1.1"]), (-1, ["0", "1", "1.0", "1.1"])],
)
def test_rows(depth, expected):
    assert [row.name for row in summarize(model(), depth).rows] == expected


def test_counts():
    summary = summarize(model())
    assert [(row.type, row.parameters, row.size) for row in summary.rows] == [("Linear", 16, 64), ("Sequential", 8, 32)]
    assert (summary.total_parameters, summary.trainable_parameters, summary.total_size) == (24, 24, 96)


def test_frozen_parameters_are_not_trainable():
    parts = model()
    parts[0].weight.requires_grad_(False)
    summary = summarize(parts)
    assert (summary.rows[0].parameters, summary.rows[0].trainable) == (16, 4)
    assert (summary.total_parameters, summary.trainable_parameters) == (24, 12)


def test_shared_parameters_count_once():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    summary = summarize(nn.Sequential(first, second))
    assert [row.parameters for row in summary.rows] == [20, 20]
    assert (summary.total_parameters, summary.total_size) == (24, 96)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 48), (torch.float32, 96), (torch.float64, 192)])
def test_sizes_are_those_of_the_dtypes(dtype, size):
    assert summarize(model().to(dtype)).total_size == size


def test_parameters_of_the_model_itself_have_a_row():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.layer = nn.Linear(1, 1)

    rows = summarize(Own()).rows
    assert [(row.name, row.parameters) for row in rows] == [("layer", 2), ("(own)", 3)]


def test_parameters_without_a_shape_yet():
    summary = summarize(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)))
    assert summary.total_parameters == 5
    assert "first forward pass are not counted" in str(summary)


def test_without_parameters():
    summary = summarize(nn.Sequential(nn.ReLU()))
    assert summary.total_parameters == 0 and "0 parameters" in str(summary)


@pytest.mark.parametrize("example", [torch.zeros(5, 3), (torch.zeros(5, 3),), {"input": torch.zeros(5, 3)}])
def test_sizes_of_an_example_input(example):
    summary = summarize(model(), 2, example_input=example)
    assert [(row.name, row.in_size, row.out_size) for row in summary.rows] == [
        ("0", "5×3", "5×4"), ("1", "5×4", "5×2"), ("1.0", "5×4", "5×2"), ("1.1", "5×2", "5×2"),
    ]  # fmt: skip


def test_the_example_leaves_no_trace():
    parts = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    parts[1].eval()
    before = torch.get_rng_state(), {k: v.clone() for k, v in parts.state_dict().items()}, [m.training for m in parts.modules()]
    summarize(parts, example_input=torch.randn(4, 3, generator=torch.Generator()))
    assert torch.equal(before[0], torch.get_rng_state())
    assert all(torch.equal(value, before[1][name]) for name, value in parts.state_dict().items())
    assert [m.training for m in parts.modules()] == before[2]
    assert not any(m._forward_hooks for m in parts.modules())


def test_text():
    lines = str(summarize(model())).splitlines()
    assert lines[0].split() == ["Name", "Type", "Params", "Trainable", "Size", "(MB)"]
    assert lines[2].split() == ["0", "Linear", "16", "16", "0.000"]
    assert lines[-1] == "24 parameters (24 trainable, 0 frozen), 0.000 MB"


def test_printed_once_at_the_start_of_a_fit(capfd):
    trainer = quiet(callbacks=[ModelSummary()])
    trainer.fit(Line(), loader(2))
    trainer.test(Line(), loader(1), verbose=False)
    assert capfd.readouterr().out.count("2 parameters (2 trainable, 0 frozen)") == 1


@pytest.mark.parametrize("depth", [-2, 1.0, "1", True])
def test_bad_depth(depth):
    with pytest.raises(ValueError, match="Received: max_depth="):
        ModelSummary(depth)
