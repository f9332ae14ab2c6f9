"""What a search keeps while it lasts: several processes may search for the same with one store."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core.progress import SilentReporter
from envbuild.lock.inputs.request import LockRequest
from envbuild.lock.search import session
from envbuild.lock.search.session import SearchSession
from envbuild.store.local import LocalStore


def test_searches_for_the_same_begin_and_end_while_others_do(tmp_path: Path) -> None:
    reporter = SilentReporter()
    store = LocalStore(tmp_path / "store", reporter)
    context = Context(store=store, site=load_site({"HOME": str(tmp_path)}), reporter=reporter)

    def search(_: int) -> None:
        found = SearchSession(folder=store.root / "searches" / "same", context=context)
        found.begin(context)
        found.end()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(search, range(100)))
    assert not (store.root / "searches" / "same").exists()


@pytest.mark.parametrize(("attempts", "resumed"), [(0, False), (1, True)])
def test_only_known_attempts_hold_a_search_to_its_moment(tmp_path: Path, attempts: int, resumed: bool) -> None:
    reporter = SilentReporter()
    store = LocalStore(tmp_path / "store", reporter)
    context = Context(store=store, site=load_site({"HOME": str(tmp_path)}), reporter=reporter)
    folder = store.root / "searches" / "same"
    first = SearchSession(folder=folder, context=context).begin(context).clock()
    for number in range(attempts):
        (folder / f"{number}.json").write_text("{}")
    second = SearchSession(folder=folder, context=context).begin(context).clock()
    assert (second == first) is resumed


def test_other_code_searches_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = SilentReporter()
    store = LocalStore(tmp_path / "store", reporter)
    context = Context(store=store, site=load_site({"HOME": str(tmp_path)}), reporter=reporter)
    code = tmp_path / "code"
    code.mkdir()
    (code / "search.py").write_text("one = 1\n")
    selection = Selection(Catalog.open(tmp_path), "nemo", "ubuntu2404-cu130", "h200")

    def folder() -> Path:
        return SearchSession.of(selection, LockRequest(), context, verifies=True).folder

    own = folder()
    assert folder() == own
    monkeypatch.setattr(session.envbuild, "__file__", str(code / "__init__.py"))
    other = folder()
    (code / "search.py").write_text("one = 2\n")
    assert len({own, other, folder()}) == 3
