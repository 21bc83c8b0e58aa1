"""The interruption law: a run that is killed anywhere, and started again by the same command, ends as if it had not been.

The places are drawn with a fixed seed; campaign.py draws more of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from drivetrain.tests.faults.campaign import Campaign
from drivetrain.tests.faults.runs import RUNS

POINTS = {1: 15, 2: 8}  # kills of each run, by its number of ranks


@pytest.fixture(scope="module")
def killed() -> Iterator[Counter[str]]:
    """Place → how often a run was killed there; printed at the end."""
    places: Counter[str] = Counter()
    yield places
    print(f"\n{sum(places.values())} kills at {len(places)} kinds of places: {dict(places.most_common())}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_R1_R5_killed_anywhere_it_ends_the_same(name, killed):
    campaign = Campaign(name)
    differences = campaign.kill(POINTS[RUNS[name].ranks])
    assert not differences, "\n".join(differences)
    killed.update(campaign.killed)


def test_places_are_many():
    """Inside a window, during a validation, at an epoch's edge, at the system calls of a save."""
    assert sum(POINTS[run.ranks] for run in RUNS.values()) >= 200
    wanted = {"training_step", "fetch", "on_before_zero_grad", "validation_step", "on_validation_end",
              "on_train_epoch_end", "on_train_epoch_start", "on_save_checkpoint", "os.writev", "os.fsync", "os.rename",
              "on_fit_start", "on_fit_end", "teardown"}  # fmt: skip
    assert wanted <= set(Campaign("plain").places)
