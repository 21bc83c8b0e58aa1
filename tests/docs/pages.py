"""Reads the pages of the documentation: their code blocks, their links.

A block's first line says what becomes of it:

    ```python              runs; blocks of one page run one after another, in one process and one folder
    ```python file=net.py  is written to net.py in that folder (any language: ```yaml file=run.yaml)
    ```sh run              runs in that folder, where the page's files and runs lie
    anything else          is only read
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(?P<language>\w*)[ ]?(?P<rest>[^\n`]*)\n(?P<code>.*?)^```[ ]*$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    options: str
    code: str
    line: int  # of the page, where the code begins

    @property
    def file(self) -> str | None:
        match = re.search(r"file=(\S+)", self.options)
        return match[1] if match else None

    @property
    def runs(self) -> bool:
        return self.file is None and (self.language == "python" or "run" in self.options.split())


def pages() -> list[Path]:
    """Return README and everything in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(match["language"], match["rest"], match["code"], text[: match.start("code")].count("\n") + 1)
        for match in FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the fragments that a link to this page may have: its headings, as Git hosts spell them."""
    headings = re.findall(r"^#+\s+(.+?)\s*$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
