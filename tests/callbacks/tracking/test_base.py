"""The interface of trackers, their names, and what is said about wrong ones."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from drivetrain.callbacks.tracking import base
from drivetrain.callbacks.tracking.base import (
    BlankTracker,
    GeneralTracker,
    filter_trackers,
    get_available_trackers,
    on_main_process,
    register_tracker_class,
    tracker_class,
)
from drivetrain.callbacks.tracking.csv import CSVTracker
from drivetrain.callbacks.tracking.trackers import finish_trackers, get_tracker, start_trackers
from drivetrain.strategies.settings import LoggerType
from drivetrain.tests.distributed import run


pytestmark = pytest.mark.timeout(400)  # programs that are started import torch, on machines that may be busy


class Recorder(GeneralTracker):
    """As a user of Accelerate writes one."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.calls = []

    @property
    def tracker(self):
        return self.calls

    @on_main_process
    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.calls.append(("log", values, step, kwargs))


class Everywhere(Recorder):
    name = "everywhere"
    main_process_only = False


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(base, "_REGISTERED", {})


def test_a_class_without_its_parts_is_refused():
    class Incomplete(GeneralTracker):
        name = "incomplete"

    with pytest.raises(NotImplementedError, match="Incomplete without requires_logging_directory, tracker"):
        Incomplete()
    assert GeneralTracker(_blank=True).log({"a": 1}) is None


def test_names_types_and_objects_are_accepted():
    recorder = Recorder()
    assert filter_trackers(None) == []
    assert filter_trackers("tensorboard", "logs") == ["tensorboard"]
    assert filter_trackers([LoggerType.TENSORBOARD, "csv", recorder, "CSV"], "logs") == ["tensorboard", "csv", recorder]
    assert filter_trackers(recorder) == [recorder]


def test_all_means_what_is_installed():
    assert filter_trackers("all", "logs") == get_available_trackers()
    assert {"tensorboard", "csv", "jsonl"} <= set(get_available_trackers())
    recorder = Recorder()
    assert filter_trackers(["all", recorder], "logs") == [*get_available_trackers(), recorder]


def test_F3_unknown_name_is_an_error_with_the_nearest():
    with pytest.raises(ValueError, match=r"Received: log_with='tensorbord'. Did you mean 'tensorboard'\?"):
        filter_trackers("tensorbord", "logs")
    with pytest.raises(TypeError, match="log_with=3"):
        filter_trackers(3)
    with pytest.raises(ValueError, match=r"Received: 'tensorbord'. Did you mean 'tensorboard'\?"):
        start_trackers("csv", "run", logging_dir="logs", init_kwargs={"tensorbord": {}})


def test_missing_folder_is_an_error():
    with pytest.raises(ValueError, match="logging_dir=None"):
        filter_trackers("csv")


def test_missing_package_names_what_to_install(monkeypatch):
    known = base._Known("tensorboard", "TensorBoardTracker", "no_such_package", "extra_name")
    monkeypatch.setitem(base._BUILT_IN, "absent", known)
    with pytest.raises(ModuleNotFoundError, match=r"no_such_package .* pip install 'drivetrain\[extra_name\]'"):
        filter_trackers("absent", "logs")
    assert "absent" not in get_available_trackers() and "absent" not in filter_trackers("all", "logs")


def test_a_registered_class_is_known_by_its_name(registry):
    assert register_tracker_class(Recorder) is Recorder
    assert filter_trackers("recorder") == ["recorder"] and tracker_class("recorder") is Recorder
    assert "recorder" in get_available_trackers()
    with pytest.raises(TypeError, match="subclass of GeneralTracker"):
        register_tracker_class(int)


def test_get_tracker_by_name():
    trackers = start_trackers(Recorder())
    assert get_tracker(trackers, "recorder") is trackers[0]
    assert get_tracker(trackers, "recorder", unwrap=True) == []
    with pytest.raises(ValueError, match=r"Received: name='recoder'. Did you mean 'recorder'\?"):
        get_tracker(trackers, "recoder")
    finish_trackers(trackers)


def test_blank_tracker_does_nothing():
    blank = get_tracker([], "anything", unwrap=True)
    assert isinstance(blank, BlankTracker) and blank.tracker is blank
    assert blank.add_figure("a", 3, global_step=1) is None and blank.log({"a": 1}, step=1) is None


def test_only_the_main_process_tracks_unless_a_tracker_says_otherwise(tmp_path):
    def work(rank):
        only, everywhere = Recorder(), Everywhere()
        trackers = start_trackers([only, everywhere, "csv"], "run", {"a": 1}, tmp_path)
        for tracker in trackers:
            tracker.log({"rank": rank}, step=0)
            tracker.finish()
        only.log({"direct": rank})  # the decorator's own judgement
        return [tracker.name for tracker in trackers], only.calls, everywhere.calls

    main, other = run(work, 2)
    assert main[0] == ["recorder", "everywhere", "csv"] and other[0] == ["everywhere"]
    assert main[1] == [("config", {"a": 1}), ("log", {"rank": 0}, 0, {}), ("log", {"direct": 0}, None, {})]
    assert other[1] == []
    assert main[2] == [("config", {"a": 1}), ("log", {"rank": 0}, 0, {})]
    assert other[2] == [("config", {"a": 1}), ("log", {"rank": 1}, 0, {})]
    assert (tmp_path / "run" / "metrics.csv").read_text() == "step,rank\n0,0\n"


def test_trackers_are_imported_when_they_are_asked_for():
    program = """
        import sys
        import drivetrain.callbacks.tracking.callback
        from drivetrain.callbacks.tracking.trackers import start_trackers
        assert "tensorboard" not in sys.modules and "yaml" not in sys.modules
        start_trackers("csv", "run", logging_dir="logs")
        assert "tensorboard" not in sys.modules
        import csv
        assert csv.__file__ != sys.modules["drivetrain.callbacks.tracking.csv"].__file__ and csv.DictReader
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


def test_nothing_is_imported_by_the_threads_of_trackers():
    """A worker that is forked meanwhile could not import the same module."""
    program = """
        import sys
        from drivetrain.callbacks.tracking.base import tracker_class
        from drivetrain.callbacks.tracking.trackers import finish_trackers, start_trackers
        names = ["csv", "jsonl", "tensorboard"]
        for name in names:
            tracker_class(name)
        before = set(sys.modules)
        trackers = start_trackers(names, "run", {"a": {"b": [1]}}, "logs")
        for tracker in trackers:
            tracker.log({"x": 1.0, "text": "y", "parts": {"a": 1.0}}, step=1)
            tracker.fail("ValueError")
            tracker.flush(30)
        finish_trackers(trackers)
        assert set(sys.modules) == before, set(sys.modules) - before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


def test_csv_tracker_finds_the_standard_library_under_any_package_name(tmp_path):
    """A test runner may import the checkout under the name of its folder."""
    program = f"""
        import importlib, importlib.util, sys
        from pathlib import Path
        import drivetrain
        root = Path(drivetrain.__file__).parent
        spec = importlib.util.spec_from_file_location("main", root / "__init__.py", submodule_search_locations=[str(root)])
        sys.modules["main"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        trackers = importlib.import_module("main.callbacks.tracking.trackers")
        started = trackers.start_trackers(["csv", "tensorboard"], "run", {{"a": 1}}, {str(tmp_path)!r})
        for tracker in started:
            tracker.log({{"x": 0.5}}, step=3)
        trackers.finish_trackers(started)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)
    assert (tmp_path / "run" / "metrics.csv").read_text() == "step,x\n3,0.5\n"


def test_class_of_a_name():
    assert tracker_class("csv") is CSVTracker
