"""Signals: a flag when it comes, at a step's edge a checkpoint, an exit code, a requeue."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Interrupted, ModelCheckpoint, Preemption, Progress
from drivetrain.strategies.checkpoint import Checkpoint
from drivetrain.tests import distributed
from drivetrain.tests.strategies.checkpoint.disks import Disk
from drivetrain.tests.faults.toy import STEPS, Falling, Noted, loader, step_of, trainer, weight_in

CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 138}


def sending(name: str, at: int, times: int = 1):
    """Return an action that sends this process a signal in the step of batch ``at``."""

    def act(module, index):
        for _ in range(times if index == at else 0):
            os.kill(os.getpid(), getattr(signal, name))

    return act


def saved(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("runs/*/checkpoints/*"))


@pytest.mark.parametrize("name", CODES)
def test_S2_one_rank_saves_at_the_edge_and_ends_by_the_code(name, tmp_path):
    before, noted = signal.getsignal(getattr(signal, name)), Noted()
    module = Falling(sending(name, at=5))
    with pytest.raises(SystemExit) as caught:
        trainer(tmp_path, callbacks=[noted]).fit(module, loader())
    assert caught.value.code == CODES[name] and module.seen == [0, 1, 2, 3, 4, 5]
    assert saved(tmp_path) == ["checkpoint-000006"] and caught.value.checkpoint.endswith("checkpoint-000006")
    assert weight_in(caught.value.checkpoint) == -6 and step_of(caught.value.checkpoint) == 6
    assert noted.errors == [caught.value] and noted.torn_down == 1
    assert signal.getsignal(getattr(signal, name)) is before
    again = Falling()
    trainer(tmp_path).fit(again, loader(), resume="last")
    assert again.seen == list(range(6, STEPS)) and float(again.weight.detach()) == -STEPS
    assert saved(tmp_path) == [f"checkpoint-{STEPS:06d}"]  # as if nothing had happened


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("signalled", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "both"])
def test_S2_two_ranks_stop_together(name, signalled, tmp_path):
    def fit(rank):
        module = Falling(sending(name, at=5) if rank in signalled else lambda module, index: None)
        with pytest.raises(SystemExit) as caught:
            trainer(tmp_path).fit(module, loader(ranks=2))
        return caught.value.code, module.seen, caught.value.checkpoint

    (code, seen, path), (code_1, seen_1, path_1) = distributed.run(fit, 2)
    assert code == code_1 == CODES[name] and path == path_1
    assert seen == [0, 2, 4, 6, 8, 10] and seen_1 == [1, 3, 5, 7, 9, 11]
    assert saved(tmp_path) == ["checkpoint-000006"] and weight_in(path) == -6


@pytest.mark.parametrize("at, steps", [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (6, 2)])
def test_a_window_of_accumulation_is_finished_first(at, steps, tmp_path):
    with pytest.raises(Interrupted) as caught:
        trainer(tmp_path, accumulate_grad_batches=4).fit(Falling(sending("SIGTERM", at)), loader())
    assert step_of(caught.value.checkpoint) == steps and weight_in(caught.value.checkpoint) == -steps


def test_a_signal_goes_before_a_least_number_of_steps(tmp_path):
    with pytest.raises(Interrupted) as caught:
        trainer(tmp_path, min_steps=10).fit(Falling(sending("SIGTERM", 2)), loader())
    assert step_of(caught.value.checkpoint) == 3


def test_a_signal_before_the_first_step(tmp_path):
    class Early(Noted):
        def on_train_start(self, trainer, module):
            os.kill(os.getpid(), signal.SIGTERM)

    module = Falling()
    with pytest.raises(Interrupted) as caught:
        trainer(tmp_path, callbacks=[Early()]).fit(module, loader())
    assert module.seen == [] and caught.value.checkpoint == "" and saved(tmp_path) == []  # there is nothing to keep
    trainer(tmp_path).fit(module, loader(), resume="last")
    assert module.seen == list(range(STEPS))


@pytest.mark.parametrize("options", [{"max_steps": STEPS}, {"max_steps": STEPS, "max_epochs": 3}])
def test_a_signal_in_the_last_step_lets_the_run_end_first(options, tmp_path):
    class Ends(Noted):
        ended = 0

        def on_train_epoch_end(self, trainer, module):
            self.ended += 1

    ends = Ends()
    with pytest.raises(Interrupted) as caught:
        trainer(tmp_path, callbacks=[ends], **options).fit(Falling(sending("SIGTERM", STEPS - 1)), loader())
    assert caught.value.code == 143 and ends.ended == 1 and step_of(caught.value.checkpoint) == STEPS


def test_an_epoch_is_closed_by_the_run_that_goes_on(tmp_path):
    class Ends(Noted):
        at = ()

        def on_train_epoch_end(self, trainer, module):
            self.at += (trainer.global_step,)

    ends, module = Ends(), Falling(sending("SIGTERM", STEPS - 1))
    with pytest.raises(Interrupted):
        trainer(tmp_path, max_epochs=2, callbacks=[ends]).fit(module, loader())
    assert ends.at == () and len(module.seen) == STEPS
    trainer(tmp_path, max_epochs=2, callbacks=[ends]).fit(module := Falling(), loader(), resume="last")
    assert ends.at == (STEPS, 2 * STEPS) and module.seen == list(range(STEPS))


def test_a_save_that_is_due_where_a_signal_has_saved_is_made(tmp_path):
    """At the end of an epoch, which only the run that goes on comes to."""
    options = {"max_epochs": 3}
    with pytest.raises(Interrupted):
        keep = ModelCheckpoint(save_top_k=-1)
        trainer(tmp_path, callbacks=[keep], **options).fit(Falling(sending("SIGTERM", STEPS - 1)), loader())
    assert saved(tmp_path) == ["checkpoint-000012"]
    trainer(tmp_path, callbacks=[ModelCheckpoint(save_top_k=-1)], **options).fit(Falling(), loader(), resume="last")
    assert saved(tmp_path) == ["checkpoint-000012", "checkpoint-000024", "checkpoint-000036"]


@pytest.mark.parametrize("per, shown", [("epoch", f"Epoch 1/1: {STEPS}/{STEPS}"), ("fit", f"{STEPS}/{STEPS}")])
def test_progress_goes_on_within_an_epoch(per, shown, tmp_path):
    with pytest.raises(Interrupted):
        trainer(tmp_path).fit(Falling(sending("SIGTERM", 5)), loader())
    output = io.StringIO()
    bar = Progress(per=per, stream=output)
    trainer(tmp_path, enable_progress_bar=None, callbacks=[bar]).fit(Falling(), loader(), resume="last")
    assert shown in output.getvalue()


def test_without_a_model_checkpoint_it_goes_into_the_runs_folder(tmp_path):
    with pytest.raises(Interrupted) as caught:
        trainer(tmp_path, enable_checkpointing=False).fit(Falling(sending("SIGTERM", 3)), loader())
    assert saved(tmp_path) == ["interrupted-000004"] and weight_in(caught.value.checkpoint) == -4
    again = Falling()
    trainer(tmp_path).fit(again, loader(), resume="last")
    assert again.seen == list(range(4, STEPS))


def test_weights_alone_are_not_what_a_run_goes_on_from(tmp_path):
    with pytest.raises(Interrupted):
        trainer(tmp_path, callbacks=[ModelCheckpoint(save_weights_only=True)]).fit(Falling(sending("SIGTERM", 3)), loader())
    assert saved(tmp_path) == ["interrupted-000004"]


def test_nothing_is_saved_where_it_is_not_wanted(tmp_path):
    with pytest.raises(Interrupted) as caught:
        trainer(tmp_path, callbacks=[Preemption(save=False)]).fit(Falling(sending("SIGTERM", 3)), loader())
    assert caught.value.checkpoint == "" and saved(tmp_path) == []


def test_the_best_that_are_kept_stay(tmp_path):
    keep = ModelCheckpoint(every_n_train_steps=2, save_top_k=2, save_last=True)
    with pytest.raises(Interrupted):
        trainer(tmp_path, callbacks=[keep]).fit(Falling(sending("SIGTERM", 4)), loader())
    assert saved(tmp_path) == ["checkpoint-000002", "checkpoint-000004", "checkpoint-000005", "last"]
    keep = ModelCheckpoint(every_n_train_steps=2, save_top_k=2, save_last=True)
    trainer(tmp_path, callbacks=[keep]).fit(Falling(), loader(), resume="last")
    assert saved(tmp_path) == ["checkpoint-000010", "checkpoint-000012", "last"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_C8_what_is_saved_in_the_background_is_waited_for(ranks, tmp_path):
    def fit(rank):
        Disk(delay=0.2)
        keep = ModelCheckpoint(every_n_train_steps=1, asynchronous=True)
        with pytest.raises(Interrupted) as caught:
            trainer(tmp_path, callbacks=[keep]).fit(Falling(sending("SIGTERM", 3)), loader(ranks=ranks))
        return weight_in(caught.value.checkpoint), step_of(caught.value.checkpoint), saved(tmp_path)

    assert distributed.run(fit, ranks) == [(-4, 4, ["checkpoint-000004"])] * ranks


def test_a_second_SIGINT_ends_at_once(tmp_path):
    module = Falling(sending("SIGINT", at=5, times=2))
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path).fit(module, loader())
    assert module.seen == [0, 1, 2, 3, 4, 5] and float(module.weight.detach()) == -5 and saved(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
def test_data_workers_outlive_what_is_sent_to_the_whole_group(name, tmp_path):
    before = set(multiprocessing.active_children())  # an earlier test's loader may still have workers

    def send(module, index):
        if index == 4:
            mine = set(multiprocessing.active_children()) - before
            for pid in [os.getpid(), *(child.pid for child in mine)]:
                os.kill(pid, getattr(signal, name))

    module = Falling(send)
    with pytest.raises(Interrupted) as caught:
        trainer(tmp_path, accumulate_grad_batches=3).fit(module, DataLoader(torch.arange(12.0), num_workers=2))
    assert module.seen == list(range(6)) and step_of(caught.value.checkpoint) == 2
    assert set(multiprocessing.active_children()) <= before


def test_signals_can_be_left_alone(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, callbacks=[Preemption(signals=())]).fit(Falling(sending("SIGINT", 2)), loader())


def test_exit_codes_can_be_chosen(tmp_path):
    policy = Preemption(exit_codes={"SIGTERM": 75})
    with pytest.raises(Interrupted) as caught:
        trainer(tmp_path, callbacks=[policy]).fit(Falling(sending("SIGTERM", 2)), loader())
    assert caught.value.code == 75
    with pytest.raises(ValueError, match="'TERM'"):
        Preemption(signals=["TERM"])


def test_a_programs_own_handler_stays_in_force(tmp_path, caplog):
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with caplog.at_level(logging.WARNING):
            module = Falling(sending("SIGTERM", 2))
            trainer(tmp_path).fit(module, loader())
        assert came == [signal.SIGTERM] and len(module.seen) == STEPS and "SIGTERM is handled" in caplog.text
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_signal_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        module = Falling(sending("SIGINT", 2))
        trainer(tmp_path).fit(module, loader())
        assert len(module.seen) == STEPS and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_fit_outside_of_the_main_thread_installs_nothing(tmp_path):
    found, before = [], signal.getsignal(signal.SIGTERM)

    def look(module, index):
        found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=lambda: trainer(tmp_path).fit(Falling(look), loader()))
    thread.start()
    thread.join()
    assert found == [before] * STEPS


def test_handlers_are_put_back_after_a_failure(tmp_path):
    before = signal.getsignal(signal.SIGTERM)

    def fail(module, index):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        trainer(tmp_path).fit(Falling(fail), loader())
    assert signal.getsignal(signal.SIGTERM) is before


SLURM = '''
import os, signal, sys, torch
from drivetrain import Trainer, TrainModule


class Slow(torch.optim.Optimizer):
    """Adds 1 to its first parameter, is interrupted, and adds 1 to its second."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        a, b = self.param_groups[0]["params"]
        a += 1
        if int(a) == 4:
            for _ in range(2):
                os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        b += 1


class Two(TrainModule):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(())) for _ in "ab")

    def training_step(self, batch, batch_idx):
        return self.a + self.b

    def configure_optimizers(self):
        return Slow(self.parameters())


if __name__ == "__main__":
    Trainer(accelerator="cpu", logger=False, max_epochs=1).fit(Two(), torch.utils.data.DataLoader(torch.zeros(10)))
    print("trained on")
'''


def scontrol(folder: Path, code: int = 0) -> Path:
    """Make a program `scontrol` that logs its arguments; return the log."""
    program = folder / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/log\necho "not allowed" >&2\nexit {code}\n')
    program.chmod(0o755)
    return folder / "log"


@pytest.mark.parametrize("signalled", [0, 1])
def test_S1_two_ranks_requeue_once(signalled, tmp_path):
    log = scontrol(tmp_path)

    def fit(rank):
        os.environ |= {"SLURM_JOB_ID": "4711", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        with pytest.raises(Interrupted):
            trainer(tmp_path).fit(Falling(sending("SIGUSR1", 2) if rank == signalled else sending("", -1)), loader(ranks=2))

    distributed.run(fit, 2)
    assert log.read_text().splitlines() == ["requeue 4711"]


@pytest.mark.parametrize("requeue, name, asked", [
    (None, "SIGTERM", 0), (True, "SIGTERM", 1), (None, "SIGUSR1", 1), (False, "SIGUSR1", 0),
])  # fmt: skip
def test_S1_when_slurm_is_asked(requeue, name, asked, tmp_path, monkeypatch):
    log = scontrol(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(Interrupted):
        trainer(tmp_path, callbacks=[Preemption(requeue=requeue)]).fit(Falling(sending(name, 2)), loader())
    assert len(log.read_text().splitlines() if log.exists() else []) == asked


def test_S1_an_interactive_job_is_not_requeued(tmp_path, monkeypatch):
    log = scontrol(tmp_path)
    for variable, value in {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "interactive"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(Interrupted):
        trainer(tmp_path).fit(Falling(sending("SIGUSR1", 2)), loader())
    assert not log.exists()


def test_S1_slurm_refuses(tmp_path, monkeypatch, caplog):
    scontrol(tmp_path, code=1)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(Interrupted) as caught:
        trainer(tmp_path).fit(Falling(sending("SIGUSR1", 2)), loader())
    assert caught.value.code == 138 and "Expected SLURM to requeue job 4711. Received: not allowed" in caplog.text


@pytest.mark.timeout(300)
def test_S1_slurm_requeues_once(tmp_path):
    name, code, requeued = "SIGUSR1", 138, ["requeue 4711"]
    script, log = tmp_path / "train.py", scontrol(tmp_path)
    script.write_text(SLURM)
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
             "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}  # fmt: skip
    done = distributed.execute([sys.executable, str(script), name], env=slurm, cwd=tmp_path, timeout=280)
    assert done.returncode == code, done.stderr
    assert (log.read_text().splitlines() if log.exists() else []) == requeued
    assert "trained on" not in done.stdout and f"{name}: training stops at step 4" in done.stdout
    (checkpoint,) = tmp_path.glob("runs/*/checkpoints/*")
    held = Checkpoint.open(checkpoint)
    weights = held.tensors("model.safetensors")
    assert float(weights["a"]) == float(weights["b"]) == held.manifest["step"] == 4
