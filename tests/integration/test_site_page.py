"""The site of the ledger in a real Chromium: at a desk, on a tablet and on a phone, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.browser import ENTER, TAB, Browser
from helpers.nights import AT, nights

from envbuild.ledger.ledger import Ledger
from envbuild.nightly.site.site import write_site

pytestmark = pytest.mark.slow

TEXT = 4.5  # WCAG 2, AA


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("site")
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        ledger.record(*nights())
        site = write_site(ledger, folder / "site", AT, 7).index.parent
    # The night with a failure, a bisection and a plan that waits.
    night = max((site / "nights").glob("nemo-*.html"))
    lock = min((site / "locks").glob("*.html"))
    return {"index": site / "index.html", "nights": site / "nights.html", "night": night, "lock": lock}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 768, 1280])
@pytest.mark.parametrize("name", ["index", "nights", "night", "lock"])
def test_page_loads_nothing_and_can_be_read(
    browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    browser.console(), browser.requests()
    browser.show(pages[name], width=width, scheme=scheme)
    browser.unfold()
    assert browser.console() == []
    assert browser.requests() == [pages[name].as_uri()]
    assert browser.ask("return document.scripts.length") == 0
    contrasts = browser.contrasts()
    assert len(contrasts) > 20
    assert [found for found in contrasts if found[0] < TEXT] == []


def test_style_is_in_force_although_the_policy_allows_nothing_else(browser: Browser, pages: dict[str, Path]) -> None:
    seen = []
    for scheme in ("light", "dark"):
        browser.show(pages["index"], width=1280, scheme=scheme)
        seen.append(browser.ask("return getComputedStyle(document.querySelector('.tile.good')).borderTopColor"))
    assert len({*seen}) == 2
    assert browser.ask("return getComputedStyle(document.querySelector('.tiles')).display") == "grid"


def test_the_answer_is_within_reach_of_a_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["index"], width=768, scheme="light")
    browser.press(TAB)
    assert browser.ask("return document.activeElement.textContent") == "To the content"
    seen: list[list[str]] = []
    # Once around.
    while not seen or seen[-1][0] != "BODY":
        browser.press(TAB)
        seen.append(browser.ask("const e = document.activeElement; return [e.tagName, e.textContent.trim()]"))
        outline = browser.ask("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid" or seen[-1][0] == "BODY"
    assert ["A", "Nights"] in seen
    assert sum(found == ["SUMMARY", "Exactly this image"] for found in seen) == 7
    browser.show(pages["index"], width=768, scheme="light")
    while browser.ask("return document.activeElement.tagName") != "SUMMARY":
        browser.press(TAB)
    browser.press(ENTER)
    assert browser.ask("return document.activeElement.parentElement.open")


def test_on_a_phone_every_cell_of_a_table_has_its_column(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["night"], width=320, scheme="light")
    labels = browser.ask(
        "return [...document.querySelectorAll('.steps tbody tr')].map(r => [...r.querySelectorAll('td')]"
        ".filter(c => c.getClientRects().length).map(c => getComputedStyle(c, '::before').content))"
    )
    assert labels[0] == ['"lock"']
    assert labels[1] == ['"wheels"', '"image"', '"certify"', '"publish"']
    below = browser.ask(
        "return [...document.querySelectorAll('.rows td')].filter(c => c.getClientRects().length && "
        "c.scrollWidth > c.clientWidth + 1).map(c => c.textContent.trim())"
    )
    assert below == [], "no text runs out of its cell"


def test_the_command_breaks_between_words_alone(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["index"], width=320, scheme="light")
    heights = browser.ask(
        "return [...document.querySelectorAll('.command span')].filter(s => s.textContent.startsWith('--'))"
        ".map(s => s.getBoundingClientRect().height)"
    )
    assert len(heights) == 14
    assert max(heights) < 25, "an option is on one line"
