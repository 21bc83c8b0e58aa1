"""What the archives hold, and what the files around the package promise."""

from __future__ import annotations

import re
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SUBPACKAGES = ("callbacks", "strategies", "trainer")
SOURCES = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*.py")} | {
    path.relative_to(ROOT).as_posix() for folder in SUBPACKAGES for path in (ROOT / folder).rglob("*.py")
}


PARTS = {"callbacks/report/page.css", "callbacks/report/page.js"}  # of the report


def test_the_wheel_holds_every_source_file_and_nothing_else(archives):
    names = zipfile.ZipFile(next(archives.glob("*.whl"))).namelist()
    held = {name.removeprefix("drivetrain/") for name in names if ".dist-info/" not in name}
    assert held == SOURCES | PARTS | {"py.typed"}


def test_the_wheel_has_the_console_script(archives):
    wheel = zipfile.ZipFile(next(archives.glob("*.whl")))
    entry_points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "drivetrain = drivetrain.trainer.cli.main:main" in wheel.read(entry_points).decode()


def test_the_sdist_holds_what_the_wheel_is_built_from(archives):
    names = tarfile.open(next(archives.glob("*.tar.gz"))).getnames()
    held = {name.split("/", 1)[1] for name in names if "/" in name}
    assert held >= SOURCES | PARTS | {"py.typed", "pyproject.toml", "README.md"}


def test_constraints_pin_everything_that_the_extras_bring():
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(requirement.specifier)), line
            if requirement.marker is None or requirement.marker.evaluate():
                pinned[canonical(requirement.name)] = requirement
    assert pinned["torch"].specifier.contains("2.13.0+cpu")
    assert needed("drivetrain", {"examples", "test"}) - {"drivetrain"} <= set(pinned)


def test_extras_that_messages_name_exist():
    extras = set(metadata.metadata("drivetrain").get_all("Provides-Extra"))
    named = {
        word.strip()
        for path in SOURCES
        for match in re.findall(r"drivetrain\[([a-z, ]+)\]", (ROOT / path).read_text())
        for word in match.split(",")
    }
    assert named <= extras


def needed(name: str, extras: set[str]) -> set[str]:
    """Return the names of all distributions that ``name[extras]`` brings on this machine; CUDA's are torch's affair."""
    found: set[str] = set()
    waiting = [(canonical(name), frozenset(extras))]
    seen = set()
    while waiting:
        item = waiting.pop()
        if item in seen or re.match(r"nvidia-|cuda-|triton", item[0]):
            continue
        seen.add(item)
        found.add(item[0])
        for requirement in map(Requirement, metadata.requires(item[0]) or ()):
            if wanted(requirement, item[1]):
                waiting.append((canonical(requirement.name), frozenset(requirement.extras)))
    return found


def wanted(requirement: Requirement, extras: frozenset[str]) -> bool:
    environment = default_environment()
    return requirement.marker is None or any(
        requirement.marker.evaluate({**environment, "extra": extra}) for extra in {"", *extras}
    )


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
