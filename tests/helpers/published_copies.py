"""The first publication of a test as a copy of one that was made once: of the world's files and the registry's."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from helpers.fault_proxy import FaultProxy
from helpers.publish_world import PublishWorld, make_publish_world

from envbuild.certify.certificate.trust import load_trust
from envbuild.lock.lockfile import read_lock
from envbuild.publish.models import Publication
from envbuild.publish.publish import publish

REPOSITORIES, OWN = "data/docker/registry/v2/repositories", "shared/publication"


@dataclass
class SharedPublication:
    """A world, and what it published to each registry.

    Attributes:
        registries: folders of docker's registry, by host.
        proxies: the host of the registry behind a proxy, and the proxy, by the proxy's host.
        published: by the registry's host.
    """

    world: PublishWorld
    registries: dict[str, Path] = field(default_factory=dict)
    proxies: dict[str, tuple[str, FaultProxy]] = field(default_factory=dict)
    published: dict[str, Publication] = field(default_factory=dict)

    def copied_to(self, project: Path) -> CopiedWorld:
        """The same lock, image and key in a project of a test's own."""
        world = self.world
        for name in ("lockfiles", "out/images"):
            shutil.copytree(world.project / name, project / name)
        shutil.copy2(world.project / "trust.toml", project)
        own = {
            "project": project,
            "lock": read_lock(project / world.lock.path.relative_to(world.project)),
            "image": replace(world.image, path=project / world.image.path.relative_to(world.project)),
            "trust": load_trust(project / "trust.toml"),
        }
        inherited = {name.name: getattr(world, name.name) for name in fields(world) if name.name not in (*own, "notes")}
        return CopiedWorld(shared=self, **inherited, **own)

    def copy(self, world: PublishWorld, to: str) -> Publication | None:
        """The publication in another repository; None where that has to be made."""
        host, repository = to.removeprefix("oci://").split("/", 1)
        if host in self.proxies:
            host, proxy = self.proxies[host]
            if proxy != FaultProxy(address=proxy.address):
                return None  # a test put something before the registry
        if host not in self.registries:
            return None
        place = self.registries[host] / REPOSITORIES
        if (place / repository).exists():
            return None
        if host not in self.published:
            self.published[host] = publish(self.world.request(f"{host}/{OWN}"), self.world.context).publication
        shutil.copytree(place / OWN, place / repository)
        shutil.copytree(self.world.project / "out/certificates", world.project / "out/certificates")
        return self.published[host]


@dataclass
class CopiedWorld(PublishWorld):
    """A world whose first publication is a copy, where nothing was changed before."""

    shared: SharedPublication | None = None

    def publish(self, to: str, **changes: Any) -> Publication:
        untouched = not (self.project / "out/certificates").exists() and not changes
        if untouched and self.shared is not None and self.image.record == self.shared.world.image.record:
            copied = self.shared.copy(self, to)
            if copied is not None:
                return copied
        return super().publish(to, **changes)


def share_publication(project: Path) -> SharedPublication:
    world = make_publish_world(project)
    world.certify()
    return SharedPublication(world)
