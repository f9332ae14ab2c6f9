"""What the search tries for a package whose source cannot be had."""

from types import SimpleNamespace

from envbuild.core.errors import NetworkError
from envbuild.lock.search.candidates import Candidates


def test_a_release_is_tried_where_a_repository_cannot_be_had():
    error = NetworkError("cannot list its refs")
    source = SimpleNamespace(name="optim", place="dev of https://x/optim", error=error, barred=False)
    decided = SimpleNamespace(git_sources=SimpleNamespace(missing=(source,)))
    candidates = Candidates(SimpleNamespace(), decided, "x", SimpleNamespace())
    ((deviation,),) = candidates.likely("optim")
    assert deviation.text() == (
        "optim any release instead of dev of https://x/optim: cannot list its refs; a release of the index"
    )
