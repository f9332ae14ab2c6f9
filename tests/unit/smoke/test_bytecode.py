"""Startup code and bytecode that no RECORD lists, in real environments."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import marshal
import os
import py_compile
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.smoke_plans import case_document, plan_document
from unit.smoke.conftest import without_packages
from unit.smoke.test_installed import install

from envbuild_smoke.environment import bytecode, debian, findings, foreign_modules, installed
from envbuild_smoke.environment.imported import Ready
from envbuild_smoke.plan.reader import parse_plan
from envbuild_smoke.results import Image

SOURCE = "def scale():\n    return 1.0\n"
CHANGED = "def scale():\n    return 2.0\n"
SMOKE = Path(__file__).resolve().parents[3] / "smoke"
# What the fork server and the runner do, in an environment of its own.
FIND = """
import json, sys
sys.path.insert(0, sys.argv[1])
from envbuild_smoke.environment import foreign_modules
started = {name: sys.modules[name].__file__ for name in foreign_modules.STARTUP_MODULES if name in sys.modules}
print(json.dumps([finding.found for finding in foreign_modules.startup_findings(started)]))
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of an installed package, with its bytecode."""
    folder = tmp_path / "lib" / "python3" / "site-packages"
    install(folder, "Megatron_Core", {"megatron/core/attention.py": SOURCE.encode(), "notes/x.py": b"x = 1\n"})
    monkeypatch.setattr(sys, "path", [str(folder)])
    path = folder / "megatron/core/attention.py"
    py_compile.compile(str(path))
    return path


def startup_findings(*modules: str) -> list[tuple[str | None, ...]]:
    findings = bytecode.bytecode_findings(installed.recorded(["megatron-core"]), modules or ("megatron.core",))
    return [(finding.code, finding.package, finding.expected, finding.found) for finding in findings]


def cache_of(source: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(source)))


def change_code(source: Path) -> None:
    """Other code under a header that stays as it is."""
    header = cache_of(source).read_bytes()[:16]
    code = compile(CHANGED, str(source), "exec")
    cache_of(source).write_bytes(header + marshal.dumps(code))


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_bytecode_of_the_source_is_fine_and_other_bytecode_that_python_takes_is_found(source, mode):
    py_compile.compile(str(source), invalidation_mode=mode)
    assert startup_findings() == []
    change_code(source)
    assert startup_findings() == [("bytecode-differs", "megatron-core", str(source), str(cache_of(source)))]
    # Packages without an expected module are not checked.
    assert startup_findings("torch") == []


def test_bytecode_that_python_compiles_anew_is_no_finding(source):
    py_compile.compile(str(source))
    change_code(source)
    os.utime(source, (1, 1))
    assert startup_findings() == []
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    change_code(source)
    source.write_text(SOURCE + "\n")
    assert startup_findings() == []


def test_bytecode_that_is_no_code_is_found_where_python_takes_it(source):
    header = cache_of(source).read_bytes()[:16]
    for content, count in ((b"", 0), (b"short", 0), (b"\0" * 40, 0), (header + b"no code", 1)):
        cache_of(source).write_bytes(content)
        assert len(startup_findings()) == count


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


def started(venv: Path) -> list[str]:
    done = subprocess.run([venv / "bin/python", "-c", FIND, SMOKE], capture_output=True, text=True, check=True)
    return [Path(file).name for file in json.loads(done.stdout)]


def test_code_that_starts_with_python_is_found_unless_a_package_lists_it(venv):
    (packages,) = venv.glob("lib/python3.*/site-packages")
    assert started(venv) == []
    (packages / "_virtualenv.py").write_text("")
    (packages / "_virtualenv.pth").write_text("import _virtualenv")
    (packages / "folders.pth").write_text("/nonexistent/important\n# import nothing\n")
    assert started(venv) == []
    install(packages, "editable", {"editable.pth": b"import sys\n"})
    assert started(venv) == []
    (packages / "left.pth").write_text("/some/folder\nimport os; os.environ['X'] = '1'\n")
    assert started(venv) == ["left.pth"]
    (packages / "left.pth").unlink()


def startup(monkeypatch: pytest.MonkeyPatch, **files: str | None) -> list[str | None]:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with without_packages():
        return [finding.found for finding in foreign_modules.startup_findings(files)]


def test_sitecustomize_of_no_package_is_found(monkeypatch):
    assert startup(monkeypatch, sitecustomize="/own/sitecustomize.py") == ["/own/sitecustomize.py"]
    of_python = f"{sysconfig.get_path('stdlib')}/sitecustomize.py"
    assert startup(monkeypatch, sitecustomize=of_python, usercustomize=None) == []


@pytest.fixture
def dpkg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Python that dpkg has, with a sitecustomize that is a setting, as Debian's is; its file."""
    library, settings, root = tmp_path / "lib/python3.11", tmp_path / "etc/sitecustomize.py", tmp_path / "dpkg"
    for folder in (library, settings.parent, root / "info"):
        folder.mkdir(parents=True)
    (library / "os.py").write_text("")
    settings.write_text("# Debian's\n")
    (library / "sitecustomize.py").symlink_to(settings)
    (root / "status").write_text(f"Conffiles:\n {settings} {hashlib.md5(settings.read_bytes()).hexdigest()}\n")
    line = f"{hashlib.md5(b'').hexdigest()}  {str(library / 'os.py').removeprefix('/')}\n"
    (root / "info" / "libpython3.11-minimal:amd64.md5sums").write_text(line)
    monkeypatch.setattr(debian, "_ROOT", root)
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(library))
    debian._digests.cache_clear()
    yield library / "sitecustomize.py"
    debian._digests.cache_clear()


def test_sitecustomize_of_a_distribution_is_the_pythons_as_it_came(dpkg, monkeypatch):
    assert startup(monkeypatch, sitecustomize=str(dpkg)) == []
    dpkg.write_text("import os\n")
    assert startup(monkeypatch, sitecustomize=str(dpkg)) == [str(dpkg)]
    other = dpkg.with_name("usercustomize.py")
    other.write_text("")
    assert startup(monkeypatch, usercustomize=str(other)) == [str(other)]


def test_startup_code_and_bytecode_are_checked_in_an_image(dpkg, source, monkeypatch):
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    change_code(source)
    expected = {"expected_modules": ["megatron.core"], "expected_versions": {"megatron-core": "1.0"}}
    plan = parse_plan(json.dumps(plan_document(case_document("train-baseline")) | expected).encode())
    assert "bytecode-differs" in {finding.code for finding in findings.file_findings(plan)}
    dpkg.write_text("import os\n")
    image = Image(file_digest="sha256:0", file_bytes=1, fingerprint=None)
    ready = Ready(started={"sitecustomize": str(dpkg)})
    result = findings.all_findings(plan, ready, [], foreign_modules.ListedFiles(()), image)
    assert "startup-code" in {finding.code for finding in result}


@pytest.mark.parametrize(
    ("fingerprint", "expected"),
    [
        ({"python": f"{sys.prefix}/bin/python"}, []),
        ({"python": "/opt/envbuild/venv/bin/python"}, [("other-python", "/opt/envbuild/venv/bin/python")]),
        ({}, []),
        (None, []),
    ],
)
def test_python_other_than_the_images_is_found(fingerprint, expected):
    result = findings._other_python(Image(file_digest="", file_bytes=0, fingerprint=fingerprint))
    assert [(finding.code, finding.expected) for finding in result] == expected
