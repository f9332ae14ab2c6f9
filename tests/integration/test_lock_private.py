"""An index that asks for a password: envbuild's own downloads use uv's credentials, and no output contains them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lock_runs import OLD, error, lock_of
from helpers.simple_index import SimpleIndex, make_sdist
from helpers.stack_files import GPU_BASE, write_stack

SECRET = "pa$s/word"
QUOTED = "pa%24s%2Fword"


@pytest.fixture
def private(own: Any, index: SimpleIndex, wheel: Callable[..., None], tmp_path: Path) -> Any:
    """Stack `s` with `kernels` of the compile phase, whose sdist the tool downloads itself."""
    write_stack(own.project, "s", {"kernels": {"phase": "compile"}}, target="gpu", base=GPU_BASE)
    index.add(make_sdist(tmp_path, "kernels", "1.0", requires=("dep",)), OLD)
    wheel("dep", "1.0")
    wheel("setuptools", "80.0")
    index.password = f"me:{SECRET}"
    own.env |= {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "none"), "UV_HTTP_RETRIES": "0"}
    return own


def settings(how: str, index: SimpleIndex, folder: Path) -> dict[str, str]:
    """The places from which uv takes a password."""
    with_password = index.url.replace("://", f"://me:{QUOTED}@")
    match how:
        case "url":
            return {"UV_DEFAULT_INDEX": with_password}
        case "named":
            return {
                "UV_DEFAULT_INDEX": f"my-own={index.url}",
                "UV_INDEX_MY_OWN_USERNAME": "me",
                "UV_INDEX_MY_OWN_PASSWORD": SECRET,
            }
        case "netrc":
            (folder / "netrc").write_text(f"machine 127.0.0.1 login me password {SECRET}\n")
            (folder / "netrc").chmod(0o600)
            return {"UV_DEFAULT_INDEX": index.url, "NETRC": str(folder / "netrc")}
        case _:
            (folder / "own.toml").write_text(f'[[index]]\nname = "x"\nurl = "{with_password}"\ndefault = true\n')
            return {"UV_CONFIG_FILE": str(folder / "own.toml")}


@pytest.mark.parametrize("how", ["url", "named", "netrc", "uv.toml"])
def test_a_private_index_locks_and_its_password_is_nowhere(
    private: Any, index: SimpleIndex, tmp_path: Path, how: str
) -> None:
    private.env |= settings(how, index, tmp_path)
    if how == "uv.toml":
        del private.env["UV_DEFAULT_INDEX"]
    done = private.run("lock", "--stack", "s", "--json")
    assert lock_of(private, "s", GPU_BASE).components["kernels"].sdist is not None
    assert "/files/kernels-1.0.tar.gz" in index.requested
    written = [done.stdout, done.stderr]
    written += [path.read_text() for path in private.project.rglob("lockfiles/**/*") if path.is_file()]
    written += [path.read_text() for path in private.cache.rglob("logs/*.log")]
    assert not any(word in text for word in (SECRET, QUOTED) for text in written)


def test_a_wrong_password_is_a_network_error_without_it(private: Any, index: SimpleIndex) -> None:
    private.env["UV_DEFAULT_INDEX"] = index.url.replace("://", "://me:wr0ng@")
    done = private.run("lock", "--stack", "s", "--json", status=10)
    assert "127.0.0.1" in error(done)["why"]
    assert "wr0ng" not in done.stdout + done.stderr
