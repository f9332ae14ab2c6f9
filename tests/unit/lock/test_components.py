"""Who decides what a component is: the user's pin, the stack's file, upstream."""

import json
from datetime import date

import pytest
from helpers.fake_git import TIP, FakeRepositories, FakeRepository

from envbuild.catalog.models import Stack
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.core.progress import SilentReporter
from envbuild.lock.components import Origin, choose, choose_anchor, lead, parse_pins, upstream_overrides
from envbuild.lock.refs import GitRef, SpecifierRef, VersionRef

NEMO, MCORE = "https://x/nemo", "https://x/mcore"
SHA = "b" * 40
DAY = date(2025, 1, 2)


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


def chosen(stack=STACK, pins=None, repositories=None, as_of=None):
    repositories = repositories or upstream()
    refs = parse_pins("s", stack, pins or {})
    anchor = choose_anchor(stack, refs, repositories, as_of)
    return choose(stack, refs, [lead(anchor, repositories, SilentReporter())], repositories, as_of)


def test_the_stack_then_upstream():
    found = chosen()
    assert list(found) == list(STACK.components)
    anchor = found["nemo-toolkit"]
    assert (anchor.origin, anchor.commit.sha, anchor.asked, anchor.git) == (Origin.STACK, TIP, "main", NEMO)
    core = found["megatron-core"]
    assert (core.origin, core.commit.sha, core.git, core.specifier) == (Origin.UPSTREAM, SHA, MCORE, "")
    assert core.because == f"requirements/manifest.json of nemo-toolkit {TIP[:12]}"
    # The stack names no repository: upstream's own is taken.
    assert (found["transformer-engine"].git, found["transformer-engine"].asked) == ("https://x/te", "v2")
    assert (found["dep"].origin, found["dep"].specifier, found["dep"].commit) == (Origin.STACK, ">=1", None)
    assert (found["anything"].specifier, found["anything"].asked) == ("", "any release")


@pytest.mark.parametrize(
    ("pin", "specifier", "commit"),
    [("0.16.1", "==0.16.1", None), (">=0.15,<0.16", ">=0.15,<0.16", None), ("core_v1", "", TIP), (SHA, "", SHA)],
)
def test_a_pin_wins(pin, specifier, commit):
    core = chosen(pins={"Megatron_Core": pin})["megatron-core"]
    assert (core.origin, core.because, core.asked) == (Origin.PIN, "pinned by the user", pin)
    assert (core.specifier, core.commit.sha if core.commit else None) == (specifier, commit)


@pytest.mark.parametrize("own", [{"version": "==0.15.*"}, {"ref": "core_v1"}])
def test_what_the_stack_says_wins_over_upstream(own):
    stack = stack_of(**{"nemo-toolkit": {"git": NEMO, "ref": "main"}, "megatron-core": {"git": MCORE, **own}})
    assert chosen(stack)["megatron-core"].because == "the stack's file"


def test_an_anchor_from_the_index_has_no_upstream():
    found = chosen(pins={"nemo-toolkit": "2.7.3"})
    assert found["nemo-toolkit"].specifier == "==2.7.3"
    assert found["megatron-core"].origin is Origin.STACK


def test_every_branch_is_as_of_the_day():
    repositories = upstream()
    chosen(pins={"megatron-core": "main"}, repositories=repositories, as_of=DAY)
    asked = {url: [when for _, when in item.resolved] for url, item in repositories.all.items()}
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
    with pytest.raises(UsageError, match="stack s has no component 'flash-attn' to pin") as caught:
        parse_pins("s", STACK, {"flash-attn": "2"})
    assert "nemo-toolkit, megatron-core" in caught.value.why


def test_a_git_pin_of_a_component_without_repository_is_refused():
    with pytest.raises(ConfigurationError, match="dep has no repository") as caught:
        parse_pins("s", STACK, {"dep": "main"})
    assert "Add git = URL" in caught.value.fix


def test_versions_that_upstream_forces_on_others():
    text = "[tool.uv]\noverride-dependencies = ['dep==9', 'other>=2', 'from-git @ git+https://x/g@v1']\n"
    repositories = upstream(**{"pyproject.toml": text})
    found = chosen(repositories=repositories)
    leads = [lead(found["nemo-toolkit"], repositories, SilentReporter())]
    forced = upstream_overrides(leads, found, repositories)
    assert {name: item.texts for name, item in forced.items()} == {"other": (">=2",)}
    assert forced["other"].by == "nemo-toolkit"
    assert upstream_overrides([], found, repositories) == {}


def test_upstreams_commit_is_in_the_repository_that_upstream_names():
    """It may be a fork, and then the stack's own repository does not have the commit."""
    fork = stack_of(**{"nemo-toolkit": {"git": NEMO, "ref": "main"}, "megatron-core": {"git": "https://x/other"}})
    assert chosen(fork)["megatron-core"].git == MCORE
