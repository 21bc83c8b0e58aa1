"""Ranks that are really started: scripts through the agent, functions in fresh processes, and how all of them end."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from drivetrain.strategies import environment, launch
from drivetrain.strategies.program import split
from drivetrain.strategies.world import TorchWorld, current, set_current
from drivetrain.tests.distributed import free_port, run

PYTHON = sys.executable
# Ranks write whole lines: they are unbuffered, and `print` would write its newline apart from its text.
SEEN = "import json, os, sys; seen = {k: os.environ.get(k) for k in ('RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS', 'EXTRA')}; "


def set_up() -> TorchWorld:
    world = TorchWorld.create(environment.detect(), "cpu")
    set_current(world)
    return world


def expect_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    assert not [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_for_files(paths: list[Path]) -> list[str]:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if all(path.exists() and path.read_text() for path in paths):
            return [path.read_text() for path in paths]
        time.sleep(0.05)
    raise AssertionError(f"never written: {[str(path) for path in paths if not path.exists()]}")


# A script through the agent


def test_ranks_find_themselves_and_their_arguments(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("REMOVED", "1")
    script = tmp_path / "script.py"
    script.write_text(SEEN + "words = json.dumps([seen, sys.argv[2:], 'REMOVED' in os.environ])\n"
                             "open(f'{sys.argv[1]}/seen-by-{seen[\"RANK\"]}', 'w').write(words)")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    before = dict(os.environ)
    code = launch.run_script([script, tmp_path, "--lr", 0.1, "with space"], 2, variables={"EXTRA": "x", "REMOVED": None})
    assert code == 0
    assert dict(os.environ) == before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == handlers
    lines = [(tmp_path / f"seen-by-{rank}").read_text() for rank in range(2)]
    right = [{"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "EXTRA": "x"} for rank in range(2)]
    assert [json.loads(line) for line in lines] == [[seen, ["--lr", "0.1", "with space"], False] for seen in right]


def test_threads_that_the_user_has_set_stay(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['OMP_NUM_THREADS'])")
    assert launch.run_script([script], 1) == 0
    assert capfd.readouterr().out.split() == ["3"]


def test_the_exit_code_of_the_rank_that_fails_is_ours(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(3)\ntime.sleep(1000)")
    assert launch.run_script([script], 2) == 3
    report = capfd.readouterr().err
    assert "Rank 1 of 2 failed first: it ended with exit code 3." in report
    assert "Then rank 0 was killed by SIGTERM." in report


def test_a_rank_that_is_killed_is_named(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '0':\n    os.kill(os.getpid(), 9)\ntime.sleep(1000)")
    assert launch.run_script([script], 2) == 128 + 9
    assert "Rank 0 of 2 failed first: it was killed by SIGKILL." in capfd.readouterr().err


def test_D2_the_first_traceback_is_on_top(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("""
from drivetrain.strategies import environment, world
here = world.TorchWorld.create(environment.detect(), "cpu")
here.barrier()
if here.rank == 1:
    raise ValueError("boom on 1")
here.barrier("which the other does not reach")
""")
    assert launch.run_script([script], 2) == 1
    report = capfd.readouterr().err.split(" failed first: ")
    assert report[0].endswith("Rank 1 of 2")
    assert 'raise ValueError("boom on 1")' in report[1]
    assert "Connection closed" not in report[1] and "barrier" not in report[1]


def test_a_rank_that_ignores_the_signal_is_killed_in_the_end(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(launch, "PATIENCE", 3)
    script, note = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(f"""
import os, signal, sys, time
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: None)
    open({str(note)!r}, "w").write(str(os.getpid()))
    while True:
        time.sleep(1000)
while not os.path.exists({str(note)!r}) or not open({str(note)!r}).read():
    time.sleep(0.01)
sys.exit(5)
""")
    assert launch.run_script([script], 2) == 5
    expect_gone([int(note.read_text())])
    assert "Then rank 0 was killed by SIGKILL." in capfd.readouterr().err


def test_a_restart_after_sigkill_finds_a_clean_store(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal, sys, torch
from drivetrain.strategies import environment, world
placement = environment.detect()
here = world.TorchWorld.create(placement, "cpu", timeout=60)
here.barrier()
if placement.attempt == 0 and here.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
total = int(here.all_reduce(torch.tensor([here.rank + 1])))
open(f"{sys.argv[1]}/rank-{here.rank}-attempt-{placement.attempt}-sum-{total}", "x")
""")
    assert launch.run_script([script, tmp_path], 2, max_restarts=1) == 0
    assert sorted(path.name for path in tmp_path.glob("*attempt-1*")) == [f"rank-{r}-attempt-1-sum-3" for r in (0, 1)]


def test_two_nodes_need_an_address(tmp_path):
    with pytest.raises(ValueError, match="main_address=None, main_port=None, node_rank=0, nodes=2"):
        launch.run_script(["x.py"], 1, nodes=2)


def test_two_nodes_meet_at_the_address(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['GROUP_RANK'])")
    port = free_port()
    program = "import sys; from drivetrain.strategies.launch import run_script; " \
              f"sys.exit(run_script([{str(script)!r}], 1, nodes=2, node_rank=int(sys.argv[1]), " \
              f"main_address='127.0.0.1', main_port={port}))"
    nodes = [subprocess.Popen([PYTHON, "-c", program, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    outputs = [node.communicate(timeout=240)[0].split() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert sorted(outputs) == [["0", "2", "0"], ["1", "2", "1"]]


@pytest.mark.parametrize("processes", [0, -1, 1.5, "2", True])
def test_numbers_of_processes_that_make_no_sense(processes):
    with pytest.raises(ValueError, match="Expected a number of processes from 1. Received: processes="):
        launch.run_script(["x.py"], processes)
    with pytest.raises(ValueError, match="Expected a number of processes from 1. Received: processes="):
        launch.call(print, processes=processes)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_and_leaves_no_process(tmp_path, number, code):
    script = tmp_path / "train.py"
    script.write_text(f"""
import os, subprocess, sys, time
if "RANK" not in os.environ:
    from drivetrain.strategies import launch
    sys.exit(launch.relaunch(2))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
note = {str(tmp_path)!r} + "/" + os.environ["RANK"]
open(note + ".part", "w").write(f"{{os.getpid()}} {{child.pid}}")
os.rename(note + ".part", note)
time.sleep(1000)
""")
    launcher = subprocess.Popen([PYTHON, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pids = [int(pid) for text in wait_for_files([tmp_path / "0", tmp_path / "1"]) for pid in text.split()]
    launcher.send_signal(number)
    launcher.communicate(timeout=240)
    assert launcher.returncode == code
    assert len(pids) == 4
    expect_gone(pids)


# This program once more

PROGRAM = """
import json, os, subprocess, sys
from drivetrain.strategies.program import can_relaunch, command
if "AGAIN" not in os.environ:
    assert can_relaunch()
    CHANGE
    sys.exit(subprocess.call([sys.executable, *command()], env={**os.environ, "AGAIN": "1"}))
print(json.dumps([sys.argv[1:], sys.flags.optimize, sys.flags.utf8_mode, __name__]))
"""


@pytest.mark.parametrize(("start", "change"), [
    (["train.py", "a", "--b=c d"], ""),
    (["-O", "-X", "utf8", "-W", "ignore", "train.py", "a", "--b=c d"], ""),
    (["train.py", "a", "--b=c d"], "os.chdir('/'); sys.argv[1:] = []"),
    (["-m", "pkg.mod", "a", "--b=c d"], ""),
    (["-Om", "pkg", "a", "--b=c d"], ""),
    (["folder", "a", "--b=c d"], ""),
    (["bin/console", "a", "--b=c d"], ""),
    (["-m", "cProfile", "-o", "/dev/null", "train.py", "a", "--b=c d"], ""),
], ids=["script", "flags", "moved_and_argv_eaten", "module", "package", "folder", "console_script", "profiler"])
def test_the_command_repeats_how_this_program_was_started(tmp_path, start, change):
    text = PROGRAM.replace("CHANGE", change)
    for name in ("train.py", "pkg/mod.py", "pkg/__main__.py", "pkg/__init__.py", "folder/__main__.py", "bin/console"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "pkg/__init__.py" else text)
    result = subprocess.run([PYTHON, *start], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [["a", "--b=c d"], int(start[0] in ("-O", "-Om")), int("utf8" in start),
                                         "__main__"]


def test_relaunch_passes_arguments_and_the_exit_code(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""
import os, sys
if "RANK" not in os.environ:
    from drivetrain.strategies import launch
    sys.exit(launch.relaunch(2, variables={"EXTRA": "x"}))
open(f"rank-{os.environ['RANK']}", "w").write(f"{os.environ['EXTRA']} {sys.argv[1:]}")
sys.exit(7 if os.environ["RANK"] == "1" else 0)
""")
    result = subprocess.run([PYTHON, script, "--lr", "1"], cwd=tmp_path, timeout=240)
    assert result.returncode == 7
    assert (tmp_path / "rank-1").read_text() == "x ['--lr', '1']"


@pytest.mark.parametrize(("argv", "right"), [
    (["a.py", "-m", "x"], ([], ["a.py"], ["-m", "x"])),
    (["-u", "-X", "dev", "-Werror", "a.py"], (["-u", "-X", "dev", "-Werror"], ["a.py"], [])),
    (["-m", "p.q", "-m"], ([], ["-m", "p.q"], ["-m"])),
    (["-mp.q", "x"], ([], ["-m", "p.q"], ["x"])),
    (["-uBm", "p", "x"], (["-uB"], ["-m", "p"], ["x"])),
    (["-Ximporttime", "a.py"], (["-Ximporttime"], ["a.py"], [])),
    (["--check-hash-based-pycs", "always", "a.py"], (["--check-hash-based-pycs", "always"], ["a.py"], [])),
    ([], ([], [], [])),
])
def test_the_interpreters_arguments_are_told_from_the_programs(argv, right):
    assert split(argv) == right


ASK = "from drivetrain.strategies.program import can_relaunch; print(can_relaunch())"


def test_what_cannot_be_started_again(tmp_path):
    assert not launch.can_relaunch()  # a test
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    worker = tmp_path / "worker.py"
    worker.write_text(f"import multiprocessing as m\ndef f():\n    {ASK}\nif __name__ == '__main__':\n"
                      "    p = m.get_context('spawn').Process(target=f); p.start(); p.join()")
    answers = {}
    for name, arguments, typed in [("script", [script], None), ("-c", ["-c", ASK], None), ("stdin", ["-"], ASK),
                                   ("prompt", ["-i"], ASK), ("-i script", ["-i", script], ""),
                                   ("worker", [worker], None)]:
        result = subprocess.run([PYTHON, *map(str, arguments)], input=typed, capture_output=True, text=True, timeout=240)
        answers[name] = result.stdout.strip()
    assert answers == {"script": "True", "-c": "False", "stdin": "False", "prompt": "False", "-i script": "False",
                       "worker": "False"}


# A function in fresh ranks


def test_call_returns_results_in_rank_order():
    offset = torch.tensor([10.0])

    def work(factor):
        world = set_up()
        total = world.all_reduce(torch.tensor([world.rank + 1.0]))
        return world.rank, offset + factor * total, torch.get_num_threads()

    before = set(multiprocessing.active_children())  # an earlier test's loader may still have workers
    results = launch.call(work, 2, processes=2)
    assert [(rank, value.item(), threads) for rank, value, threads in results] == [(0, 16.0, 1), (1, 16.0, 1)]
    assert current().size == 1 and set(multiprocessing.active_children()) <= before


def test_call_passes_large_results():
    results = launch.call(lambda: torch.full((1 << 20,), float(os.environ["RANK"])), processes=2)
    assert [float(result.sum()) for result in results] == [0.0, float(1 << 20)]


def test_called_ranks_are_found_launched():
    placements = launch.call(environment.detect, processes=2)
    assert [(one.rank, one.size, one.launcher, one.launched) for one in placements] == [
        (0, 2, "torchrun", True), (1, 2, "torchrun", True)]


def test_call_spawns_functions_of_modules(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert launch.call(torch.get_num_threads, processes=2, start_method="spawn") == [2, 2]


@pytest.mark.parametrize("failing", [0, 1])
def test_D2_a_failing_call_names_the_rank_and_keeps_the_cause(failing):
    def work():
        world = set_up()
        if world.rank == failing:
            raise ValueError("boom")
        world.barrier("which the other does not reach")

    before = set(multiprocessing.active_children())
    with pytest.raises(launch.LaunchError) as caught:
        launch.call(work, processes=2)
    assert str(caught.value).startswith(f"Rank {failing} of 2 failed first: it ended with exit code 1.\nTraceback")
    assert caught.value.rank == failing and 'raise ValueError("boom")' in caught.value.traceback
    assert isinstance(caught.value.__cause__, ValueError)
    assert set(multiprocessing.active_children()) <= before


def test_what_a_failed_call_leaves_behind_does_not_harm_the_next():
    """The failed call's store, kept by a traceback in a cycle, must not be destroyed in a rank forked later."""
    def fails():
        set_up()
        raise ValueError("boom")

    def collects():
        set_up()
        gc.collect()
        return "alive"

    gc.disable()
    try:
        for _ in range(3):
            try:
                launch.call(fails, processes=2)
            except launch.LaunchError as error:
                cycle = [error]
                cycle.append(cycle)
                del cycle
            assert launch.call(collects, processes=2) == ["alive", "alive"]
    finally:
        gc.enable()


@pytest.mark.parametrize(("end", "code", "how"), [
    (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, "was killed by SIGKILL"),
    (lambda: sys.exit(3), 3, "ended with exit code 3"),
    (lambda: os._exit(4), 4, "ended with exit code 4"),
])
def test_a_rank_that_dies_in_a_call(end, code, how):
    def work():
        world = set_up()
        if world.rank == 0:
            end()
        world.barrier("never")

    with pytest.raises(launch.LaunchError, match=f"Rank 0 of 2 failed first: it {how}") as caught:
        launch.call(work, processes=2)
    assert caught.value.exit_code == code


def test_healthy_ranks_may_save_before_they_end(tmp_path):
    def work():
        world = set_up()
        if world.rank == 1:
            raise ValueError("boom")
        try:
            world.barrier("never")
        except RuntimeError:
            (tmp_path / "saved").write_text("yes")
            raise

    with pytest.raises(launch.LaunchError, match="Rank 1 of 2 failed first"):
        launch.call(work, processes=2)
    assert (tmp_path / "saved").exists()


def test_a_healthy_rank_that_sleeps_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "PATIENCE", 3)

    def work():
        world = set_up()
        (tmp_path / str(world.rank)).write_text(str(os.getpid()))
        world.barrier()
        if world.rank == 1:
            raise ValueError("boom")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)

    with pytest.raises(launch.LaunchError, match="Rank 1 of 2 failed first"):
        launch.call(work, processes=2)
    expect_gone([int((tmp_path / str(rank)).read_text()) for rank in range(2)])


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(launch.LaunchError, match="(?i)pickle"):
        launch.call(lambda: lambda: 1, processes=2)


def test_an_exception_that_cannot_be_sent_is_still_reported():
    class Odd(Exception):
        def __init__(self, value, other):
            super().__init__(f"odd {value}")
            self.held = lambda: other

    def work():
        raise Odd(1, 2)

    with pytest.raises(launch.LaunchError, match="Odd: odd 1"):
        launch.call(work, processes=2)


def test_forking_is_refused_where_a_process_group_exists():
    def work(rank):
        with pytest.raises(RuntimeError, match="Expected no process group in the process that forks ranks"):
            launch.call(print, processes=2)

    run(work)


def test_unknown_start_methods_are_refused():
    with pytest.raises(ValueError, match="Received: start_method='thread'"):
        launch.call(print, processes=2, start_method="thread")


def test_interrupting_a_call_leaves_no_process(tmp_path):
    program = f"""
import os, time
from drivetrain.strategies import launch
def work():
    note = {str(tmp_path)!r} + "/" + os.environ["RANK"]
    open(note + ".part", "w").write(str(os.getpid()))
    os.rename(note + ".part", note)
    time.sleep(1000)
launch.call(work, processes=2)
"""
    process = subprocess.Popen([PYTHON, "-c", program], stderr=subprocess.PIPE, text=True)
    pids = [int(text) for text in wait_for_files([tmp_path / "0", tmp_path / "1"])]
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=240)[1]
    assert "KeyboardInterrupt" in errors
    expect_gone(pids)


# Accelerate's launchers


def test_debug_launcher_uses_the_cpu():
    assert launch.debug_launcher(lambda extra: (os.environ["ACCELERATE_USE_CPU"], os.environ["RANK"], extra), (5,)) == [
        ("yes", "0", 5), ("yes", "1", 5)]
    assert "ACCELERATE_USE_CPU" not in os.environ


def test_notebook_launcher():
    def work():
        world = set_up()
        return os.environ["ACCELERATE_MIXED_PRECISION"], world.rank, os.environ["MASTER_PORT"]

    port = free_port()
    assert launch.notebook_launcher(work, num_processes=2, mixed_precision="bf16", use_port=port) == [
        ("bf16", 0, str(port)), ("bf16", 1, str(port))]


def test_notebook_launcher_with_one_process_runs_here():
    result = launch.notebook_launcher(lambda: (os.getpid(), os.environ["ACCELERATE_MIXED_PRECISION"]), num_processes=1)
    assert result == [(os.getpid(), "no")]


def test_notebook_launcher_restarts():
    def work():
        world = set_up()
        attempt = environment.detect().attempt
        if attempt == 0 and world.rank == 1:
            raise ValueError("only once")
        return attempt, int(world.all_reduce(torch.tensor([world.rank + 1])))

    results = launch.notebook_launcher(work, num_processes=2, max_restarts=1, use_port=free_port())
    assert results == [(1, 3), (1, 3)]


def test_notebook_launcher_refuses_unknown_precision():
    with pytest.raises(ValueError, match="Received: mixed_precision='int4'"):
        launch.notebook_launcher(print, mixed_precision="int4", num_processes=2)
