"""A .sqsh store with a published image."""

import pytest
from helpers.publish_world import make_publish_world
from helpers.pull_world import PullWorld, make_pull_world

CONTENT = b"a squashfs file " * 10_000


@pytest.fixture
def there(tmp_path) -> PullWorld:
    world = make_publish_world(tmp_path / "project")
    world.rebuild({"torch": CONTENT})
    return make_pull_world(world, tmp_path / "home")
