"""What ``self.log`` does: values are kept as they come and reduced, over time and ranks, when a row is due.

Nothing here reads a tensor's value or talks to another rank while a step runs. A mean over an epoch is
``sum(value * batch_size) / sum(batch_size)`` over all batches of all ranks.
"""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import Tensor, nn

from ..strategies.world import World
from .reduction import Row, adopt, check_same_names, elsewhere, final, over_ranks, reduction_name, stack

if TYPE_CHECKING:
    from torchmetrics import Metric

_COMPACT_AT = 256
NOTHING = {"total": None, "values": None, "weight": 0.0, "fresh": False}  # that a series has collected
_VALUES = ("callback", "logged", "progress_bar", "steps")


class Series:
    """The values that were logged under one name in one stage."""

    __slots__ = (
        "name", "options", "prog_bar", "logger", "on_step", "on_epoch", "reduction", "sync", "rank_zero_only",
        "metric", "last", "last_weight", "values", "weights", "total", "weight", "fresh", "touched", "final",
    )  # fmt: skip

    def __init__(self, name: str, options: tuple[Any, ...], *, on_step: bool, on_epoch: bool) -> None:
        prog_bar, logger, _, _, reduce_fx, sync_dist, rank_zero_only = options
        self.name, self.options, self.prog_bar, self.logger = name, options, prog_bar, logger is not False
        self.on_step, self.on_epoch = on_step, on_epoch
        self.reduction = reduction_name(name, reduce_fx)
        self.sync, self.rank_zero_only = sync_dist is not False, rank_zero_only
        self.metric: Metric | None = None
        self.last: Any = 0.0
        self.last_weight = 0.0
        self.fresh = False
        self.clear()

    @property
    def due(self) -> bool:
        """Whether there is something for the epoch's row."""
        return self.on_epoch and (self.touched or self.total is not None)

    def key(self) -> tuple[Any, ...]:
        """Return the options in effect; a lambda in the call is a new object each time, of the same code."""
        reduction = getattr(self.reduction, "__code__", self.reduction)
        return (self.prog_bar, self.logger, self.on_step, self.on_epoch, reduction, self.sync, self.rank_zero_only)

    def clear(self) -> None:
        """Forget the values of the epoch."""
        self.values: list[Any] = []
        self.weights: list[float] = []
        self.total: Any = None
        self.weight = 0.0
        self.touched = False
        self.final = math.nan  # reduced by a function that only the process before an interruption knew

    def add(self, value: Any, weight: float) -> None:
        """Take a value; ``weight`` is the number of samples that it is a mean over."""
        self.last, self.last_weight, self.fresh, self.touched = value, weight, True, True
        if self.on_epoch and self.metric is None:
            self.values.append(value)
            self.weights.append(weight)
            if len(self.values) >= _COMPACT_AT and isinstance(self.reduction, str):
                self.compact()

    def compact(self) -> None:
        """Fold the values into one running value, without reading any of them."""
        if not self.values or callable(self.reduction):
            return
        values = stack(self.values)
        if self.reduction == "mean":
            values = values * torch.tensor(self.weights, dtype=values.dtype, device=values.device)
        self.merge(self._fold(values), sum(self.weights))
        self.values, self.weights = [], []

    def merge(self, total: Any, weight: float) -> None:
        """Take in another running value."""
        self.total = total if self.total is None else self._fold(stack([self.total, total]))
        self.weight += weight

    def state_dict(self, paths: dict[int, str]) -> dict[str, Any]:
        """Return what an interruption must not lose; ``paths`` tells metrics' places in the module by their ids."""
        self.compact()
        own = callable(self.reduction)
        last = self.metric._forward_cache if self.metric is not None else self.last
        return {
            "options": [*self.options[:4], None if own else self.reduction, *self.options[5:]],
            "values": stack(self.values).cpu() if own and self.values else None,
            "on_step": self.on_step,
            "on_epoch": self.on_epoch,
            "total": self.total,
            "weight": self.weight,
            "touched": self.touched,
            "fresh": self.fresh,
            "last": last if self.fresh else None,
            "last_weight": self.last_weight,
            "metric": paths.get(id(self.metric)),
        }

    def load_state_dict(self, state: dict[str, Any], metrics: dict[str, Metric]) -> None:
        """Take in a state; those of several ranks one after another."""
        self.metric = metrics.get(state["metric"])
        self.touched = self.touched or state["touched"]
        self.fresh, self.last, self.last_weight = state["fresh"], state["last"], state["last_weight"]
        if self.metric is not None and self.fresh:
            self.metric._forward_cache = state["last"]
        if state["total"] is not None:
            self.merge(state["total"], state["weight"])
        if state.get("values") is not None:
            self.values += state["values"].unbind()
            self.weights += [1.0] * len(state["values"])

    def take_over(self, other: Series) -> Series:
        """Return this one with what ``other`` has collected, whose function nobody knew until now."""
        for name in ("metric", "last", "last_weight", "values", "weights", "fresh", "touched"):
            setattr(self, name, getattr(other, name))
        return self

    def _fold(self, values: Tensor) -> Tensor:
        return values.sum() if self.reduction in ("mean", "sum") else getattr(torch, f"a{self.reduction}")(values)


class Metrics:
    """All series of a run, by stage, and the last reduced value of each name.

    ``callback``, ``logged`` and ``progress_bar`` map names to floats that are the same on every rank; ``steps`` maps a
    name to the ``global_step`` at which it was last reduced.
    """

    def __init__(self, world: World, module: nn.Module) -> None:
        self.world = world
        self.module = module
        self.tables: dict[str, dict[str, Series]] = {}
        self.callback: Row = {}
        self.logged: Row = {}
        self.progress_bar: Row = {}
        self.steps: dict[str, int] = {}
        self.pending: Row = {}
        self.samples: int | None = 1  # in the batch that is being worked on; set by the loop
        self.stage = "train"
        self.loader_index: int | None = None  # set where there are several evaluation loaders
        self.batchwise = False  # whether the running hook is about one batch
        self.without_batch = False  # whether this rank found none in some loader of the running evaluation
        self.adopted = False  # whether some rank did, and has taken over what the others logged
        self.forgotten = False  # whether an interruption has left values whose reduction only the user's code knows
        self.partly: set[str] = set()  # names of those that some ranks have logged again since, and some have not
        self.view: dict[str, Series] = {}  # names as the module gives them → series

    def begin(self, stage: str, *, batchwise: bool, loader_index: int | None = None) -> None:
        """Say what is logged from now on: in a stage, for one of its loaders, about batches or whole epochs."""
        if (stage, batchwise, loader_index) != (self.stage, self.batchwise, self.loader_index):
            self.stage, self.batchwise, self.loader_index, self.view = stage, batchwise, loader_index, {}
        self.samples = None if batchwise else 1
        self.module.__dict__["_series"] = self.view  # past nn.Module.__setattr__, which is slow

    def close(self) -> None:
        """Say that no row follows: whoever logs now is told so."""
        self.module.__dict__["_series"] = None

    def series(self, name: str, options: tuple[Any, ...], add_dataloader_idx: bool) -> Series:
        """Return the series of a name, made at its first use.

        Raises ValueError where the options contradict each other or earlier ones.
        """
        several = self.loader_index is not None and add_dataloader_idx
        full = f"{name}/dataloader_idx_{self.loader_index}" if several else name
        prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, rank_zero_only = options
        each_batch = self.stage == "train" and self.batchwise
        on_step = each_batch if on_step is None else on_step
        on_epoch = not each_batch if on_epoch is None else on_epoch
        if not (on_step and self.batchwise or on_epoch):
            where = "" if self.batchwise else " in a hook that is not about one batch"
            raise ValueError(
                f"Expected {name!r} to be logged on_step (in batches) or on_epoch. "
                f"Received: on_step={on_step}, on_epoch={on_epoch}{where}. Set one."
            )
        series = Series(full, options, on_step=on_step, on_epoch=on_epoch)
        known = self.table(self.stage).setdefault(full, series)
        if known.reduction is elsewhere:
            known = self.table(self.stage)[full] = series.take_over(known)
        if known.key() != series.key():
            raise ValueError(
                f"Expected one set of options for {name!r} in {self.stage}. Received: {series.key()} after "
                f"{known.key()} (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, rank_zero_only). "
                "Log it under another name."
            )
        known.options = options
        self.view[name] = known
        return known

    def table(self, stage: str) -> dict[str, Series]:
        """Return the series of a stage; the same dict during the whole run."""
        return self.tables.setdefault(stage, {})

    def reduce_step(self, stage: str, step: int, *, keep: bool = False) -> Row:
        """Reduce the values of this step over all ranks and return those meant for the trackers (collective).

        ``keep`` leaves them to the next row as well.
        """
        due = [s for s in self.table(stage).values() if s.on_step and s.fresh]
        row = self._reduce({f"{s.name}_step" if s.on_epoch else s.name: s for s in due}, _step_value, step)
        for series in due:
            series.fresh = keep
        return row

    def reduce_epoch(self, stage: str, step: int, *, clear: bool = True, publish: bool = True) -> Row:
        """Reduce an epoch's values over its batches and all ranks (collective).

        Returns those meant for the trackers; ``publish=False`` leaves the last reduced values as they are.
        """
        self._adopt(stage)
        due = [s for s in self.table(stage).values() if s.due]
        names = {f"{s.name}_epoch" if s.on_step else s.name: s for s in due}
        row = self._reduce(names, self._epoch_value, step, publish=publish)
        for series in self.table(stage).values() if clear else ():
            if series.metric is not None and series.touched:
                series.metric.reset()
            series.clear()
        return row

    def _adopt(self, stage: str) -> None:
        self.adopted = stage != "train" and self.world.size > 1 and self.world.agree(self.without_batch)
        if stage == "train" and self.forgotten:
            lacking = {name for name, s in self.table(stage).items() if s.reduction is elsewhere}
            everywhere = self.world.gather_object(lacking)
            self.partly = set().union(*everywhere) - lacking.intersection(*everywhere)
        if self.adopted:
            adopt(self.table(stage), self.world, dict(self._metrics()), here=self.without_batch, make=Series)

    def take_pending(self) -> Row:
        """Return the host values that callbacks added to the next row."""
        pending, self.pending = self.pending, {}
        return pending

    def _reduce(
        self, due: dict[str, Series], value_of: Callable[[Series], Any], step: int, *, publish: bool = True
    ) -> Row:
        check_same_names([name for name, series in due.items() if not series.rank_zero_only], self.world)
        reduced = over_ranks([(name, series, *value_of(series)) for name, series in due.items()], self.world)
        row = {name: value for name, value in reduced.items() if due[name].logger}
        if publish:
            self.logged.update(row)
            for name, value in reduced.items():
                self.callback[name] = self.callback[due[name].name] = value
                self.steps[name] = self.steps[due[name].name] = step
            self.progress_bar.update({name: v for name, v in reduced.items() if due[name].prog_bar})
        return row

    def _epoch_value(self, series: Series) -> tuple[Any, float, str]:
        if series.metric is not None:
            value = series.metric.compute()
            check_scalar(series.name, value)
            return value, 1.0, "same"
        if callable(series.reduction):
            values = stack(series.values) if series.values else torch.zeros(0, dtype=torch.float64)
            known = series.reduction is not elsewhere
            if not series.sync or series.rank_zero_only:
                return series.reduction(values) if known else series.final, 1.0, "mean"
            gathered = torch.cat([v.to(values.device) for v in self.world.all_gather_uneven(values)])
            apart = self.adopted or series.name in self.partly
            if not known and apart:
                return 0.0, 0.0, "mean"
            return series.reduction(gathered) if known else series.final, 1.0, "mean" if apart else "same"
        series.compact()
        return (0.0, 0.0, series.reduction) if series.total is None else (series.total, series.weight, series.reduction)

    def state_dict(self) -> dict[str, Any]:
        """Return the last reduced values and what the unfinished epoch has collected, one entry a rank (collective)."""
        paths = {id(metric): path for path, metric in self._metrics()}
        known = {name: s for name, s in self.table("train").items() if s.metric is None or id(s.metric) in paths}
        series = {name: s.state_dict(paths) for name, s in known.items()}
        mine = {"series": series, "metrics": {path: _metric_state(m) for path, m in self._metrics() if m._update_count}}
        nothing = {"series": {name: entry | NOTHING for name, entry in series.items()}, "metrics": {}}
        ranks = self.world.placed(self.world.gather_object(mine), nothing)
        finals = {name: final(s, ranks) for name, s in known.items() if callable(s.reduction) and s.due}
        return {"ranks": ranks, "finals": finals, "values": self.values()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned, at any world size."""
        self.take_values(state["values"])
        ranks, metrics = state["ranks"], dict(self._metrics())
        moved = len(ranks) != self.world.size
        if not moved:
            ranks = [ranks[self.world.rank]]
        elif self.world.rank:  # another world size: rank 0 takes what all ranks had, the others begin with nothing
            ranks = [{"series": {k: e | NOTHING for k, e in r["series"].items()}, "metrics": {}} for r in ranks]
        finals = state.get("finals", {})
        self.forgotten = bool(finals)
        for saved in ranks:
            for name, entry in saved["series"].items():
                entry = entry | {"fresh": False} if moved else entry  # one step's value is of the ranks that it had
                options = {"on_step": entry["on_step"], "on_epoch": entry["on_epoch"]}
                given = (*entry["options"][:4], entry["options"][4] or elsewhere, *entry["options"][5:])
                series = self.table("train").setdefault(name, Series(name, given, **options))
                series.load_state_dict(entry, metrics)
                series.final = finals.get(name, math.nan)
        self._load_metrics([saved["metrics"] for saved in ranks])

    def values(self) -> dict[str, Any]:
        """Return the last reduced values."""
        return {name: dict(getattr(self, name)) for name in _VALUES}

    def take_values(self, values: dict[str, Any]) -> None:
        """Take over what ``values`` returned."""
        for name in _VALUES:
            getattr(self, name).update(values[name])

    def metric_states(self) -> dict[str, dict[str, Any]]:
        """Return copies of the states of the module's torchmetrics objects, for ``forget``."""
        return {path: _metric_state(metric, copied=True) for path, metric in self._metrics()}

    def forget(self, stage: str, states: dict[str, dict[str, Any]]) -> None:
        """Drop what a stage has logged, and put the module's torchmetrics objects back."""
        self.tables.pop(stage, None)
        self.view = {}
        for path, metric in self._metrics():
            metric.reset()
            for name, value in states[path]["states"].items() if path in states else ():
                setattr(metric, name, value)
            metric._update_count = states[path]["count"] if path in states else 0

    def within(self, whole: World) -> None:
        """Let metric objects gather from the ranks of this world only, where it is a part of the whole one."""
        for _, metric in self._metrics() if self.world is not whole else ():
            if self.world.size == 1:
                metric.distributed_available_fn = _alone
            elif metric.process_group is None:
                metric.process_group = self.world.group  # type: ignore[attr-defined]

    def _metrics(self) -> list[tuple[str, Metric]]:
        return [(path, m) for path, m in self.module.named_modules() if is_metric(m)]

    def _load_metrics(self, saved: list[dict[str, Any]]) -> None:
        for path, metric in self._metrics():
            states = [entry[path] for entry in saved if path in entry]
            for name in metric._defaults if states else ():
                setattr(
                    metric, name, _merged([s["states"][name] for s in states], metric._reductions[name], metric.device)
                )
            metric._update_count = sum(s["count"] for s in states) or metric._update_count


def _alone() -> bool:
    return False


def is_metric(value: Any, name: str = "Metric") -> bool:
    """Tell whether a value is a torchmetrics object, without importing torchmetrics: who has one has imported it."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, getattr(torchmetrics, name))


def check_scalar(name: str, value: Any) -> None:
    """Raise unless a logged value is one number."""
    if isinstance(value, Tensor) and value.numel() == 1 or isinstance(value, Real):
        return
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(
        f"Expected one number under {name!r}. Received: {what}. Log a scalar: reduce it first, e.g. by .mean()."
    )


def _step_value(series: Series) -> tuple[Any, float, str]:
    value, weight = series.last, series.last_weight or 1.0
    if series.metric is not None:
        cached = series.metric._forward_cache
        value = series.metric.compute() if cached is None else cached
        check_scalar(series.name, value)
    kind = series.reduction if isinstance(series.reduction, str) else "mean"
    return (value * weight, weight, kind) if kind == "mean" else (value, weight, kind)


def _metric_state(metric: Metric, *, copied: bool = False) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    if copied:
        states = {name: list(value) if isinstance(value, list) else value.clone() for name, value in states.items()}
    return {"count": metric._update_count, "states": states}


def _merged(values: list[Any], reduction: Any, device: torch.device) -> Any:
    if isinstance(values[0], list):
        return [v.to(device) for part in values for v in part]
    values = [v.to(device) for v in values]
    return values[0] if len(values) == 1 else reduction(torch.stack(values)) if reduction else values[0]
