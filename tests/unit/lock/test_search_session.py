"""What a search keeps while it lasts: several processes may search for the same with one store."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core.progress import SilentReporter
from envbuild.lock.search.session import SearchSession
from envbuild.store.local import LocalStore


def test_searches_for_the_same_begin_and_end_while_others_do(tmp_path: Path) -> None:
    reporter = SilentReporter()
    store = LocalStore(tmp_path / "store", reporter)
    context = Context(store=store, site=load_site({"HOME": str(tmp_path)}), reporter=reporter)

    def search(_: int) -> None:
        session = SearchSession(folder=store.root / "searches" / "same", context=context, verifies=False)
        session.begin(context)
        session.end()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(search, range(100)))
    assert not (store.root / "searches" / "same").exists()
