"""What an index may answer: no upload times, no hashes, garbage. A lock comes of it, or an error with its reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import OLD, error, files_of, lock_of, result
from helpers.simple_index import JSON_TYPE, SimpleIndex, simple_index
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


def test_an_open_stack_needs_the_users_word_for_an_index_without_times(own: Any, wheel: Callable[..., None]) -> None:
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}, "dep": {}}, anchor="lib", as_of="now")
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


def changed(**more: Any) -> Callable[[dict[str, Any]], Any]:
    def change(page: dict[str, Any]) -> Any:
        return {**page, "files": [{**file, **more} for file in page["files"]]}

    return change


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    def change(page: dict[str, Any]) -> Any:
        return {
            **page,
            "files": [{name: value for name, value in file.items() if name != key} for file in page["files"]],
        }

    return change


ANSWERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no hash": changed(hashes={}),
    "sha1 only": changed(hashes={"sha1": "0" * 40}),
    "a short hash": changed(hashes={"sha256": "abc"}),
    "another hash": changed(hashes={"sha256": "0" * 64}),
    "hashes of another type": changed(hashes=5),
    "no file": lambda page: {**page, "files": []},
    "files of another type": lambda page: {**page, "files": 5},
    "a list": lambda page: [page],
    "no meta": lambda page: {"name": page["name"], "files": page["files"]},
    "every release yanked": changed(yanked="broken"),
    "garbage in requires-python": changed(**{"requires-python": ">=banana"}),
    "garbage in upload-time": changed(**{"upload-time": "yesterday"}),
    "metadata that is not there": changed(**{"core-metadata": {"sha256": "0" * 64}}),
    "no url": without("url"),
    "an url of nothing": changed(url="https://index.invalid/lib-1.0-py3-none-any.whl"),
    "another name": lambda page: {**page, "name": "other"},
    "a file of another package": changed(filename="other-1.0-py3-none-any.whl"),
    "a size that is a text": changed(size="big"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_an_index_answers_never_ends_in_exit_code_1(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], name: str
) -> None:
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}}, as_of="2025-02-01")
    wheel("lib", "1.0")
    own.env["UV_HTTP_RETRIES"] = "0"
    index.changes["lib"] = ANSWERS[name]
    done = own.run("lock", "--stack", "s", "--json", status=None)
    assert done.returncode in (0, 3, 4, 5, 10), done.stderr
    if done.returncode:
        assert error(done)["why"]
    else:
        assert "--hash=sha256:" in (own.project / "lockfiles/s" / BASE / "main.txt").read_text()


@pytest.mark.parametrize("kind", ["text/html", "text/plain", "application/json", JSON_TYPE])
@pytest.mark.parametrize("status", [200, 403, 500])
def test_no_body_of_a_page_ends_in_exit_code_1(
    own: Any, index: SimpleIndex, wheel: Callable[..., None], kind: str, status: int
) -> None:
    write_stack(own.project, "s", {"lib": {"version": "==1.0"}}, as_of="2025-02-01")
    wheel("lib", "1.0")
    own.env["UV_HTTP_RETRIES"] = "0"
    index.bodies["lib"] = (status, kind, b"<html><a href='::::'>lib-1.0.tar.gz</a> \xff{")
    done = own.run("lock", "--stack", "s", "--json", status=None)
    assert done.returncode in (3, 4, 10), done.stderr
    assert error(done)["why"]


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
    wheel("dep", "1.0", module="other = 1\n")
    error(own.run("lock", "--check", "--online", "--json", status=5))
    own.run("lock", "--stack", "s", "--online", status=2)
