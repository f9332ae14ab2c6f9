"""The tables of companions never contradict the checks: each of their rows is locked with what the index has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Tool
from packaging.specifiers import SpecifierSet

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root

CATALOG = Catalog.open(data_root())
# How a release leads a lock of stack nemo.
OPTIONS = {
    "nemo-toolkit": ("--nemo", "{}"),
    # NeMo 3.0 has no LLM collection, and so the stack takes Bridge.
    "megatron-bridge": ("--nemo", "3.0.0", "--pin", "megatron-bridge={}"),
}
# Rows with releases that are newer than what leads the lock.
AS_OF = {"==0.6.*": ("--as-of", "2026-10-15")}
ROWS = [(package, row) for package in OPTIONS for row in CATALOG.companions(package).releases]


@pytest.mark.slow
@pytest.mark.parametrize(("package", "row"), ROWS, ids=[f"{package}{row.versions}" for package, row in ROWS])
def test_each_row_of_companions_locks(package, row, tmp_path: Path, site_cache: Path) -> None:
    # A folder of wheels has no dates. uv looks for a Python of the base that is here, and downloads none.
    tool = Tool(tmp_path, site_cache, env={"UV_FIND_LINKS": "", "PIP_FIND_LINKS": "", "UV_PYTHON_DOWNLOADS": "never"})
    options = [*(option.format(row.versions) for option in OPTIONS[package]), *AS_OF.get(row.versions, ())]
    done = json.loads(tool.run("lock", *options, "--name", "row", "--no-verify", "--json").stdout)
    assert done["deviations"] == []
    assert SpecifierSet(row.versions).contains(done["components"][package], prereleases=True)
    for name, versions in row.components.items():
        if name in done["components"]:
            assert SpecifierSet(versions).contains(done["components"][name], prereleases=True), name
