"""Which packages bring a module, as far as its name says."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.utils import canonicalize_name

# Names under which packages are imported, where these are not their own.
DISTRIBUTIONS = {
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "google": "protobuf",
    # NeMo's recipes of April 2025 import it, and NeMo does not declare it.
    "pytriton": "nvidia-pytriton",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "yaml": "pyyaml",
}


def distribution_of(module: str) -> str:
    """The package that is likely to bring an outermost module."""
    return canonicalize_name(DISTRIBUTIONS.get(module, module))


def is_brought(module: str, packages: Iterable[str]) -> bool:
    """Whether one of the packages, by canonical name, may bring an outermost module: ``nvidia-modelopt`` modelopt."""
    wanted = {distribution_of(module), canonicalize_name(module)}
    return any(name in package or name.startswith(f"{package}-") for package in packages for name in wanted)
