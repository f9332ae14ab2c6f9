"""Sandboxes: what a command line lets in, what it keeps out, and why a machine forbids them."""

from pathlib import Path

import pytest

from envbuild.core import sandbox
from envbuild.core.errors import MachineError
from envbuild.core.sandbox import Bind, Sandbox, why_blocked

BWRAP = Path("/usr/bin/bwrap")


def words_of(**attributes) -> list[str]:
    return Sandbox(root=Path("/images/root"), **attributes).command(BWRAP, ["prog", "--flag"])


def pairs(words: list[str], option: str) -> list[tuple[str, str]]:
    return [(words[i + 1], words[i + 2]) for i, word in enumerate(words) if word == option]


def test_command_runs_the_program_last_and_untouched():
    words = words_of()
    assert words[0] == str(BWRAP)
    assert words[words.index("--") + 1 :] == ["prog", "--flag"]


def test_command_shuts_everything_out_by_default():
    words = words_of()
    assert "--unshare-all" in words
    assert "--die-with-parent" in words
    assert "--share-net" not in words
    assert pairs(words, "--ro-bind") == [("/images/root", "/")]
    assert "--bind" not in words


def test_command_shares_the_network_only_when_asked():
    assert "--share-net" in words_of(network=True)


def test_command_binds_read_only_unless_writable():
    binds = (Bind(source=Path("/a"), target="/run/a"), Bind(source=Path("/b"), target="/run/b", writable=True))
    words = words_of(binds=binds)
    assert ("/a", "/run/a") in pairs(words, "--ro-bind")
    assert pairs(words, "--bind") == [("/b", "/run/b")]


def test_command_mounts_in_an_order_that_hides_nothing():
    words = words_of(
        tmpfs=("/opt",), binds=(Bind(source=Path("/a"), target="/opt/a"),), links=(("/opt/link", "/opt/a/x"),)
    )
    assert words.index("/images/root") < words.index("/opt") < words.index("/opt/a") < words.index("/opt/link")


def test_environment_values_are_not_on_the_command_line():
    box = Sandbox(root=Path("/"), environment={"TOKEN": "s3cret", "PATH": "/bin"})
    assert not any("s3cret" in word for word in box.command(BWRAP, ["prog"]))
    assert box.process_environment() == {"TOKEN": "s3cret", "PATH": "/bin"}


def test_loader_variables_reach_the_program_and_not_bwrap():
    box = Sandbox(root=Path("/"), environment={"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"})
    assert pairs(box.command(BWRAP, ["prog"]), "--setenv") == [("LD_LIBRARY_PATH", "/usr/local/cuda/lib64")]
    assert box.process_environment() == {}


def settings(folder: Path, **values: str) -> Path:
    for name, value in values.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value + "\n")
    return folder


@pytest.mark.parametrize(
    ("values", "root", "in_container", "named"),
    [
        ({"user__max_user_namespaces": "0"}, True, False, "user.max_user_namespaces"),
        ({"user__max_user_namespaces": "0"}, False, True, "user.max_user_namespaces"),
        ({"kernel__unprivileged_userns_clone": "0"}, False, False, "kernel.unprivileged_userns_clone"),
        (
            {"kernel__apparmor_restrict_unprivileged_userns": "1", "user__max_user_namespaces": "15000"},
            False,
            False,
            "kernel.apparmor_restrict_unprivileged_userns",
        ),
        ({}, True, True, "--privileged"),
        ({"kernel__apparmor_restrict_unprivileged_userns": "1"}, True, True, "--privileged"),
        ({"kernel__unprivileged_userns_clone": "1"}, False, True, "seccomp=unconfined"),
    ],
)
def test_why_blocked_names_the_setting(tmp_path, values, root, in_container, named):
    cause, fix = why_blocked(settings(tmp_path, **values), in_container=in_container, root=root)
    assert cause
    assert named in cause + fix


def test_why_blocked_without_a_known_cause_says_where_to_look(tmp_path):
    cause, fix = why_blocked(tmp_path, in_container=False, root=True)
    assert cause == ""
    assert "sysctl" in fix


def test_opened_folder_is_writable_and_shows_what_the_root_has(tmp_path):
    (tmp_path / "opt/vendor").mkdir(parents=True)
    (tmp_path / "opt/link").symlink_to("vendor")
    words = Sandbox(root=tmp_path, opened=("/opt",)).command(Path("/usr/bin/bwrap"), ["true"])
    at = words.index("/opt")
    assert words[at - 1 : at + 7] == [
        *("--tmpfs", "/opt"),
        *("--symlink", "vendor", "/opt/link"),
        *("--ro-bind", str(tmp_path / "opt/vendor"), "/opt/vendor"),
    ]


def bwrap_that(monkeypatch, folder: Path, script: str) -> None:
    program = folder / "bin/bwrap"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def test_probe_gets_over_a_fault_that_passes(tmp_path, monkeypatch):
    bwrap_that(monkeypatch, tmp_path, f"[ -e {tmp_path}/again ] && exit 0; touch {tmp_path}/again; exit 1")
    assert sandbox.probe() == tmp_path / "bin/bwrap"


def test_probe_says_what_bubblewrap_said_where_it_fails_every_time(tmp_path, monkeypatch):
    bwrap_that(monkeypatch, tmp_path, f"echo x >> {tmp_path}/tries; echo 'bwrap: it is forbidden' >&2; exit 1")
    with pytest.raises(MachineError, match="cannot make its namespaces") as caught:
        sandbox.probe()
    assert "bwrap: it is forbidden" in caught.value.why
    assert len((tmp_path / "tries").read_text().splitlines()) == sandbox.TRIES
