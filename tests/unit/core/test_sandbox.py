"""Sandboxes: what a command line lets in, what it keeps out, and why a machine forbids them."""

from pathlib import Path

import pytest

from envbuild.core import sandbox
from envbuild.core.errors import MachineError
from envbuild.core.sandbox import Bind, Sandbox, why_blocked

BWRAP = Path("/usr/bin/bwrap")


def test_command_binds_what_is_named_and_nothing_else():
    """In an order in which no mount hides another; values of the environment are not on the command line."""
    bare = Sandbox(root=Path("/images/root")).command(BWRAP, ["prog", "--flag"])
    alone = [str(BWRAP), "--unshare-all", "--die-with-parent", "--new-session", "--uid", "0", "--gid", "0"]
    root = ["--ro-bind", "/images/root", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/run"]
    assert bare == [*alone, *root, "--chdir", "/", "--", "prog", "--flag"]
    box = Sandbox(
        root=Path("/images/root"),
        binds=(
            Bind(source=Path("/a"), target="/opt/a"),
            Bind(source=Path("/b"), target="/run/b", writable=True),
            Bind(source=Path("/dev/gpu"), target="/dev/gpu", device=True),
        ),
        tmpfs=("/opt",),
        links=(("/opt/link", "/opt/a/x"),),
        environment={"TOKEN": "s3cret", "LD_LIBRARY_PATH": "/usr/local/cuda/lib64"},
        network=True,
    )
    more = ["--tmpfs", "/opt", "--ro-bind", "/a", "/opt/a", "--bind", "/b", "/run/b", "--dev-bind", "/dev/gpu"]
    more += ["/dev/gpu", "--symlink", "/opt/a/x", "/opt/link"]
    more += ["--setenv", "LD_LIBRARY_PATH", "/usr/local/cuda/lib64"]
    assert box.command(BWRAP, ["prog"]) == [*alone, "--share-net", *root, *more, "--chdir", "/", "--", "prog"]
    assert box.process_environment() == {"TOKEN": "s3cret"}


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


def test_why_blocked_without_a_known_cause_names_the_settings(tmp_path):
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


def test_probe_is_repeated_after_a_passing_fault(tmp_path, monkeypatch):
    bwrap_that(monkeypatch, tmp_path, f"[ -e {tmp_path}/again ] && exit 0; touch {tmp_path}/again; exit 1")
    assert sandbox.probe() == tmp_path / "bin/bwrap"


def test_probe_that_fails_every_time_shows_the_message_of_bubblewrap(tmp_path, monkeypatch):
    bwrap_that(monkeypatch, tmp_path, f"echo x >> {tmp_path}/tries; echo 'bwrap: it is forbidden' >&2; exit 1")
    with pytest.raises(MachineError, match="cannot make its namespaces") as caught:
        sandbox.probe()
    assert "bwrap: it is forbidden" in caught.value.why
    assert len((tmp_path / "tries").read_text().splitlines()) == sandbox.TRIES
