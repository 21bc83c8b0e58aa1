"""The interruption law where ranks share a model: killed anywhere and started again, it ends bit for bit the same.

Each rank's own parts of weights and optimizer states, random states, counters, metrics, logged rows and checkpoints.
"""

from __future__ import annotations

import pytest

from drivetrain.tests.faults import campaign
from drivetrain.tests.faults.sharded_runs import SHARDED_RUNS

SHORT = ("fsdp", "fsdp1", "tp", "cp", "sp", "pp-1F1B", "ep", "hsdp", "fsdp+tp", "pp-1F1B with windows")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHORT)
def test_R1_a_shared_run_that_is_killed_anywhere_ends_the_same(name):
    """campaign.py kills the others, and more often."""
    law = campaign.Campaign(name)
    differences = law.kill(3 if SHARDED_RUNS[name].ranks == 2 else 2)
    assert not differences, "\n".join(differences)


def test_runs_end_with_all_that_the_law_is_about():
    """On the first rank everything; on the others what they alone have."""
    with campaign.scratch():
        ends, _ = campaign.finish(SHARDED_RUNS["pp-1F1B"])
    first, second = ({str(path) for path in end["tensors"]} for end in ends)
    own = [{path for path in paths if "weights" in path and "checkpoints" not in path} for paths in (first, second)]
    assert own[0] and own[1] and not own[0] & own[1]  # each has its stage
    for part in ("optimizers", "random"):
        assert any(part in path for path in first) and any(part in path for path in second), part
    assert any("checkpoints" in path for path in first)
