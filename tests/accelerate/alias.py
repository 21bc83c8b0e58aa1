"""Puts drivetrain into the place of Accelerate, for libraries that import that by name."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import drivetrain

VERSION = "1.15.0"
_MODULES = ("big_modeling", "data_loader", "hooks", "logging", "optimizer", "parallelism_config", "scheduler", "state",
            "tracking", "utils", "utils.constants", "utils.dataclasses", "utils.deepspeed", "utils.fsdp_utils",
            "utils.imports", "utils.memory", "utils.modeling", "utils.operations", "utils.other")


class Alias(ModuleType):
    """A module whose names are drivetrain's."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__file__ = drivetrain.__file__
        self.__path__: list[str] = []
        self.__version__ = VERSION

    def __getattr__(self, name: str) -> Any:
        return getattr(drivetrain, name)


def install(folder: Path) -> None:
    """From here on `import accelerate` gives drivetrain; what says that it is installed is written into a folder.

    Call it in a process of its own: transformers, which may be there already, is imported anew, as it looks once.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        del sys.modules[name]
    described = folder / f"accelerate-{VERSION}.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: accelerate\nVersion: {VERSION}\n")
    sys.path.append(str(folder))
    sys.modules["accelerate"] = Alias("accelerate")
    for name in _MODULES:
        parent, _, own = f"accelerate.{name}".rpartition(".")
        module = sys.modules[f"accelerate.{name}"] = Alias(f"accelerate.{name}")
        setattr(sys.modules[parent], own, module)
