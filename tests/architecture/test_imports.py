"""Imports point one way: trainer → callbacks → strategies → torch, and form no cycle inside a folder."""

from __future__ import annotations

import subprocess
import sys

import pytest

from drivetrain.tests.architecture.source import RANKS, modules_by_name, sources

MAY_LOOK_UP_FOR_TYPES = {"callbacks/base.py"}  # hooks get the trainer and the module: their signatures name them


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_imports_point_downwards(source):
    if not source.folder:
        return  # the root only hands names on
    for imported in source.imports():
        target = imported.module.split(".")[0]
        if not imported.own or (imported.typing_only and source.name in MAY_LOOK_UP_FOR_TYPES):
            continue
        if not target and source.text.splitlines()[imported.line - 1].endswith("import __version__"):
            continue
        assert target in RANKS, f"{source.name}:{imported.line} imports drivetrain itself: name the module"
        assert RANKS[target] <= RANKS[source.folder], f"{source.name}:{imported.line} imports {imported.module}"


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_own_modules_are_imported_relatively(source):
    for imported in source.imports():
        assert not imported.own or "from drivetrain" not in source.text.splitlines()[imported.line - 1], (
            f"{source.name}:{imported.line} must be relative, which is true on disk as well as in the package"
        )


@pytest.mark.parametrize("folder", RANKS)
def test_no_cycle_inside_a_folder(folder):
    graph = {
        name: {
            imported.module
            for imported in source.imports()
            if imported.own
            and imported.module in modules_by_name()
            and imported.module != name
            and imported.module.split(".")[0] == folder
            and not imported.typing_only  # a name that only an annotation needs makes no cycle at run time
        }
        for name, source in modules_by_name().items()
        if source.folder == folder
    }
    assert cycle(graph) is None


def cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """Return one cycle of the graph, or None."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        found = next(filter(None, (walk(target, [*path, name]) for target in sorted(graph.get(name, ())))), None)
        done.add(name)
        return found

    return next(filter(None, (walk(name, []) for name in sorted(graph))), None)


def test_importing_the_package_imports_no_torch():
    code = "import sys, drivetrain; print(sorted({'torch', 'numpy', 'yaml', 'jsonargparse'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_trainer_brings_nothing_slow_beside_torch():
    """Optional and heavy packages load when they are used: a tracker, the command line, metrics, progress bars."""
    heavy = {"tensorboard", "jsonargparse", "torchmetrics", "sklearn", "pandas", "transformers", "tqdm", "scipy",
             "torch._dynamo", "torch._inductor"}  # fmt: skip
    code = (
        "import sys, torch; before = set(sys.modules); from drivetrain import Trainer, TrainModule, Accelerator;"
        f"print(sorted(({heavy} & set(sys.modules)) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "[]", done.stderr
