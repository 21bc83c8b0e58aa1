"""What a run puts into a checkpoint beside weights and optimizers, and how it finds one to go on from."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks.rescue import FOLDER
from ..strategies.checkpoint.folders import sweep
from ..strategies.checkpoint.format import Checkpoint, CheckpointError, newest
from ..strategies.checkpoint.state import encode
from ..strategies.contents import load_module, read_by
from .remote_checkpoints import Remote, brought, found_at, newest_copy
from .run_folder import is_run_id
from .restarts import Attempt

if TYPE_CHECKING:
    from .loop import FitLoop
    from .session import Session
    from .trainer import Trainer

logger = logging.getLogger(__name__)


class RunState:
    """An entry of each checkpoint: counters, the loader's position, metrics, callbacks, the data module."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._collected: dict[str, Any] = {}

    def collect(self) -> None:
        """Gather the state; every rank calls this before the main process asks for it."""
        session = self.trainer.session
        if session is None or session.loop is None:
            self._collected = {}
            return
        entries: dict[str, Any] = {}
        session.hooks.fire("on_save_checkpoint", entries)
        self._collected = {
            "progress": self._progress(session, session.loop),
            "loader": self._position(session, session.loop),
            "metrics": session.metrics.state_dict(),
            "callbacks": {key: callback.state_dict() for key, callback in keyed(session.callbacks).items()},
            "datamodule": session.datamodule.state_dict() if session.datamodule is not None else {},
            "entries": entries,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what was collected."""
        return self._collected

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; only ``fit`` goes on from one."""
        session = self.trainer.session
        if session is None or session.stage != "fit" or "progress" not in state:
            return
        if "loader" not in state:
            state = self._completed(session, state)
        self.trainer.progress.load_state_dict(state["progress"])
        session.train_loader.load_state_dict(state["loader"])
        session.metrics.load_state_dict(state["metrics"])
        for key, callback in keyed(session.callbacks).items():
            if key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][key])
        missing = sorted(
            key for key, saved in state["callbacks"].items() if saved and key not in keyed(session.callbacks)
        )
        if missing:
            logger.warning("The checkpoint holds states of callbacks that this run has not: %s.", ", ".join(missing))
        if session.datamodule is not None:
            session.datamodule.load_state_dict(state["datamodule"])
        session.hooks.fire("on_load_checkpoint", state["entries"])

    def _completed(self, session: Session, state: dict[str, Any]) -> dict[str, Any]:
        """What another library has not saved, as it is at the beginning of an epoch."""
        progress = self.trainer.progress.state_dict() | state["progress"]
        loader = {"epoch": progress["epoch"], "samples": 0, "seed": session.train_loader.state_dict()["seed"]}
        datamodule = session.datamodule.state_dict() if session.datamodule is not None else {}
        now = {"metrics": session.metrics.state_dict(), "callbacks": {}, "datamodule": datamodule, "entries": {}}
        return now | state | {"progress": progress, "loader": loader}

    def _progress(self, session: Session, loop: FitLoop) -> dict[str, Any]:
        state = self.trainer.progress.state_dict()
        if loop.at_edge and state["phase"] == "train" and state["batch"] and loop.loader.end_of_dataloader:
            state["phase"] = "full"  # an iterable without a length could not tell it again
        if not loop.at_edge:  # only when something raised: what was not finished is trained again
            state["batch"], state["batches"], state["samples"], _ = loop.edge
        return state

    def _position(self, session: Session, loop: FitLoop) -> dict[str, Any]:
        state = session.train_loader.state_dict()
        if not loop.at_edge:
            state["batches"], _, _, state["samples"] = loop.edge
        return state


class HeldGradients:
    """Gradients that manual optimization keeps from one batch to the next, of each rank: an entry of checkpoints."""

    per_rank = True

    def __init__(self, module: Any) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients by their parameters' names."""
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the gradients back."""
        for name, parameter in self.module.named_parameters():
            if name in state:
                parameter.grad = state[name].to(device=parameter.device, dtype=parameter.dtype)


def keyed(callbacks: list[Any]) -> dict[str, Any]:
    """Return the callbacks by their state keys, equal keys numbered."""
    found: dict[str, Any] = {}
    for callback in callbacks:
        key, count = callback.state_key, 2
        while key in found:
            key, count = f"{callback.state_key}#{count}", count + 1
        found[key] = callback
    return found


def find_checkpoint(trainer: Trainer, wanted: Any, attempt: Attempt | None = None) -> Path | None:
    """Return the folder that ``wanted`` means: a path, "last" (None where nothing was saved yet) or "best".

    In a fit that an agent has started again it is what that fit has saved before, whatever was wanted. The main process
    looks and tells the others, so that all ranks go on from the same one (collective).
    """
    again = attempt if attempt is not None and attempt.again else None
    if wanted is None and again is None:
        return None
    world = trainer.accelerator.world
    outcome: Any = None
    if world.rank == 0:
        try:
            outcome = (_own(trainer, again) if again is not None else None) or _find(trainer, wanted), None
        except Exception as error:
            outcome = None, error
    found, error = world.broadcast_object(outcome)
    if error is not None:
        raise error
    return brought(trainer, found) if isinstance(found, Remote) else found


def _own(trainer: Trainer, attempt: Attempt) -> Path | None:
    found = attempt.found(_folders(trainer))
    if found is not None:
        logger.warning("The launch was started again: the run goes on from %s.", found)
    return found


def _find(trainer: Trainer, wanted: Any) -> Path | Remote | None:
    if wanted is None:
        return None
    if wanted == "last":
        return last_checkpoint(trainer)
    if wanted == "best":
        best = next((c.best_model_path for c in trainer.checkpoint_callbacks if c.best_model_path), None)
        if best is None:
            raise ValueError(
                'Expected a best checkpoint. Received: ckpt_path="best", but nothing was saved in this process. '
                "Name a path."
            )
        return Path(best)
    if not (isinstance(wanted, str) or hasattr(wanted, "__fspath__")):
        raise TypeError(f'Expected a checkpoint. Received: ckpt_path={wanted!r}. Write "last", "best" or a path.')
    if "://" in str(wanted):
        return found_at(trainer, str(wanted))
    path = Path(wanted)
    if not path.exists():
        raise FileNotFoundError(
            f'Expected a checkpoint. Received: ckpt_path={str(wanted)!r}, which is not there. Use "last" or a path.'
        )
    return path


def last_checkpoint(trainer: Trainer) -> Path | Remote | None:
    """Return the newest complete checkpoint where this trainer saves, runs of earlier processes included.

    It is a remote one where ``CheckpointUpload`` copied one that is newer than all that lie here.
    """
    here = _last_here(trainer)
    _tell_of_rescued(trainer, here)
    time = Checkpoint.open(here, verify=False).manifest["time"] if here is not None else ""
    found = newest_copy(trainer, later_than=time) or here
    if found is None:
        logger.warning(
            "No checkpoint to resume from lies in %s; the run starts from its beginning.", trainer.default_root_dir
        )
    return found


def _folders(trainer: Trainer) -> list[Path]:
    """Where checkpoints of this trainer may lie; those of the newest run come first."""
    given = [Path(c.dirpath) for c in trainer.checkpoint_callbacks if c.dirpath is not None]
    runs = (Path(trainer.default_root_dir) / "runs").glob("*/checkpoints")
    return given + sorted(runs, key=lambda folder: folder.parent.name, reverse=True)


def _last_here(trainer: Trainer) -> Path | None:
    for folder in filter(Path.is_dir, _folders(trainer)):
        sweep(folder)  # what a killed process left half written or half removed
        found = newest(folder, by="time")
        if found is not None:
            return found.resolve()
    return None


def _tell_of_rescued(trainer: Trainer, found: Path | None) -> None:
    """Name what healthy ranks have saved when one failed, if it is ahead: not being exact, it is taken when named."""
    run = run_of(found) or "*"
    for folder in sorted((Path(trainer.default_root_dir) / "runs").glob(f"{run}/{FOLDER}"), reverse=True)[:1]:
        rescued = newest(folder)
        step = -1 if rescued is None else Checkpoint.open(rescued, verify=False).manifest["step"]
        if step > (-1 if found is None else Checkpoint.open(found, verify=False).manifest["step"]):
            logger.warning("A rank failed after step %d, which %s holds; resume=<that path> takes it.", step, rescued)


def restore(session: Session) -> None:
    """Load the session's checkpoint into everything that is prepared."""
    trainer, path = session.trainer, session.checkpoint
    if path is None:
        return
    whole = Checkpoint.open(path, verify=False).has("training.json")
    if session.stage == "fit" and not whole:
        logger.warning("%s holds only weights; counters, optimizers and data begin anew.", path)
    strict = session.module.strict_loading
    only_weights = session.stage != "fit" or not whole
    manifest = trainer.accelerator.load_state(str(path), weights_only=only_weights, strict=strict)
    if only_weights:
        return
    if manifest.get("world_size", trainer.world_size) != trainer.world_size:
        trainer.progress.batch = session.train_loader.done
    logger.info("Resumed from %s at epoch %d, step %d.", path, trainer.current_epoch, trainer.global_step)


def metadata(trainer: Trainer) -> dict[str, Any]:
    """Return what a checkpoint's manifest says of the run."""
    progress, module, datamodule = trainer.progress, trainer.module, trainer.datamodule
    attempt = trainer.session.attempt if trainer.session is not None else None
    return {
        "step": progress.step,
        "epoch": progress.epoch,
        "samples": progress.samples,
        "world_size": trainer.world_size,
        "run_id": trainer.run_id,
        "hparams": dict(module.hparams) if module is not None else {},
        "datamodule_hparams": dict(datamodule.hparams) if datamodule is not None else {},
        **({"launch": attempt.name} if attempt is not None and attempt.name else {}),
    }


def check_hyperparameters(session: Session) -> None:
    """Raise TypeError, naming it, for a hyperparameter that cannot be saved: before training, not at a save."""
    things = {"hparams": session.module, "datamodule hparams": session.datamodule}
    for name, thing in things.items():
        if thing is None:
            continue
        try:
            _, tensors = encode(dict(thing.hparams), name)
        except TypeError as error:
            raise TypeError(
                f"{error} Leave it out by save_hyperparameters(ignore=[...]), or save what it is made from."
            ) from None
        if tensors:
            raise TypeError(
                f"Expected hyperparameters without tensors. Received: {next(iter(tensors))}. "
                "Use register_buffer for it."
            )


def run_of(path: Path | None) -> str | None:
    """Return the id of the run that a checkpoint belongs to; None, and a warning, where it names no folder."""
    found = None if path is None else Checkpoint.open(path, verify=False).manifest.get("run_id")
    if found is None or is_run_id(found):
        return found
    logger.warning("%s says run_id=%r, which is no name of a folder; the run gets a new id.", path, found)
    return None


def read_module(cls: Any, path: Any, map_location: Any, strict: bool, overrides: dict[str, Any]) -> Any:
    """Return a module of class ``cls`` with the hyperparameters and weights of a checkpoint."""
    module = cls(**{**read_hyperparameters(cls, path, "hparams"), **overrides})
    module.load_state_dict(load_module(_with_weights(path)), strict=strict)
    return module if map_location is None else module.to(map_location)


def _with_weights(path: Any) -> Checkpoint:
    """A checkpoint whose weights are read, or where they are in parts verified; nothing else of it is looked at."""
    checkpoint = Checkpoint.open(path, verify=False)
    names = [name for name in checkpoint.files if name.startswith("model")]
    whole = read_by(0, names, weights_only=True)
    checkpoint.fetch(whole)
    if problems := checkpoint.examine(name for name in names if name not in whole):
        raise CheckpointError(f"{checkpoint.directory} is damaged: " + "; ".join(problems))
    return checkpoint


def read_hyperparameters(cls: Any, path: Any, kind: str) -> dict[str, Any]:
    """Return the saved hyperparameters that ``cls`` takes; ``kind`` is "hparams" or "datamodule_hparams"."""
    saved = Checkpoint.open(path, verify=False).manifest.get(kind, {})
    parameters = inspect.signature(cls).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(saved)
    return {p.name: saved[p.name] for p in parameters if p.name in saved}
