"""The page in a real Chromium: at a desk and on a phone, light and dark."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from helpers.browser import ENTER, TAB, Browser
from helpers.reports import REPORTS, full, large

from envbuild.certify.report.files import write_reports

pytestmark = pytest.mark.slow

WIDTHS = (1280, 360)
SCHEMES = ("light", "dark")
# WCAG 2, AA: text, and what is drawn.
TEXT, DRAWN = 4.5, 3.0
RED = "body { background: red }"
FOCUSED = "const e = document.activeElement; return [e.tagName, e.textContent.trim().slice(0, 40)]"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {name: write_reports(folder / name, make()).page for name, make in REPORTS.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", REPORTS)
def test_page_loads_nothing_and_can_be_read(
    browser: Browser, pages: dict[str, Path], tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    browser.console(), browser.requests()
    browser.show(pages[name], width=width, scheme=scheme)
    verdict = browser.ask("return document.querySelector('h1').textContent")
    assert verdict == ("Not certified" if name == "failed" else "Certified")
    browser.unfold()
    assert browser.console() == []
    assert browser.requests() == [pages[name].as_uri()]
    contrasts = browser.contrasts()
    assert len(contrasts) > 20
    assert [contrast for contrast in contrasts if contrast[0] < TEXT] == []
    picture = browser.screenshot(tmp_path / f"{name}-{width}-{scheme}.png")
    assert struct.unpack(">I", picture[16:20])[0] == width


def test_style_is_in_force_although_the_policy_allows_nothing_else(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["large"], width=1280, scheme="light")
    light = browser.ask("return getComputedStyle(document.body).backgroundColor")
    browser.show(pages["large"], width=1280, scheme="dark")
    dark = browser.ask("return getComputedStyle(document.body).backgroundColor")
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(15, 18, 22)")
    added = (
        "const s = document.createElement('style'); s.textContent = 'body { background: red }'; document.head.append(s)"
    )
    browser.ask(added)
    assert browser.ask("return getComputedStyle(document.body).backgroundColor") == dark
    browser.console()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_curves_are_drawn_where_they_can_be_seen(browser: Browser, pages: dict[str, Path], scheme: str) -> None:
    browser.show(pages["failed"], width=360, scheme=scheme)
    drawn = browser.ask(
        "return [...document.querySelectorAll('figure path.line')].filter(p => p.getClientRects().length)"
        ".map(p => [p.getTotalLength(), getComputedStyle(p).stroke, p.getAttribute('class')])"
    )
    assert len(drawn) > 20
    assert [curve for curve in drawn if curve[0] <= 0 or curve[1] == "none"] == []
    background = browser.ask("return getComputedStyle(document.body).backgroundColor")
    # The baseline's broad band lies below the others and is seen with them.
    faint = [curve for curve in drawn if "baseline" not in curve[2] and ratio(curve[1], background) < DRAWN]
    assert faint == []
    sizes = browser.ask(
        "return [...document.querySelectorAll('figure svg text')].filter(t => t.getClientRects().length)"
        ".map(t => t.getBoundingClientRect().height)"
    )
    assert min(sizes) > 9, "text in charts is too small on a phone"


def ratio(one: str, two: str) -> float:
    def light(colour: str) -> float:
        values = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    first, second = sorted((light(one), light(two)), reverse=True)
    return (first + 0.05) / (second + 0.05)


def test_all_cases_are_within_reach_of_a_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["failed"], width=1280, scheme="light")
    seen = []
    for _ in range(60):
        browser.press(TAB)
        seen.append(
            browser.ask("const e = document.activeElement; return [e.tagName, e.textContent.trim().slice(0, 40)]")
        )
    assert seen[0] == ["A", "To the cases"]
    assert sum(tag == "A" for tag, _ in seen) >= 8
    assert any(tag == "SUMMARY" for tag, _ in seen)
    while browser.ask("return document.activeElement.tagName") != "SUMMARY":
        browser.press(TAB)
    opened = "return document.activeElement.parentElement.open"
    before = browser.ask(opened)
    browser.press(ENTER)
    assert browser.ask(opened) is not before
    outline = browser.ask("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


# What cannot be seen without scrolling sideways, be it the page or a box on it.
BESIDE = """
return [...document.querySelectorAll(arguments[0])].filter(e => {
  const r = e.getBoundingClientRect();
  return r.left < 0 || r.right > document.documentElement.clientWidth || !r.width;
}).map(e => e.textContent.trim());
"""
VERDICTS = "main .state:not(details *)"


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_verdict_and_numbers_of_every_case_are_on_the_screen(
    browser: Browser, pages: dict[str, Path], width: int
) -> None:
    browser.show(pages["full"], width=width, scheme="light")
    assert browser.ask("return document.documentElement.scrollWidth") == width
    assert browser.ask(BESIDE, VERDICTS) == []
    verdicts = browser.ask(f"return [...document.querySelectorAll('{VERDICTS}')].map(e => e.textContent.trim())")
    assert verdicts == ["passed"] * len(full().cases)
    assert browser.ask(BESIDE, ".cases th, .cases td, .cases a") == []
    # No cell's text runs into the next one.
    assert browser.ask(
        "return [...document.querySelectorAll('.cases th, .cases td')].filter(e => e.scrollWidth > e.clientWidth + 1)"
        ".map(e => e.textContent.trim())"
    ) == []  # fmt: skip


def test_row_of_a_case_has_its_verdict_first(browser: Browser, pages: dict[str, Path]) -> None:
    rows = "return [...document.querySelectorAll('.cases tbody tr')].map(r => [...r.children].map(c => c.innerText))"
    browser.show(pages["full"], width=360, scheme="light")
    cells = browser.ask(rows)
    assert {row[0] for row in cells} == {"passed"}
    by_name = {row[1]: row[2:] for row in cells}
    assert by_name["baseline-gb4"] == ["the others are compared with it"]
    # Its loss is off by its place in the matrix.
    (off,) = (case.largest_relative_difference.loss for case in full().cases if case.id == "gpt-fp32-tp4")
    assert by_name["tp4"] == [f"{off:.1e}", "7.5e-08", "3.9e-07"]
    browser.show(pages["failed"], width=360, scheme="light")
    failed = [row for row in browser.ask(rows) if row[0] == "failed"]
    assert [row[1].split() for row in failed] == [["pp2-vp2", "parity-loss"], ["cp2", "not-finite", "rank-exception"]]
    assert failed[0][2:] == ["1.0e-02, over", "1.0e+00, over", "-"]


def test_link_of_a_row_leads_to_its_case(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["large"], width=360, scheme="light")
    assert len(large().cases) == browser.ask("return document.querySelectorAll('a.case').length")
    browser.ask("document.querySelectorAll('a.case')[20].click()")
    top = browser.ask("return document.querySelector(':target').getBoundingClientRect().top")
    assert -1 <= top < 900


def test_logs_scroll_inside_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["failed"], width=360, scheme="light")
    inside = browser.ask(
        "return [...document.querySelectorAll('pre')].filter(e => e.scrollWidth > e.clientWidth)"
        ".map(e => [getComputedStyle(e).overflowX, e.tabIndex, e.getAttribute('role')])"
    )
    assert inside
    assert {tuple(inner) for inner in inside} == {("auto", 0, "region")}


def test_tools_of_pages_find_no_script_to_run(browser: Browser, pages: dict[str, Path]) -> None:
    """So that nothing is lost where scripts are switched off, and nothing that was measured becomes one."""
    for page in pages.values():
        browser.show(page, width=1280, scheme="light")
        assert browser.ask("return document.scripts.length") == 0
