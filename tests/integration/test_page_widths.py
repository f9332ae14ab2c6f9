"""Every kind of page that envbuild writes, in a real Chromium from a phone's width to a desk's: all can be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.browser import Browser
from helpers.nights import AT, nights
from helpers.reports import REPORTS

from envbuild.certify.report.files import write_reports
from envbuild.ledger.ledger import Ledger
from envbuild.nightly.site.site import write_site

pytestmark = pytest.mark.slow

# Those of devices, and those at which the layouts for wider screens begin.
WIDTHS = (320, 375, 641, 768, 961, 1024, 1153, 1280)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each template of the site, a night that failed and one that did not; every kind of report."""
    folder = tmp_path_factory.mktemp("pages")
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        ledger.record(*nights(20))
        site = write_site(ledger, folder / "site", AT, 7).index.parent
    kinds = {page.name: page for page in sorted(site.glob("*.html"))}
    nights_of_nemo, locks = sorted((site / "nights").glob("nemo-*.html")), sorted((site / "locks").glob("*.html"))
    kinds |= {"good night": nights_of_nemo[0], "failed night": nights_of_nemo[-1], "lock": locks[0]}
    return kinds | {f"report {name}": write_reports(folder / name, make()).page for name, make in REPORTS.items()}


def test_nothing_overflows_and_no_word_of_a_first_column_breaks(browser: Browser, pages: dict[str, Path]) -> None:
    misfits = {}
    assert {"index.html", "nights.html", "good night", "lock", "report full", "report known-wrong"} < {*pages}
    for name, page in pages.items():
        browser.show(page, width=WIDTHS[0], scheme="light")
        for part in ("folded", "unfolded"):
            if part == "unfolded":
                browser.unfold()
            for width in WIDTHS:
                browser.device(width, 900)
                if wide := browser.misfits():
                    misfits[name, width, part] = wide
    assert misfits == {}


def test_the_worst_is_on_a_phones_first_screens(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["index.html"], width=375, scheme="light")
    shown = browser.ask(
        "return [...document.querySelectorAll('.overview a.badge')].map(e => [e.textContent.trim(), "
        "e.getBoundingClientRect().right <= 375])"
    )
    assert [text.partition(",")[0] for text, _ in shown[:2]] == ["b200: suspect", "gb200: waiting for hardware"]
    assert len(shown) == 7
    assert all(fits for _, fits in shown)
    tops = browser.ask(
        "return ['nemo-b200', 'nemo-gb200', 'nemo-h200', 'mcore-cpu'].map(id => "
        "document.getElementById(id).getBoundingClientRect().top)"
    )
    assert tops == sorted(tops)
