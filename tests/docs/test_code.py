"""Every code block of README and docs runs as it is printed, those of one page in order, in one process and one folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.tests.docs.pages import ROOT, Block, blocks, pages


ELSEWHERE = {"xla"}  # pages whose code needs an environment of its own: see tests/xla/test_docs.py


@pytest.mark.timeout(1200)  # a page may start a dozen programs, one after another
@pytest.mark.parametrize("page", [page for page in pages() if page.stem not in ELSEWHERE], ids=lambda page: page.stem)
def test_blocks_run(page, tmp_path):
    run_page(page, tmp_path)


def run_page(page: Path, tmp_path: Path) -> None:
    """Run a page's blocks in a folder; they have to succeed."""
    script = tmp_path / "page.py"
    script.write_text(as_script(page))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env={**os.environ, "PATH": path},
                          capture_output=True, text=True, timeout=1150, stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 0, f"{page.relative_to(ROOT)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


def as_script(page: Path) -> str:
    """Return a page's blocks as one script whose line numbers are the page's."""
    lines = [""] * len(page.read_text().splitlines())
    for block in blocks(page):
        code = as_python(block).splitlines()
        lines[block.line - 1 : block.line - 1 + len(code)] = code
    return "\n".join(lines) + "\n"


def as_python(block: Block) -> str:
    """Return what a block does; a shell block and a file become one statement each."""
    if block.file:
        return f"__import__('pathlib').Path({block.file!r}).write_text({block.code!r})"
    if not block.runs:
        return ""
    if block.language == "python":
        return block.code
    return f"__import__('subprocess').run(['sh', '-eu', '-c', {block.code!r}], check=True)"
