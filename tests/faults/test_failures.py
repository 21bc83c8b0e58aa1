"""One rank fails: the job ends, soon, with the cause on top; the others run `on_exception`. No test waits for its sleepers."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from drivetrain import Accelerator, Watchdog
from drivetrain.strategies import launch
from drivetrain.tests import distributed
from drivetrain.tests.faults.toy import Falling, Noted, loader, trainer

pytestmark = pytest.mark.timeout(240)  # those that are waited for sleep longer


class Written(Noted):
    """Writes down, in a file a rank, what ended its run."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_exception(self, trainer, module, exception):
        (self.folder / f"rank-{trainer.global_rank}").write_text(f"{type(exception).__name__}: {exception}")


def raises(module, index):
    raise ValueError("a broken sample")


def exits(module, index):
    sys.exit(7)


def interrupts(module, index):
    raise KeyboardInterrupt


def runs_out_of_memory(module, index):
    raise torch.OutOfMemoryError("no memory left")


def vanishes(module, index):
    os._exit(3)


def killed(number):
    def act(module, index):
        os.kill(os.getpid(), number)

    return act


# what a rank does in its third step → (what is said of it, whether its own on_exception runs)
FAULTS = {
    "raises": (raises, "ValueError: a broken sample", True),
    "exits": (exits, "ended with exit code", True),
    "interrupts": (interrupts, "KeyboardInterrupt", True),
    "out of memory": (runs_out_of_memory, "OutOfMemoryError: no memory left", True),
    "vanishes": (vanishes, "ended with exit code 3", False),
    "SIGKILL": (killed(signal.SIGKILL), "was killed by SIGKILL", False),
    "SIGSEGV": (killed(signal.SIGSEGV), "was killed by SIGSEGV", False),
    "SIGABRT": (killed(signal.SIGABRT), "was killed by SIGABRT", False),
}
OTHERS = {"works": lambda module, index: None, "sleeps": lambda module, index: index == 2 and time.sleep(1000)}


@pytest.fixture
def impatient(monkeypatch):
    """A rank that hears nothing is ended a bit earlier; all others need far less, also on a loaded machine."""
    monkeypatch.setattr(launch, "PATIENCE", 8)


ENDED: list[str] = []  # the scenarios that came to their end


@pytest.fixture(scope="module", autouse=True)
def _told_how_many():
    yield
    print(f"\n{len(ENDED)} failures of ranks ended, of {len(set(ENDED))} kinds: {', '.join(sorted(set(ENDED)))}")


def failed(fit) -> launch.LaunchError:
    """Run ``fit`` on 2 ranks and return how that failed."""
    with pytest.raises(launch.LaunchError) as caught:
        launch.call(fit, processes=2)
    return caught.value


def told(folder: Path) -> dict[int, str]:
    """Return by rank what its `on_exception` was told."""
    return {int(path.name[-1]): path.read_text() for path in folder.glob("rank-*")}


ONE_FAILS = [(fault, bad, "works") for fault in FAULTS for bad in (0, 1)]
ONE_FAILS += [(fault, index % 2, "sleeps") for index, fault in enumerate(FAULTS)]


@pytest.mark.parametrize("fault, bad, other", ONE_FAILS)
def test_D2_one_rank_fails(fault, bad, other, tmp_path, impatient):
    ENDED.append(f"one rank {fault} while the other {other}")
    act, said, tells = FAULTS[fault]

    def fit():
        run = trainer(tmp_path, callbacks=[Written(tmp_path)])
        at_third = lambda module, index: act(module, index) if index == 2 else None  # noqa: E731
        run.fit(Falling(at_third if run.global_rank == bad else OTHERS[other]), loader(ranks=2))

    error, heard = failed(fit), told(tmp_path)
    assert error.rank == bad and error.exit_code != 0
    assert str(error).startswith(f"Rank {bad} of 2 failed first") and said in str(error)
    assert (bad in heard) is tells and 1 - bad in heard
    if other == "sleeps":
        assert heard[1 - bad].startswith(f"PeerFailed: Expected all ranks to go on. Received: rank {bad}: ")


class Elsewhere(Falling):
    """Fails on one rank, in a place other than a training step."""

    def __init__(self, where: str, fails: bool) -> None:
        super().__init__()
        self.where, self.fails = where, fails

    def reach(self, place: str) -> None:
        if self.fails and place == self.where:
            raise ValueError(f"broken in {place}")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.fails and self.where == "loss" and batch_idx == 2 else loss

    def validation_step(self, batch, batch_idx):
        self.reach("validation")
        self.log("mean", batch.mean())
        if self.fails and self.where == "keys":
            self.log("another", 1.0)

    def on_train_epoch_end(self):
        self.reach("epoch end")

    def on_before_optimizer_step(self, optimizer):
        self.reach("optimizer step")

    def on_save_checkpoint(self, checkpoint):
        self.reach("save")

    def configure_optimizers(self):
        self.reach("configuring")
        return super().configure_optimizers()


class Worn(torch.utils.data.Dataset):
    """Numbers, one of which cannot be read."""

    def __init__(self, bad: int | None) -> None:
        self.bad = bad

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError(f"sample {index} cannot be read")
        return torch.tensor(float(index))


ELSEWHERE = ["validation", "epoch end", "optimizer step", "save", "configuring", "loss", "keys"]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("where", ELSEWHERE)
def test_D2_a_rank_fails_somewhere_else(where, bad, tmp_path, impatient):
    ENDED.append(f"one rank fails in its {where}")

    def fit():
        run = trainer(tmp_path, callbacks=[Written(tmp_path)])
        run.fit(Elsewhere(where, run.global_rank == bad), loader(ranks=2), loader(ranks=2))

    error, heard = failed(fit), told(tmp_path)
    said = {"loss": f"None on rank {bad}", "keys": "another"}.get(where, f"broken in {where}")
    assert said in str(error) and set(heard) == {0, 1}
    assert where == "keys" or error.rank == bad  # of keys that differ both ranks complain


@pytest.mark.parametrize("workers", [0, 2])
def test_D2_a_sample_that_one_rank_cannot_read(workers, tmp_path, impatient):
    ENDED.append(f"one rank cannot read a sample, with {workers} workers")

    def fit():
        data = torch.utils.data.DataLoader(Worn(7), num_workers=workers)
        trainer(tmp_path, callbacks=[Written(tmp_path)]).fit(Falling(), data)

    error = failed(fit)
    assert error.rank == 1 and "sample 7 cannot be read" in str(error) and set(told(tmp_path)) == {0, 1}


# A rank that leaves the loop early


class Leaving(Falling):
    """One rank wishes to end the epoch before batch 5, or training after it."""

    def __init__(self, how: str, wishes: bool) -> None:
        super().__init__()
        self.how, self.wishes, self.epochs = how, wishes, []

    def on_train_batch_start(self, batch, batch_idx):
        if self.wishes and batch_idx == 5:
            if self.how == "the epoch":
                return -1
            self.trainer.should_stop = True
        return None

    def on_train_epoch_end(self):
        self.epochs.append((self.trainer.global_step, len(self.seen)))


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("how, epochs", [("the epoch", [(5, 5), (10, 10)]), ("training", [(6, 6)])])
def test_D1_ranks_leave_the_loop_together(how, epochs, bad, tmp_path):
    ENDED.append(f"one rank leaves {how}")

    def fit(rank):
        module = Leaving(how, rank == bad)
        trainer(tmp_path, max_epochs=2).fit(module, loader(ranks=2))
        return module.epochs, float(module.weight.detach())

    assert distributed.run(fit, 2) == [(epochs, -epochs[-1][0])] * 2


@pytest.mark.parametrize("bad", [0, 1])
def test_D2_a_rank_leaves_a_loop_of_its_own(bad, tmp_path, impatient):
    """The script of one rank just ends, well: the others cannot go on without it."""
    ENDED.append("one rank leaves a loop of its own")

    def fit():
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1)
        model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(ranks=2))
        for index, batch in enumerate(data):
            if index == 3 and accelerator.process_index == bad:
                return
            accelerator.backward(model(batch[:, None]).mean())
            optimizer.step()

    error = failed(fit)
    assert error.rank == 1 - bad and error.exit_code != 0


# A rank that stands still


def sleeps(module, index):
    time.sleep(1000)


def spins(module, index):
    while True:
        pass


def is_deaf(module, index):
    """Sleeps in native code, which comes back to no signal's handler (and lets other threads run)."""
    import ctypes

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})
    ctypes.CDLL(None).sleep(1000)


STALLS = {"sleeps": sleeps, "spins": spins, "is deaf": is_deaf}


@pytest.mark.parametrize("stall, bad", [("sleeps", 0), ("sleeps", 1), ("spins", 1), ("is deaf", 0)])
def test_D2_a_rank_that_hangs_is_named_and_the_run_ends(stall, bad, tmp_path, impatient, capfd):
    ENDED.append(f"one rank {stall}")

    def fit():
        run = trainer(tmp_path, callbacks=[Watchdog(5), Written(tmp_path)])
        at_third = lambda module, index: STALLS[stall](module, index) if index == 2 else None  # noqa: E731
        run.fit(Falling(at_third if run.global_rank == bad else OTHERS["works"]), loader(ranks=2))

    error, heard = failed(fit), told(tmp_path)
    assert error.exit_code != 0
    assert f"rank {bad} holds up the run: it is in " in str(error) and STALLS[stall].__name__ in str(error)
    assert 1 - bad in heard and (bad in heard) is (stall != "is deaf")
    output = capfd.readouterr().err
    for rank in (0, 1):
        assert f"Rank {rank} of 2 has ended no step for 5 s: stage train, epoch 0, batch 2, step 2, in " in output


def test_scenarios_are_many():
    kinds = len(FAULTS) * len(OTHERS) + len(ELSEWHERE) + len(STALLS) + 5
    assert kinds >= 20


def test_a_watchdog_may_only_tell(tmp_path, capfd):
    module = Falling(lambda module, index: time.sleep(4.5) if index == 2 else None)
    trainer(tmp_path, callbacks=[Watchdog(1, stop=False)]).fit(module, loader())
    assert len(module.seen) == 12
    output = capfd.readouterr().err
    assert output.count("Rank 0 of 1 has ended no step for 1 s: stage train, epoch 0, batch 2, step 2, in ") == 1
    assert "time.sleep(4.5)" in output


def test_a_watchdog_leaves_a_run_that_goes_on_alone(tmp_path, capfd):
    before = signal.getsignal(signal.SIGUSR2)
    trainer(tmp_path, callbacks=[Watchdog("30min")]).fit(Falling(), loader())
    assert "has ended no step" not in capfd.readouterr().err and signal.getsignal(signal.SIGUSR2) is before
