"""A choice by arrow keys, where a person sits at a terminal that can do that."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence

_UP, _DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j")
_ENTER, _STOP = ("\r", "\n"), ("\x03", "\x04")


def usable() -> bool:
    """Whether keys can be read one by one and lines be drawn again."""
    try:
        import termios  # noqa: F401  (not on Windows)
        import tty  # noqa: F401
    except ImportError:
        return False
    return sys.stdin.isatty() and sys.stdout.isatty()


def choose(choices: Sequence[str], start: int = 0) -> int:
    """Let a person move through `choices` by arrow keys or by number, and return the index; KeyboardInterrupt on ^C."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    place = start
    print("\n" * len(choices), end="")
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)
        _draw(choices, place)
        for key in _keys(terminal):
            if key in _ENTER:
                break
            place = _moved(place, key, len(choices))
            _draw(choices, place)
        return place
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _keys(terminal: int) -> Iterator[str]:
    """Yield what is pressed; several keys may come in one piece."""
    while piece := os.read(terminal, 64).decode(errors="ignore"):
        for key in re.findall(r"\x1b[\[O].|.|\n", piece):
            if key in _STOP:
                raise KeyboardInterrupt
            yield key
    raise KeyboardInterrupt  # the terminal is gone


def _moved(place: int, key: str, count: int) -> int:
    if key.isdigit() and int(key) < count:
        return int(key)
    return (place + (key in _DOWN) - (key in _UP)) % count


def _draw(choices: Sequence[str], place: int) -> None:
    lines = [f"\x1b[2K {'➔' if number == place else ' '} {choice}\n" for number, choice in enumerate(choices)]
    print(f"\x1b[{len(choices)}A" + "".join(lines), end="", flush=True)
