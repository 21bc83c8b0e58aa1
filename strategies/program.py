"""How this program was started: what the interpreter would need to run it once more."""

from __future__ import annotations

import multiprocessing
import re
import sys
from pathlib import Path

from . import environment

_FLAGS_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


def can_relaunch() -> bool:
    """Whether starting this program again would repeat it: no notebook, prompt, test, `-c`, stdin or worker."""
    if environment.interactive() or environment.under_test_runner() or multiprocessing.parent_process() is not None:
        return False
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or (path is not None and Path(path).is_file())


def command() -> list[str]:
    """The interpreter's arguments that run this program again: flags, script (absolute) or `-m` module, arguments."""
    flags, started, arguments = split(sys.orig_argv[1:])
    target, same = _target(started)
    # Under a debugger or a profiler the interpreter was started with theirs; sys.argv then has the program's own.
    return flags + target + (arguments if same else sys.argv[1:])


def split(argv: list[str]) -> tuple[list[str], list[str], list[str]]:
    """An interpreter's arguments as its own flags, what it runs (`[script]` or `["-m", module]`), and the rest."""
    flags: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        item = rest.pop(0)
        module = re.fullmatch(r"-([a-ln-zA-VYZ]*)m(.*)", item)  # -m, also behind other letters, also with its value
        if module is not None:
            flags += [f"-{module[1]}"] if module[1] else []
            return flags, ["-m", module[2] or rest.pop(0)], rest
        flags += [item, rest.pop(0)] if item in _FLAGS_WITH_VALUE else [item]
    return flags, rest[:1], rest[1:]


def _target(started: list[str]) -> tuple[list[str], bool]:
    """What runs as `__main__`, and whether it is what the interpreter was started with."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        name = spec.name.removesuffix(".__main__")
        return ["-m", name], [part.removesuffix(".__main__") for part in started] == ["-m", name]
    path = Path(str(main.__file__) if spec is None else sys.argv[0])  # else a folder or an archive with a __main__
    return [str(path.absolute())], len(started) == 1 and Path(started[0]).name == path.name
