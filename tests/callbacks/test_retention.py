"""Which checkpoints stay: plans, links, removal, and what is found after a crash or a move."""

from __future__ import annotations

import math
import os
import warnings

import pytest
from drivetrain.callbacks.monitored import Monitored
from drivetrain.callbacks.retention import Kept, discard, point
from drivetrain.strategies.checkpoint import Writer, complete
from drivetrain.strategies.world import World


def written(path):
    with Writer(path, world=World()) as writer:
        writer.json("training.json", {})
        writer.commit({"step": 1})
    return str(path)


def after(scores, *, limit, mode="min", last=False):
    """What is kept after saving a, b, c, … with these scores."""
    rank = None if mode is None else Monitored("x", mode, owner="Test").rank
    kept = Kept()
    for name, score in zip("abcdefgh", scores):
        planned = kept.admit(score, limit=limit, rank=rank, last=last)
        kept = kept if planned is None else planned.named(name)
    return kept


@pytest.mark.parametrize(
    ("scores", "limit", "mode", "names", "best"),
    [
        ([3, 1, 2], 1, "min", "b", "b"),
        ([3, 1, 2], 2, "min", "bc", "b"),
        ([3, 1, 2], 2, "max", "ac", "a"),
        ([3, 1, 2], -1, "min", "abc", "b"),
        ([3, 1, 2], 0, "min", "", None),
        ([1, 1, 1], 1, "min", "a", "a"),  # an equal is no improvement
        ([math.nan, 5], 1, "min", "b", "b"),  # not a number is worse than any
        ([5, math.nan], 1, "max", "a", "a"),
        ([5, math.nan], 2, "max", "ab", "a"),
        ([math.nan], 1, "min", "a", None),  # kept, since there is nothing better, but never the best
        ([math.inf, 5], 1, "min", "b", "b"),
        ([0, 0, 0], 2, None, "bc", "c"),  # without a metric: the newest
    ],
)
def test_kept(scores, limit, mode, names, best):
    kept = after(scores, limit=limit, mode=mode)
    assert "".join(kept.scores) == names
    assert kept.best == best


def test_what_is_not_kept_is_not_saved():
    assert after([1], limit=1).admit(2, limit=1, rank=lambda value: value, last=False) is None


def test_last_stays_beside_the_best_and_goes_when_the_next_comes():
    kept = after([1, 2], limit=1, last=True)
    assert (list(kept.scores), kept.last, list(kept.doomed)) == (["a"], "b", [])
    kept = kept.admit(3, limit=1, rank=lambda value: value, last=True).named("c")
    assert (list(kept.scores), kept.last, list(kept.doomed)) == (["a"], "c", ["b"])


def test_a_name_that_comes_again_is_replaced_not_removed():
    kept = after([2], limit=1).admit(1, limit=1, rank=lambda value: value, last=True).named("a")
    assert (kept.scores, kept.last, kept.best, kept.doomed) == ({"a": 1}, "a", "a", {})


def test_found_again_after_a_restart(tmp_path):
    a, b, c = (str(tmp_path / name) for name in "abc")
    written(a), written(b)
    kept = Kept({a: 1.0, c: 2.0}, last=b, best=a, best_score=1.0, new=b)
    found = kept.found(str(tmp_path), str(tmp_path))
    assert found == Kept({a: 1.0}, last=b, best=a, best_score=1.0)  # c is gone


def test_a_crash_before_the_new_one_was_complete_keeps_the_old(tmp_path):
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    written(old)
    kept = Kept({new: 1.0}, best=new, best_score=1.0, new=new, doomed={old: 2.0})
    assert kept.found(str(tmp_path), str(tmp_path)).scores == {old: 2.0}
    written(new)
    found = kept.found(str(tmp_path), str(tmp_path))
    assert (found.scores, found.doomed) == ({new: 1.0}, {old: 2.0})  # the old one's time has come


def test_a_folder_that_was_moved_is_followed(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    written(here / "a")
    found = Kept({str(there / "a"): 1.0}, best=str(there / "a")).found(str(there), str(here))
    assert (found.scores, found.best) == ({str(here / "a"): 1.0}, str(here / "a"))


def test_nothing_of_another_folder_is_ours_to_remove(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    path = written(there / "a")
    found = Kept({path: 1.0}, last=path, best=path, best_score=1.0, doomed={path: 2.0}).found(str(there), str(here))
    assert found == Kept(best=path, best_score=1.0)


def test_link_is_relative_and_replaced(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    point(tmp_path / "last", first)
    point(tmp_path / "last", second)
    assert os.readlink(tmp_path / "last") == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "last", "second"]


def test_link_that_cannot_be_made_is_a_warning(tmp_path):
    (tmp_path / "last").mkdir()
    with pytest.warns(UserWarning, match="folder that can hold links"):
        point(tmp_path / "last", tmp_path / "a")


def test_only_checkpoints_are_removed(tmp_path):
    path, other = written(tmp_path / "a"), tmp_path / "precious"
    other.mkdir()
    with pytest.warns(UserWarning, match="Remove .*precious by hand"):
        discard([path, str(other)])
    assert not os.path.exists(path) and other.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        discard([path])  # already gone
    assert not complete(path)
