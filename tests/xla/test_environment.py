"""The environment that `./start tests-xla` makes: pinned to what was tried."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

from drivetrain.tests.packaging.test_contents import canonical, needed

ROOT = Path(__file__).resolve().parents[2]


def pins() -> dict[str, str]:
    """Return what constraints-xla.txt pins for this Python."""
    lines = (line for line in (ROOT / "constraints-xla.txt").read_text().splitlines() if not line.startswith("#"))
    requirements = [Requirement(line) for line in lines]
    return {
        canonical(requirement.name): str(requirement.specifier).removeprefix("==")
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate()
    }


def test_everything_that_the_extra_brings_is_pinned_and_is_what_runs_here():
    brought = needed("drivetrain", {"test-xla"}) - {"drivetrain"}
    assert {"torch", "torch-xla", "pytest"} <= brought
    pinned = pins()
    assert brought <= set(pinned)
    assert {name: version(name).split("+")[0] for name in brought} == {name: pinned[name] for name in brought}


def test_torch_and_torch_xla_are_of_one_version():
    assert pins()["torch"] == pins()["torch-xla"]
