"""The project's layout: packages, top level, ignore rules, docs, and no machine's path in any file."""

import configparser
import json
import os
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import click
import pytest

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.cli.commands import COMMANDS
from envbuild.cli.group import cli
from envbuild.cli.main import run
from envbuild.core import tomlread
from envbuild.lock.lockfile import PHASE_FILES, read_lock

ROOT = data_root()
FILES = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT, capture_output=True, text=True, check=True,
).stdout.strip("\0").split("\0")  # fmt: skip
PRESENT = [name for name in FILES if (ROOT / name).is_file()]
PYPROJECT = tomlread.loads((ROOT / "pyproject.toml").read_text())
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
TOP = {
    *("build", "smoke", "envs", "lockfiles", "containers", "tests", "benchmarks", "docs", ".ci", ".github"),
    *("pyproject.toml", "dev", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
    *(".gitignore", ".pre-commit-config.yaml"),
}


def texts():
    for name in PRESENT:
        yield name, (ROOT / name).read_bytes().decode(errors="replace")


def test_top_level_has_no_strays():
    assert {name.split("/")[0] for name in PRESENT} <= TOP


def test_import_contracts_are_kept():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_package_has_its_layer():
    packages = {path.parent.name for path in (ROOT / "build" / "envbuild").glob("*/__init__.py")}
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if "envbuild.cli" in contract.get("layers", []))
    assert packages <= {layer.rpartition(".")[2].strip("()") for layer in layers}


def test_smoke_imports_nothing_of_build():
    for path in (ROOT / "smoke").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) envbuild\b(?!_smoke)", path.read_text(), re.MULTILINE), path


@pytest.mark.parametrize(
    "name", ["build/envbuild/wheels/x.py", "build/envbuild/x.py", "smoke/envbuild_smoke/x.py", "envs/bases/x.toml"]
)
def test_gitignore_hides_no_source(name):
    """Many global ignore files have build/ and wheels/; ours must not, and hatchling reads ours."""
    done = subprocess.run(
        ["git", "-c", "core.excludesFile=/dev/null", "check-ignore", "-v", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize(
    "name",
    ["out/x", ".venv/x", "build/envbuild/__pycache__/x.pyc", "lockfiles/mcore/debian12/uv.lock", ".hypothesis/x"],
)
def test_gitignore_hides_what_is_made(name):
    assert subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT).returncode == 0


def test_build_is_no_package():
    assert not (ROOT / "build" / "__init__.py").exists()


def test_test_files_are_found_by_pytest():
    assert [
        name for name in PRESENT if re.search(r"(^|/)test_[^/]*\.py$", name) and not name.startswith("tests/")
    ] == []


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_a_page(command):
    assert (ROOT / "docs" / "reference" / f"{command}.md").read_text().startswith(f"# envbuild {command}\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_named_in_the_docs_exist(page):
    """Relative links with their anchors, and files in backquotes that begin with a folder of the tree."""
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, (
                target
            )
    for path in re.findall(r"`((?:build|smoke|containers|tests|benchmarks|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_that_names_the_trust_file_shows_it_or_where_it_is_shown(page):
    text = page.read_text()
    shown = "> trust.toml" in text or "certificate.md#the-trust-file" in text
    assert shown or "trust.toml" not in text


def test_commands_in_the_docs_have_the_options_that_the_docs_show():
    for page in PAGES:
        # A backslash continues a line; a comment ends one.
        lines = page.read_text().replace("\\\n", " ").splitlines()
        for line in (line.partition(" #")[0] for line in lines):
            for words in re.findall(r"\benvbuild ([a-z]+[^`&|;]*)", line):
                command = cli.get_command(click.Context(cli), words.split()[0])
                if command is None:
                    continue
                commands = [command, *getattr(command, "commands", {}).values()]
                known = {
                    flag
                    for each in commands
                    for option in each.params
                    for flag in (*option.opts, *option.secondary_opts)
                }
                shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", re.sub(r"'[^']*'", "", words)))
                assert shown <= {*known, "--help"}, (page.name, line)


def test_the_docs_stay_short():
    words = {page: len(page.read_text().split()) for page in PAGES}
    assert words[ROOT / "README.md"] <= 900
    assert sum(words.values()) <= 18_000


def configured_hosts() -> set[str]:
    """The hosts of package indexes and wheel pages that this machine is configured with."""
    names = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
    names += ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "ENVBUILD_TORCH_INDEX")
    text = " ".join(os.environ.get(name, "") for name in names)
    for file in ("/etc/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf"):
        config = configparser.ConfigParser(interpolation=None)
        config.read(Path(file).expanduser())
        text += " ".join(
            config.get("global", key, fallback="") for key in ("index-url", "extra-index-url", "find-links")
        )
    for file in ("/etc/uv/uv.toml", "~/.config/uv/uv.toml"):
        if Path(file).expanduser().is_file():
            text += Path(file).expanduser().read_text()
    hosts = {urllib.parse.urlsplit(url).hostname or "" for url in re.findall(r"https?://[^\s,\"']+", text)}
    return hosts - {"", "pypi" + chr(46) + "org", "download.pytorch.org", "127.0.0.1", "localhost"}


def test_no_file_names_the_index_of_this_machine():
    hosts = configured_hosts()
    assert [(name, host) for name, text in texts() for host in hosts if host in text] == []


def test_no_file_names_the_place_of_this_checkout():
    place = str(ROOT) if len(ROOT.parts) > 2 else None  # "/build", say, is an ordinary word
    assert [name for name, text in texts() if place and place in text] == []


def test_locks_name_no_place_but_the_repositories_of_their_stacks():
    catalog = Catalog.open(ROOT)
    files = {name: text for name, text in texts() if name.startswith("lockfiles/") and not name.endswith(".md")}
    for name, text in files.items():
        stack = catalog.stack(Path(name).parts[1])
        known = {spec.git for spec in stack.components.values() if spec.git}
        assert set(re.findall(r"\w+://[^\s\"'@]+", text)) <= known, name
    assert {Path(name).name for name in files} <= {"stack.lock.toml", "pyproject.toml", *PHASE_FILES.values()}


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-dev.txt"])
def test_dependencies_are_pinned_with_hashes_and_name_no_index(file):
    text = (ROOT / "build" / file).read_text()
    assert "://" not in text
    assert not re.search(r"^\s*--(extra-)?index-url|^\s*--find-links", text, re.MULTILINE)
    pinned = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE))
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert all("==" in block and "--hash=sha256:" in block for block in blocks)
    project = list(PYPROJECT["project"]["dependencies"])
    project += PYPROJECT["dependency-groups"]["dev"] if file == "requirements-dev.txt" else []
    assert {re.match(r"[A-Za-z0-9._-]+", line)[0] for line in project} <= set(pinned)


def test_the_demo_runs_with_what_the_tests_run_with():
    run, tests = (
        {
            # Which machines need a package is another matter: the tests need some on all.
            (block.split()[0], *re.findall(r"sha256:\w+", block))
            for block in re.split(r"^(?=[A-Za-z0-9])", (ROOT / "build" / file).read_text(), flags=re.MULTILINE)[1:]
        }
        for file in ("requirements.txt", "requirements-dev.txt")
    )
    assert run < tests


def test_tests_skip_nothing_and_expect_no_failure():
    """Not even where it would be convenient: what cannot run here belongs to another folder."""
    marks = re.compile(r"pytest\.(mark\.)?(skip|skipif|xfail|importorskip)\b")
    names = [
        name for name, text in texts() if name.startswith("tests/") and name.endswith(".py") and marks.search(text)
    ]
    assert names == []


def test_committed_locks_are_what_their_inputs_give(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path / "cache"))
    assert run(["lock", "--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "certificate", sorted((ROOT / "benchmarks" / "records").glob("*/*.intoto.jsonl")), ids=lambda path: path.stem
)
def test_committed_certificates_are_signed_and_of_the_image_that_their_record_names(certificate, capsys):
    record = json.loads((certificate.parent / "record.json").read_text())
    trust = ["--trust", str(certificate.parent / "trust.toml")]
    digest = ["--digest", record["sqsh_digest"]]
    assert run(["certificate", "verify", str(certificate), *trust, *digest, "--json"]) == 0, capsys.readouterr().err
    printed = json.loads(capsys.readouterr().out)
    assert printed["lock_digest"] == record["lock_digest"]
    assert record["machine"]["gpus"] == f"{len(printed['gpus'])}x {printed['gpus'][0]}"


def test_every_base_of_a_stack_is_locked_or_listed_as_not_locked():
    locked = {path.parent.relative_to(ROOT / "lockfiles") for path in (ROOT / "lockfiles").glob("*/*/stack.lock.toml")}
    with_lock, without = (ROOT / "lockfiles" / "README.md").read_text().split("Not locked here:")
    catalog = Catalog.open(ROOT)
    named = {
        f"{stack}/{base}"
        for stack in catalog.names("stacks")
        for builds in catalog.stack(stack).builds
        for base in builds.bases
    }
    assert set(re.findall(r"`([a-z0-9.-]+/[a-z0-9-]+)`", without)) == named - {str(path) for path in locked}
    rows = re.findall(r"^\| `(\S+)` \| (\d+) \|", with_lock, re.MULTILINE)
    assert {Path(name): int(packages) for name, packages in rows} == {
        path: sum(phase.packages for phase in read_lock(ROOT / "lockfiles" / path).lock.phases.values())
        for path in locked
    }


# JSON that is read becomes frozen types. The aliases are of messages as they arrive, and of what libraries' own
# functions take and checkpoints hold.
ALIASES = {f"smoke/envbuild_smoke/{name}.py" for name in ("ranks/ipc", "nodes/wire", "drivers/parts")}
# What reads the pyproject.toml of others, and the user's uv.toml.
READERS = {"build/envbuild/lock/components/project_metadata.py", "build/envbuild/lock/uv/settings.py"}


@pytest.mark.parametrize(
    ("folder", "anything"),
    [("build/envbuild/certify", "Any"), ("build/envbuild/lock", "(Any|object)"), ("smoke/envbuild_smoke", "Any")],
)
def test_no_dictionary_of_anything_is_passed_on(folder, anything):
    untyped = re.compile(rf"\b((Mutable)?Mapping|[dD]ict)\[str, \"?{anything}\b")
    names = {name for name in PRESENT if name.startswith(f"{folder}/") and name.endswith(".py")}
    assert [name for name in sorted(names - ALIASES - READERS) if untyped.search((ROOT / name).read_text())] == []
