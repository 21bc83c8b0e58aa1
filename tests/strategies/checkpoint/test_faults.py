"""Killed anywhere, a full disk, a file size limit, a disk that may not be written: the last good checkpoint stays."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from drivetrain.strategies.checkpoint import CheckpointError, Writer, complete, folders, newest, remove, save_weights
from drivetrain.tests.strategies.checkpoint.killing import Killer, Trace
from drivetrain.tests.strategies.checkpoint.samples import check, forked, hidden, megabytes, save, visible, weights


@pytest.fixture
def parent():
    """A folder in memory where there is one: hundreds of saves wait for no disk there."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        yield Path(folder) / "runs"


def without_exchange() -> None:
    """Make this process one on a file system that cannot exchange two names."""
    folders.exchange = lambda first, second: False


def count(act: Callable[[], None]) -> int:
    """Return how many system calls a save makes, found out in a child."""
    reading, writing = os.pipe()

    def measure():
        trace = Trace()
        act()
        os.write(writing, str(len(trace.seen)).encode())

    assert forked(measure) == 0
    os.close(writing)
    with open(reading) as pipe:
        return int(pipe.read())


def kill_everywhere(
    parent: Path, prepare: Callable[[], None], act: Callable[[], None], judge: Callable[[], None]
) -> int:
    """Let `act` in a child die at each of its system calls in turn, `judge` what it leaves, return the points."""
    prepare()
    points = count(act)
    for torn in (False, True):
        for point in range(points):
            shutil.rmtree(parent)
            prepare()

            def die():
                Killer(point, torn=torn)
                act()

            assert forked(die) == -signal.SIGKILL, f"point {point}"
            judge()
    return 2 * points


def test_C2_replacing_a_checkpoint_killed_at_every_call(parent):
    directory = parent / "last"

    def judge():
        assert visible(parent) == ["last"]
        assert newest(parent) == directory
        step = json.loads((directory / "training.json").read_text())["step"]
        check(directory, step)
        seen.add(step)
        save(directory, 3)  # and the next save works, and leaves nothing behind
        check(directory, 3)
        assert hidden(parent) == []

    seen: set[int] = set()
    points = kill_everywhere(parent, lambda: save(directory, 1), lambda: save(directory, 2), judge)
    assert seen == {1, 2} and points >= 60
    print(f"killed at {points} points")


def test_C2_replacing_without_an_exchange_of_names_killed_at_every_call(parent):
    directory = parent / "last"

    def act():
        without_exchange()
        save(directory, 2)

    def judge():
        assert newest(parent) == directory  # which brings back the one that was stepping aside
        step = json.loads((directory / "training.json").read_text())["step"]
        check(directory, step)
        seen.add((step, "last" in before))

    def prepare():
        save(directory, 1)

    seen: set[tuple[int, bool]] = set()
    before: list[str] = []

    def look_and_judge():
        before[:] = visible(parent)
        judge()

    points = kill_everywhere(parent, prepare, act, look_and_judge)
    assert {step for step, _ in seen} == {1, 2}
    assert (2, False) in seen  # the window in which neither was visible
    print(f"killed at {points} points")


def test_C2_keeping_one_killed_at_every_call(parent):
    """A new folder is saved, then the old one is removed."""

    def act():
        save(parent / "checkpoint-2", 2)
        remove(parent / "checkpoint-1")

    def judge():
        for name in visible(parent):
            check(parent / name, int(name[-1]))
        found = newest(parent)
        assert found is not None and found.name == visible(parent)[-1]
        seen.add(tuple(visible(parent)))
        save(parent / "checkpoint-3", 3)
        assert hidden(parent) == [] and newest(parent).name == "checkpoint-3"

    seen: set[tuple[str, ...]] = set()
    points = kill_everywhere(parent, lambda: save(parent / "checkpoint-1", 1), act, judge)
    assert seen == {("checkpoint-1",), ("checkpoint-1", "checkpoint-2"), ("checkpoint-2",)}
    print(f"killed at {points} points")


def test_C2_the_first_save_killed_at_every_call(parent):
    def prepare():
        parent.mkdir()

    def judge():
        assert visible(parent) in ([], ["checkpoint-1"])
        if visible(parent):
            check(parent / "checkpoint-1", 1)
        save(parent / "checkpoint-1", 3)
        assert os.listdir(parent) == ["checkpoint-1"]

    kill_everywhere(parent, prepare, lambda: save(parent / "checkpoint-1", 1), judge)


def test_plain_weights_killed_at_every_call(parent):
    """No manifest there, but each file is the old or the new one, and a single file stays the one that counts."""

    def judge():
        step = int(load_file(parent / "model.safetensors")["steps"])
        assert step in (1, 2)
        save_weights(parent, weights(3))
        assert os.listdir(parent) == ["model.safetensors"]

    kill_everywhere(parent, lambda: save_weights(parent, weights(1)), lambda: save_weights(parent, weights(2)), judge)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_order_of_writing_syncing_and_renaming(parent, can_exchange):
    """Against a power failure: content, then its folder, then the name, then the name's folder, then deletions."""
    directory = parent / "last"
    save(directory, 1)

    def act():
        if not can_exchange:
            without_exchange()
        trace = Trace()
        save(directory, 2)
        names = [name for name, *_ in trace.seen]
        moves = [
            i
            for i, (name, *places) in enumerate(trace.seen)
            if name in ("exchange", "rename") and str(directory) in places
        ]
        first, last = moves[0], moves[-1]
        written = {path for name, path, _ in trace.seen[:first] if name == "writev"}
        assert {Path(path).name for path in written} == set(visible(directory)) and len(written) == 4
        for path in written:
            calls = [name for name, place, _ in trace.seen[:first] if place == path]
            assert calls.index("fsync") > max(i for i, name in enumerate(calls) if name == "writev")
        order = [Path(path).name for name, path, _ in trace.seen if name == "writev"]
        assert order[-1] == "manifest.json"
        folder = str(Path(next(iter(written))).parent)
        synced = [i for i, (name, path, _) in enumerate(trace.seen[:first]) if name == "fsync" and path == folder]
        opened = [i for i, (name, path, _) in enumerate(trace.seen[:first]) if name == "writev"]
        assert synced[-1] > opened[-1]
        after = [
            i for i, (name, path, _) in enumerate(trace.seen) if name == "fsync" and path == str(parent) and i > last
        ]
        deletions = [i for i, name in enumerate(names) if name in ("unlink", "rmdir")]
        assert after and deletions and after[0] < deletions[0]

    assert forked(act) == 0


def test_order_of_removing(parent):
    save(parent / "checkpoint-1", 1)

    def act():
        trace = Trace()
        remove(parent / "checkpoint-1")
        names = [name for name, *_ in trace.seen]
        assert names.index("rename") < names.index("fsync") < names.index("unlink")

    assert forked(act) == 0


@pytest.mark.parametrize("limit", [0, 1, 8, 100, 300, 450, 550])
def test_C1_a_file_size_limit_in_the_second_save(parent, limit):
    """Short writes are real here: the system writes what the limit allows, and refuses the next."""
    save(parent / "checkpoint-1", 1)

    def act():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        for name in ("checkpoint-2", "checkpoint-1"):
            with pytest.raises(CheckpointError) as error:
                save(parent / name, 2)
            assert "EFBIG" in str(error.value) and name in str(error.value)
            assert isinstance(error.value.__cause__, OSError) and error.value.__cause__.errno == errno.EFBIG
            assert os.listdir(parent) == ["checkpoint-1"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        save(parent / "checkpoint-2", 2)  # a later save in the same process works

    assert forked(act) == 0
    check(parent / "checkpoint-1", 1)
    check(parent / "checkpoint-2", 2)


def test_C1_short_writes_of_large_tensors_name_the_file(parent):
    save(parent / "checkpoint-1", 1)

    def act():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20 + 17, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match="Could not write big.safetensors of .*checkpoint-2: File too large"):
            with Writer(parent / "checkpoint-2") as writer:
                writer.json("small.json", 1)
                writer.tensors("big.safetensors", {"a": megabytes(2), "b": megabytes(2)})
                writer.commit()

    assert forked(act) == 0
    assert os.listdir(parent) == ["checkpoint-1"]
    assert newest(parent) == parent / "checkpoint-1"


def own_disk(place: Path, size: int) -> bool:
    """Mount a disk of so many bytes that only this process sees; False where the system does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_user = 0x00020000, 0x10000000
    if libc.unshare(new_mounts) != 0 and libc.unshare(new_mounts | new_user) != 0:
        return False
    private = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC: nothing is seen outside
    libc.mount(None, b"/", None, private, None)
    return libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, f"size={size}".encode()) == 0


@pytest.mark.parametrize("told", [True, False])
def test_C1_a_full_disk(parent, told):
    """Told: the system says beforehand how much is free. Else (quotas, disks that others fill) the write fails."""
    parent.mkdir()

    def act():
        if not own_disk(parent, 4 * 2**20):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the nearest to it that needs no privileges
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        if not told:
            plenty = os.statvfs("/")
            os.statvfs = lambda folder: plenty
        save(parent / "checkpoint-1", 1)
        words = "free space for model.safetensors|EFBIG" if told else r"\((ENOSPC|EFBIG)\)"
        for name in ("checkpoint-2", "checkpoint-1"):
            with pytest.raises(CheckpointError, match=words), Writer(parent / name) as writer:
                writer.tensors("model.safetensors", {"a": megabytes(4.5 if not told else 3.5)})
                writer.commit()
            assert os.listdir(parent) == ["checkpoint-1"]
        check(parent / "checkpoint-1", 1)
        save(parent / "checkpoint-2", 2)
        check(parent / "checkpoint-2", 2)

    assert forked(act) == 0


def test_C1_a_folder_that_may_not_be_written(tmp_path):
    parent = tmp_path / "runs"
    save(parent / "checkpoint-1", 1)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/") and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    parent.chmod(0o555)

    def act():
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        for name in ("checkpoint-2", "checkpoint-1"):
            with pytest.raises(CheckpointError, match=rf"Could not save .*{name}: Permission denied \(EACCES\)"):
                save(parent / name, 2)
        with pytest.raises(OSError):
            remove(parent / "checkpoint-1")
        assert newest(parent) == parent / "checkpoint-1"

    try:
        assert forked(act) == 0
    finally:
        parent.chmod(0o755)
    check(parent / "checkpoint-1", 1)
    assert os.listdir(parent) == ["checkpoint-1"]


def test_a_disk_that_fails_when_it_shall_keep_what_was_written(parent):
    """fsync reports the error of an earlier write: the save failed, wherever it comes."""
    save(parent / "last", 1)
    real, calls = os.fsync, []

    def attempt(point: int, can_exchange: bool) -> None:
        def fails(file):
            calls.append(file)
            if len(calls) == point:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(file)

        if not can_exchange:
            without_exchange()
        os.fsync = fails
        with pytest.raises(CheckpointError, match="EIO"):
            save(parent / "last", 2)
        os.fsync = real
        check(parent / "last", 1)
        assert os.listdir(parent) == ["last"]

    for can_exchange in (True, False):
        for point in range(1, 7):  # three files, the manifest, the folder, the folder above
            assert forked(lambda: attempt(point, can_exchange)) == 0


def test_a_signal_handler_that_raises_leaves_nothing(parent):
    save(parent / "last", 1)

    def act():
        def stop(number, frame):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, stop)
        with pytest.raises(KeyboardInterrupt), Writer(parent / "last") as writer:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            for number in range(10_000):
                writer.json(f"{number}.json", number)
        check(parent / "last", 1)
        assert os.listdir(parent) == ["last"]

    assert forked(act) == 0


def test_saving_from_a_thread_while_others_run(parent):
    threads = [threading.Thread(target=save, args=(parent / f"checkpoint-{step}", step)) for step in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step in range(1, 9):
        check(parent / f"checkpoint-{step}", step)
    assert hidden(parent) == [] and complete(newest(parent)) and newest(parent).name == "checkpoint-8"


def test_an_interrupt_between_the_two_renames_leaves_the_old_one_visible(parent):
    save(parent / "last", 1)

    def act():
        without_exchange()
        real = os.rename

        def interrupted(source, target):
            if ".writing-" in str(source):
                raise KeyboardInterrupt
            real(source, target)

        os.rename = interrupted
        with pytest.raises(KeyboardInterrupt):
            save(parent / "last", 2)
        check(parent / "last", 1)
        assert os.listdir(parent) == ["last"]

    assert forked(act) == 0
