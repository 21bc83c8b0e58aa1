"""The page in a real browser: it draws, works by keyboard, fits a narrow screen, and keeps hostile texts texts."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from drivetrain.callbacks.report.page import page
from drivetrain.callbacks.report.runs import Run

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
HOSTILE = '</script><img src=x onerror="document.title=1">'


def runs():
    steps = [float(step) for step in range(1, 201)]
    falling = [5 * math.exp(-step / 40) + 0.2 * math.sin(step) for step in steps]
    timeline = {"step": steps, "elapsed": [step / 10 for step in steps], "samples": [8 * step for step in steps]}
    first = Run(Path("run-0001"), metrics={"train_loss": (steps, falling)}, timeline=timeline, config={"lr": 0.1})
    second = Run(Path("run-0002"), metrics={"train_loss": (steps[:100], falling[:100]), HOSTILE: ([1.0], [2.0])},
                 config={"lr": HOSTILE}, sections=[("optimizer", 3.0), ("backward", 1.0)])  # fmt: skip
    return [first, second]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=200_000)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page(runs()), encoding="utf-8")
    problems, asked = [], []

    def open_page(**options):
        context = browser.new_context(**options)
        context.set_default_timeout(200_000)  # milliseconds: a machine may be busy
        tab = context.new_page()
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(path.as_uri())
        return tab

    yield open_page
    assert problems == [] and asked == [path.as_uri()] * len(asked)


def test_it_draws_each_curve_and_asks_for_nothing(opened):
    tab = opened()
    assert tab.locator("#charts figure").count() == 3  # train_loss, the hostile one, samples a second
    first = tab.locator("#charts figure").first
    assert first.locator("figcaption").inner_text() == "train_loss" and first.locator("path.curve").count() == 2
    assert tab.locator("#histogram rect").count() > 0 and tab.title().startswith("run-0001, run-0002")
    assert tab.locator("img").count() == 0


def test_it_works_by_keyboard(opened):
    tab = opened()
    chart = tab.locator("#charts figure").first
    chart.locator("svg").focus()
    tab.keyboard.press("End")
    assert chart.locator(".reading").inner_text().startswith("step 200: ")
    tab.keyboard.press("ArrowLeft")
    assert chart.locator(".reading").inner_text().startswith("step 199: ")
    tab.keyboard.press("Home")
    assert chart.locator(".reading").inner_text().startswith("step 1: run-0001 ")
    tab.locator("#smooth").focus()
    before = chart.locator("path.curve").first.get_attribute("d")
    for _ in range(20):
        tab.keyboard.press("ArrowRight")
    assert chart.locator("path.curve").first.get_attribute("d") != before and chart.locator("path.raw").count() == 2
    reached = set()
    tab.locator("#theme").focus()
    for _ in range(12):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"smooth", "axis", "log", "svg"} <= reached


def test_runs_can_be_hidden_and_the_axis_changed(opened):
    tab = opened()
    chart = tab.locator("#charts figure").first
    tab.get_by_role("checkbox", name="run-0002").uncheck()
    assert chart.locator("path.curve").count() == 1
    tab.locator("#axis").select_option("time")
    chart.locator("svg").focus()
    tab.keyboard.press("End")
    assert chart.locator(".reading").inner_text().startswith("minute 0.3333: ")  # 20 s
    tab.get_by_label("Logarithmic").check()
    assert chart.locator("path.curve").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_needs_no_scrolling_aside(opened, scheme):
    tab = opened(viewport={"width": 360, "height": 700}, color_scheme=scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    back, text = (
        tab.evaluate(f"getComputedStyle(document.body).{name}.match(/\\d+/g).slice(0, 3).map(Number)")
        for name in ("backgroundColor", "color")
    )
    assert (sum(back) > sum(text)) == (scheme == "light")
    tab.locator("#theme").click()
    assert tab.evaluate("document.documentElement.dataset.theme") == ("dark" if scheme == "light" else "light")
