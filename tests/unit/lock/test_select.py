"""Who decides what a component is: the user's pin, the stack's file, upstream."""

import json
from datetime import date
from pathlib import Path

import pytest
from helpers.fake_git import TIP, FakeRepositories, FakeRepository
from packaging.version import Version

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.stack import Component, Stack
from envbuild.core.errors import ConfigurationError, NetworkError, UsageError
from envbuild.git.refs import GitRef
from envbuild.lock.components.models import Companion, DecidedBy, Lead
from envbuild.lock.components.select import Chooser, left_out, releases_like, tree_lead, upstream_overrides
from envbuild.lock.components.tree import tree_of
from envbuild.lock.inputs.pins import SpecifierRef, VersionRef, parse_pins

NEMO, MCORE = "https://x/nemo", "https://x/mcore"
SHA = "b" * 40
DAY = date(2025, 1, 2)
CATALOG = Catalog.open(Path("/nonexistent"))
BASE = CATALOG.base("debian12")


def stack_of(**components):
    fields = {"summary": "s", "driver": "nemo", "matrix": "m", "builds": [{"target": "cpu", "bases": ["b"]}]}
    return Stack.model_validate({**fields, "anchor": next(iter(components)), "components": components})


def upstream(**files):
    entries = {"megatron-lm": {"repo": MCORE, "ref": SHA}, "transformer_engine": {"repo": "https://x/te", "ref": "v2"}}
    manifest = json.dumps({"vcs-dependencies": entries})
    return FakeRepositories(FakeRepository(NEMO, {"requirements/manifest.json": manifest, **files}))


STACK = stack_of(
    **{
        "nemo-toolkit": {"git": NEMO, "ref": "main"},
        "megatron-core": {"git": MCORE},
        "transformer-engine": {},
        "dep": {"version": ">=1"},
        "anything": {},
    }
)


def lead_of(entry, repositories):
    """What belongs to a component, where no table says anything of releases."""
    tree = tree_of(entry, repositories)
    return tree_lead(tree, BASE) if tree is not None else Lead(chosen=entry, companions={})


def chooser(repositories, stack=STACK, pins=None, as_of=None):
    return Chooser(pins=parse_pins("s", stack, pins or {}), as_of=as_of, base=BASE, repositories=repositories)


def chosen(stack=STACK, pins=None, repositories=None, as_of=None):
    repositories = repositories or upstream()
    choosing = chooser(repositories, stack, pins, as_of)
    return choosing.components(stack, [lead_of(choosing.anchor(stack), repositories)])


def test_the_stack_then_upstream():
    components = chosen()
    assert list(components) == list(STACK.components)
    anchor = components["nemo-toolkit"]
    assert (anchor.origin, anchor.commit.sha, anchor.asked, anchor.git) == (DecidedBy.STACK, TIP, "main", NEMO)
    core = components["megatron-core"]
    assert (core.origin, core.commit.sha, core.git, core.specifier) == (DecidedBy.UPSTREAM, SHA, MCORE, "")
    assert core.because == f"requirements/manifest.json of nemo-toolkit {TIP[:12]}"
    # The stack names no repository: upstream's own is taken.
    assert (components["transformer-engine"].git, components["transformer-engine"].asked) == ("https://x/te", "v2")
    assert (components["dep"].origin, components["dep"].specifier, components["dep"].commit) == (
        DecidedBy.STACK,
        ">=1",
        None,
    )
    assert (components["anything"].specifier, components["anything"].asked) == ("", "any release")


@pytest.mark.parametrize(
    ("pin", "specifier", "commit"),
    [("0.16.1", "==0.16.1", None), (">=0.15,<0.16", ">=0.15,<0.16", None), ("core_v1", "", TIP), (SHA, "", SHA)],
)
def test_a_pin_wins(pin, specifier, commit):
    core = chosen(pins={"Megatron_Core": pin})["megatron-core"]
    assert (core.origin, core.because, core.asked) == (DecidedBy.PIN, "pinned by the user", pin)
    assert (core.specifier, core.commit.sha if core.commit else None) == (specifier, commit)


@pytest.mark.parametrize("own", [{"version": "==0.15.*"}, {"ref": "core_v1"}])
def test_what_the_stack_says_wins_over_upstream(own):
    stack = stack_of(**{"nemo-toolkit": {"git": NEMO, "ref": "main"}, "megatron-core": {"git": MCORE, **own}})
    assert chosen(stack)["megatron-core"].because == "the stack's file"


def test_an_anchor_from_the_index_has_no_upstream():
    components = chosen(pins={"nemo-toolkit": "2.7.3"})
    assert components["nemo-toolkit"].specifier == "==2.7.3"
    assert components["megatron-core"].origin is DecidedBy.STACK


def test_every_branch_is_as_of_the_day():
    repositories = upstream()
    chosen(pins={"megatron-core": "main"}, repositories=repositories, as_of=DAY)
    asked = {url: [when for _, when in entry.resolved] for url, entry in repositories.all.items()}
    assert asked == {NEMO: [DAY], MCORE: [DAY], "https://x/te": [DAY]}


def test_a_commit_without_a_repository_is_refused():
    files = {"pyproject.toml": "", "requirements/manifest.json": '{"vcs-dependencies": {}}'}
    repository = FakeRepository(NEMO, files, submodules={"3rdparty/Megatron-LM": SHA})
    stack = stack_of(**{"nemo-toolkit": {"git": NEMO, "ref": "main"}, "megatron-core": {}})
    with pytest.raises(ConfigurationError, match=f"names commit {SHA} of megatron-core"):
        chosen(stack, repositories=FakeRepositories(repository))


def test_pins_are_parsed():
    pins = parse_pins("s", STACK, {"NeMo.Toolkit": "v2.3.0", "dep": "1.0", "anything": "<2"})
    assert pins == {"nemo-toolkit": GitRef("v2.3.0"), "dep": VersionRef("1.0"), "anything": SpecifierRef("<2")}


def test_a_pin_of_something_else_is_refused():
    released = stack_of(**{"nemo-toolkit": {}, "megatron-core": {}})
    with pytest.raises(UsageError, match="stack s has no component 'flash-attn' to pin") as caught:
        parse_pins("s", released, {"flash-attn": "2"})
    assert "nemo-toolkit, megatron-core" in caught.value.why


def test_a_pin_of_what_a_component_from_git_may_take_is_kept():
    assert parse_pins("s", STACK, {"Flash.Attn": "v2"}) == {"flash-attn": GitRef("v2")}
    for name in ("megatron-energon", "megatron-core-utils", "megatron-fsdp"):
        assert parse_pins("s", STACK, {name: "main"}) == {name: GitRef("main")}


@pytest.mark.parametrize(
    ("name", "meant"),
    [("megatron-cor", "megatron-core"), ("Megtron_Core", "megatron-core"), ("nemo", "nemo-toolkit")],
)
def test_a_misspelt_component_is_refused_before_anything_is_fetched(name, meant):
    with pytest.raises(UsageError, match=f"stack s has no component '{name}' to pin") as caught:
        parse_pins("s", STACK, {name: "main"})
    assert f"Did you mean '{meant}'?" in caught.value.why
    canonical = name.lower().replace("_", "-")
    assert f"--pin {canonical}=git:REF" in caught.value.fix
    assert parse_pins("s", STACK, {name: "git:main"}) == {canonical: GitRef("main")}


FORK = "https://git.example.invalid/me/core"
PAGES = (
    ("pull/7/files", "refs/pull/7/head"),
    ("tree/my/branch", "my/branch"),
    ("-/tree/main/", "main"),
    ("commit/1234567", "1234567"),
)


@pytest.mark.parametrize(
    ("text", "url", "ref"),
    [
        ("https://git.example.invalid/me/core", "https://git.example.invalid/me/core", "REF"),
        ("git+https://git.example.invalid/me/core@my/branch", "https://git.example.invalid/me/core", "my/branch"),
        ("ssh://git@git.example.invalid/me/core.git@v1", "ssh://git@git.example.invalid/me/core.git", "v1"),
        ("git@git.example.invalid:me/core", "git@git.example.invalid:me/core", "REF"),
        ("https://u:secret@git.example.invalid/me/core@v1", "https://git.example.invalid/me/core", "v1"),
        *((f"{FORK}/{page}", FORK, ref) for page, ref in PAGES),
    ],
)
def test_the_address_of_a_fork_is_answered_with_the_stack_that_takes_it(text, url, ref):
    with pytest.raises(ConfigurationError, match="names a repository, and a pin names a version, or a ref") as caught:
        parse_pins("s", STACK, {"megatron-core": text})
    assert caught.value.fix.endswith(f'extends = "s"\n[components.megatron-core]\ngit = "{url}"\nref = "{ref}"')
    assert "secret" not in str(caught.value) + caught.value.fix


def test_the_page_of_a_ref_is_answered_with_its_pin():
    with pytest.raises(ConfigurationError) as caught:
        parse_pins("s", STACK, {"megatron-core": f"{FORK}/pull/7/files"})
    assert "--pin megatron-core=refs/pull/7/head" in caught.value.fix


def test_a_git_pin_of_a_component_without_repository_is_refused():
    with pytest.raises(ConfigurationError, match="dep has no repository") as caught:
        parse_pins("s", STACK, {"dep": "main"})
    assert "Add git = URL" in caught.value.fix


def test_versions_that_upstream_forces_on_others():
    text = "[tool.uv]\noverride-dependencies = ['dep==9', 'other>=2', 'from-git @ git+https://x/g@v1']\n"
    repositories = upstream(**{"pyproject.toml": text})
    components = chosen(repositories=repositories)
    leads = [lead_of(components["nemo-toolkit"], repositories)]
    forced = upstream_overrides(leads, components, repositories)
    assert {name: forced_range.texts for name, forced_range in forced.items()} == {"other": (">=2",)}
    assert forced["other"].by == "nemo-toolkit"
    assert upstream_overrides([], components, repositories) == {}


def test_upstreams_commit_is_in_the_repository_that_upstream_names():
    """It may be a fork, and then the stack's own repository does not have the commit."""
    fork = stack_of(**{"nemo-toolkit": {"git": NEMO, "ref": "main"}, "megatron-core": {"git": "https://x/other"}})
    assert chosen(fork)["megatron-core"].git == MCORE


@pytest.mark.parametrize("gone", [True, False])
def test_an_outage_is_not_upstreams(gone, monkeypatch):
    error = NetworkError("cannot list the refs")
    error.gone = gone
    resolve = FakeRepository.resolve

    def fails(self, *arguments):
        if self.url == MCORE:
            raise error
        return resolve(self, *arguments)

    monkeypatch.setattr(FakeRepository, "resolve", fails)
    with pytest.raises(NetworkError) as caught:
        chosen(stack_of(**{"nemo-toolkit": {"git": NEMO, "ref": "main"}, "megatron-core": {"git": MCORE}}))
    assert caught.value.of_upstream is gone


# ---- of a commit that upstream pins, its release


TE = "https://x/te"
VERSION_FILE = "build_tools/VERSION.txt"
RELEASED = {"git": TE, "release_file": VERSION_FILE}
WITH_RELEASES = stack_of(
    **{
        "nemo-toolkit": {"git": NEMO, "ref": "main"},
        "megatron-core": {"git": MCORE, "uses": ["transformer-engine"]},
        "transformer-engine": RELEASED,
        "transformer-engine-torch": RELEASED,
    }
)


def with_version(text, *others):
    """Upstream, whose manifest pins a commit of Transformer Engine that says this version."""
    files = {} if text is None else {VERSION_FILE: text}
    actual = upstream()
    actual.all[TE] = FakeRepository(TE, files)
    actual.all.update({repository.url: repository for repository in others})
    return actual


def test_of_a_pinned_commit_the_release_of_its_version_is_taken():
    components = chosen(WITH_RELEASES, repositories=with_version("2.7.0\n"))
    for name in ("transformer-engine", "transformer-engine-torch"):
        component = components[name]
        assert (component.commit, component.git, component.specifier, component.asked) == (None, "", "==2.7.*", "v2")
        assert component.because == (
            f"requirements/manifest.json of nemo-toolkit {TIP[:12]}; {VERSION_FILE} at that commit says 2.7.0, "
            "so a release of that"
        )


@pytest.mark.parametrize(
    ("version", "specifier"),
    [("2.7.0", "==2.7.*"), ("2.18.0+e7c550c5", "==2.18.*"), ("2.8.0.dev0", "<2.9"), ("3.0.0rc1", "==3.0.*")],
)
def test_releases_that_a_commit_is_nearest_to(version, specifier):
    assert releases_like(Version(version)) == specifier


@pytest.mark.parametrize(("text", "why"), [(None, "is not there"), ("two", "says 'two' there")])
def test_a_commit_that_does_not_say_its_version_is_refused(text, why):
    with pytest.raises(ConfigurationError, match="which release of transformer-engine belongs to commit") as caught:
        chosen(WITH_RELEASES, repositories=with_version(text))
    assert why in caught.value.why
    assert "--pin transformer-engine=VERSION" in caught.value.fix


def test_a_commit_that_the_user_pins_is_that_commit():
    component = chosen(WITH_RELEASES, {"transformer-engine": SHA}, with_version("2.7.0"))["transformer-engine"]
    assert (component.commit.sha, component.specifier) == (SHA, "")


def test_megatrons_own_sources_count_where_the_leads_say_nothing():
    sources = f'[tool.uv.sources]\ntransformer-engine = {{ git = "{TE}", rev = "{SHA}" }}\n'
    megatron = FakeRepository(MCORE, {"pyproject.toml": sources})
    entries = {"megatron-lm": {"repo": MCORE, "ref": SHA}}
    nemo = FakeRepository(NEMO, {"requirements/manifest.json": json.dumps({"vcs-dependencies": entries})})
    repositories = FakeRepositories(nemo, megatron, FakeRepository(TE, {VERSION_FILE: "2.18.0"}))
    component = chosen(WITH_RELEASES, repositories=repositories)["transformer-engine"]
    assert component.specifier == "==2.18.*"
    assert component.because.startswith(f"pyproject.toml [tool.uv.sources] of megatron-core {SHA[:12]}; ")
    assert chosen(WITH_RELEASES, repositories=repositories)["transformer-engine-torch"].specifier == "==2.18.*"
    # What it does not use is for its authors' own builds.
    unused = WITH_RELEASES.model_copy(
        update={"components": {**WITH_RELEASES.components, "megatron-core": Component(git=MCORE)}}
    )
    assert chosen(unused, repositories=repositories)["transformer-engine"].origin is DecidedBy.STACK
    # What the leads say comes first.
    both = with_version("2.7.0", megatron)
    assert chosen(WITH_RELEASES, repositories=both)["transformer-engine"].specifier == "==2.7.*"
    # An anchor that does not lead comes last.
    choosing = chooser(both, WITH_RELEASES)
    taking_over = choosing.own_choice("bridge", Component(git="https://x/bridge", ref="main"))
    leads = [Lead(chosen=taking_over, companions={}), lead_of(choosing.anchor(WITH_RELEASES), both)]
    components = choosing.components(WITH_RELEASES, leads)
    assert f"sources] of megatron-core {SHA[:12]}" in components["transformer-engine"].because
    # A release of megatron-core has no such file.
    pinned = chosen(WITH_RELEASES, {"megatron-core": "0.16.1"}, repositories)
    assert pinned["transformer-engine"].origin is DecidedBy.STACK


# ---- what belongs to the leads and is not in the stack


def test_what_upstream_names_and_the_stack_lacks_is_left_out():
    repositories = upstream()
    stack = stack_of(**{"nemo-toolkit": {"git": NEMO, "ref": "main"}, "megatron-core": {"git": MCORE}})
    choosing = chooser(repositories, stack)
    leads = [lead_of(choosing.anchor(stack), repositories)]
    components = choosing.components(stack, leads)
    where = f"(requirements/manifest.json of nemo-toolkit {TIP[:12]})"
    assert left_out(leads, components) == (f"transformer-engine v2 {where}", f"transformer-engine-torch v2 {where}")
    # Where one package of a repository is a component, the others are its affair.
    whole = chooser(repositories).components(STACK, leads)
    assert left_out(leads, whole) == ()


def test_versions_that_are_forced_are_not_left_out_and_a_tables_are():
    text = "[tool.uv]\noverride-dependencies = ['other>=2', 'from-git @ git+https://x/g@v1']\n"
    repositories = FakeRepositories(FakeRepository(NEMO, {"pyproject.toml": text}))
    components = chosen(repositories=repositories)
    own = lead_of(components["nemo-toolkit"], repositories)
    assert [line.split(" (")[0] for line in left_out([own], components)] == ["from-git v1"]
    table = Lead(
        chosen=components["dep"],
        companions={"kernels": Companion(package="kernels", where="envs/companions/dep.toml", specifier="<3")},
        origin=DecidedBy.TABLE,
    )
    assert left_out([table], components) == ("kernels <3 (envs/companions/dep.toml for dep >=1)",)
