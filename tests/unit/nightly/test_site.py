"""The site of a ledger: its files, what they say, and what they must not do."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.certificates import EVIL
from helpers.ledger_rows import digest, lock_row, night_row, publication_row, step_row
from helpers.nights import AT, ERROR, REPOSITORY, nights

from envbuild.core.errors import UsageError
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import Row
from envbuild.nightly.site import words
from envbuild.nightly.site.site import write_site


class Page(HTMLParser):
    """The links, anchors and tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.add(tag)
        self.links += filter(None, [attributes.get("href")])
        self.anchors |= {*filter(None, [attributes.get("id")])}


def site_of(folder: Path, *rows: Row, max_age_days: float = 7) -> Path:
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        ledger.record(*rows)
        write_site(ledger, folder / "site", AT, max_age_days)
    return folder / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return site_of(tmp_path_factory.mktemp("site"), *nights())


def test_every_link_leads_somewhere_and_no_page_runs_or_loads_anything(site: Path) -> None:
    files = sorted(site.rglob("*.html"))
    pages = {file: Page(file.read_text()) for file in files}
    assert len(files) == 2 + 30 + 30
    for file, page in pages.items():
        assert not page.tags & {"script", "img", "iframe", "link", "object"}
        for link in page.links:
            if link.startswith("https://"):
                continue
            name, _, anchor = link.partition("#")
            target = (file.parent / name).resolve() if name else file
            assert target.is_file(), f"{link} of {file}"
            assert not anchor or anchor in pages[target].anchors, f"{link} of {file}"
        assert "default-src &#39;none&#39;" in file.read_text()


def test_the_first_page_has_the_answer_for_each_target(site: Path) -> None:
    text = (site / "index.html").read_text()
    plain = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", text))
    record = json.loads((site / "index.json").read_text())
    states = {(target["stack"], target["target"]): target["state"] for target in record["targets"]}
    assert states["nemo", "b200"] == "suspect"
    assert states["nemo", "gb200"] == "stale"
    assert states["nemo", "h200"] == "good"
    good = sum(state == "good" for state in states.values())
    assert f"{good} of {len(states)} targets have a good image" in plain
    assert f"envbuild pull {REPOSITORY}:nemo-main-h200 --target h200 --format sqsh" in plain
    assert f"docker pull {REPOSITORY}@{digest('nemo 14 h200')}" in plain
    assert "certified 3 hours ago" in plain
    assert "failed in certify: 1 of 6 cases failed" in plain
    for title in (
        "step time of gpt-bf16-baseline-gb8, ms",
        "image size, GB",
        "certification, minutes",
    ):
        assert title in plain


def test_the_worst_stack_and_the_worst_target_come_first(site: Path) -> None:
    text = (site / "index.html").read_text()
    order = re.findall(r'id="((?:nemo|mcore)-[a-z0-9]+)"', text)
    assert order == [*(f"nemo-{name}" for name in ("b200", "gb200", "a100", "h100", "h200")), "mcore-cpu", "mcore-h200"]
    night = max((site / "nights").glob("nemo-*.html")).read_text()
    rows = re.findall(r'<tr><th scope="row">(?:<a [^>]*>)?(all|[a-z]+[0-9]+)<', night)
    assert rows == ["all", "b200", "gb200", "h100", "h200", "a100"]


def test_a_night_shows_what_failed_and_what_broke_it_as_text(site: Path) -> None:
    text = next(file for file in sorted((site / "nights").iterdir(), reverse=True) if "nemo" in file.name).read_text()
    assert EVIL not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    plain = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", text))
    for words_of_it in (
        *("nemo: 1 of 5 targets failed", "What failed for b200", "training", "What broke it"),
        *("megatron-core 0.17.0rc14 -> 0.17.0rc15", "7 more", "a plan waits for hardware in out/plans/1"),
        *("loss of gpt-bf16-baseline-gb8", "gpt-bf16-cp2: failed", "429 MB to registry.example.org/training/envs"),
    ):
        assert words_of_it in plain, words_of_it


@pytest.mark.parametrize(
    ("state", "words_of_it"), [("done", "mcore: the lock failed"), ("failed", "mcore: 1 of 1 targets failed")]
)
def test_a_lock_that_failed_is_no_target(tmp_path: Path, state: str, words_of_it: str) -> None:
    night = night_row(finished_at="2026-01-02T04:00:00Z", exit_code=4)
    lock = step_row("lock", target="", state="failed", error=ERROR)
    site = site_of(tmp_path, night, lock, step_row("image", state=state))
    assert words_of_it in (site / "nights/n1.html").read_text()
    assert words_of_it.removeprefix("mcore: ") in (site / "nights.html").read_text()


def test_a_lock_has_a_page_and_a_record(site: Path) -> None:
    name = digest("nemo 14").removeprefix("sha256:")
    record = json.loads((site / f"locks/{name}.json").read_text())
    assert record["schema"] == "envbuild.site-lock/1"
    assert [row["digest"] for row in record["locks"]] == [digest("nemo 14")]
    assert {row["target"] for row in record["certificates"]} == {"h100", "h200", "a100"}
    page = (site / f"locks/{name}.html").read_text()
    assert f'href="{name}.json"' in page
    assert f'href="https://github.com/NVIDIA/Megatron-LM/commit/{24:040x}"' in page


def test_keys_and_addresses_from_elsewhere_are_no_paths_and_no_links(tmp_path: Path) -> None:
    lock = lock_row("a")
    part = lock.components["megatron-core"].model_copy(update={"git": "javascript:alert(1)//"})
    site = site_of(
        tmp_path,
        lock.model_copy(update={"components": {"megatron-core": part}}),
        night_row("../../evil", lock_digest=lock.digest),
        step_row(night="../../evil"),
    )
    assert not (tmp_path.parent / "evil.html").exists()
    assert len(list((site / "nights").iterdir())) == 1
    assert "javascript:" not in (site / f"locks/{lock.digest[7:]}.html").read_text()


def test_an_empty_ledger_and_one_with_publications_alone_have_pages(tmp_path: Path) -> None:
    assert "No image was published yet" in (site_of(tmp_path) / "index.html").read_text()
    text = (site_of(tmp_path, publication_row("a"), publication_row("b", target="h200")) / "index.html").read_text()
    assert "0 of 2 targets have a good image" in text
    assert "Stale since" in text


def test_a_site_is_replaced_as_a_whole_and_nothing_else_is(tmp_path: Path) -> None:
    site = site_of(tmp_path, night_row("n1"))
    (site / "nights/left-over.html").write_text("")
    site_of(tmp_path, night_row("n2"))
    assert sorted(path.name for path in (site / "nights").iterdir()) == ["n1.html", "n2.html"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    assert site.stat().st_mode & 0o777 == 0o755
    own = tmp_path / "own"
    own.mkdir()
    (own / "thesis.tex").write_text("mine")
    with (
        Ledger.open(tmp_path / "ledger.sqlite") as ledger,
        pytest.raises(UsageError, match="is not a site of envbuild"),
    ):
        write_site(ledger, own, AT, 7)
    assert (own / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (143e6, "143 MB"), (7.93e9, "7.9 GB")],
)
def test_sizes(count: float, text: str) -> None:
    assert words.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (59.97, "1 min 00 s"), (200, "3 min 20 s"), (3599, "59 min 59 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text
