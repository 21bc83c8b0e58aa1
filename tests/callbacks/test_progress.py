"""Progress on a real (pseudo) terminal and in files."""

from __future__ import annotations

import io
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
import traceback
from fcntl import ioctl

import pytest
import torch
from torch.utils.data import IterableDataset

from drivetrain import Progress
from drivetrain.callbacks.displays import clock, shown
from drivetrain.callbacks.progress import TQDMProgressBar
from drivetrain.tests import distributed
from drivetrain.tests.callbacks.toy import Line, loader, quiet

class Shown(Line):
    """Shows its loss; ``during`` is called in each step."""

    def __init__(self, during=None):
        super().__init__([3.0])
        self.during = during

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", 0.25, prog_bar=True)
        if self.during is not None:
            self.during(self, batch_idx)
        return loss


def fit(*, epochs=2, train=50, val=10, during=None, after=None, **arguments):
    """Return a function that trains and then prints how long it took."""

    def run():
        began = time.monotonic()
        trainer = quiet(callbacks=[Progress(**arguments)], max_epochs=epochs, log_every_n_steps=10, num_sanity_val_steps=2)
        trainer.fit(Shown(during), loader(train), loader(val))
        if after is not None:
            after(trainer)
        print("ELAPSED", time.monotonic() - began)

    return run


def forked(function, *, output):
    """Run a function in a process whose output goes to ``output``; return its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    finally:
        os._exit(70)


def on_terminal(function, *, columns=120, code=0) -> str:
    """Run a function on a terminal and return all that it wrote to it; its process has to end with this exit code."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40 if columns else 0, columns, 0, 0))
    pid = forked(function, output=slave)
    os.close(slave)
    parts = []
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        parts.append(data)
    os.close(master)
    output = b"".join(parts).decode()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code, output
    return output


def screen(output: str) -> list[str]:
    """What a terminal shows after this output."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token in ("\x1b[A", "\x1b[1A"):
            row = max(0, row - 1)
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]


def test_bar_on_a_terminal():
    output = on_terminal(fit())
    assert "Sanity check" in output and "Validation" in output
    lines = [line for line in screen(output) if line]
    assert lines[0].startswith("Epoch 2/2: 100%|") and "| 50/50 [" in lines[0] and "loss=0.25" in lines[0]
    assert lines[1].startswith("ELAPSED")
    assert len(lines) == 2  # no bar was left behind


def test_redraws_at_most_ten_times_a_second():
    output = on_terminal(fit(train=1500, val=300))
    elapsed = float(re.search(r"ELAPSED ([\d.]+)", output)[1])
    bars = 1 + 1 + 2 * 2  # training, sanity check, two validations: opened, ended, drawn at epochs' ends
    most = 10 * elapsed * 2 + 12 * bars
    assert output.count("\r") - output.count("\r\n") <= most and output.count("it/s") <= most


def test_prints_do_not_break_lines():
    def speak(module, batch_idx):
        time.sleep(0.005)
        if batch_idx % 7 == 0:
            module.print(f"hello {batch_idx} from the step")

    lines = screen(on_terminal(fit(during=speak, epochs=1)))
    assert [line for line in lines if "hello" in line] == [f"hello {index} from the step" for index in range(0, 50, 7)]
    assert sum("100%" in line for line in lines) == 1


@pytest.mark.parametrize("columns", [0, 20, 40, 200])  # 0: the terminal does not know
def test_any_width(columns):
    lines = screen(on_terminal(fit(epochs=1, train=10), columns=columns))
    assert any("10/10" in line or "100%" in line for line in lines)
    assert all(len(line) <= (columns or 80) for line in lines if not line.startswith("ELAPSED"))


def test_leave_keeps_each_epochs_bar():
    lines = screen(on_terminal(fit(leave=True)))
    assert [line[:9] for line in lines if line.startswith("Epoch")] == ["Epoch 1/2", "Epoch 2/2"]
    assert all("50/50" in line for line in lines if line.startswith("Epoch"))


def test_one_bar_for_the_whole_fit():
    lines = screen(on_terminal(fit(per="fit")))
    assert sum("Training: 100%" in line and "100/100" in line for line in lines) == 1


def test_bars_of_tests_stay():
    lines = screen(on_terminal(fit(after=lambda trainer: trainer.test(dataloaders=loader(7), verbose=False))))
    assert any(line.startswith("Testing: 100%") and "7/7" in line for line in lines)


def test_rich_bars_and_prints_between():
    """Each printed line is there whole and once; the last state of the bar stays."""

    def prints(module, index):
        if index % 20 == 0:
            module.print(f"SAID {index}")
            print(f"PRINTED {index}")

    lines = screen(on_terminal(fit(style="rich", during=prints, epochs=1, train=50)))
    for word in ("SAID", "PRINTED"):
        assert [line for line in lines if line.startswith(word)] == [f"{word} {index}" for index in (0, 20, 40)]
    assert [line for line in lines if "Epoch 1/1" in line and "50/50" in line and "loss=0.25" in line]
    assert not any("Validation" in line for line in lines)


def test_rich_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match=r"drivetrain\[rich\]"):
        Progress(style="rich")
    with pytest.raises(ValueError, match="style='bold'"):
        Progress(style="bold")


def test_L4_lines_in_a_file(tmp_path):
    """2 × (200 training + 50 validation) batches: plain lines, under 4 kB, no carriage returns."""
    with open(tmp_path / "log.txt", "wb") as file:
        pid = forked(fit(train=200, val=50), output=file.fileno())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    text = (tmp_path / "log.txt").read_bytes()
    assert len(text) < 4000 and b"\r" not in text and b"\x1b" not in text
    lines = text.decode().splitlines()
    for epoch in (1, 2):
        (line,) = [line for line in lines if line.startswith(f"Epoch {epoch}/2: 200/200, ")]
        assert f"step {200 * epoch}, " in line and " left, " in line and "loss=0.25" in line


def lines_of(progress, model=None, train=None, **options):
    progress.stream = stream = io.StringIO()
    trainer = quiet(callbacks=[progress], **options)
    trainer.fit(model or Line([1.0] * 9), loader(4) if train is None else train, loader(2))
    return stream.getvalue().splitlines(), trainer


def test_L4_a_sign_of_life_while_a_batch_takes_long():
    progress = Progress(line_seconds=0.1)

    class Slow(Line):
        def training_step(self, batch, batch_idx):
            while batch_idx == 1 and progress.stream.getvalue().count("no batch has ended") < 3:
                time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    lines, _ = lines_of(progress, Slow([1.0]))
    assert sum(bool(re.match(r"Epoch 1/1: no batch has ended for \d+ s. Last: ", line)) for line in lines) >= 3


def test_no_thread_is_left():
    lines_of(Progress(line_seconds=0.05))
    left = [thread for thread in threading.enumerate() if thread.name == "drivetrain-progress"]
    for thread in left:  # one may be about to end
        thread.join(60)
    assert not [thread for thread in left if thread.is_alive()]


def test_lines_at_the_ends_of_epochs_do_not_flood():
    lines, _ = lines_of(Progress(), max_epochs=200)
    assert 21 <= len(lines) < 40
    assert lines[0].startswith("Epoch 1/200: 4/4") and lines[-1].startswith("Epoch 200/200: 4/4")


def test_metrics_of_the_epoch_are_in_its_line():
    class Logged(Line):
        def training_step(self, batch, batch_idx):
            self.log("mean", float(batch_idx), on_step=False, on_epoch=True, prog_bar=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("val", 0.125, prog_bar=True)

    lines, _ = lines_of(Progress(), Logged())
    assert "mean=1.5" in lines[-1] and "val=0.125" in lines[-1]


def test_loader_without_length():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([torch.ones(1)] * 5)

    lines, _ = lines_of(Progress(), train=torch.utils.data.DataLoader(Stream()))
    assert lines[-1].startswith("Epoch 1/1: 5, ")


def test_without_limit_of_epochs():
    lines, _ = lines_of(Progress(), max_epochs=-1, max_steps=6)
    assert [line[:12] for line in lines] == ["Epoch 1: 4/4", "Epoch 2: 2/4"]


def test_prints_go_to_stdout(capfd):
    class Printing(Line):
        def training_step(self, batch, batch_idx):
            self.print("hello", batch_idx, sep="-")
            return super().training_step(batch, batch_idx)

    lines_of(Progress(), Printing([1.0]))
    assert capfd.readouterr().out.splitlines() == [f"hello-{index}" for index in range(4)]


def test_switched_off():
    for progress in (Progress(refresh_rate=0), Progress()):
        progress.disable()
        lines, _ = lines_of(progress)
        assert lines == []
    progress.enable()
    assert lines_of(progress)[0]


def test_what_cannot_be_written_stops_nothing():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    progress = Progress(stream=Full())
    trainer = quiet(callbacks=[progress])
    trainer.fit(Line([1.0]), loader(4), loader(1))
    assert trainer.global_step == 4


def test_only_the_main_process_shows():
    def run(rank):
        stream = io.StringIO()
        trainer = quiet(callbacks=[Progress(stream=stream)], devices=2, strategy="ddp")
        trainer.fit(Line([1.0]), loader(4), loader(2))
        return stream.getvalue()

    first, second = distributed.run(run, 2)
    assert "Epoch 1/1: 2/2" in first and second == ""


def test_an_exception_ends_the_bar_first():
    def fail(module, batch_idx):
        assert batch_idx < 5, "on purpose"

    lines = screen(on_terminal(fit(during=fail), code=1))
    start = lines.index("Traceback (most recent call last):")
    assert "Epoch 1/2" in lines[start - 1]
    assert lines[start + 1].startswith("  File")


@pytest.mark.parametrize(
    ("metrics", "text"),
    [({"a": 0.123456}, ["a=0.1235"]), ({"a": 12345.0}, ["a=12345"]), ({"a": 1e-7}, ["a=1e-07"]), ({"a": float("nan")}, ["a=nan"]), ({}, [])],
)  # fmt: skip
def test_numbers(metrics, text):
    assert shown(metrics) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (3661.9, "1:01:01"), (360000, "100:00:00")])
def test_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    "arguments",
    [{"refresh_rate": -1}, {"refresh_rate": 1.5}, {"process_position": -1}, {"per": "step"}, {"line_seconds": 0}, {"line_seconds": "30"}],
)  # fmt: skip
def test_bad_arguments(arguments):
    (name, value), *_ = arguments.items()
    with pytest.raises(ValueError, match=f"Received: {name}={re.escape(repr(value))}"):
        Progress(**arguments)


def test_lightnings_name():
    assert TQDMProgressBar(refresh_rate=20, process_position=1, leave=True).refresh_rate == 20
