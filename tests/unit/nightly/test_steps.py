"""What a night asks of its lock."""

from pathlib import Path

from helpers.image_inputs import SELECTION
from helpers.locks import make_lock
from helpers.placed_images import RECORD

from envbuild.catalog.catalog import HostDistribution, select
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.catalog.stack import Driver
from envbuild.core.progress import SilentReporter
from envbuild.image.output import PlacedImage
from envbuild.lock.lockfile import read_lock
from envbuild.nightly import steps
from envbuild.nightly.models import Job, NightRequest
from envbuild.store.local import LocalStore
from envbuild.sync.verify import Verifier


def test_a_night_certifies_by_the_matrix_of_the_driver_that_the_lock_names(tmp_path: Path) -> None:
    reporter = SilentReporter()
    context = Context(store=LocalStore(tmp_path / "store", reporter), site=load_site(), reporter=reporter)
    selection = select(SELECTION.catalog, "nemo", "h200", None, HostDistribution("debian", "12"))
    night = steps.NightSteps(request=NightRequest(selections=(selection,), project=tmp_path), context=context)
    for driver in (Driver.NEMO, Driver.BRIDGE):
        make_lock(tmp_path / driver.value, stack="nemo", driver=driver)
        job = Job(
            selection=selection, lock=read_lock(tmp_path / driver.value), image=PlacedImage(tmp_path, RECORD, "nemo")
        )
        assert night.certify_request(job).matrix_name == f"{driver.value}-recipes"


def test_the_lock_of_a_pinned_stack_is_verified_too(tmp_path: Path, monkeypatch) -> None:
    """Only then does it name its base, without which no image of it is published."""
    verifiers: list[object] = []
    monkeypatch.setattr(steps, "lock_stack", lambda *arguments: verifiers.append(arguments[-1]))
    reporter = SilentReporter()
    context = Context(store=LocalStore(tmp_path / "store", reporter), site=load_site(), reporter=reporter)
    request = NightRequest(selections=(SELECTION,), project=tmp_path)
    steps.make_lock(SELECTION, request, context)
    assert isinstance(verifiers[0], Verifier)
