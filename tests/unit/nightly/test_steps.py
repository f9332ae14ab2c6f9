"""What a night asks of its lock."""

from pathlib import Path

from helpers.image_inputs import SELECTION

from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core.progress import SilentReporter
from envbuild.nightly import steps
from envbuild.nightly.models import NightRequest
from envbuild.store.local import LocalStore


def test_the_lock_of_a_pinned_stack_is_verified_too(tmp_path: Path, monkeypatch) -> None:
    """Only then does it name its base, without which no image of it is published."""
    asked = []
    monkeypatch.setattr(
        steps, "lock_on_fitting_base", lambda item, _asked, options, _context: asked.append(options(item))
    )
    reporter = SilentReporter()
    context = Context(store=LocalStore(tmp_path / "store", reporter), site=load_site(), reporter=reporter)
    request = NightRequest(selections=(SELECTION,), project=tmp_path)
    steps.make_lock(SELECTION, request, context)
    assert asked[0].verify is not None
    assert asked[0].ready is not None
