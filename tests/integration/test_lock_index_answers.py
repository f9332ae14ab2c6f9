"""What an index may answer: no upload times, no hashes, garbage. A lock comes of it, or an error with its reason."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import ANY, OLD, error, files_of, lock_of, result
from helpers.simple_index import JSON_TYPE, SimpleIndex, make_sdist, simple_index
from helpers.stack_files import BASE, write_stack


def test_an_index_without_upload_times_locks_a_stack_that_pins_its_components(
    own: Any, wheel: Callable[..., None]
) -> None:
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}}, as_of="2025-02-01")
    wheel("lib", "1.0", None, requires=("dep",))
    wheel("dep", "1.0", None)
    done = own.run("lock", "--stack", "s", "--json")
    assert "does not say when lib was uploaded" in done.stderr
    lock = lock_of(own, "s")
    assert (lock.inputs.as_of_held, lock.inputs.no_as_of) == (False, False)
    assert "exclude-newer" not in (own.project / "lockfiles/s" / BASE / "pyproject.toml").read_text()
    assert result(own.run("lock", "--stack", "s", "--json"))["built"] is False
    own.run("lock", "--check")
    refused = error(own.run("lock", "--stack", "s", "--as-of", "2025-02-01", "--name", "t", "--json", status=3))
    assert "does not say when lib was uploaded" in refused["what"]
    assert "--no-as-of" in refused["fix"]


@pytest.mark.parametrize("anchor", [{"anchor": "lib"}, {}], ids=["anchor", "none"])
def test_an_open_stack_needs_the_users_word_for_an_index_without_times(
    own: Any, wheel: Callable[..., None], anchor: dict[str, str]
) -> None:
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}, "dep": {}}, **anchor, as_of="now")
    wheel("lib", "1.0", None, requires=("dep",))
    wheel("dep", "1.0", None)
    refused = error(own.run("lock", "--stack", "s", "--no-verify", "--json", status=3))
    assert "does not say when" in refused["what"]
    own.run("lock", "--stack", "s", "--no-verify", "--no-as-of")
    lock = lock_of(own, "s")
    assert (lock.inputs.as_of_held, lock.inputs.no_as_of) == (False, True)
    own.run("lock", "--check")
    own.run("lock", "--stack", "s", "--no-as-of", "--as-of", "now", status=2)


def test_only_packages_of_the_index_without_times_are_not_held(own: Any, wheel: Callable[..., Path]) -> None:
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}}, as_of="2025-02-01")
    wheel("lib", "1.0", requires=("dep", "own"))
    for uploaded in (OLD, "2025-03-01T00:00:00Z"):
        wheel("dep", "1.0" if uploaded == OLD else "2.0", uploaded)
    with simple_index() as mirror:
        # An index beside the default one, for what uv asks there first.
        own.env["UV_INDEX"] = mirror.url
        for name, requires in (("own", ("deep",)), ("deep", ())):
            path = wheel(name, "1.0", None, requires=requires)
            mirror.add(path, None)
        done = own.run("lock", "--stack", "s")
        assert "held to no moment, and another day may lock others: deep, own\n" in done.stderr
        before, lock = files_of(own, "s"), lock_of(own, "s")
        assert (lock.inputs.as_of_held, lock.inputs.not_held) == (True, ("deep", "own"))
        assert lock.inputs.as_of == "2025-02-02T00:00:00Z"
        assert "\ndep==1.0" in before["main.txt"]
        # What was locked stays, as in a lock that is held altogether.
        mirror.add(wheel("deep", "2.0", None), None)
        own.run("lock", "--stack", "s", "--upgrade")
        assert files_of(own, "s") == before
        own.run("lock", "--check")


# ---- other answers: never exit code 1


Setup = Callable[[SimpleIndex], object]
WHEEL = f"/files/lib-1.0-{ANY}.whl"
slow = pytest.mark.slow


def page(change: Callable[[dict[str, Any]], Any]) -> Setup:
    return lambda index: index.changes.update(lib=change)


def changed(**more: Any) -> Setup:
    return page(lambda answer: {**answer, "files": [{**file, **more} for file in answer["files"]]})


def without(key: str) -> Setup:
    return page(
        lambda answer: {**answer, "files": [{k: v for k, v in file.items() if k != key} for file in answer["files"]]}
    )


def redirected(path: str, to: str) -> Setup:
    return lambda index: index.redirects.update({path: to.replace("INDEX", index.address)})


def status(path: str, number: int) -> Setup:
    return lambda index: index.statuses.update({path: number})


def metadata(stated: str, text: bytes = b"", number: int = 200) -> Setup:
    """The file of PEP 658, with a stated hash of its own."""

    def answer(index: SimpleIndex) -> None:
        changed(**{"core-metadata": {"sha256": stated or hashlib.sha256(text).hexdigest()}})(index)
        index.bodies[f"{WHEEL}.metadata"] = (number, "text/plain", text)

    return answer


# What an index does, and the exit code.
ANSWERS: dict[str, tuple[Setup, int]] = {
    "no hash": (changed(hashes={}), 10),
    "md5 only": (changed(hashes={"md5": "0" * 32}), 10),
    "files of another type": (page(lambda answer: {**answer, "files": 5}), 10),
    "metadata with another hash": (metadata("0" * 64, b"Name: lib\n"), 10),
    "a redirect without end": (redirected("/simple/lib/", "INDEX/simple/lib/"), 10),
}
SLOW_ANSWERS: dict[str, tuple[Setup, int]] = {
    "sha1 only": (changed(hashes={"sha1": "0" * 40}), 10),
    "a short hash": (changed(hashes={"sha256": "abc"}), 10),
    "another hash": (changed(hashes={"sha256": "0" * 64}), 0),
    "hashes of another type": (changed(hashes=5), 10),
    "no file": (page(lambda answer: {**answer, "files": []}), 4),
    "a list": (page(lambda answer: [answer]), 10),
    "no meta": (page(lambda answer: {"name": answer["name"], "files": answer["files"]}), 0),
    "every release yanked": (changed(yanked="broken"), 5),
    "garbage in requires-python": (changed(**{"requires-python": ">=banana"}), 4),
    "garbage in upload-time": (changed(**{"upload-time": "yesterday"}), 10),
    "metadata that is not there": (metadata("0" * 64, number=404), 10),
    "metadata that is refused": (metadata("0" * 64, number=429), 10),
    "metadata that is garbage": (metadata("", b"\0\xff"), 4),
    "no url": (without("url"), 10),
    "an url of nothing": (changed(url=f"https://index.invalid/lib-1.0-{ANY}.whl"), 10),
    "a relative url": (changed(url=f"../..{WHEEL}"), 0),
    "another name": (page(lambda answer: {**answer, "name": "other"}), 0),
    "a file of another package": (changed(filename=f"other-1.0-{ANY}.whl"), 4),
    "a file name in capitals": (changed(filename=f"LIB-1.0-{ANY}.whl"), 0),
    "a size that is a text": (changed(size="big"), 10),
    "busy": (status("/simple/lib/", 429), 10),
    "down": (status("/simple/lib/", 503), 10),
    "a file that is gone": (status(WHEEL, 404), 10),
    "a redirect to a file": (redirected(WHEEL, "file:///etc/hostname"), 10),
    "a redirect to nowhere": (redirected(WHEEL, "http://[:::"), 10),
}


@pytest.mark.parametrize("name", [*ANSWERS, *(pytest.param(name, marks=slow) for name in SLOW_ANSWERS)])
def test_what_an_index_answers_never_ends_in_exit_code_1(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], name: str
) -> None:
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}}, as_of="2025-02-01")
    wheel("lib", "1.0")
    own.env["UV_HTTP_RETRIES"] = "0"
    answer, code = {**ANSWERS, **SLOW_ANSWERS}[name]
    answer(index)
    done = own.run("lock", "--stack", "s", "--json", status=code)
    if code:
        assert error(done)["why"]
        # Another moment or version is no cure for an index that is broken.
        assert code != 10 or "--as-of" not in error(done)["fix"]
    else:
        assert "--hash=sha256:" in (own.project / "lockfiles/s" / BASE / "main.txt").read_text()


@slow
@pytest.mark.parametrize("kind", ["text/html", "text/plain", "application/json", JSON_TYPE])
@pytest.mark.parametrize("number", [200, 403, 500])
def test_no_body_of_a_page_ends_in_exit_code_1(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], kind: str, number: int
) -> None:
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}}, as_of="2025-02-01")
    wheel("lib", "1.0")
    own.env["UV_HTTP_RETRIES"] = "0"
    index.bodies["/simple/lib/"] = (number, kind, b"<html><a href='::::'>lib-1.0.tar.gz</a> \xff{")
    done = own.run("lock", "--stack", "s", "--json", status=None)
    assert done.returncode in (4, 10), done.stderr
    assert error(done)["why"]


@slow
@pytest.mark.parametrize("line", ["Requires-Dist: ???", "Requires-Dist: a>=x", "Requires-Python: x", "Name: other"])
def test_metadata_that_cannot_be_read_is_a_release_that_does_not_resolve(
    own: Any, wheel: Callable[..., None], line: str
) -> None:
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}}, as_of="2025-02-01")
    wheel("lib", "1.0", headers=(line,))
    assert "lib" in error(own.run("lock", "--stack", "s", "--json", status=4))["why"]


@pytest.mark.parametrize("text", ["build-system = 5\n", "[build-system]\nrequires = 5\nbuild-backend = 5\n"])
def test_no_pyproject_of_an_sdist_ends_in_exit_code_1(own: Any, index: SimpleIndex, tmp_path: Path, text: str) -> None:
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}}, as_of="2025-02-01")
    index.add(make_sdist(tmp_path, "lib", "1.0", pyproject=text), OLD)
    own.run("lock", "--stack", "s", "--json")


# ---- what an index drops


def test_a_nightly_build_is_warned_of_and_online_sees_that_it_is_gone(
    own: Any, index: SimpleIndex, wheel: Callable[..., None]
) -> None:
    write_stack(own.project, "s", {"lib": {"version": "==2.0.dev20250105"}, "dep": {}}, as_of="2025-02-01")
    wheel("lib", "2.0.dev20250105", requires=("dep",))
    wheel("dep", "1.0")
    own.run("lock", "--stack", "s")
    (warning,) = lock_of(own, "s").warnings
    assert "lib 2.0.dev20250105 is a nightly build" in warning
    own.run("lock", "--check", "--online")
    index.remove("dep-1.0-py3-none-any.whl")
    own.run("lock", "--check")
    refused = error(own.run("lock", "--check", "--online", "--json", status=5))
    assert "dep" in refused["why"]
    gone = error(own.run("sync", "--stack", "s", "--into", "venv", "--json", status=6))
    assert "does not have that version any more" in gone["fix"]
    wheel("dep", "1.0", module="other = 1\n")
    error(own.run("lock", "--check", "--online", "--json", status=5))
    own.run("lock", "--stack", "s", "--online", status=2)
