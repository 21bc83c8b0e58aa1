"""Every event of a run, its order and number, for many lengths, windows and validation intervals."""

from __future__ import annotations

import itertools
import math

import pytest
from drivetrain import Callback
from drivetrain.callbacks.base import HOOKS

from drivetrain.tests.loop.models import Validated, loader, quiet

LISTENED = [name for name in HOOKS if name not in ("on_exception", "on_log", "on_load_checkpoint", "on_save_checkpoint")]


class Recorder(Callback):
    """Writes down every event."""

    def __init__(self, name: str, events: list[str], priority: int = 0) -> None:
        self.priority = priority
        for hook in LISTENED:
            setattr(self, hook, self._listener(f"{name}.{hook}", events))

    def _listener(self, text: str, events: list[str]):
        return lambda *arguments: events.append(text)


def recording_module(events: list[str]) -> Validated:
    module = Validated()
    for hook in LISTENED:
        setattr(module, hook, lambda *arguments, hook=hook: events.append(f"module.{hook}"))
    step, evaluate = module.training_step, module.validation_step
    module.training_step = lambda batch, index: (events.append("training_step"), step(batch, index))[1]
    module.validation_step = lambda batch, index: (events.append("validation_step"), evaluate(batch, index))[1]
    return module


def expected(*, batches: int, accumulate: int, epochs: int, val: int, every: int | None, sanity: int) -> list[str]:
    """The pseudo-code of the loop, written down once more."""
    out: list[str] = []

    def fire(*names: str) -> None:
        for name in names:
            out.extend(f"{who}.{name}" for who in ("early", "module", "late"))

    def validation(count: int) -> None:
        fire("on_validation_start", "on_validation_epoch_start")
        for _ in range(count):
            fire("on_validation_batch_start")
            out.append("validation_step")
            fire("on_validation_batch_end")
        fire("on_validation_epoch_end", "on_validation_end")

    fire("setup", "on_fit_start")
    if sanity and val:
        fire("on_sanity_check_start")
        validation(min(sanity, val))
        fire("on_sanity_check_end")
    fire("on_train_start")
    for _ in range(epochs):
        fire("on_train_epoch_start")
        for index in range(batches):
            fire("on_train_batch_start")
            out.append("training_step")
            fire("on_before_backward", "on_after_backward")
            if (index + 1) % accumulate == 0 or index + 1 == batches:
                fire("on_before_optimizer_step", "on_before_zero_grad")
            fire("on_train_batch_end")
            if val and every is not None and (index + 1) % every == 0:
                validation(val)
        if val and every is None:
            validation(val)
        fire("on_train_epoch_end")
    fire("on_stop", "on_train_end", "on_fit_end", "teardown")
    return out


CASES = list(itertools.product((1, 3, 4), (1, 2, 4), (1, 2), (0, 2), (None, 1, 2), (0, 1)))


@pytest.mark.parametrize(("batches", "accumulate", "epochs", "val", "every", "sanity"), CASES)
def test_every_event_in_its_place(batches, accumulate, epochs, val, every, sanity):
    if every is not None and every > batches:
        every = batches
    events: list[str] = []
    trainer = quiet(
        max_epochs=epochs, accumulate_grad_batches=accumulate, num_sanity_val_steps=sanity, val_check_interval=every,
        callbacks=[Recorder("late", events, priority=100), Recorder("early", events)],
    )  # fmt: skip
    trainer.fit(recording_module(events), loader(2 * batches), loader(2 * val) if val else None)
    assert events == expected(batches=batches, accumulate=accumulate, epochs=epochs, val=val, every=every, sanity=sanity)
    assert trainer.global_step == epochs * math.ceil(batches / accumulate)
    assert trainer.current_epoch == epochs


def test_callbacks_run_by_priority_then_position():
    events: list[str] = []
    trainer = quiet(max_epochs=1, limit_train_batches=1, callbacks=[
        Recorder("c", events, 5), Recorder("a", events, -1), Recorder("b", events), Recorder("d", events, 5),
    ])  # fmt: skip
    trainer.fit(Validated(), loader(2))
    assert [event for event in events if event.endswith("on_train_start")] == [f"{n}.on_train_start" for n in "abcd"]


def test_minus_one_from_batch_start_ends_the_epoch():
    class Half(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    module = Validated()
    quiet(max_epochs=2, callbacks=[Half()]).fit(module, loader(8))
    assert module.seen == [[0, 1], [2, 3]] * 2


def test_fit_test_and_predict_hooks():
    events: list[str] = []
    module = Validated()
    module.test_step = lambda batch, index: events.append("test_step")
    module.predict_step = lambda batch, index: index
    trainer = quiet(max_epochs=1, callbacks=[Recorder("c", events)])
    trainer.test(module, loader(4), verbose=False)
    assert events == ["c.setup", "c.on_test_start", "c.on_test_epoch_start"] + [
        "c.on_test_batch_start", "test_step", "c.on_test_batch_end"] * 2 + [
        "c.on_test_epoch_end", "c.on_test_end", "c.teardown"]  # fmt: skip
    events.clear()
    assert trainer.predict(module, loader(4)) == [0, 1]
    assert events == ["c.setup", "c.on_predict_start", "c.on_predict_epoch_start"] + [
        "c.on_predict_batch_start", "c.on_predict_batch_end"] * 2 + [
        "c.on_predict_epoch_end", "c.on_predict_end", "c.teardown"]  # fmt: skip


def test_gradients_can_be_freed_ahead_of_a_validation_outside_of_windows():
    class Freeing(Validated):
        def __init__(self):
            super().__init__()
            self.freed = []

        def on_validation_model_zero_grad(self):
            self.freed.append((self.trainer.batch_idx, self.trainer.training))

    module = Freeing()
    quiet(max_epochs=1, accumulate_grad_batches=2, val_check_interval=1).fit(module, loader(8), loader(2))
    assert module.freed == [(2, True), (4, True)]
