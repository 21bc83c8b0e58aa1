"""A tracker behind its queue: in order, never in the way, nothing lost."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch

from drivetrain.callbacks.tracking import journal
from drivetrain.callbacks.tracking.base import GeneralTracker
from drivetrain.callbacks.tracking.delivery import GIVE_UP_AFTER
from drivetrain.callbacks.tracking.feed import QueuedTracker
from drivetrain.callbacks.tracking.trackers import finish_trackers, get_tracker, start_trackers
from drivetrain.tests.distributed import run


pytestmark = pytest.mark.timeout(400)  # programs that are started import torch, on machines that may be busy


class Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.calls = []
        self.threads = set()

    @property
    def tracker(self):
        return self.calls

    def _note(self, *call):
        self.threads.add(threading.current_thread().name)
        self.calls.append(call)

    def start(self):
        self._note("start")

    def store_init_configuration(self, values):
        self._note("config", values)

    def log(self, values, step=None, **kwargs):
        self._note("log", values, step, kwargs)

    def log_images(self, values, step=None):
        self._note("images", values, step)

    def flush(self):
        self._note("flush")

    def fail(self, error):
        self._note("fail", error)

    def finish(self):
        self._note("finish")

    def steps(self):
        return [call[2] for call in self.calls if call[0] == "log"]


class Gated(Recorder):
    """Takes nothing until its gate is opened: a server that hangs."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.reached = threading.Event()

    def log(self, values, step=None, **kwargs):
        self.reached.set()
        self.gate.wait()
        super().log(values, step, **kwargs)


class Refusing(Recorder):
    def __init__(self, refused):
        super().__init__()
        self.refused = refused

    def log(self, values, step=None, **kwargs):
        if step in self.refused:
            raise ConnectionError(f"no server at step {step}")
        super().log(values, step, **kwargs)


def queued(tracker, folder, **options):
    feed = QueuedTracker(tracker, journal_dir=folder, **{"timeout": 60, **options})  # a machine may be busy
    feed.start()
    return feed


def of_trackers(caught):
    """What trackers told, of the warnings that were caught: what is collected meanwhile may warn too."""
    return [one for one in caught if str(one.message).startswith("Tracker ")]


def journalled(path):
    return [(entry.call, entry.values, entry.step) for entry in journal.read(path)]


def test_calls_arrive_in_order_from_one_other_thread(tmp_path):
    tracker = Recorder()
    (feed,) = start_trackers(tracker, "run", {"a": {"b": [1]}}, tmp_path)
    feed.log({"loss": 0.5}, step=3, note="x")
    feed.log({"loss": torch.tensor(0.25)})
    feed.fail("ValueError")
    finish_trackers([feed])
    assert tracker.calls == [
        ("start",), ("config", {"a": {"b": [1]}}), ("log", {"loss": 0.5}, 3, {"note": "x"}),
        ("log", {"loss": 0.25}, None, {}), ("fail", "ValueError"), ("finish",),
    ]
    assert tracker.threads == {"tracker-recorder"}
    assert list(tmp_path.iterdir()) == []


def test_values_are_those_of_the_call(tmp_path):
    tracker = Gated()
    feed = queued(tracker, tmp_path)
    loss, values = torch.tensor(1.0), {"x": 1}
    feed.log({"loss": loss})
    feed.log(values)
    loss.add_(1)
    values["x"] = 2
    tracker.gate.set()
    feed.finish()
    assert [call[1] for call in tracker.calls if call[0] == "log"] == [{"loss": 1.0}, {"x": 1}]


def test_L6_a_full_queue_neither_blocks_nor_loses_nor_reorders(tmp_path):
    tracker = Gated()
    feed = queued(tracker, tmp_path, capacity=10)
    for step in range(1000):  # returns although the tracker takes nothing
        feed.log({"loss": step / 3}, step=step)
    waiting = tmp_path / "journal-recorder.waiting.jsonl"
    assert 980 <= len(waiting.read_text().splitlines()) - 1 <= 990
    tracker.gate.set()
    for step in range(1000, 1500):
        feed.log({"loss": step / 3}, step=step)
    feed.finish()
    assert tracker.steps() == list(range(1500))
    assert [call[1]["loss"] for call in tracker.calls if call[0] == "log"] == [step / 3 for step in range(1500)]
    assert tracker.calls[-1] == ("finish",) and list(tmp_path.iterdir()) == []


def test_queue_and_disk_take_turns(tmp_path):
    """Small queue, several bursts: the hand-over between memory and disk happens many times."""
    tracker = Recorder()
    feed = queued(tracker, tmp_path, capacity=2)
    for step in range(3000):
        feed.log({"x": step}, step=step)
        if step % 250 == 0:
            feed.flush(timeout=200)
    feed.finish()
    assert tracker.steps() == list(range(3000)) and list(tmp_path.iterdir()) == []


def test_L6_a_tracker_that_hangs_is_left_behind_and_its_entries_are_kept(tmp_path):
    tracker = Gated()
    feed = queued(tracker, tmp_path, capacity=10, timeout=0.5)
    for step in range(100):
        feed.log({"loss": step / 7}, step=step)
    assert tracker.reached.wait(200)
    with pytest.warns(RuntimeWarning, match=r"'recorder': It did not finish within 0.5 s: 100 calls .*The run goes on"):
        feed.finish()
    kept = [("log", {"loss": step / 7}, step) for step in range(100)]
    assert journalled(feed.journal) == kept
    tracker.gate.set()  # it comes back when nobody waits any more
    feed._thread.join(200)
    assert tracker.steps() == [0] and ("finish",) not in tracker.calls
    assert journalled(feed.journal) == kept


def test_L6_a_tracker_that_refuses_one_entry_gets_the_others(tmp_path):
    tracker = Refusing({3, 5})
    feed = queued(tracker, tmp_path)
    with pytest.warns(RuntimeWarning, match="'recorder': It raised in log: ConnectionError: no server at step 3") as caught:
        for step in range(8):
            feed.log({"loss": 0.5}, step=step)
        feed.finish()
    assert len(of_trackers(caught)) == 1
    assert tracker.steps() == [0, 1, 2, 4, 6, 7] and tracker.calls[-1] == ("finish",)
    assert journalled(feed.journal) == [("log", {"loss": 0.5}, 3), ("log", {"loss": 0.5}, 5)]
    assert feed.journal == tmp_path / "journal-recorder.jsonl"


def test_L6_a_dead_tracker_is_given_up(tmp_path):
    tracker = Refusing(set(range(2, 100)))
    feed = queued(tracker, tmp_path, capacity=5)
    with pytest.warns(RuntimeWarning) as caught:
        for step in range(100):
            feed.log({"loss": step}, step=step)
        feed.finish()
    assert len(of_trackers(caught)) == 1 and GIVE_UP_AFTER == 3
    assert tracker.steps() == [0, 1]
    assert [entry[2] for entry in journalled(feed.journal)] == list(range(2, 100))


def test_a_tracker_that_does_not_start_is_reported_and_all_is_kept(tmp_path):
    class Broken(Recorder):
        def start(self):
            raise OSError("no such server")

    with pytest.warns(RuntimeWarning, match="It raised in start: OSError: no such server") as caught:
        (feed,) = start_trackers(Broken(), "run", {"a": [1]}, tmp_path)
        feed.log({"loss": 1.0}, step=1)
        finish_trackers([feed])
    assert len(of_trackers(caught)) == 1
    assert journalled(tmp_path / "run" / "journal-recorder.jsonl") == [
        ("store_init_configuration", {"a": [1]}, None), ("log", {"loss": 1.0}, 1)
    ]


def test_entries_carry_their_time_and_what_json_does_not_hold_as_text(tmp_path):
    tracker = Refusing({1})
    feed = queued(tracker, tmp_path)
    with pytest.warns(RuntimeWarning):
        feed.log({"loss": float("nan"), "type": torch.optim.SGD, "tensor": torch.tensor(3)}, step=1, option={"x": 1})
        feed.finish()
    said, line = feed.journal.read_text().splitlines()
    assert json.loads(said) == {"tracker": {"name": "recorder", "run_id": None, "title": None}}
    entry = json.loads(line)
    assert entry["values"]["loss"] != entry["values"]["loss"] and entry["values"]["type"] == "torch.optim.sgd.SGD"
    assert entry["values"]["tensor"] == 3 and entry["options"] == {"option": {"x": 1}}
    assert abs(entry["time"] - feed.journal.stat().st_mtime) < 60


def test_a_journal_grows_while_a_run_goes_on(tmp_path):
    for step in (1, 2):
        with pytest.warns(RuntimeWarning):
            feed = queued(Refusing({1, 2}), tmp_path, goes_on=True)
            feed.log({"loss": 1.0}, step=step)
            feed.finish()
    assert [entry[2] for entry in journalled(feed.journal)] == [1, 2]


def test_the_journal_of_another_run_is_put_aside(tmp_path):
    for step in (1, 2, 3):
        with pytest.warns(RuntimeWarning):
            feed = queued(Refusing({1, 2, 3}), tmp_path, origin={"project": f"p{step}"})
            feed.log({"loss": 1.0}, step=step)
            feed.finish()
    found = {path.name: [entry[2] for entry in journalled(path)] for path in tmp_path.iterdir()}
    assert found == {"journal-recorder-1.jsonl": [1], "journal-recorder-2.jsonl": [2], "journal-recorder.jsonl": [3]}
    assert journal.header(tmp_path / "journal-recorder-1.jsonl")["project"] == "p1"


class Returning(Recorder):
    """Refuses everything until it is back."""

    def __init__(self):
        super().__init__()
        self.back = threading.Event()

    def log(self, values, step=None, **kwargs):
        if not self.back.is_set():
            raise ConnectionError("no server")
        super().log(values, step, **kwargs)


def test_L6_a_tracker_that_comes_back_gets_its_journal_in_order(tmp_path):
    tracker = Returning()
    with pytest.warns(RuntimeWarning, match="no server") as caught:
        feed = queued(tracker, tmp_path)
        for step in range(20):
            feed.log({"x": step}, step=step)
        feed.flush(timeout=200)
        assert [entry[2] for entry in journalled(feed.journal)] == list(range(20))
        tracker.back.set()
        deadline = time.monotonic() + 60
        while feed.journal.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        feed.log({"x": 20}, step=20)
        feed.finish()
    assert len(of_trackers(caught)) == 1 and list(tmp_path.iterdir()) == []
    assert tracker.steps() == list(range(21))


def test_L6_pictures_in_a_journal_are_whole(tmp_path):
    tracker = Returning()
    tracker.log_images = lambda values, step=None: tracker.log(values, step)
    image = torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2)
    with pytest.warns(RuntimeWarning):
        feed = queued(tracker, tmp_path)
        feed.log_images({"image": image}, step=1)
        feed.flush(timeout=200)
        tracker.back.set()
        feed.finish()
    (logged,) = [call[1] for call in tracker.calls if call[0] == "log"]
    assert logged["image"].tolist() == image.tolist() and list(tmp_path.iterdir()) == []


class Asked(Recorder):
    """Knows which steps its run has, and loses what it has in memory when the process is killed."""

    survives_kill = False
    before = (1, 2)

    def logged_steps(self, name):
        return self.before if name == "loss" else ()


def test_L3_what_a_killed_process_had_sent_is_sent_again_unless_it_is_there(tmp_path):
    child = os.fork()
    if child == 0:
        feed = queued(Asked(), tmp_path)
        for step in range(1, 7):
            feed.log({"loss": step / 8, "lr": 0.5}, step=step)
        feed.flush(timeout=200)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    tracker = Asked()
    tracker.resume_step = 4
    feed = queued(tracker, tmp_path, goes_on=True)
    for step in (5, 6):
        feed.log({"loss": step / 8, "lr": 0.5}, step=step)
    feed.finish()
    assert [call[1:3] for call in tracker.calls if call[0] == "log"] == [
        ({"lr": 0.5}, 1), ({"lr": 0.5}, 2), *(({"loss": step / 8, "lr": 0.5}, step) for step in range(3, 7))
    ]
    assert list(tmp_path.iterdir()) == []


def test_L6_a_full_disk_of_the_journal_is_told_once_and_ends_no_run(tmp_path):
    def work(rank):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            feed = queued(Refusing(set(range(100))), tmp_path, capacity=5)
            for step in range(100):
                feed.log({"loss": step / 8}, step=step)
            feed.finish()
        return len(of_trackers(caught)), [entry[2] for entry in journalled(feed.journal)]

    ((told, kept),) = run(work, 1)
    assert told == 1 and kept == list(range(len(kept))) and 0 < len(kept) < 10  # whole lines, as many as fit


def test_what_a_tracker_has_nothing_for_is_told_once(tmp_path):
    feed = queued(Recorder(), tmp_path)
    with pytest.warns(RuntimeWarning, match="It has nothing for sound: what is given to log_audio is left out") as caught:
        for step in range(3):
            feed.log_audio({"a": [0.0]}, step=step)
    feed.finish()
    assert len(of_trackers(caught)) == 1 and feed.wrapped.calls == [("start",), ("finish",)]
    with pytest.raises(AttributeError):
        _ = feed.log_nonsense


def test_sigterm_in_a_loop_of_ones_own_finishes_the_trackers(tmp_path):
    def work(rank):
        child = os.fork()
        if child == 0:
            trackers = start_trackers("jsonl", "run", logging_dir=tmp_path)
            for step in range(50):
                trackers[0].log({"x": step}, step=step)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run(work, 1) == [-signal.SIGTERM]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[:-1]] == list(range(50)) and lines[-1] == {"error": "stopped by SIGTERM"}


def test_warnings_as_errors_end_no_run(tmp_path, capfd):
    feed = queued(Refusing({1}), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed.log({"loss": 1.0}, step=1)
        feed.log({"loss": 1.0}, step=2)
        feed.finish()
    assert feed.wrapped.steps() == [2]
    assert "ConnectionError" in capfd.readouterr().err


def test_the_native_object_is_waited_for(tmp_path):
    class Slow(Recorder):
        gate = threading.Event()

        def start(self):
            self.gate.wait()
            self.run = "native"

        @property
        def tracker(self):
            return self.run

    trackers = start_trackers(Slow(), logging_dir=tmp_path)
    threading.Timer(0.05, Slow.gate.set).start()
    assert get_tracker(trackers, "recorder", unwrap=True) == "native"
    assert trackers[0].run == "native"
    with pytest.raises(AttributeError):
        _ = trackers[0].nothing
    finish_trackers(trackers)


def test_a_native_object_that_never_comes_is_an_error(tmp_path):
    class Hanging(Recorder):
        gate = threading.Event()

        def start(self):
            self.gate.wait()

    feed = queued(Hanging(), tmp_path, timeout=0.2)
    with pytest.raises(RuntimeError, match="Expected tracker 'recorder' to start within 0.2 s"):
        _ = feed.tracker
    Hanging.gate.set()
    feed.timeout = 200
    feed.finish()


def test_methods_for_media_are_enqueued_in_order(tmp_path):
    tracker = Gated()
    feed = queued(tracker, tmp_path)
    image = torch.zeros(2)
    feed.log({"x": 1}, step=1)
    feed.log_images({"image": image}, step=1)
    feed.log({"x": 2}, step=2)
    image.add_(1)
    tracker.gate.set()
    feed.finish()
    assert [call[0] for call in tracker.calls] == ["start", "log", "images", "log", "finish"]
    assert tracker.calls[2][1]["image"].tolist() == [0.0, 0.0]


def test_flush_waits_for_all_that_was_logged(tmp_path):
    tracker = Recorder()
    feed = queued(tracker, tmp_path)
    for step in range(50):
        feed.log({"x": step}, step=step)
    feed.flush(timeout=200)
    assert tracker.steps() == list(range(50)) and tracker.calls[-1] == ("flush",)
    feed.finish()


def test_a_slow_tracker_is_waited_for_once(tmp_path):
    tracker = Gated()
    feed = queued(tracker, tmp_path)
    feed.log({"x": 1}, step=1)
    feed.flush(timeout=0.1)
    feed.flush(timeout=100_000)  # returns at once
    tracker.gate.set()
    feed.finish()
    assert tracker.steps() == [1]


def test_logging_after_the_end_is_kept_and_said(tmp_path):
    feed = queued(Recorder(), tmp_path)
    feed.finish()
    with pytest.warns(RuntimeWarning, match="logged after it was finished"):
        feed.log({"x": 1}, step=1)
    feed.finish()
    assert journalled(feed.journal) == [("log", {"x": 1}, 1)] and feed.wrapped.calls == [("start",), ("finish",)]


def test_trackers_finish_together(tmp_path):
    hanging = [queued(Gated(), tmp_path / str(index), timeout=1.0) for index in range(3)]
    fine = queued(Recorder(), tmp_path, timeout=0.1)
    for feed in (*hanging, fine):
        feed.log({"x": 1}, step=1)
    fine.flush(timeout=30)
    with pytest.warns(RuntimeWarning) as caught:
        finish_trackers([*hanging, fine])
    assert len(of_trackers(caught)) == 3
    fine._thread.join(200)
    assert fine.wrapped.calls[-1] == ("finish",)
    for feed in hanging:
        feed.wrapped.gate.set()


def test_a_forked_child_does_not_log_and_does_not_hang(tmp_path):
    tracker = Recorder()
    feed = queued(tracker, tmp_path)
    feed.log({"x": 1}, step=1)
    child = os.fork()
    if child == 0:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            feed.log({"x": 2}, step=2)
            feed.flush()
            feed.finish()
        os._exit(0 if len(of_trackers(caught)) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    feed.finish()
    assert tracker.steps() == [1] and list(tmp_path.iterdir()) == []


def script(folder, last):
    return textwrap.dedent(f"""
        import os, signal, sys
        from drivetrain.callbacks.tracking.trackers import start_trackers
        trackers = start_trackers(["csv", "tensorboard"], "run", {{"a": 1}}, {str(folder)!r})
        for step in range(300):
            for tracker in trackers:
                tracker.log({{"loss": float(step)}}, step=step)
    """) + last + "\n"


@pytest.mark.parametrize("last, code", [("", 0), ("raise ValueError('no')", 1), ("sys.exit(3)", 3)])
def test_a_program_that_ends_without_finishing_loses_nothing(tmp_path, last, code):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = subprocess.run([sys.executable, "-c", script(tmp_path, last)], timeout=300, capture_output=True)
    assert done.returncode == code
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 301
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(300))


def test_what_was_flushed_survives_a_kill(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    last = "for tracker in trackers: tracker.flush()\nos.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", script(tmp_path, last)], timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 301
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(300))
