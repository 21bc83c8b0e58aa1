"""Accelerate's functions around environment variables, for scripts that use them; drivetrain itself does not."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .environment import exported, live

_TRUE, _FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Sets environment variables, names in upper case, while the block runs; then all is as it was for these."""
    names = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: live().get(name) for name in names}
    live().update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            _put(name, value)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Runs the block without any environment variable; then all are there again, whatever the block set."""
    with exported({}):
        yield


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """A function after which the `ACCELERATE_…` variables are as before it; a class: each of its test methods."""
    if not inspect.isclass(func_or_cls):
        return _purging(func_or_cls)
    for name, method in list(vars(func_or_cls).items()):
        if name.startswith("test") and callable(method):
            setattr(func_or_cls, name, _purging(method))
    return func_or_cls


def _purging(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = _ours()
        try:
            return function(*args, **kwargs)
        finally:
            for name in {*before, *_ours()}:
                _put(name, before.get(name))

    return run


def _ours() -> dict[str, str]:
    return {name: value for name, value in live().items() if name.startswith("ACCELERATE_")}


def _put(name: str, value: str | None) -> None:
    if value is None:
        live().pop(name, None)
    else:
        live()[name] = value


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for y, yes, t, true, on and 1, 0 for their opposites, in any case; as a bool with `to_bool`.

    Raises:
        ValueError: the text is none of these.
    """
    word = value.lower()
    if word not in _TRUE + _FALSE:
        known = ", ".join(_TRUE + _FALSE)
        raise ValueError(f"Expected one of {known}. Received: value={value!r}. Write yes or no.")
    return word in _TRUE if to_bool else int(word in _TRUE)


def get_int_from_env(env_keys: list[str] | tuple[str, ...], default: int) -> int:
    """The first of these variables that is set and not negative, as an integer; else the default."""
    for key in env_keys:
        if (value := int(live().get(key, -1))) >= 0:
            return value
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """A variable as a truth value."""
    return bool(str_to_bool(live().get(key, str(default)), to_bool=True))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """A variable as it is, or the default."""
    return str(live().get(key, default))


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    """Lines `NAME=value` for variables whose names and values a shell takes as they are; others are left out."""
    return [f"{name}={value}\n" for name, value in current_env.items() if not set(f"{name}{value}") & set(";\n<>& ")]


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of these libraries that this process has imported."""
    return [name for name in library_names if name in sys.modules]
