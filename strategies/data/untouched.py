"""Whether anything was drawn from numpy and random since they were seeded, in 0.2 µs.

Both are Mersenne twisters: seeding fills a table of 624 words, of which the first is known, and puts the place in it at
624; the first draw changes both. There is no call that tells them short of copying the tables (36 µs), so they are
read where they lie. Where a build of Python or numpy keeps them elsewhere, which is tried out on generators made for
that, the answer is always that something may have been drawn: slower, and as right.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

_WORDS = 624
_FIRST = 0x80000000  # of random's table, whatever the seed


def watch() -> Callable[[int], bool]:
    """The function that tells whether numpy and random are as `seed_all` left them with this seed."""
    current = np.random.get_bit_generator  # type: ignore[attr-defined]  # numpy's stubs lack it
    bits = current()
    if not (isinstance(bits, np.random.MT19937) and _readable()):
        return lambda seed: False
    python, first, place = _python(random._inst), *_numpy(bits)

    def untouched(seed: int) -> bool:
        return (python[0] == _WORDS and python[1] == _FIRST and current() is bits
                and place.value == _WORDS and first.value == seed & 0xFFFFFFFF)

    return untouched


def _python(generator: random.Random) -> Any:
    """The place and the first word of the table, which follow the head that every object has."""
    return (ctypes.c_uint32 * 2).from_address(id(generator) + object.__basicsize__)


def _numpy(bits: np.random.MT19937) -> tuple[Any, Any]:
    """The first word of the table, and the place, which follows the table."""
    address = bits.ctypes.state_address
    return ctypes.c_uint32.from_address(address), ctypes.c_int32.from_address(address + 4 * _WORDS)


@cache
def _readable() -> bool:
    """Whether both tables lie here where they are looked for."""
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + 4 * (_WORDS + 1):
        return False
    one, bits = random.Random(5), np.random.MT19937()
    other = np.random.RandomState(bits)
    other.seed(5)
    python, first, place = _python(one), *_numpy(bits)
    seeded = (python[0], python[1], first.value, place.value) == (_WORDS, _FIRST, 5, _WORDS)
    one.random(), other.random_sample()
    state = one.getstate()[1]
    key, position = other.get_state(legacy=True)[1:3]  # type: ignore[index]  # a tuple then
    return seeded and (python[0], python[1], first.value, place.value) == (state[-1], state[0], key[0], position)
