"""Profiler: tables and traces of real fits."""

from __future__ import annotations

import inspect
import json
import time
from pathlib import Path

import pytest
import torch

from drivetrain import Callback, ModelCheckpoint, Profiler
from drivetrain.callbacks.sections import table
from drivetrain.tests import distributed
from drivetrain.tests.callbacks.toy import Line, Numbers, loader, quiet


def sections(path) -> dict[str, tuple[float, float]]:
    """Return section → (seconds, share) of a written table."""
    lines = Path(path).read_text().splitlines()
    rows = [(line[: line.index("  ")], line.split()[-3:]) for line in lines[2:]]
    return {name: (float(seconds), float(share)) for name, (seconds, share, _) in rows}


class Sleeping(Numbers):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


class SleepingCallback(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(0.02)


class Working(Line):
    """Takes longest in its step."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.04)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self):
        time.sleep(0.01)


def test_where_the_time_goes(tmp_path):
    callbacks = [SleepingCallback(), Profiler("simple", tmp_path), ModelCheckpoint(tmp_path / "checkpoints")]
    trainer = quiet(callbacks=callbacks, max_epochs=2)
    trainer.fit(Working([1.0, 1.0]), torch.utils.data.DataLoader(Sleeping(10)), loader(2))
    found = sections(tmp_path / "profile-simple.txt")
    largest_first = [seconds for name, (seconds, _) in found.items() if name != "total"]
    assert largest_first == sorted(largest_first, reverse=True)
    assert {"backward", "optimizer", "validation", "checkpoint", "logging", "hooks of the module", "other"} <= set(found)
    assert round(sum(share for name, (_, share) in found.items() if name != "total"), 6) == 100.0
    assert found["total"][1] == 100.0
    parts = sum(seconds for name, (seconds, _) in found.items() if name != "total")
    assert parts == pytest.approx(found["total"][0], abs=0.01)
    slept = {"training_step": 0.8, "SleepingCallback (callback)": 0.4, "waiting for data": 0.2, "hooks of the module": 0.02}
    for name, seconds in slept.items():  # and the parts make the whole: what one has, no other has
        assert found[name][0] >= seconds - 0.001, (name, found)


def test_goes_to_the_runs_folder_and_is_printed(capfd):
    trainer = quiet(profiler="simple")
    trainer.fit(Line(), loader(3))
    printed = capfd.readouterr().out
    assert "of 3 batches went" in printed and "waiting for data" in printed
    assert (Path(trainer.log_dir) / "profile-simple.txt").read_text().strip() in printed


def test_lets_go_of_all_hooks(tmp_path):
    model, other = Working([1.0]), SleepingCallback()
    quiet(callbacks=[other, Profiler("simple", tmp_path)]).fit(model, loader(1), loader(1))
    assert "on_train_batch_end" not in vars(other)
    assert inspect.ismethod(model.on_train_epoch_start) and "on_train_epoch_start" not in vars(model)


def test_hooks_with_fewer_arguments_are_called_as_before(tmp_path):
    class Short(Line):
        def on_train_batch_start(self, batch):
            self.seen = batch

    model = Short()
    quiet(callbacks=[Profiler("simple", tmp_path)]).fit(model, loader(2))
    assert model.seen.item() == 1.0


def test_a_fit_that_fails_is_reported_too(tmp_path):
    class Failing(Line):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="on purpose"):
        quiet(callbacks=[Profiler("simple", tmp_path)]).fit(Failing(), loader(4))
    assert "of 2 batches went" in (tmp_path / "profile-simple.txt").read_text()


def test_a_second_fit_begins_anew(tmp_path):
    profiler = Profiler("simple", tmp_path)
    for count in (3, 2):
        quiet(callbacks=[profiler]).fit(Line(), loader(count))
        assert f"of {count} batches went" in (tmp_path / "profile-simple.txt").read_text()


@pytest.mark.parametrize("kind", ["simple", "torch", "cprofile"])
def test_training_is_the_same_with_and_without(tmp_path, kind):
    weights = []
    for callbacks in ([], [Profiler(kind, tmp_path)]):
        torch.manual_seed(0)
        model = Line(lr=0.01)
        quiet(callbacks=callbacks, max_epochs=2, seed=1).fit(model, loader(6, shuffle=True))
        weights.append(model.layer.weight.item())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("kind", ["torch", "pytorch"])
def test_operators(tmp_path, kind):
    profiler = Profiler(kind, tmp_path, wait=1, warmup=1, active=2, repeat=2, profile_memory=True, record_shapes=True)
    quiet(callbacks=[profiler]).fit(Line(), loader(10))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "profile-torch-1.pt.trace.json", "profile-torch-1.txt", "profile-torch-2.pt.trace.json", "profile-torch-2.txt",
    ]  # fmt: skip
    events = json.loads((tmp_path / "profile-torch-1.pt.trace.json").read_text())["traceEvents"]
    assert {"aten::linear", "ProfilerStep#2", "ProfilerStep#3"} <= {event["name"] for event in events}
    assert "ProfilerStep#4" not in {event["name"] for event in events}
    text = (tmp_path / "profile-torch-1.txt").read_text()
    assert "aten::" in text and "CPU Mem" in text


def test_memory_over_time(tmp_path):
    """A list of times in ns, and beside it, for each, the bytes of each of torch's categories of memory."""
    quiet(callbacks=[Profiler("torch", tmp_path, memory_timeline=True)]).fit(Line(), loader(10))
    times, sizes = json.loads((tmp_path / "profile-torch-1-memory.json").read_text())
    assert len(times) == len(sizes) > 10 and times == sorted(times)
    assert max(sum(row) for row in sizes) >= 8  # a weight and a bias


def test_xla_is_asked_for_where_it_is_not(tmp_path):
    with pytest.raises(ImportError, match=r"drivetrain\[xla\]"):
        quiet(callbacks=[Profiler("xla", tmp_path)]).fit(Line(), loader(2))


def test_too_few_batches_to_profile_are_said(tmp_path):
    with pytest.warns(UserWarning, match="Expected more than 2 batches to profile"):
        quiet(callbacks=[Profiler("torch", tmp_path)]).fit(Line(), loader(2))


def test_functions(tmp_path):
    quiet(callbacks=[Profiler("cprofile", tmp_path, row_limit=200)]).fit(Line(), loader(4))
    assert "training_step" in (tmp_path / "profile-cprofile.txt").read_text()
    assert (tmp_path / "profile-cprofile.prof").stat().st_size > 0


def test_every_rank_has_files_of_its_own(tmp_path):
    def run(rank):
        for kind in ("simple", "torch"):
            trainer = quiet(callbacks=[Profiler(kind, tmp_path)], devices=2, strategy="ddp")
            trainer.fit(Line(lr=0.1), loader(12))

    distributed.run(run, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "profile-simple-rank1.txt", "profile-simple.txt", "profile-torch-1.pt.trace.json", "profile-torch-1.txt",
        "profile-torch-rank1-1.pt.trace.json", "profile-torch-rank1-1.txt",
    ]  # fmt: skip


def test_shares_make_a_hundred():
    text = table({"a": 1.0, "b": 1.0, "c": 1.0}, 2)
    assert [line.split()[-2] for line in text.splitlines()[2:]] == ["33.4", "33.3", "33.3", "100.0"]
    assert table({}, 0).splitlines()[-1].split()[0] == "total"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "line"}, "kind='line'"), ({"profile_memory": True}, "Received: profile_memory"),
        ({"kind": "cprofile", "wait": 1}, "Received: wait"), ({"kind": "torch", "active": 0}, "active=0"),
        ({"kind": "torch", "wait": -1}, "wait=-1"), ({"kind": "torch", "row_limit": 0}, "row_limit=0"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Profiler(**arguments)
