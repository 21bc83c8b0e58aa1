"""The TensorBoard tracker, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard import SummaryWriter

from drivetrain.callbacks.tracking.tensorboard import TensorBoardTracker


def opened(folder, resume_step=None, **options):
    tracker = TensorBoardTracker("", folder, **options)
    tracker.resume_step = resume_step
    tracker.start()
    return tracker


def read(folder):
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    found.Reload()
    return found


def scalars(folder, tag):
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def hparams(folder, tag):
    return HParamsPluginData.FromString(read(folder).summary_metadata[f"_hparams_/{tag}"].plugin_data.content)


def test_scalars_with_step_and_time(tmp_path):
    tracker = opened(tmp_path)
    tracker.logged_at = 1700000000.5
    tracker.log({"loss": 0.5, "count": 3, "tensor": np.float32(0.25), "nan": math.nan}, step=4)
    tracker.log({"loss": 0.125}, step=8)
    tracker.finish()
    assert scalars(tmp_path, "loss") == [(4, 0.5), (8, 0.125)]
    assert scalars(tmp_path, "count") == [(4, 3.0)]
    assert math.isnan(scalars(tmp_path, "nan")[0][1])
    assert read(tmp_path).Scalars("loss")[0].wall_time == 1700000000.5
    assert isinstance(tracker.tracker, SummaryWriter)


def test_text_lists_and_dicts_of_numbers(tmp_path):
    tracker = opened(tmp_path)
    tracker.log({"note": "good", "parts": [1.0, 2.0], "loss": {"train": 0.5, "val": 0.75}}, step=2)
    tracker.finish()
    assert read(tmp_path).Tensors("note/text_summary")[0].tensor_proto.string_val == [b"good"]
    assert scalars(tmp_path, "parts/0") == [(2, 1.0)] and scalars(tmp_path, "parts/1") == [(2, 2.0)]
    assert scalars(tmp_path / "loss_train", "loss") == [(2, 0.5)]
    assert scalars(tmp_path / "loss_val", "loss") == [(2, 0.75)]


def test_L6_nested_configuration(tmp_path):
    tracker = opened(tmp_path)
    tracker.store_init_configuration(
        {"optim": {"name": "adam", "betas": [0.9, 0.999], "groups": [{"lr": 0.1}]}, "none": None, "path": tmp_path}
    )
    tracker.finish()
    stored = hparams(tmp_path, "session_start_info").session_start_info.hparams
    assert {name: value.number_value or value.string_value for name, value in stored.items()} == {
        "optim/name": "adam", "optim/betas/0": 0.9, "optim/betas/1": 0.999, "optim/groups/0/lr": 0.1,
        "none": "None", "path": str(tmp_path),
    }
    assert hparams(tmp_path, "session_end_info").session_end_info.status == Status.Value("STATUS_SUCCESS")
    assert len(list(tmp_path.iterdir())) == 1  # no folder of its own for the hyperparameters


def test_a_failed_run_is_marked(tmp_path):
    tracker = opened(tmp_path)
    tracker.store_init_configuration({"a": 1})
    tracker.fail("ValueError: no")
    tracker.finish()
    assert hparams(tmp_path, "session_end_info").session_end_info.status == Status.Value("STATUS_FAILURE")
    assert read(tmp_path).Tensors("error/text_summary")[0].tensor_proto.string_val == [b"ValueError: no"]


def test_images(tmp_path):
    tracker = opened(tmp_path)
    tracker.log_images({"digits": np.zeros((2, 4, 4, 3), np.uint8)}, step=1, dataformats="NHWC")
    tracker.finish()
    assert [image.step for image in read(tmp_path).Images("digits")] == [1]


def test_what_it_cannot_take_is_said_once(tmp_path):
    tracker = opened(tmp_path)
    with pytest.warns(RuntimeWarning, match="Received: weights of type Tensor") as caught:
        for step in range(3):
            tracker.log({"weights": torch.zeros(3), "loss": 1.0}, step=step)
    tracker.finish()
    assert sum("Received: weights" in str(one.message) for one in caught) == 1 and len(scalars(tmp_path, "loss")) == 3


def test_L3_steps_after_the_restored_one_are_hidden_and_none_is_doubled(tmp_path):
    first = opened(tmp_path)
    for step in range(1, 11):
        first.log({"loss": step * 1.5}, step=step)
    first.log({"val_loss": 9.0}, step=6)
    first.finish()
    second = opened(tmp_path, resume_step=6)
    second.log({"val_loss": 9.0, "late": 1.0}, step=6)
    for step in range(7, 12):
        second.log({"loss": step * 2.5}, step=step)
    second.finish()
    third = opened(tmp_path, resume_step=8)
    third.log({"loss": 20.0}, step=8)
    third.log({"loss": 99.0}, step=9)
    third.finish()
    expected = [(step, step * 1.5) for step in range(1, 7)] + [(7, 17.5), (8, 20.0), (9, 99.0)]
    assert scalars(tmp_path, "loss") == expected
    assert scalars(tmp_path, "val_loss") == [(6, 9.0)] and scalars(tmp_path, "late") == [(6, 1.0)]


def test_L3_a_step_that_was_hidden_before_is_logged_again(tmp_path):
    first = opened(tmp_path)
    for step in (1, 2, 3, 4):
        first.log({"loss": float(step)}, step=step)
    first.finish()
    opened(tmp_path, resume_step=1).finish()  # went back to 1 and logged nothing
    third = opened(tmp_path, resume_step=3)
    third.log({"loss": 30.0}, step=3)
    third.finish()
    assert scalars(tmp_path, "loss") == [(1, 1.0), (3, 30.0)]


def test_a_torn_event_is_no_obstacle(tmp_path):
    first = opened(tmp_path)
    first.log({"loss": 1.0}, step=1)
    first.log({"loss": 2.0}, step=2)
    first.finish()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    second = opened(tmp_path, resume_step=1)
    second.log({"loss": 20.0}, step=2)
    second.finish()
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 20.0)]


def test_nothing_is_flushed_at_each_call(tmp_path):
    tracker = opened(tmp_path)
    flushes = []
    writer = tracker.tracker.file_writer.event_writer._async_writer._writer
    flush = writer.flush
    writer.flush = lambda: (flushes.append(1), flush())
    for step in range(500):
        tracker.log({"loss": float(step)}, step=step)
    before = len(flushes)
    tracker.flush()
    assert before <= 1 and len(flushes) == before + 1  # the writer flushes its first event at once
    assert len(scalars(tmp_path, "loss")) == 500
    tracker.finish()


def test_a_wrong_option_is_an_error_at_once(tmp_path):
    with pytest.raises(TypeError, match="flush_seconds"):
        TensorBoardTracker("", tmp_path, flush_seconds=5)


def test_no_warnings(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker = opened(tmp_path, flush_secs=5)
        tracker.log({"a": 1.0, "b": "x"}, step=None)
        tracker.finish()
