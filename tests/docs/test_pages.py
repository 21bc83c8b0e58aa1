"""The documentation names everything public, and its links lead somewhere."""

from __future__ import annotations

import re

import pytest

import drivetrain
from drivetrain.tests.docs.pages import anchors, blocks, pages, prose


def test_every_public_name_is_in_the_docs():
    text = "\n".join(page.read_text() for page in pages())
    missing = [name for name in drivetrain._EXPORTS if not re.search(rf"\b{name}\b", text)]
    assert not missing


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), f"{page.name} → {target}"
        assert not fragment or fragment in anchors(other), f"{page.name} → {target}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_page_has_a_title_and_short_lines(page):
    text = page.read_text()
    assert text.startswith("# ")
    assert all(len(line) <= 120 for block in blocks(page) for line in block.code.splitlines())
