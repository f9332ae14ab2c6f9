"""Packages that components from git take from an index of their own: that one, at the site's address, or no lock."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.git_repos import History
from helpers.lock_runs import ANY, OLD, error, lock_of, result
from helpers.simple_index import SimpleIndex, make_sdist, simple_index
from helpers.stack_files import BASE, write_base, write_stack
from helpers.upstreams import PUBLIC, project_files
from helpers.wheels import make_wheel

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.site import load_site
from envbuild.core import tomlread
from envbuild.core.progress import SilentReporter
from envbuild.lock.lockfile import read_lock
from envbuild.store.local import LocalStore
from envbuild.wheels.plan import buildable
from envbuild.wheels.sources import WheelSources

URL = f"{PUBLIC}/x/comp"
DECLARED = "https://index.example.invalid/simple"


def index_table(name: str = "site", *, explicit: bool = True) -> str:
    return f'[[tool.uv.index]]\nname = "{name}"\nurl = "{DECLARED}"\nexplicit = {str(explicit).lower()}\n'


EXPLICIT = f'[tool.uv.sources]\nkitops = {{ index = "site" }}\n{index_table()}'


class World:
    """A component from git, the default index, and an index of the component's own; both have a `kitops`."""

    def __init__(self, own: Any, index: SimpleIndex, site: SimpleIndex, folder: Path) -> None:
        self.own, self.index, self.site = own, index, site
        self.folder = folder
        self.history = History(folder / "x/comp")
        for place, where, version in ((index, "public", "2.0"), (site, "site", "1.0.19")):
            place.add(self.wheel(where, "kitops", version, module=f"where = '{where}'\n"), OLD)

    def wheel(self, where: str, name: str, version: str, needs: tuple[str, ...] = (), **more: Any) -> Path:
        return make_wheel(self.folder / where, name, version, ANY, needs, **more)

    def commit(
        self, text: str, *needs: str, extras: str = "", build: str = "", more: dict[str, Any] | None = None
    ) -> str:
        files = project_files("comp", "1.0", "comp", needs)
        if build:
            files["pyproject.toml"] = str(files["pyproject.toml"]).replace('"setuptools>=61"', build)
        files["pyproject.toml"] = f"{files['pyproject.toml']}[project.optional-dependencies]\n{extras}\n{text}"
        return self.history.commit("main", "2025-04-01T00:00:00Z", {**files, **(more or {})})

    def configure(self, **indexes: str) -> None:
        file = self.folder / "config.toml"
        file.write_text("[indexes]\n" + "".join(f'{name} = "{url}"\n' for name, url in indexes.items()))
        self.own.env["ENVBUILD_CONFIG"] = str(file)

    def stack(self, anchor: str = "", **more: Any) -> None:
        components = {"comp": {"git": URL, "ref": "main", "modules": ["comp"]}, **more}
        setuptools = {"version": "==80.0", "reason": "what builds the packages from git"}
        settings = {
            "as_of": "now",
            "requirements": {"setuptools": setuptools},
            **({"anchor": anchor} if anchor else {}),
        }
        write_stack(self.own.project, "s", components, **settings)

    def lock(self, *more: str, status: int = 0) -> Any:
        return self.own.run("lock", "--stack", "s", "--json", *more, status=status)

    def refused(self, status: int, *more: str) -> dict[str, Any]:
        return error(self.lock(*more, status=status))

    def text(self, file: str) -> str:
        text: str = (self.own.project / "lockfiles/s" / BASE / file).read_text()
        return text

    def asked_default_for(self, package: str) -> list[str]:
        return [path for path in self.index.requested if package in path]


@pytest.fixture
def world(own: Any, index: SimpleIndex, wheel: Callable[..., Path], tmp_path: Path) -> Iterator[World]:
    from helpers.build_backend import BACKEND, SETUPTOOLS_MODULE

    wheel("setuptools", "80.0", module=SETUPTOOLS_MODULE, sources={"setuptools/build_meta.py": BACKEND})
    settings = tmp_path / "gitconfig"
    settings.write_text(f'[url "file://{tmp_path}/"]\n\tinsteadOf = {PUBLIC}/\n[protocol "file"]\n\tallow = always\n')
    own.env |= {"GIT_CONFIG_GLOBAL": str(settings), "GIT_CONFIG_NOSYSTEM": "1"}
    (tmp_path / "x").mkdir()
    write_base(own.project)
    with simple_index() as site:
        made = World(own, index, site, tmp_path)
        made.stack()
        yield made


@pytest.mark.parametrize("needs", ["kitops>=1.0", "kitops==1.0.19"])
def test_an_explicit_index_is_configured_or_the_lock_is_refused(world: World, needs: str) -> None:
    world.commit(EXPLICIT, needs)
    refused = world.refused(3)
    assert "takes kitops from index 'site'" in refused["what"]
    assert DECLARED in refused["why"]
    assert f'[indexes]\nsite = "{DECLARED}"' in refused["fix"]
    assert world.asked_default_for("kitops") == []
    world.configure(site=world.site.url)
    assert result(world.lock())["components"]["kitops"] == "1.0.19"
    assert world.asked_default_for("kitops") == []
    component = lock_of(world.own, "s").components["kitops"]
    assert (component.index, component.transitive) == ("site", True)
    (digest,) = (world.folder / "site").glob("kitops-1.0.19*")
    assert hashlib.sha256(digest.read_bytes()).hexdigest() in world.text("main.txt")
    # By name: no file that is committed names a host.
    committed = "".join(world.text(file) for file in ("pyproject.toml", "stack.lock.toml", "main.txt", "git.txt"))
    assert [host for host in ("127.0.0.1", "index.example") if host in committed] == []
    assert '[tool.uv.sources.kitops]\nindex = "site"' in world.text("pyproject.toml")
    assert result(world.lock())["built"] is False
    assert "no change" in world.own.run("lock", "--stack", "s", "--diff").stdout


def test_what_is_locked_is_installed_from_that_index_by_its_hash(world: World) -> None:
    world.commit(EXPLICIT, "kitops")
    world.configure(site=world.site.url)
    world.lock()
    world.own.run("sync", "--stack", "s", "--into", "venv")
    assert "site" in (world.own.project / "venv/lib/python3.11/site-packages/kitops/__init__.py").read_text()
    world.own.run("export", "--stack", "s", "--format", "cyclonedx", "--output", "bom.json")
    world.configure()
    refused = error(world.own.run("sync", "--stack", "s", "--into", "other", "--json", status=3))
    assert "does not name index 'site'" in refused["what"]


def test_a_pylock_names_each_package_at_its_own_index(world: World) -> None:
    world.commit(EXPLICIT, "kitops", "lib")
    world.configure(site=world.site.url)
    for place, where in ((world.index, "public"), (world.site, "site")):
        place.add(world.wheel(where, "lib", "1.0", module=f"where = '{where}'\n"), OLD)
    world.index.add(world.wheel("public", "kitops", "1.0.19"), OLD)
    world.lock()
    world.site.requested.clear()
    text = world.own.run("export", "--stack", "s", "--format", "pylock").stdout
    packages = tomlread.loads(text)["packages"]
    assert [package["name"] for package in packages] == ["comp", "kitops", "lib", "setuptools"]
    addresses = {package["name"]: package["wheels"][0]["url"] for package in packages if "wheels" in package}
    assert {name for name, url in addresses.items() if url.startswith(world.site.address)} == {"kitops"}
    assert world.asked_default_for("kitops") == []
    assert [path for path in world.site.requested if "kitops" not in path] == []


def test_a_release_that_the_index_does_not_have_is_not_taken_from_another(world: World) -> None:
    world.commit(EXPLICIT, "kitops==2.0")
    world.configure(site=world.site.url)
    assert "kitops" in world.refused(4)["why"]
    assert world.asked_default_for("kitops") == []


def test_an_index_that_cannot_be_reached_is_not_replaced(world: World) -> None:
    world.commit(EXPLICIT, "kitops")
    world.configure(site="http://127.0.0.1:1/simple")
    world.own.env["UV_HTTP_RETRIES"] = "0"
    world.refused(10)
    assert world.asked_default_for("kitops") == []


def test_an_extra_matters_where_something_asks_for_it(world: World) -> None:
    text = f'[tool.uv.sources]\nkitops = [{{ index = "site", extra = "ops" }}]\n{index_table()}'
    world.commit(text, extras='ops = ["kitops"]')
    assert "kitops" not in result(world.lock())["components"]
    # A release asks for the extra: known only once that is resolved.
    world.index.add(world.wheel("public", "asks", "1.0", ("comp[ops]",)), OLD)
    world.stack(asks={})
    assert "index 'site'" in world.refused(3)["what"]
    assert 'no-build-package = ["kitops"]' in world.text("pyproject.toml")
    world.configure(site=world.site.url)
    assert result(world.lock())["components"]["kitops"] == "1.0.19"


PINNED = ("--pin", "kitops=1.0.19", "--name", "p")


@pytest.mark.parametrize(
    ("components", "more", "arguments"),
    [
        pytest.param({"kitops": {"version": ">=1"}}, {}, (), marks=pytest.mark.slow),
        pytest.param({"kitops": {"version": ">=1"}}, {}, PINNED, marks=pytest.mark.slow),
        # The release of the anchor is looked up for its date, before anything else is decided.
        pytest.param({"kitops": {}}, {"anchor": "kitops"}, PINNED, marks=pytest.mark.slow),
        ({"kitops": {}}, {"anchor": "comp"}, (*PINNED, "--pin", "comp=COMMIT")),
        # What it declares is read before the whole is resolved.
        ({"kitops": {"version": ">=1", "uses": ["lib"]}, "lib": {}}, {}, ()),
    ],
)
def test_no_question_about_such_a_package_reaches_another_index(
    world: World, components: Any, more: Any, arguments: tuple[str, ...]
) -> None:
    commit = world.commit(EXPLICIT, "kitops")
    arguments = tuple(word.replace("COMMIT", commit) for word in arguments)
    world.index.add(world.wheel("public", "lib", "1.0"), OLD)
    for version, day in (("1.0.19", "2025-05-01"), ("1.0.20", "2025-05-02")):
        world.site.add(world.wheel("site", "kitops", version), f"{day}T00:00:00Z")
    world.index.add(world.wheel("public", "kitops", "1.0.19"), "2025-06-06T00:00:00Z")
    world.stack(**components, **more)
    assert "index 'site'" in world.refused(3, *arguments)["what"]
    world.configure(site=world.site.url)
    locked = result(world.lock(*arguments))
    assert locked["components"]["kitops"] == ("1.0.19" if arguments else "1.0.20")
    name = "p" if arguments else "s"
    if "anchor" in more:
        assert lock_of(world.own, name).inputs.as_of.startswith("2025-05-15")
    world.own.run("lock", "--check", "--online")
    world.own.env["UV_CACHE_DIR"] = str(world.folder / "uv-anew")
    world.own.run("sync", "--stack", "s", "--name", name, "--into", "venv")
    assert [path for path in world.site.requested if "lib" in path or "setuptools" in path] == []
    assert world.asked_default_for("kitops") == []


def test_an_error_names_the_index_that_lacks_a_release(world: World) -> None:
    world.commit(EXPLICIT, "kitops>=2.0")
    world.configure(site=world.site.url)
    refused = world.refused(4)
    assert "kitops is taken from index 'site' alone." in refused["why"]
    assert "[indexes]" in refused["fix"]
    assert world.asked_default_for("kitops") == []


def test_no_trial_of_what_pins_exclude_asks_another_index(world: World) -> None:
    commit = world.commit(EXPLICIT, "kitops", "lib<2")
    # A release of the component, which a trial takes in the place of its commit.
    world.index.add(world.wheel("public", "comp", "0.9", ("kitops",)), OLD)
    for version in ("1.0", "2.0"):
        world.index.add(world.wheel("public", "lib", version), OLD)
    world.stack(lib={})
    world.configure(site=world.site.url)
    pins = ("--pin", f"comp={commit}", "--pin", "lib=2.0")
    assert "lib" in world.refused(4, *pins, "--name", "p")["why"]
    assert "/simple/comp/" in world.index.requested
    assert world.asked_default_for("kitops") == []


def test_a_compiled_package_is_built_from_the_sdist_of_its_own_index(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, where in ((world.index, "public"), (world.site, "site")):
        place.add(make_sdist(world.folder / where / "sdists", "kitops", "1.1", files={"where": where}), OLD)
    world.commit(EXPLICIT, "kitops")
    world.stack(kitops={"version": "==1.1", "phase": "compile"})
    world.configure(site=world.site.url)
    world.lock()
    for name, value in world.own.env.items():
        monkeypatch.setenv(name, value)
    lock = read_lock(world.own.project / "lockfiles/s" / BASE)
    base = Catalog.open(world.own.project).base(BASE)
    store = LocalStore(world.folder / "anew", SilentReporter())
    sources = WheelSources(base=base, site=load_site(), store=store, reporter=SilentReporter())
    sources.archive(buildable(lock)["kitops"])
    assert world.asked_default_for("kitops") == []


def test_an_isolated_build_that_needs_it_is_refused(world: World) -> None:
    world.commit(EXPLICIT, build='"setuptools>=61", "kitops"')
    world.configure(site=world.site.url)
    refused = world.refused(3)
    assert "is built with kitops of index 'site'" in refused["what"]
    world.stack(comp={"git": URL, "ref": "main", "phase": "compile"})
    world.lock()
    assert "kitops==1.0.19" in world.text("main.txt")
    assert world.asked_default_for("kitops") == []


@pytest.mark.parametrize("builder", ["kitops", "mid"])
def test_an_isolated_build_of_another_component_does_not_take_it_elsewhere(world: World, builder: str) -> None:
    world.index.add(world.wheel("public", "mid", "1.0", ("kitops",)), OLD)
    world.index.add(world.wheel("public", "kitops", "1.0.19"), OLD)
    world.commit(EXPLICIT, "kitops", "mid")
    files = project_files("other", "1.0", "other")
    files["pyproject.toml"] = str(files["pyproject.toml"]).replace('>=61"', f'>=61", "{builder}"')
    History(world.folder / "x/other").commit("main", "2025-04-01T00:00:00Z", files)
    world.stack(other={"git": f"{PUBLIC}/x/other", "ref": "main"})
    world.configure(site=world.site.url)
    refused = world.refused(3)
    assert "other" in refused["what"]
    assert "is built with kitops of index 'site'" in refused["what"]
    assert world.asked_default_for("kitops") == []


# A build backend of its own: its wheel says which `kitops` it was built with.
VICTIM = """
import pathlib, zipfile
{top}
def get_requires_for_build_wheel(config_settings=None): return [{hook}]
def build_wheel(folder, config_settings=None, metadata_directory=None):
    import kitops
    info = "victim-1.0.dist-info/"
    with zipfile.ZipFile(pathlib.Path(folder) / "victim-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("victim.py", f"built_with = {{kitops.where!r}}")
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: victim\\nVersion: 1.0\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "victim.py,,\\n")
    return "victim-1.0-py3-none-any.whl"
"""


@pytest.mark.parametrize(
    ("requires", "hook", "metadata"),
    [
        ("mid", "", "2.2"),
        # Without static metadata uv builds it to resolve: what it is built with runs before there is a lock.
        pytest.param("kitops", "", "2.1", marks=pytest.mark.slow),
        ("", "'kitops'", "2.2"),
    ],
    ids=["declared", "for its metadata", "computed"],
)
def test_an_isolated_build_of_a_release_does_not_take_it_elsewhere(
    world: World, requires: str, hook: str, metadata: str
) -> None:
    pyproject = f"[build-system]\nrequires = {json.dumps([requires] if requires else [])}\n"
    pyproject += 'build-backend = "victim_build"\nbackend-path = ["."]\n'
    files = {"victim_build.py": VICTIM.format(hook=hook, top="import kitops" if requires else "")}
    sdist = make_sdist(world.folder / "sdists", "victim", "1.0", pyproject=pyproject, files=files, metadata=metadata)
    world.index.add(sdist, OLD)
    world.index.add(world.wheel("public", "mid", "1.0", ("kitops",)), OLD)
    world.commit(EXPLICIT, "kitops", "victim", "mid")
    world.configure(site=world.site.url)
    if hook:
        world.lock()
        refused = error(world.own.run("sync", "--stack", "s", "--into", "venv", "--json", status=3))
    else:
        refused = world.refused(3)
    assert "is built with kitops" in refused["what"]
    assert world.asked_default_for("kitops") == []
    # The cure that it names.
    if requires == "mid":
        assert 'phase = "compile"' in refused["fix"]
        world.stack(victim={"phase": "compile"})
        world.lock()
        world.own.run("sync", "--stack", "s", "--into", "venv")
        assert "site" in (world.own.project / "venv/lib/python3.11/site-packages/victim.py").read_text()
        assert world.asked_default_for("kitops") == []


@pytest.mark.parametrize("extras", ['ops = ["kitops"]', ""], ids=["extra", "undeclared"])
def test_what_the_project_requires_itself_is_taken_from_it(world: World, extras: str) -> None:
    """A search adds what is imported and not declared; a stack requires what it says."""
    world.index.add(world.wheel("public", "lib", "1.0"), OLD)
    world.commit(EXPLICIT, "lib", extras=extras, more={"comp/__init__.py": "import kitops\n"})
    world.stack("comp", lib={})
    assert "takes kitops from index 'site'" in world.refused(3)["what"]
    world.configure(site=world.site.url)
    world.lock()
    (deviation,) = lock_of(world.own, "s").deviations
    assert deviation.startswith("kitops is added")
    assert "kitops==1.0.19" in world.text("main.txt")
    assert world.asked_default_for("kitops") == []


@pytest.mark.parametrize("name", ["Site", "elsewhere"])
def test_an_index_that_its_tree_does_not_declare_is_never_another_one(world: World, name: str) -> None:
    world.commit(EXPLICIT.replace('index = "site"', f'index = "{name}"'), "kitops")
    refused = world.refused(3)
    assert f"takes kitops from index '{name}'" in refused["what"]
    assert "does not declare it" in refused["why"]
    assert world.asked_default_for("kitops") == []
    world.configure(**{name: world.site.url})
    assert result(world.lock())["components"]["kitops"] == "1.0.19"


def test_a_component_of_the_stack_is_taken_from_it_too(world: World) -> None:
    world.commit(EXPLICIT, "kitops")
    world.stack(kitops={"version": ">=1"})
    assert "index 'site'" in world.refused(3)["what"]
    world.configure(site=world.site.url)
    world.lock()
    component = lock_of(world.own, "s").components["kitops"]
    assert (component.version, component.index, component.transitive) == ("1.0.19", "site", False)


def test_an_index_that_is_not_explicit_is_followed_where_the_site_has_it(world: World) -> None:
    world.commit(EXPLICIT.replace("= true", "= false"), "kitops")
    done = world.lock()
    assert result(done)["components"].get("kitops") is None
    assert "kitops==2.0" in world.text("main.txt")
    assert "takes kitops from its index site, which is not explicit" in done.stderr
    world.configure(site=world.site.url)
    world.lock("--upgrade")
    assert "kitops==1.0.19" in world.text("main.txt")


def test_one_name_with_two_addresses_is_refused(world: World) -> None:
    world.commit(EXPLICIT, "kitops")
    other = History(world.folder / "x/other")
    files = project_files("other", "1.0", "other", ("kitops",))
    files["pyproject.toml"] += EXPLICIT.replace("index.example", "another.example")
    other.commit("main", "2025-04-01T00:00:00Z", files)
    world.stack(other={"git": f"{PUBLIC}/x/other", "ref": "main"})
    world.configure(site=world.site.url)
    refused = world.refused(3)
    assert "two indexes of the name 'site'" in refused["what"]
    assert "another.example" in refused["why"]


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ('[tool.uv.sources]\nkitops = { path = "libs/kitops" }\n', ""),
        ("[tool.uv.sources]\nkitops = { workspace = true }\n", '[tool.uv.workspace]\nmembers = ["libs/*"]\n'),
    ],
)
def test_what_is_in_the_same_tree_is_taken_from_there(world: World, source: str, more: str) -> None:
    member = project_files("kitops", "0.5", "kitops")
    commit = world.commit(source + more, "kitops", more={f"libs/kitops/{name}": text for name, text in member.items()})
    world.lock()
    assert f"kitops @ git+{URL}@{commit}#subdirectory=libs/kitops" in world.text("git.txt")
    assert [path for path in world.asked_default_for("kitops") if "files" in path] == []
    world.own.run("lock", "--check")


@pytest.mark.parametrize("path", ["../kitops", "/opt/kitops", "libs/kitops"])
def test_a_path_outside_of_the_tree_is_no_package_of_the_index(world: World, path: str) -> None:
    world.commit(f'[tool.uv.sources]\nkitops = {{ path = "{path}" }}\n', "kitops")
    refused = world.refused(4)
    assert f"kitops from path {path}" in json.dumps(refused)
