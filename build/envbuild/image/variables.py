"""The variables and labels of an image: the environment's before the base's."""

from __future__ import annotations

from collections.abc import Mapping

from envbuild.oci.models import BaseConfig

PLAIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LANG = "C.UTF-8"
# Lists of folders: the base's come after the environment's.
_LISTS = ("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH")
# They would put other packages, or another standard library, before the environment's own.
_NOT_CARRIED = ("PYTHONPATH", "PYTHONHOME")
# These labels describe the base, which is another image.
_BASES_OWN = "org.opencontainers.image."


def image_variables(
    venv: str, base: Mapping[str, str], required: Mapping[str, str], own: Mapping[str, str]
) -> dict[str, str]:
    """The variables of an image.

    Args:
        base: those of the base.
        required: what is required of the node (:mod:`envbuild.image.node_requirements`).
        own: what the stack sets.
    """
    carried = {name: value for name, value in base.items() if name not in _NOT_CARRIED}
    merged = {
        "PATH": f"{venv}/bin:{base.get('PATH') or PLAIN_PATH}",
        "VIRTUAL_ENV": venv,
        "LANG": base.get("LANG") or LANG,
    }
    merged |= {name: value for name, value in carried.items() if name not in merged}
    merged |= required
    for name, value in own.items():
        behind = carried.get(name, "") if name in _LISTS else ""
        merged[name] = f"{value}:{behind}" if behind else value
    return merged


def path_front(path: str) -> str:
    """What of an image's PATH a login shell does not have from /etc/profile: the environment's, and the base's own."""
    usual = PLAIN_PATH.split(":")
    return ":".join(folder for folder in path.split(":") if folder and folder not in usual)


def base_labels(config: BaseConfig, name: str, digest: str) -> dict[str, str]:
    """The labels that an image has from its base, and those that name the base (OCI image-spec, "Annotations")."""
    carried = {key: value for key, value in config.labels.items() if not key.startswith(_BASES_OWN)}
    named = {f"{_BASES_OWN}base.name": name, f"{_BASES_OWN}base.digest": digest}
    return {**carried, **{key: value for key, value in named.items() if value}}
