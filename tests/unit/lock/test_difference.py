"""What changed between two locks, in people's words."""

from pathlib import Path

from helpers.locks import make_lock

from envbuild.catalog.stack import Phase
from envbuild.lock.diff import compare, needed_by, summary
from envbuild.lock.lockfile import read_lock
from envbuild.lock.models import LockedComponent

MAIN = """\
# Written by `envbuild lock`.
dep==1.0 ; python_version > '3' \\
    --hash=sha256:aa
    # via
    #   lib
    #   other
lib==1.0 \\
    --hash=sha256:bb
    # via envbuild-mcore
only-here==1 \\
    --hash=sha256:cc
    # via lib
"""


def component(version="1.0", **more):
    return LockedComponent(**({"asked": ">=1", "version": version, "phase": Phase.MAIN} | more))


def lock(path: Path, main: str = MAIN, **components: LockedComponent):
    # The digest is of another record's components: only what is compared matters here.
    made = make_lock(path, main)
    whole = read_lock(path)
    return type(whole)(path, made.model_copy(update={"components": components or {"lib": component()}}))


def texts(old, new):
    return [change.text() for change in compare(old, new)]


def test_who_needs_whom(tmp_path):
    assert needed_by(lock(tmp_path)) == {
        "dep": ("lib", "other"),
        "lib": ("envbuild-mcore",),
        "only-here": ("lib",),
    }


def test_packages_that_came_went_and_moved(tmp_path):
    new = MAIN.replace("dep==1.0", "dep==2.0").replace("only-here==1", "newcomer==3")
    old, new = lock(tmp_path / "a"), lock(tmp_path / "b", new)
    assert texts(old, new) == [
        "~ dep 1.0 -> 2.0  (needed by lib, other)",
        "+ newcomer 3  (needed by lib)",
        "- only-here 1  (was needed by lib)",
    ]
    assert summary(old, new, compare(old, new)).endswith(": 1 changed, 1 added, 1 removed")


def test_many_who_need_it_are_cut_short(tmp_path):
    many = "    # via\n" + "".join(f"    #   p{number}\n" for number in range(5))
    new = MAIN.replace("dep==1.0", "dep==2.0").replace("    # via\n    #   lib\n    #   other\n", many)
    (line,) = texts(lock(tmp_path / "a"), lock(tmp_path / "b", new))
    assert line == "~ dep 1.0 -> 2.0  (needed by p0, p1, p2 and others)"


def changed(tmp_path, before, after):
    components = [{"x": entry} if entry else {"other": component()} for entry in (before, after)]
    old, new = lock(tmp_path / "a", **components[0]), lock(tmp_path / "b", **components[1])
    return [line for line in texts(old, new) if " x " in line]


def git(sha, asked="main", kind="branch", **more):
    return component(asked=asked, git="https://x/r", commit=sha * 40, ref_kind=kind, **more)


def test_why_a_component_changed(tmp_path):
    cases = [
        (git("a"), git("b"), "~ x 1.0 at aaaaaaaaaaaa -> 1.0 at bbbbbbbbbbbb  (branch main moved)"),
        (
            git("a", "v1", "tag"),
            git("b", "v1", "tag"),
            "~ x 1.0 at aaaaaaaaaaaa -> 1.0 at bbbbbbbbbbbb  (tag v1 is another commit now)",
        ),
        (component(), component("1.1"), "~ x 1.0 -> 1.1  (>=1 allows a release that the as-of moment lets in)"),
        (
            component(),
            component("2.0", asked="==2.0", because="pinned by the user"),
            "~ x 1.0 -> 2.0  (asked for ==2.0 instead of >=1: pinned by the user)",
        ),
        (None, component(because="the stack's file"), "+ x 1.0  (new component: the stack's file)"),
        (component(), None, "- x 1.0  (no component of the stack any more)"),
    ]
    for number, (before, after, expected) in enumerate(cases):
        assert changed(tmp_path / str(number), before, after) == [expected]


def test_component_appears_once_in_a_difference(tmp_path):
    new = MAIN.replace("lib==1.0", "lib==2.0")
    old, new = lock(tmp_path / "a"), lock(tmp_path / "b", new, lib=component("2.0"))
    assert [(change.name, change.component) for change in compare(old, new)] == [("lib", True)]


def test_no_change_and_only_other_hashes(tmp_path):
    old, new = lock(tmp_path / "a"), lock(tmp_path / "b", MAIN.replace("sha256:aa", "sha256:ab"))
    assert compare(old, old) == compare(old, new) == ()
    assert summary(old, old, ()).startswith("no change: lock ")
    assert "the same versions; hashes" in summary(old, new, ())


def test_components_from_git_are_no_packages_that_changed(tmp_path):
    old, new = lock(tmp_path / "a", lib=git("a")), lock(tmp_path / "b", lib=git("b"))
    assert [change.name for change in compare(old, new)] == ["lib"]
