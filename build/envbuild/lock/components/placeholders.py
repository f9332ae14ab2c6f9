"""Releases without content: they hold a name on the index, or fetch a wheel from another index when they are built."""

from __future__ import annotations

from packaging.version import Version

from envbuild.lock.components.project_metadata import PYPROJECT, build_backend
from envbuild.lock.components.sdist_metadata import metadata_files
from envbuild.lock.context import LockContext
from envbuild.lock.uv_lock import ResolvedPackage

# A release with smaller files holds a name: transformer-engine 0.0.0 has 1,097 bytes, its core 0.0.0a0 1,158.
SMALLEST_CONTENT = 4096
# Their build downloads a wheel from pypi.nvidia.com that no lock has a hash of: nvidia-modelopt 0.46.0rc1 (2,179
# bytes), tensorrt-llm 1.4.0rc1 (209,280 bytes, for its README).
STUB_BACKENDS = ("wheel_stub", "nvidia_stub")
LARGEST_STUB = 1 << 19


def is_empty(release: ResolvedPackage) -> bool:
    """Whether a release only holds a name."""
    sizes = [file.size for file in release.files if file.size is not None]
    return bool(sizes) and max(sizes) < SMALLEST_CONTENT and Version(release.version).release[:2] in ((0,), (0, 0))


def is_stub(release: ResolvedPackage, context: LockContext) -> bool:
    """Whether a release is an sdist alone whose build downloads the package from another index.

    Raises:
        NetworkError: the sdist cannot be downloaded.
    """
    sdist = release.sdist
    if release.wheels or sdist is None or not (sdist.url or sdist.path) or (sdist.size or 0) > LARGEST_STUB:
        return False
    files, _ = metadata_files(release, context)
    try:
        backend = build_backend(files.get(PYPROJECT, b"").decode())
    except ValueError:
        return False  # uv says what is wrong with it
    return backend.partition(".")[0] in STUB_BACKENDS
