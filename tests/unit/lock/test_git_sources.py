"""What components from git take from elsewhere, from trees that are dictionaries, and what a resolution asks for."""

from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.fake_git import TIP, FakeRepositories, FakeRepository
from helpers.locks import resolved_package

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.stack import Component
from envbuild.core.errors import ConfigurationError, NetworkError, ResolutionError
from envbuild.core.progress import SilentReporter
from envbuild.git.refs import GitRef
from envbuild.lock.components.asked_sources import refuse_missing, settle
from envbuild.lock.components.git_sources import (
    GitSourceReader,
    forced_sources,
    marked,
    with_upstreams_phases,
)
from envbuild.lock.components.models import ALWAYS, ANY, BUILD, Chosen, Companion, DecidedBy, Lead
from envbuild.lock.components.tree_sources import IndexNotConfiguredError
from envbuild.lock.inputs.pins import VersionRef
from envbuild.lock.resolve.builds import to_compile

CORE, OPTIM, OTHER = "https://x/core", "https://x/optim", "https://x/other"
SHA = "b" * 40
BASE = Catalog.open(Path("/nonexistent")).base("debian12")
DAY = date(2025, 3, 1)


def project(sources, *, needs=(), extras="", more="", build=("setuptools",)):
    return (
        f'[project]\nname = "p"\nversion = "1"\ndependencies = {list(needs)}\n{more}'
        f"[project.optional-dependencies]\n{extras}"
        f"[build-system]\nrequires = {list(build)}\n[tool.uv.sources]\n{sources}"
    )


def component(name="core", url=CORE, **more):
    commit = FakeRepository(url).resolve(GitRef("main"))
    fields = {"asked": "main", "origin": DecidedBy.STACK, "because": "the stack's file", "git": url, "commit": commit}
    return Chosen(name=name, **{"spec": Component(git=url), **fields, **more})


def take(*repositories, chosen=None, **changes):
    arguments = {
        "base": BASE,
        "repositories": FakeRepositories(*repositories),
        "reporter": SilentReporter(),
        "ruled": (),
        "forced": {},
        "pins": {},
        "as_of": DAY,
    }
    every = chosen or {"core": component()}
    return GitSourceReader(**{**arguments, **changes}).sources(every)


def core(text):
    return FakeRepository(CORE, {"pyproject.toml": text})


SOURCE = f'Optim = {{ git = "{OPTIM}", branch = "dev" }}\n'


def test_a_dependency_is_required_and_its_branch_is_of_the_day():
    optim = FakeRepository(OPTIM, {"pyproject.toml": "[build-system]\nrequires = ['flit']"})
    (source,) = take(core(project(SOURCE, needs=["optim>=1"])), optim).candidates
    # It is built in isolation: the environment does not get what builds it.
    assert (source.name, source.required, source.parts, source.build_requires) == ("optim", True, {ALWAYS}, ())
    assert optim.resolved == [("refs/heads/dev", DAY)]
    assert source.chosen.wanted == f" @ git+{OPTIM}@{TIP}"
    assert source.chosen.because == f"pyproject.toml [tool.uv.sources] of core {TIP[:12]}"


@pytest.mark.parametrize(("asked", "required"), [((), False), (("dev",), True)])
def test_an_extra_is_required_where_the_stack_asks_for_it(asked, required):
    text = project(SOURCE, extras='dev = ["optim"]\n')
    spec = Component(git=CORE, extras=asked)
    (entry,) = take(core(text), chosen={"core": component(spec=spec)}).candidates
    assert (entry.parts, entry.required) == ({"dev"}, required)


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        (SOURCE, []),
        (SOURCE, ["optim ; sys_platform == 'darwin'"]),
        (f'optim = {{ git = "{OPTIM}", marker = "python_version < \'3\'" }}', ["optim"]),
        (f'optim = {{ git = "{OPTIM}", group = "test" }}', ["optim"]),
        (f'optim = {{ git = "{OPTIM}", extra = "dev" }}', ["optim"]),
    ],
)
def test_what_is_not_meant_here_is_not_taken(source, needs):
    optim = FakeRepository(OPTIM)
    assert take(core(project(source, needs=needs, extras="dev = []\n")), optim).candidates == ()
    assert optim.resolved == []


def test_what_is_of_an_index_that_nothing_declares_is_never_taken_from_another():
    repository = core(project('optim = { index = "x" }', needs=["optim"]))
    with pytest.raises(IndexNotConfiguredError, match="takes optim from index 'x'"):
        take(repository, FakeRepository(OPTIM))


def test_what_builds_it_and_what_only_a_build_would_tell():
    repository = core(project(SOURCE, build=["optim"]))
    assert take(repository).candidates == ()
    shared = {"core": component(spec=Component(git=CORE, phase="compile"))}
    (entry,) = take(repository, chosen=shared).candidates
    assert (entry.parts, entry.required) == ({BUILD}, True)
    dynamic = f'[project]\nname = "p"\ndynamic = ["dependencies"]\n[tool.uv.sources]\n{SOURCE}'
    (entry,) = take(core(dynamic)).candidates
    assert (entry.parts, entry.required) == ({ANY}, False)


def test_what_builds_in_the_environment_is_as_upstream_has_it():
    settings = '[tool.uv]\nno-build-isolation-package = ["Kernels"]\n'
    kernels = FakeRepository(OTHER, {"pyproject.toml": project("", build=["setuptools<80,>=61", "torch"])})
    repositories = FakeRepositories(core(settings), kernels)
    chosen = {"core": component(), "kernels": component("kernels", OTHER), "optim": component("optim", OPTIM)}
    phases = {name: part.phase.value for name, part in with_upstreams_phases(chosen, (), (), repositories).items()}
    assert phases == {"core": "main", "kernels": "compile", "optim": "main"}
    # Of the index, too, once a resolution shows that there is no wheel of it.
    del chosen["kernels"]
    added = with_upstreams_phases(chosen, {"kernels", "mamba-ssm"}, (), repositories)
    assert {*added} == {"core", "optim", "kernels", "mamba-ssm"}
    assert (added["mamba-ssm"].phase.value, added["mamba-ssm"].because) == (
        "compile",
        "its recipe, and there is no wheel of it",
    )
    assert (added["kernels"].phase.value, added["kernels"].specifier) == ("compile", "")
    assert "no-build-isolation-package of core" in added["kernels"].because
    # What a lead says of its releases holds, also where nobody listed it as a component.
    table = {"mamba-ssm": Companion(package="mamba-ssm", where="envs/companions/core.toml", specifier="==2.3.1")}
    lead = Lead(chosen=chosen["core"], companions=table, origin=DecidedBy.TABLE)
    held = with_upstreams_phases(chosen, {"mamba-ssm"}, (lead,), repositories)["mamba-ssm"]
    assert (held.specifier, held.origin, held.phase.value) == ("==2.3.1", DecidedBy.TABLE, "compile")
    assert held.because.startswith("envs/companions/core.toml for core")
    # Taken by another one, its build's limit of setuptools does not hold for the environment.
    source = f'kernels = {{ git = "{OTHER}" }}\n[tool.uv]\nno-build-isolation-package = ["kernels"]\n'
    (entry,) = take(core(project(source, needs=["kernels"])), kernels).candidates
    assert (entry.chosen.phase.value, entry.build_requires) == ("compile", ("setuptools>=61", "torch"))


@pytest.mark.parametrize(
    ("table", "compiled"),
    [
        ({"source": {"registry": "x"}, "sdist": {}}, True),
        ({"source": {"registry": "x"}, "wheels": [{"url": "https://x/kernels-1.0-cp313-cp313-win_amd64.whl"}]}, True),
        ({"source": {"registry": "x"}, "wheels": [{"url": "https://x/kernels-1.0-py3-none-any.whl"}]}, False),
        ({"source": {"git": "x"}}, False),
        (None, False),
    ],
)
def test_what_of_the_index_must_be_compiled(table, compiled):
    core_of = core('[tool.uv]\nno-build-isolation-package = ["kernels"]\n')
    chosen = {"core": component()}
    catalog = SimpleNamespace(names=lambda kind: {"wheels": ["mamba-ssm"]}[kind])
    plan = SimpleNamespace(
        project=SimpleNamespace(base=BASE, chosen=chosen, every=chosen),
        inputs=SimpleNamespace(selection=SimpleNamespace(catalog=catalog)),
    )
    package = resolved_package({"name": "kernels", **table}) if table else None
    resolution = SimpleNamespace(packages={"kernels": package} if package else {})
    assert to_compile(plan, resolution, FakeRepositories(core_of)) == ({"kernels"} if compiled else set())
    # Upstream's tree does not name it, as that of a release from the index cannot.
    resolution.packages["mamba-ssm"] = package or resolved_package({"name": "mamba-ssm", "source": {"git": "x"}})
    expected = {"kernels", "mamba-ssm"} if compiled else set()
    assert to_compile(plan, resolution, FakeRepositories(core_of)) == expected
    del resolution.packages["mamba-ssm"]
    plan.project.every = {**chosen, "kernels": component("kernels", OTHER)}
    assert to_compile(plan, resolution, FakeRepositories(core_of)) == set()


def test_the_stacks_own_and_what_is_ruled_are_not_taken():
    repository = core(project(f'{SOURCE}torch = {{ git = "{OTHER}" }}\n', needs=["optim", "torch"]))
    chosen = {
        "core": component(),
        "optim": component("optim", OPTIM, because="pinned by the user", origin=DecidedBy.PIN),
    }
    takings = take(repository, chosen=chosen, ruled={"torch"})
    assert takings.candidates == ()
    over = f"dev of {OPTIM} (pyproject.toml [tool.uv.sources] of core {TIP[:12]})"
    assert marked(chosen, takings)["optim"].because == f"pinned by the user, over {over}"
    assert marked(chosen, takings)["core"].because == "the stack's file"


def test_an_override_of_upstream_says_where_it_is_taken_from():
    lead = FakeRepository(OTHER, {"pyproject.toml": f'[tool.uv]\noverride-dependencies = ["Optim @ git+{OPTIM}@v1"]\n'})
    leads = [Lead(chosen=component("lead", OTHER), companions={})]
    forced = forced_sources(leads, BASE, FakeRepositories(lead))
    source = f'optim = {{ git = "{OPTIM}", rev = "{SHA}" }}\n'
    (entry,) = take(core(project(source, needs=["optim"])), lead, forced=forced).candidates
    assert (entry.by.name, entry.parts, entry.required) == ("core", {ALWAYS}, True)
    assert entry.chosen.asked == "v1"
    assert entry.chosen.because == f"pyproject.toml [tool.uv] override-dependencies of lead {TIP[:12]}"
    # Nothing asks for it.
    assert take(core(project(source)), lead, forced=forced).candidates == ()


class Unreachable(FakeRepository):
    def resolve(self, ref, as_of=None):
        error = NetworkError(f"cannot list the refs of {self.url}", why="It is gone.")
        error.gone = True
        raise error


class Down(FakeRepository):
    def resolve(self, ref, as_of=None):
        raise NetworkError(f"cannot list the refs of {self.url}", why="Timed out.")


def test_an_outage_of_a_source_is_no_reason_to_take_another_release():
    why = f"takes optim from dev of {OPTIM}.\nTimed out."
    with pytest.raises(NetworkError) as caught:
        take(core(project(SOURCE, needs=["optim"])), Down(OPTIM))
    assert caught.value.why.endswith(why)
    assert "--pin optim=VERSION" in caught.value.fix
    sources = take(core(project(SOURCE, extras='dev = ["optim"]\n')), Down(OPTIM))
    refuse_missing(sources, [table("core"), table("optim")])
    with pytest.raises(NetworkError) as caught:
        refuse_missing(sources, [table("core", dev=["optim"]), table("optim")])
    assert caught.value.why.endswith(why)


def test_a_source_that_cannot_be_had_matters_where_something_asks_for_it():
    repository = core(project(SOURCE, extras='dev = ["optim"]\n'))
    sources = take(repository, Unreachable(OPTIM))
    assert sources.candidates == ()
    refuse_missing(sources, [table("core"), table("optim")])
    with pytest.raises(ResolutionError, match="optim cannot be taken from where core aaaaaaaaaaaa takes it") as caught:
        refuse_missing(sources, [table("core", dev=["optim"]), table("optim")])
    assert caught.value.packages == ("optim",)
    assert f"takes optim from dev of {OPTIM}.\ncannot list the refs of {OPTIM}\nIt is gone." in caught.value.why
    # What the user says is wrong, and not what upstream does.
    with pytest.raises(NetworkError):
        take(repository, Unreachable(OPTIM), pins={"optim": GitRef("main")})


def test_pins_of_what_is_taken():
    text = project(SOURCE, needs=["optim"])
    (source,) = take(core(text), pins={"optim": GitRef(SHA)}).candidates
    assert source.chosen.wanted == f" @ git+{OPTIM}@{SHA}"
    (source,) = take(core(text), pins={"optim": VersionRef("2.0")}).candidates
    assert (source.chosen.wanted, source.chosen.is_direct) == ("==2.0", False)
    assert source.chosen.because.startswith(f"pinned by the user, over dev of {OPTIM}")
    filed = project('optim = { url = "https://x/o.whl" }', needs=["optim"])
    with pytest.raises(ConfigurationError, match="optim has no repository"):
        take(core(filed), pins={"optim": GitRef(SHA)})


def test_malformed_source_is_refused_with_its_place():
    with pytest.raises(ConfigurationError, match=r"\[tool\.uv\.sources\] of https://x/core at") as caught:
        take(core(project("optim = { git = 5 }\n", needs=["optim"])))
    assert "git must be a string" in caught.value.why
    assert "--pin core=REF" in caught.value.fix


def two(extras=""):
    """Two components that take different commits of a package; the second for an extra, if there is one."""
    needs = ["optim"]
    one = core(project(f'optim = {{ git = "{OPTIM}", rev = "{SHA}" }}', needs=needs))
    other = project(SOURCE, needs=[] if extras else needs, extras=extras)
    chosen = {"core": component(), "other": component("other", OTHER)}
    return [one, FakeRepository(OTHER, {"pyproject.toml": other})], chosen


def test_two_commits_of_one_package_are_refused():
    repositories, chosen = two()
    with pytest.raises(ResolutionError, match="take optim from two places") as caught:
        take(*repositories, chosen=chosen)
    assert f"optim {SHA} ({SHA[:12]}): pyproject.toml [tool.uv.sources] of core" in caught.value.why
    assert f"({TIP[:12]}): pyproject.toml [tool.uv.sources] of other" in caught.value.why
    assert f"--pin optim={SHA[:12]}" in caught.value.fix
    assert len(take(*repositories, chosen=chosen, pins={"optim": GitRef(SHA)}).in_force) == 1


def table(name, *needs, **extras):
    lists = {extra: [{"name": entry} for entry in items] for extra, items in extras.items()}
    needed = [{"name": entry} for entry in needs]
    return resolved_package({"name": name, "dependencies": needed, "optional-dependencies": lists})


def test_of_two_the_one_that_is_asked_for_counts():
    repositories, chosen = two(extras='dev = ["optim"]\n')
    takings = take(*repositories, chosen=chosen)
    quiet = [table("core", "optim"), table("other"), table("optim")]
    assert [source.by.name for source in settle(takings, quiet).candidates] == ["core"]
    with pytest.raises(ResolutionError, match="take optim from two places"):
        settle(takings, [table("core", "optim"), table("other", dev=["optim"]), table("optim")])


def test_what_nothing_asks_for_goes_with_what_it_takes():
    inner = project(f'inner = {{ git = "{OTHER}" }}\n', needs=["inner"])
    optim = FakeRepository(OPTIM, {"pyproject.toml": inner})
    takings = take(core(project(SOURCE, extras='dev = ["optim"]\n')), optim)
    assert [(source.name, source.by.name) for source in takings.candidates] == [("optim", "core"), ("inner", "optim")]
    asked = [table("core", dev=["optim"]), table("optim", "inner"), table("inner")]
    assert settle(takings, asked) == takings
    # It is there, from the index, and so is what it would have taken.
    assert settle(takings, [table("core"), table("optim", "inner"), table("inner")]).candidates == ()
    assert takings.without({"core"}).candidates == ()
