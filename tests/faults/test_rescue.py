"""When a rank fails the others save what they hold: whole, at one step, found in limited time."""

from __future__ import annotations

import signal
import time
import warnings
from pathlib import Path

import pytest
import torch

from drivetrain import ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.strategies import launch
from drivetrain.strategies.checkpoint import Checkpoint
from drivetrain.strategies.survivors import Survivors
from drivetrain.strategies.world import current
from drivetrain.tests import distributed
from drivetrain.tests.faults.test_failures import failed, impatient, killed, raises  # noqa: F401
from drivetrain.tests.faults.toy import STEPS, Falling, loader, step_of, trainer, weight_in

pytestmark = pytest.mark.timeout(240)


def rescued(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("runs/*/rescue/*"))


def failing(root: Path, ranks: int, bad: int, act, *, at: int = 4, others=lambda module, index: None, **options):
    """Run ``ranks`` of which one fails in its step ``at``; return how that failed."""

    def fit():
        run = trainer(root, **options)
        chosen = act if run.global_rank == bad else others
        run.fit(Falling(lambda module, index: chosen(module, index) if index == at else None), loader(ranks=ranks))

    with pytest.raises(launch.LaunchError) as caught:
        launch.call(fit, processes=ranks)
    return caught.value


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("act", [raises, killed(signal.SIGKILL)], ids=["raises", "SIGKILL"])
def test_the_other_rank_saves_its_step_and_the_run_can_go_on(act, bad, tmp_path, impatient, caplog):  # noqa: F811
    assert failing(tmp_path, 2, bad, act).rank == bad
    (path,) = tmp_path.glob("runs/*/rescue/*")
    assert path.name == "step-000004" and (step_of(path), weight_in(path)) == (4, -4)
    checkpoint = Checkpoint.open(path)
    assert checkpoint.has(f"rank-0000{1 - bad}.json") and not checkpoint.has(f"rank-0000{bad}.json")
    assert checkpoint.manifest["world_size"] == 2

    def go_on(rank, where):
        module = Falling()
        run = trainer(tmp_path)
        run.fit(module, loader(ranks=2), resume=where)
        return module.seen, float(module.weight.detach())

    assert distributed.run(go_on, 2, path) == [(list(range(8 + rank, 24, 2)), -STEPS) for rank in (0, 1)]
    assert not rescued(tmp_path)  # the run has come to its end


def test_last_keeps_to_what_is_exact_and_names_what_is_ahead(tmp_path, impatient, caplog):  # noqa: F811
    keep = ModelCheckpoint(every_n_train_steps=3)
    failing(tmp_path, 2, 1, raises, callbacks=[keep])
    assert rescued(tmp_path) == ["step-000004"]
    module = Falling()
    trainer(tmp_path, callbacks=[ModelCheckpoint(every_n_train_steps=3)]).fit(module, loader(ranks=2), resume="last")
    assert module.seen[0] == 6 and f"{tmp_path}/runs/run-0001/rescue/step-000004" in caplog.text


def test_what_is_saved_already_is_not_saved_again(tmp_path, impatient):  # noqa: F811
    failing(tmp_path, 2, 1, raises, callbacks=[ModelCheckpoint(every_n_train_steps=1)])
    assert rescued(tmp_path) == []


def test_only_the_newest_is_kept(tmp_path, impatient):  # noqa: F811
    failing(tmp_path, 2, 1, raises)

    def fit():
        run = trainer(tmp_path)
        run.fit(Falling(raises if run.global_rank == 1 else lambda module, index: None), loader(ranks=2))

    def again():
        run = trainer(tmp_path)
        fails = lambda module, index: raises(module, index) if run.global_rank == 1 and index == 9 else None  # noqa: E731
        run.fit(Falling(fails), loader(ranks=2), resume=next(tmp_path.glob("runs/*/rescue/*")))

    failed(again)
    assert rescued(tmp_path) == ["step-000009"]
    failed(fit)  # of a first step nothing is to be saved
    assert rescued(tmp_path) == ["step-000009"]


@pytest.mark.parametrize("options", [{"enable_checkpointing": False}, {"barebones": True, "enable_checkpointing": None}])
def test_a_run_without_checkpoints_leaves_none(options, tmp_path, impatient):  # noqa: F811
    failing(tmp_path, 2, 1, raises, **options)
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("bad", [0, 2])
def test_three_ranks_of_which_one_or_two_save(bad, tmp_path):
    failing(tmp_path, 3, bad, killed(signal.SIGKILL))
    (path,) = tmp_path.glob("runs/*/rescue/*")
    files = Checkpoint.open(path).files
    # A rank may have had all gradients of the next step before the others; then it saves that one alone.
    assert weight_in(path) == -step_of(path) and step_of(path) in (4, 5) and f"rank-0000{bad}.json" not in files
    assert sum(name.startswith("rank-") and name.endswith(".json") for name in files) in (1, 2)


@pytest.mark.parametrize("callback, name", [
    (lambda root: ModelCheckpoint(save_on_exception=True), "checkpoint-000004"),
    (lambda root: OnExceptionCheckpoint(root / "runs/x/checkpoints", filename="{step}"), "step=4"),
], ids=["ModelCheckpoint", "OnExceptionCheckpoint"])  # fmt: skip
def test_where_a_callback_is_to_save_on_exception_it_does(callback, name, tmp_path, impatient):  # noqa: F811
    failing(tmp_path, 2, 1, raises, callbacks=[callback(tmp_path)])
    (path,) = tmp_path.glob("runs/*/checkpoints/*4")
    assert path.name == name and (step_of(path), weight_in(path)) == (4, -4)


class Half(torch.optim.SGD):
    """Fails when it has changed one of two weights."""

    def step(self, closure=None):
        super().step(closure)
        if float(self.param_groups[0]["params"][0].detach()) == -4:
            raise ValueError("half done")


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_within_a_step_are_not_saved(ranks, tmp_path, impatient):  # noqa: F811
    class Torn(Falling):
        def configure_optimizers(self):
            return Half(self.parameters(), lr=1.0)

    def fit():
        with pytest.warns(UserWarning, match="in the midst of an optimizer's step"), pytest.raises(ValueError, match="half"):
            trainer(tmp_path, callbacks=[ModelCheckpoint(save_on_exception=True)]).fit(Torn(), loader(ranks=ranks))

    launch.call(fit, processes=ranks)
    assert not list(tmp_path.rglob("manifest.json"))


def test_manual_optimization_saves_only_between_batches(tmp_path):
    class Manual(Falling):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(self.weight * 1.0)
            if batch_idx == 3 and self.where == "before":
                raise ValueError("broken")
            optimizer.step()
            optimizer.zero_grad()
            if batch_idx == 3:
                raise ValueError("broken")

    for where, steps in (("before", [3]), ("after", [])):
        module = Manual()
        module.where, module.automatic_optimization = where, False
        keep = ModelCheckpoint(save_on_exception=True)
        with pytest.raises(ValueError, match="broken"), warnings.catch_warnings(record=True):
            trainer(tmp_path / where, callbacks=[keep]).fit(module, loader())
        assert [step_of(path) for path in (tmp_path / where).glob("runs/*/checkpoints/*")] == steps


def test_an_error_in_a_validation_lets_the_run_that_goes_on_validate_again(tmp_path):
    class Validated(Falling):
        broken, validated = True, 0

        def validation_step(self, batch, batch_idx):
            self.validated += 1
            if self.broken and batch_idx == 2:
                raise ValueError("broken")

    module, options = Validated(), {"val_check_interval": 4}
    with pytest.raises(ValueError, match="broken"):
        keep = ModelCheckpoint(save_on_exception=True)
        trainer(tmp_path, callbacks=[keep], **options).fit(module, loader(), loader())
    module = Validated()
    module.broken = False
    trainer(tmp_path, **options).fit(module, loader(), loader(), resume="last")
    assert module.seen == list(range(4, STEPS)) and module.validated == 3 * STEPS


# The meeting


def test_a_meeting_takes_those_that_come(tmp_path):
    def work(rank):
        world = current()
        if rank == 2:
            return None
        newest = lambda found: [one for one in found if found[one] == max(found.values())]  # noqa: E731
        survivors = Survivors.meet(world, "a", rank // 3, seconds=20, gone=lambda other: other == 2, choose=newest)
        if survivors is None:
            return None
        seen = survivors.gather_object(f"from {rank}")
        value = survivors.all_reduce(torch.tensor([float(rank)]), "mean")
        survivors.barrier()
        told = survivors.broadcast_object(rank, src=1)
        some, every = survivors.agree(rank == 3), survivors.agree(rank == 3, how="all")
        return survivors.members, seen, float(value), told, some, every, survivors.placed(seen, "-")

    texts = ["from 3", "from 4"]
    right = ([3, 4], texts, 3.5, 4, True, False, ["-", "-", "-", *texts])
    assert distributed.run(work, 5) == [None, None, None, right, right]


def test_nobody_waits_longer_than_told(tmp_path):
    def work(rank):
        if rank == 1:
            while not (tmp_path / "over").exists():
                time.sleep(0.02)
            return None
        everybody = lambda found: list(found)  # noqa: E731
        alone = Survivors.meet(current(), "b", None, seconds=0.2, gone=lambda other: False, choose=everybody)
        both = Survivors.meet(current(), "c", None, seconds=0.2, gone=lambda other: False, choose=lambda found: [0, 1])
        with pytest.raises(RuntimeError):
            both.gather_object(1)
        (tmp_path / "over").touch()
        return alone.members, alone.gather_object("x")

    assert distributed.run(work, 2)[0] == ([0], ["x"])


def test_a_process_group_of_the_users_own_has_no_store(tmp_path):
    import torch.distributed as dist

    from drivetrain.strategies import environment
    from drivetrain.strategies.world import TorchWorld

    def work(rank):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=rank, world_size=2)
        world = TorchWorld.create(environment.detect({}), "cpu")
        return Survivors.meet(world, "d", None, seconds=1, gone=lambda other: False, choose=list)

    assert distributed.run(work, 2, group=False) == [None, None]
