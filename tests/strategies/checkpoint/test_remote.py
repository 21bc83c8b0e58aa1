"""Copies at other places: complete there or not there, verified on the way back."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from drivetrain.strategies.checkpoint import Checkpoint, CheckpointError, Writer, complete
from drivetrain.strategies.checkpoint.remote import complete_at, download, upload
from drivetrain.tests.strategies.checkpoint.samples import check, hidden, save, visible

URL = "memory://runs/checkpoint-1"


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


@pytest.fixture
def local(tmp_path):
    with Writer(tmp_path / "made" / "checkpoint-1") as writer:
        writer.json("rank-00000/part.json", [1])
        writer.json("training.json", {"step": 1})
        return writer.commit({"step": 1})


def test_there_and_back(memory, tmp_path):
    save(tmp_path / "one", 1)
    assert not complete_at(URL)
    assert upload(tmp_path / "one", URL) == URL and complete_at(URL)
    names = sorted(path.rpartition("/")[2] for path in memory.find("/runs/checkpoint-1"))
    assert names == ["manifest.json", "model.safetensors", "rank-00000.json", "training.json"]
    assert download(URL, tmp_path / "back" / "one") == tmp_path / "back" / "one"
    check(tmp_path / "back" / "one", 1)
    assert Checkpoint.open(tmp_path / "back" / "one").manifest == Checkpoint.open(tmp_path / "one").manifest
    assert hidden(tmp_path / "back") == []


def test_folders_within_and_a_folder_of_this_machine(local, tmp_path):
    url = f"file://{tmp_path}/elsewhere/checkpoint-1"
    upload(local, url)
    assert complete(tmp_path / "elsewhere" / "checkpoint-1")
    assert Checkpoint.open(download(url, tmp_path / "back")).json("rank-00000/part.json") == [1]


def test_the_manifest_goes_last_and_its_absence_means_none(memory, tmp_path):
    save(tmp_path / "one", 1)
    upload(tmp_path / "one", URL)
    events = []

    class Watched(type(memory)):
        protocol = "watched"
        cachable = False

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.replace("watched://", "memory://"))

        def put_file(self, lpath, rpath, **options):
            events.append(("put", rpath.rpartition("/")[2]))
            if len(events) == goal:
                raise OSError("the line is cut")
            super().put_file(lpath, rpath, **options)

        def rm_file(self, path):
            events.append(("rm", path.rpartition("/")[2]))
            super().rm_file(path)

    fsspec.register_implementation("watched", Watched, clobber=True)
    save(tmp_path / "two", 2)
    for goal in range(2, 6):
        events.clear()
        with pytest.raises(CheckpointError, match="Could not copy .*two to watched.*: OSError: the line is cut"):
            upload(tmp_path / "two", "watched://runs/checkpoint-1")
        assert not complete_at(URL)
        with pytest.raises(CheckpointError, match="has no manifest.json"):
            download(URL, tmp_path / "back")
        upload(tmp_path / "one", URL)
    goal = 0
    events.clear()
    upload(tmp_path / "two", "watched://runs/checkpoint-1")
    assert events[0] == ("rm", "manifest.json") and events[-1] == ("put", "manifest.json") and len(events) == 5
    check(download(URL, tmp_path / "back"), 2)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "manifest"])
def test_damage_is_named_and_leaves_nothing(memory, tmp_path, damage):
    save(tmp_path / "one", 1)
    upload(tmp_path / "one", URL)
    place = "/runs/checkpoint-1/" + ("manifest.json" if damage == "manifest" else "model.safetensors")
    data = bytearray(memory.cat_file(place))
    data[len(data) // 2] ^= 1
    memory.rm_file(place)
    if damage != "gone":
        memory.pipe_file(place, bytes(data if damage in ("flip", "manifest") else data[:-1]))
    with pytest.raises(CheckpointError, match=Path(place).name):
        download(URL, tmp_path / "back" / "one")
    assert complete_at(URL) == (damage == "flip")  # sizes alone do not tell
    assert not (tmp_path / "back").exists() or visible(tmp_path / "back") + hidden(tmp_path / "back") == []


def test_only_what_is_good_goes_and_nothing_is_overwritten(memory, tmp_path):
    save(tmp_path / "one", 1)
    (tmp_path / "one" / "training.json").write_text(json.dumps({"step": 2, "name": "run"}))
    with pytest.raises(CheckpointError, match="training.json"):
        upload(tmp_path / "one", URL)
    assert not memory.exists("/runs/checkpoint-1")
    save(tmp_path / "two", 2)
    upload(tmp_path / "two", URL)
    (tmp_path / "taken").write_text("")
    with pytest.raises(CheckpointError, match="taken"):
        download(URL, tmp_path / "taken")
    with pytest.raises(CheckpointError, match="has no manifest.json"):
        download("memory://nowhere", tmp_path / "back")
