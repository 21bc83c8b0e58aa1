"""A checkpoint is complete and verified, or it is not there: writing, replacing, opening, finding, removing."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from xxhash import xxh3_64_hexdigest

from drivetrain.strategies.checkpoint import (
    Checkpoint, CheckpointError, Writer, complete, folders, manifest, newest, remove,
)  # fmt: skip
from drivetrain.tests.strategies.checkpoint.samples import check, forked, hidden, megabytes, save, visible, weights

CK = Path("runs/checkpoint-1")


def edit(directory: Path, change) -> None:
    """Change a manifest as somebody who knows the format would: with a right checksum."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    change(manifest)
    body = (json.dumps(manifest)[:-1] + ", ").encode()
    path.write_bytes(body + f'"checksum": "{xxh3_64_hexdigest(body)}"\n}}\n'.encode())


def test_a_checkpoint_is_written_and_read():
    assert save(CK, 1) == CK.absolute()
    assert visible(CK) == ["manifest.json", "model.safetensors", "rank-00000.json", "training.json"]
    assert visible(CK.parent) == ["checkpoint-1"] and hidden(CK.parent) == []
    check(CK, 1)
    checkpoint = Checkpoint.open(CK)
    assert checkpoint.directory == CK.absolute() and checkpoint.verify() == [] and complete(CK)
    assert checkpoint.has("training.json") and not checkpoint.has("manifest.json")
    assert set(checkpoint.files) == {"model.safetensors", "rank-00000.json", "training.json"}
    for name, record in checkpoint.files.items():
        data = (CK / name).read_bytes()
        assert record == {"size": len(data), "xxh3_64": xxh3_64_hexdigest(data)}
        assert checkpoint.read(name) == data


def test_manifest_says_what_is_asked_for():
    before = time.time()
    with Writer(CK) as writer:
        writer.json("a.json", {})
        writer.commit(
            {"step": np.int64(12), "epoch": 3, "strategy": "ddp", "run_id": "r1", "shape": (1, 2), "nan": float("nan")}
        )
    manifest = Checkpoint.open(CK).manifest
    assert manifest["format"] == "drivetrain-checkpoint" and manifest["format_version"] == 1
    assert (manifest["step"], manifest["epoch"], manifest["strategy"], manifest["world_size"]) == (12, 3, "ddp", 1)
    assert manifest["samples"] is None and manifest["run_id"] == "r1" and manifest["shape"] == (1, 2)
    assert manifest["versions"]["torch"] == torch.__version__ and set(manifest["versions"]) == {
        "drivetrain", "torch", "numpy", "python"
    }  # fmt: skip
    assert before - 1 < datetime.fromisoformat(manifest["time"]).timestamp() < time.time() + 1


@pytest.mark.parametrize("metadata", [{"files": 1}, {"format": 1}, {3: 1}])
def test_metadata_may_not_take_the_manifest_s_own_names(metadata):
    with pytest.raises(ValueError, match="names of its own"), Writer(CK) as writer:
        writer.commit(metadata)
    assert os.listdir(CK.parent) == []


@pytest.mark.parametrize("metadata", [{"loss": nn.Linear(1, 1)}, {"loss": torch.ones(1)}, {"step": 1.5}])
def test_metadata_is_plain(metadata):
    with pytest.raises(TypeError), Writer(CK) as writer:
        writer.commit(metadata)
    assert os.listdir(CK.parent) == []


def test_nested_state_with_tensors():
    state = {"lr": 0.1, "moments": {0: torch.randn(3)}, "t": (1, None)}
    with Writer(CK) as writer:
        writer.state("optimizer-0", state)
        writer.state("training", {"plain": [1, 2]})
        writer.commit()
    checkpoint = Checkpoint.open(CK)
    assert sorted(checkpoint.files) == ["optimizer-0.json", "optimizer-0.safetensors", "training.json"]
    back = checkpoint.state("optimizer-0")
    assert torch.equal(back["moments"][0], state["moments"][0]) and back["t"] == (1, None)
    assert checkpoint.state("training") == {"plain": [1, 2]}


def test_C7_an_object_in_the_state_leaves_nothing_behind():
    save(CK, 1)
    with pytest.raises(TypeError, match=r"hparams\.loss: a CrossEntropyLoss"), Writer(CK) as writer:
        writer.json("a.json", 1)
        writer.state("hparams", {"loss": nn.CrossEntropyLoss()})
    check(CK, 1)
    assert os.listdir(CK.parent) == ["checkpoint-1"]


def test_files_in_subfolders_and_files_of_another_writer():
    with Writer(CK) as writer:
        writer.json("deep/er/a.json", [1])
        (writer.folder / "foreign.bin").write_bytes(b"x" * 100)
        writer.adopt("foreign.bin")
        writer.commit()
    checkpoint = Checkpoint.open(CK)
    assert checkpoint.json("deep/er/a.json") == [1] and checkpoint.read("foreign.bin") == b"x" * 100


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../x", "", ".", "..", "a//b", "a/", ".hidden", "a\\b", "a\0b", "x/.y"]
)
def test_names_that_leave_the_folder_are_refused(name):
    with pytest.raises(ValueError, match="inside the checkpoint"), Writer(CK) as writer:
        writer.json(name, 1)
    assert os.listdir(CK.parent) == []


def test_a_name_is_used_once_and_the_manifest_s_never():
    for names in (["a.json", "a.json"], ["manifest.json"]):
        with pytest.raises(CheckpointError, match="taken"), Writer(CK) as writer:
            for name in names:
                writer.json(name, 1)
    with pytest.raises(TypeError, match="JSON tree for a.json"), Writer(CK) as writer:
        writer.json("a.json", float("nan"))
    with pytest.raises(TypeError, match="JSON tree for a.json"), Writer(CK) as writer:
        writer.json("a.json", {1, 2})


def test_a_writer_is_used_inside_its_block():
    with pytest.raises(CheckpointError, match="with-block"):
        Writer(CK).json("a.json", 1)
    with Writer(CK) as writer:
        writer.commit()
        with pytest.raises(CheckpointError, match="with-block"):
            writer.json("a.json", 1)


def test_without_a_commit_nothing_is_there():
    with Writer(CK) as writer:
        writer.json("a.json", 1)
        assert visible(CK.parent) == [] and len(hidden(CK.parent)) == 1
        assert hidden(CK.parent)[0].startswith(".checkpoint-1.writing-")
    assert os.listdir(CK.parent) == []
    with pytest.raises(KeyboardInterrupt), Writer(CK) as writer:
        raise KeyboardInterrupt
    assert os.listdir(CK.parent) == []


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_checkpoint_of_the_same_name_is_replaced(can_exchange, monkeypatch):
    if not can_exchange:  # as on a file system that cannot
        monkeypatch.setattr(folders, "exchange", lambda first, second: False)
    save(CK, 1)
    save(CK, 2)
    check(CK, 2)
    assert os.listdir(CK.parent) == ["checkpoint-1"]


def test_files_that_a_user_put_into_the_old_checkpoint_stay():
    save(CK, 1)
    (CK / "notes.txt").write_text("mine")
    (CK / "plots").mkdir()
    (CK / "plots" / "loss.png").write_text("png")
    (CK / "training.json.orig").symlink_to("training.json")
    save(CK, 2)
    check(CK, 2)
    assert (CK / "notes.txt").read_text() == "mine" and (CK / "plots" / "loss.png").read_text() == "png"
    assert os.readlink(CK / "training.json.orig") == "training.json"


def test_files_of_the_old_checkpoint_that_the_new_one_has_not_go():
    with Writer(CK) as writer:
        writer.json("rank-00000.json", 1)
        writer.json("rank-00001.json", 1)
        writer.commit()
    save(CK, 2)
    assert "rank-00001.json" not in visible(CK)


def test_what_is_no_checkpoint_is_never_replaced():
    CK.mkdir(parents=True)
    save(CK, 1)  # an empty folder is a place
    shutil.rmtree(CK)
    CK.mkdir()
    (CK / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="neither"):
        save(CK, 1)
    assert os.listdir(CK.parent) == ["checkpoint-1"] and visible(CK) == ["thesis.tex"]
    with pytest.raises(CheckpointError, match="neither"):
        save(CK / "thesis.tex", 1)
    with pytest.raises(CheckpointError, match="Could not save"):
        save(CK / "thesis.tex" / "x", 1)


def test_a_link_in_the_way_is_replaced_and_what_it_points_to_stays():
    save(CK, 1)
    last = CK.parent / "last"
    last.symlink_to("checkpoint-1")
    save(last, 2)
    check(last, 2)
    check(CK, 1)
    assert not last.is_symlink() and hidden(CK.parent) == []


def test_a_relative_place_is_where_it_was_when_the_save_began(monkeypatch, tmp_path):
    with Writer("here/ck") as writer:
        monkeypatch.chdir(tmp_path)
        writer.json("a.json", 1)
        place = writer.commit()
    assert place.is_absolute() and complete(place) and not (tmp_path / "here").exists()


def test_free_space_is_checked_before_anything_is_written():
    free = shutil.disk_usage(".").free
    with pytest.raises(CheckpointError, match="MB of free space for checkpoint-1. Received: .* MB free"):
        Writer(CK, expected_bytes=2 * free).__enter__()
    assert os.listdir(CK.parent) == []
    huge = torch.empty(1).expand(free // 2)
    with pytest.raises(CheckpointError, match="free space for model.safetensors"), Writer(CK) as writer:
        writer.tensors("model.safetensors", {"huge": huge})
    assert os.listdir(CK.parent) == []


# Opening


def opened(words: str) -> None:
    """Assert that opening CK is refused with these words, and that it counts as no complete checkpoint."""
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(CK)
    assert words in str(error.value) and "checkpoint-1" in str(error.value)
    assert newest(CK.parent) is None


def test_what_is_not_there_or_no_checkpoint_is_refused():
    CK.parent.mkdir()
    opened("is not there")
    CK.write_text("x")
    opened("is not there, or is no folder")
    CK.unlink()
    CK.mkdir()
    opened("has no manifest.json")
    (CK / "manifest.json").mkdir()
    opened("expected a regular file")


@pytest.mark.parametrize(
    "version, word", [(2, "newer"), (99, "newer"), (0, "older"), ("1", "damaged"), (True, "damaged")]
)
def test_another_format_version_is_refused(version, word):
    save(CK, 1)
    edit(CK, lambda manifest: manifest.update(format_version=version))
    opened(word)


def test_the_version_is_told_even_where_the_rest_is_foreign():
    save(CK, 1)
    (CK / "manifest.json").write_text('{"format": "drivetrain-checkpoint", "format_version": 7, "new": "layout"}')
    opened("format_version 1. Received: 7, which is newer. Update drivetrain")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "17", '{"format": "other"}', "[" * 100_000, '{"format": NaN}', "\xff", "{}" * 2]
)
def test_a_manifest_that_is_none_is_refused(text):
    save(CK, 1)
    (CK / "manifest.json").write_bytes(text.encode("latin-1"))
    opened("manifest.json")


CHANGES = {
    "path escapes": lambda m: m["files"].update({"../evil": {"size": 1, "xxh3_64": "0"}}),
    "absolute path": lambda m: m["files"].update({"/etc/passwd": {"size": 1, "xxh3_64": "0"}}),
    "hidden": lambda m: m["files"].update({".x": {"size": 1, "xxh3_64": "0"}}),
    "no files": lambda m: m.pop("files"),
    "files is a list": lambda m: m.update(files=["model.safetensors"]),
    "a file without size": lambda m: m["files"]["training.json"].pop("size"),
    "a size that is text": lambda m: m["files"]["training.json"].update(size="3"),
    "a size below zero": lambda m: m["files"]["training.json"].update(size=-1),
    "a hash that is none": lambda m: m["files"]["training.json"].update(xxh3_64=None),
    "a record that is none": lambda m: m["files"].update({"training.json": None}),
    "no time": lambda m: m.pop("time"),
    "a step that is text": lambda m: m.update(step="1"),
    "metadata that nobody wrote": lambda m: m.update(run_id={"$evil": 1}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_manifest_with_a_right_checksum_and_wrong_content_is_refused(change):
    save(CK, 1)
    edit(CK, change)
    with pytest.raises(CheckpointError):
        Checkpoint.open(CK)
    assert not complete(CK) and newest(CK.parent) is None


def test_editing_as_somebody_who_knows_the_format_would():
    save(CK, 1)
    edit(CK, lambda manifest: manifest.update(run_id="other"))
    assert Checkpoint.open(CK).manifest["run_id"] == "other"


def test_links_are_not_followed():
    save(CK, 1)
    (CK / "model.safetensors").rename("model.safetensors")
    (CK / "model.safetensors").symlink_to(Path("model.safetensors").absolute())
    opened("model.safetensors: is, or lies behind, a symbolic link")
    assert not complete(CK)
    with Writer("runs/other") as writer:
        writer.json("sub/a.json", 1)
        writer.commit()
    Path("runs/other/sub").rename("sub")
    Path("runs/other/sub").symlink_to(Path("sub").absolute())
    with pytest.raises(CheckpointError, match="sub/a.json: is, or lies behind"):
        Checkpoint.open("runs/other")


def test_other_files_do_not_matter():
    save(CK, 1)
    (CK / "extra.bin").write_bytes(b"x")
    check(CK, 1)
    with pytest.raises(CheckpointError, match="no file 'extra.bin'; it has model.safetensors, "):
        Checkpoint.open(CK).read("extra.bin")


def test_verify_lists_every_problem():
    save(CK, 1)
    checkpoint = Checkpoint.open(CK)
    (CK / "training.json").unlink()
    (CK / "rank-00000.json").write_text("[1]")
    data = bytearray((CK / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (CK / "model.safetensors").write_bytes(data)
    problems = checkpoint.verify()
    assert len(problems) == 3
    assert "model.safetensors: is damaged (its hash is wrong)" in problems[0]
    assert "rank-00000.json: is damaged (expected 11 bytes. Received: 3)" in problems[1]
    assert "training.json: is missing" in problems[2]
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(CK)
    assert all(problem in str(error.value) for problem in problems)


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_changes_after_opening_is_noticed_when_it_is_read(verify):
    save(CK, 1)
    checkpoint = Checkpoint.open(CK, verify=verify)
    data = bytearray((CK / "model.safetensors").read_bytes())
    data[-3] ^= 16
    with open(CK / "model.safetensors", "r+b") as file:  # in place
        file.write(data)
    with pytest.raises(CheckpointError, match="model.safetensors: is damaged"):
        checkpoint.tensors("model.safetensors")
    assert checkpoint.json("training.json")["step"] == 1


def test_damage_is_found_before_tensors_that_are_there_are_touched():
    save(CK, 1)
    data = bytearray((CK / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (CK / "model.safetensors").write_bytes(data)
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights(1).items()}
    with pytest.raises(CheckpointError, match="hash"):
        Checkpoint.open(CK, verify=False).tensors("model.safetensors", into=targets)
    assert not any(tensor.any() for tensor in targets.values())


def test_a_link_that_is_turned_round_does_not_mix_two_checkpoints():
    save(CK, 1)
    save(CK.parent / "checkpoint-2", 2)
    last = CK.parent / "last"
    last.symlink_to("checkpoint-1")
    checkpoint = Checkpoint.open(last)
    last.unlink()
    last.symlink_to("checkpoint-2")
    assert checkpoint.json("training.json")["step"] == 1 and checkpoint.directory.name == "checkpoint-1"


# Finding


def test_newest_is_by_step_and_then_by_time():
    parent = Path("runs")
    assert newest(parent) is None
    for name, step in (("b", 3), ("c", 20), ("a", 20), ("d", 10)):
        save(parent / name, step)
    assert newest(parent) == parent / "a"
    save(parent / "c", 20)
    assert newest(parent) == parent / "c"
    with Writer(parent / "unnumbered") as writer:
        writer.commit()
    assert newest(parent) == parent / "c"


def test_C3_the_newest_that_is_whole_is_taken_and_damaged_ones_are_named(caplog):
    parent = Path("runs")
    for step in (1, 2, 3, 4, 5):
        save(parent / f"checkpoint-{step}", step)
    (parent / "checkpoint-5" / "training.json").unlink()
    (parent / "checkpoint-4" / "manifest.json").unlink()
    data = bytearray((parent / "checkpoint-3" / "model.safetensors").read_bytes())
    data[100] ^= 1
    (parent / "checkpoint-3" / "model.safetensors").write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert newest(parent) == parent / "checkpoint-2"
    for words in ("checkpoint-5/training.json: is missing", "checkpoint-4: has no manifest.json",
                  "checkpoint-3/model.safetensors: is damaged"):  # fmt: skip
        assert words in caplog.text
    assert "checkpoint-1" not in caplog.text


def test_newest_skips_unfinished_saves_and_what_is_no_checkpoint(caplog):
    parent = Path("runs")
    save(parent / "checkpoint-1", 1)
    save(Path("other/checkpoint-9"), 9)
    shutil.move("other/checkpoint-9", parent / ".checkpoint-9.writing-00000000-1-1-00000000")
    (parent / "logs").mkdir()
    (parent / "logs" / "events").write_text("x")
    (parent / "file").write_text("x")
    assert newest(parent) == parent / "checkpoint-1" and not caplog.records


def test_newest_follows_links_that_lead_to_checkpoints(caplog):
    parent = Path("runs")
    save(parent / "checkpoint-1", 1)
    (parent / "last").symlink_to("checkpoint-1")
    assert newest(parent) == parent / "checkpoint-1"
    save(Path("elsewhere/checkpoint-2"), 2)
    (parent / "best").symlink_to(Path("elsewhere/checkpoint-2").absolute())
    assert newest(parent) == Path("elsewhere/checkpoint-2").absolute()
    (parent / "gone").symlink_to("nowhere")
    (parent / "loop").symlink_to("loop")
    assert newest(parent) == Path("elsewhere/checkpoint-2").absolute()
    assert "gone" in caplog.text and "loop" in caplog.text


def test_complete_is_quick_and_looks_at_sizes_only():
    save(CK, 1)
    data = bytearray((CK / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (CK / "model.safetensors").write_bytes(data)
    assert complete(CK)
    (CK / "model.safetensors").write_bytes(data[:-1])
    assert not complete(CK)
    assert not complete("nowhere") and not complete(CK / "training.json")


# Removing


def test_remove():
    save(CK, 1)
    remove(CK)
    assert os.listdir(CK.parent) == []
    remove(CK)  # nothing to do
    save(CK, 1)
    last = CK.parent / "last"
    last.symlink_to("checkpoint-1")
    remove(last)
    check(CK, 1)
    assert os.listdir(CK.parent) == ["checkpoint-1"]
    Path("home/work").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="which has no manifest.json"):
        remove("home")
    assert Path("home/work").exists()


# What dead processes leave


def leave(kind: str) -> str:
    """Let a child process that dies leave a hidden folder of this kind beside CK; return its name."""

    def begin():
        path = folders.claim(CK.absolute(), kind)
        if kind == "writing":
            path.mkdir(parents=True)
        else:
            CK.rename(path)
        (path / "rest").write_text("x")
        os.kill(os.getpid(), signal.SIGKILL)

    CK.parent.mkdir(exist_ok=True)
    assert forked(begin) == -signal.SIGKILL
    return next(name for name in hidden(CK.parent) if f".{kind}-" in name)


def test_leftovers_of_the_dead_are_swept_by_the_next_save():
    save(CK, 1)
    leave("writing")
    leave("removing")
    assert len(hidden(CK.parent)) == 2 and newest(CK.parent) is None
    save(CK.parent / "checkpoint-2", 2)
    assert os.listdir(CK.parent) == ["checkpoint-2"]


def test_a_replacement_that_a_crash_stopped_is_recovered():
    save(CK, 1)
    leave("replaced")
    assert visible(CK.parent) == []
    check(CK, 1)  # opening it by its name brings it back
    leave("replaced")
    assert newest(CK.parent) == CK
    leave("replaced")
    save(CK.parent / "checkpoint-2", 2)
    check(CK, 1)
    assert hidden(CK.parent) == []


def test_unfinished_saves_of_living_processes_stay():
    code = f"""
import sys
from pathlib import Path
from drivetrain.strategies.checkpoint import Writer
with Writer({str(CK.absolute())!r}) as writer:
    writer.json("a.json", 1)
    print("open", flush=True)
    sys.stdin.readline()
    writer.commit({{"step": 7}})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    (unfinished,) = hidden(CK.parent)
    save(CK.parent / "checkpoint-2", 2)
    assert hidden(CK.parent) == [unfinished]
    process.communicate("go\n")
    assert process.returncode == 0 and Checkpoint.open(CK).manifest["step"] == 7
    assert hidden(CK.parent) == []


def test_an_unfinished_save_of_this_process_stays_while_it_is_open():
    with Writer(CK) as writer:
        writer.json("a.json", 1)
        save(CK.parent / "checkpoint-2", 2)
        writer.commit()
    assert complete(CK) and hidden(CK.parent) == []


def test_a_later_process_of_the_same_id_is_another_one():
    mine = folders.claim(CK.absolute(), "writing")
    folders.release(mine)
    start = folders._started(os.getpid())
    earlier = mine.with_name(mine.name.replace(f"-{os.getpid()}-{start}-", f"-{os.getppid()}-1-"))
    earlier.mkdir(parents=True)  # the parent lives, but did not begin right after the machine
    (left,) = folders.hidden_folders(CK.parent)
    assert not left.alive()


def test_what_another_machine_is_writing_stays_for_a_day():
    parent = CK.parent
    foreign = parent / ".checkpoint-9.writing-01234567-1-1-89abcdef"
    foreign.mkdir(parents=True)
    (foreign / "model.safetensors").write_text("x")
    save(CK, 1)
    assert hidden(parent) == [foreign.name]
    old = time.time() - 25 * 3600
    os.utime(foreign, (old, old))
    save(CK, 1)
    assert hidden(parent) == [foreign.name]  # its file is new
    os.utime(foreign / "model.safetensors", (old, old))
    save(CK, 1)
    assert hidden(parent) == []


def test_hidden_folders_of_others_are_left_alone():
    for name in (".git", ".checkpoint.writing", ".x.writing-1", ".cache"):
        (CK.parent / name).mkdir(parents=True)
    save(CK, 1)
    assert len(hidden(CK.parent)) == 4


def test_the_reader_waits_while_a_living_process_replaces():
    """Without an exchange of names there is a moment in which neither is visible."""
    save(CK, 1)
    aside = folders.claim(CK.absolute(), "replaced")
    CK.rename(aside)

    def come_back():
        time.sleep(0.3)
        aside.rename(CK.absolute())

    thread = threading.Thread(target=come_back)
    thread.start()
    check(CK, 1)
    thread.join()
    folders.release(aside)


def test_large_checkpoints_are_verified_by_several_threads():
    with Writer(CK, sync=False) as writer:
        for number in range(3):
            writer.tensors(f"part-{number}.safetensors", {"a": megabytes(24)})
        writer.commit()
    checkpoint = Checkpoint.open(CK)
    for name in ("part-0.safetensors", "part-2.safetensors"):
        with open(CK / name, "r+b") as file:
            file.seek(20 * 2**20)
            file.write(bytes(4))
    assert [problem.rpartition("/")[2] for problem in checkpoint.verify()] == [
        "part-0.safetensors: is damaged (its hash is wrong).", "part-2.safetensors: is damaged (its hash is wrong)."
    ]  # fmt: skip
    assert torch.equal(checkpoint.tensors("part-1.safetensors")["a"].view(torch.int32), megabytes(24).view(torch.int32))


def test_what_is_saved_later_is_newer_though_the_clock_goes_back():
    """Also in the next process, which has only read what the one before wrote."""
    save(CK.with_name("checkpoint-3"), 3)
    real = manifest.datetime

    class Back(real.datetime):
        @classmethod
        def now(cls, zone=None):
            return real.datetime(1970, 1, 1, tzinfo=zone)

    def later() -> None:
        manifest._latest = None
        manifest.datetime = SimpleNamespace(datetime=Back, timezone=real.timezone)
        assert newest(CK.parent, by="time") == CK.with_name("checkpoint-3")
        save(CK.with_name("checkpoint-1"), 1)
        save(CK.with_name("checkpoint-2"), 2)
        assert newest(CK.parent, by="time") == CK.with_name("checkpoint-2")

    assert forked(later) == 0
    assert newest(CK.parent, by="time") == CK.with_name("checkpoint-2")
