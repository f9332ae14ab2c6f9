"""Slurm's Prolog and enroot's hook as a site installs them, but for where its files are."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.data import data_root


@dataclass(frozen=True)
class SiteScripts:
    """A site's folder in the place of /etc/envbuild, with the scripts and their programs."""

    folder: Path

    @property
    def prolog(self) -> Path:
        return self.folder / "prolog.sh"

    @property
    def hook(self) -> Path:
        return self.folder / "hook.sh"

    @property
    def settings(self) -> Path:
        return self.folder / "prolog.env"

    @property
    def notes(self) -> Path:
        return self.folder / "notes"


def install_scripts(folder: Path, trust: Path | None = None) -> SiteScripts:
    """Install both scripts, with an envbuild to run and the keys that the site trusts."""
    scripts = SiteScripts(folder)
    programs = folder / "bin"
    programs.mkdir(parents=True)
    envbuild = programs / "envbuild"
    envbuild.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m envbuild "$@"\n')
    envbuild.chmod(0o755)
    if trust is not None:
        (folder / "trust.toml").write_bytes(trust.read_bytes())
    scripts.settings.write_text(f"PATH={programs}:$PATH\n")
    for script, source in ((scripts.prolog, "slurm/prolog.sh"), (scripts.hook, "enroot/hook.sh")):
        text = (data_root() / "containers" / source).read_text()
        places = (("/etc/envbuild", folder), ("/run/envbuild/jobs", scripts.notes))
        for real, own in places:
            text = text.replace(real, str(own))
        script.write_text(text)
        script.chmod(0o755)
    return scripts
