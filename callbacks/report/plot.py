"""Draws a curve in a terminal, by the dots of braille characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a character's 4 × 2 dots


def plot(steps: Sequence[float], values: Sequence[float], *, width: int = 64, height: int = 10) -> str:
    """Return a curve as lines of text: its highest and lowest value at the left, its first and last step below.

    ``width`` and ``height`` are characters of the curve alone. Values that are not finite leave gaps.
    """
    points = [(s, v) for s, v in zip(steps, values) if math.isfinite(s) and math.isfinite(v)]
    if not points:
        return "nothing to show"
    low, high = min(v for _, v in points), max(v for _, v in points)
    first, last = points[0][0], points[-1][0]
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for step, value in points:
        x = round((step - first) / (last - first or 1) * (2 * width - 1))
        y = round((high - value) / (high - low or 1) * (4 * height - 1))
        for dot_x, dot_y in _line(before, (x, y)):
            cells[dot_y // 4][dot_x // 2] |= _DOTS[dot_y % 4][dot_x % 2]
        before = (x, y)
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    curves = ("".join(chr(0x2800 + cell) for cell in row).rstrip(chr(0x2800)) for row in cells)
    lines = [f"{label:>{margin}} ┤{curve}" for label, curve in zip(labels, curves)]
    ends = f"{first:g}", f"{last:g}"
    return "\n".join([*lines, " " * (margin + 2) + ends[0] + ends[1].rjust(width - len(ends[0]))])


def _line(start: tuple[int, int] | None, end: tuple[int, int]) -> list[tuple[int, int]]:
    if start is None:
        return [end]
    (x0, y0), (x1, y1) = start, end
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)) for i in range(1, count + 1)]
