"""Slurm's Prolog: a job with a verified .sqsh starts, another one is cancelled, and its user reads why."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.publish_world import PublishWorld
from helpers.slurm_scripts import SiteScripts, install_scripts

OPTION = "SPANK__SLURM_SPANK_OPTION_pyxis_container_image"


@dataclass
class Prolog:
    """The Prolog of a site, with commands of Slurm that write down what they are given.

    Attributes:
        home: the job's working folder.
    """

    scripts: SiteScripts
    home: Path

    def run(self, image: str, *, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        # As slurmd starts it: without PATH, and with nothing of the job's or of slurmd's own environment.
        environment = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_UID": str(os.getuid()),
            "SLURM_JOB_GID": str(os.getgid()),
            "SLURM_JOB_WORK_DIR": str(self.home),
            "SLURM_SCRIPT_CONTEXT": "prolog_slurmd",
            **({OPTION: image} if image else {}),
            **more,
        }
        done = subprocess.run(
            ["/bin/sh", self.scripts.prolog], env=environment, cwd=cwd, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr  # anything else drains the node
        return done

    @property
    def commands(self) -> str:
        """What Slurm's commands were given."""
        file = self.scripts.folder / "commands"
        return file.read_text() if file.exists() else ""

    def starts(self, image: str, *, cwd: Path | None = None, **more: str) -> bool:
        self.run(image, cwd=cwd, **more)
        return not self.commands

    @property
    def note(self) -> Path:
        return self.scripts.notes / "7"


def installed(folder: Path, *noting: str, trust: Path | None = None) -> Prolog:
    """A Prolog; ``noting`` are programs that only write down what they are given, and fail."""
    scripts = install_scripts(folder / "site", trust)
    for name in noting:
        program = scripts.folder / "bin" / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >> "{scripts.folder}/commands"\nexit 1\n')
        program.chmod(0o755)
    for name, script in (("scancel", f'echo "scancel $*" >> "{scripts.folder}/commands"'), ("squeue", "")):
        (scripts.folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (scripts.folder / "bin" / name).chmod(0o755)
    home = folder / "home"
    home.mkdir()
    return Prolog(scripts, home)


@pytest.fixture
def prolog(world: PublishWorld, tmp_path: Path) -> Prolog:
    # Slurm's controller may be away: a message that cannot be left does not keep the job.
    return installed(tmp_path, "scontrol", trust=world.project / "trust.toml")


@pytest.fixture
def sqsh(world: PublishWorld, prolog: Prolog) -> Path:
    """A .sqsh with its certificate next to it, in the job's working folder."""
    file = prolog.home / "nemo.sqsh"
    file.write_bytes(world.image.sqsh().read_bytes())
    Path(f"{file}.intoto.jsonl").write_bytes(world.certify().read_bytes())
    return file


@pytest.mark.parametrize("form", ["{sqsh}", "./nemo.sqsh"])
def test_a_verified_image_starts_and_the_hook_is_told(
    world: PublishWorld, prolog: Prolog, sqsh: Path, form: str
) -> None:
    assert prolog.starts(form.format(sqsh=sqsh))
    assert prolog.note.read_text() == f"{world.image.record.oci_digest}\n"
    # The Epilog is the same script.
    assert prolog.starts(str(sqsh), SLURM_SCRIPT_CONTEXT="epilog_slurmd")
    assert not prolog.note.exists()


@pytest.mark.parametrize("image", ["", "registry.example.org#team/nemo:mcore-h200", "docker://nemo:1", "nemo:1"])
def test_an_image_of_a_registry_is_the_importers(tmp_path: Path, image: str) -> None:
    prolog = installed(tmp_path, "scontrol", "envbuild")
    assert prolog.starts(image)
    assert not prolog.note.exists()


@pytest.mark.parametrize(
    "image",
    [
        *("{home}/evil.sqsh", "{home}/e#vil.sqsh", "{home}/a://evil.sqsh", "{home}//evil.sqsh", "/{home}/evil.sqsh"),
        *("./evil.sqsh", "../home/evil.sqsh", ".evil.sqsh", "..evil.sqsh", ".e#vil.sqsh", ".a://evil.sqsh"),
        *("./link.sqsh", "./e vil.sqsh", "./e'v\"il.sqsh", "./$(evil).sqsh", "./*", "./-evil.sqsh", "./evil=x"),
        "{home}/e\\vil.sqsh",
    ],
)
def test_whatever_begins_like_a_path_is_verified(tmp_path: Path, image: str) -> None:
    prolog = installed(tmp_path, "scontrol", "envbuild")
    image = image.format(home=prolog.home)
    place = prolog.home / image
    place.parent.mkdir(exist_ok=True)
    place.symlink_to("/dev/null") if "link" in image else place.write_bytes(b"another image")
    Path(f"{place}.intoto.jsonl").write_bytes(b"a certificate")
    assert not prolog.starts(image)
    path = image if image.startswith("/") else f"{prolog.home}/{image}"
    asked, *_, last = prolog.commands.splitlines()
    assert asked.startswith(f"envbuild certificate verify {path}.intoto.jsonl --image {path} --trust ")
    assert last == "scancel 7"
    assert not prolog.note.exists()


@pytest.mark.parametrize("image", ["./.sqsh\n", "{home}/a\n", "./nemo\n.sqsh", "{home}/a\x1b[2J"])
def test_a_name_that_enroot_would_read_otherwise_is_refused(tmp_path: Path, image: str) -> None:
    # enroot drops the line end, and opens the file without it.
    prolog = installed(tmp_path, "scontrol", "envbuild")
    image = image.format(home=prolog.home)
    for suffix in ("", ".intoto.jsonl"):
        (prolog.home / f"{image}{suffix}").write_bytes(b"an image")
    assert not prolog.starts(image)
    assert "envbuild certificate" not in prolog.commands
    assert "control character" in prolog.commands


@pytest.mark.parametrize(
    "name", ["e'v\"il", "$(touch pwned)", "`touch pwned`;touch pwned", "a  b", "-rf", "x&&touch pwned#", "é\\n", "*"]
)
def test_what_is_printed_to_be_pasted_is_quoted(tmp_path: Path, name: str) -> None:
    prolog = installed(tmp_path, "scontrol", "envbuild")
    printed = prolog.run(f"./{name}.sqsh").stderr
    command = printed.partition("Pull it again: envbuild ")[2].splitlines()[0]
    shown = subprocess.run(
        ["/bin/sh", "-c", f"printf '%s\\0' {command}"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split("\0")[-2] == f"{prolog.home}/./{name}.sqsh"
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nhelp: rm -rf /", "a\u009b2Jb", "a\tb", "a\x7f"])
def test_no_control_character_reaches_a_terminal(tmp_path: Path, name: str) -> None:
    """Of the image's name, or of the folder that the job names."""
    prolog = installed(tmp_path, "scontrol", "envbuild")
    for more in ({"image": f"./{name}"}, {"image": "./a.sqsh", "SLURM_JOB_WORK_DIR": f"{prolog.home}/{name}"}):
        printed = prolog.run(**more).stderr
        assert "The path of the image has a control character." in printed
        for text in (printed, prolog.commands):
            assert all(character.isprintable() for line in text.splitlines() for character in line)
            assert name not in text


@pytest.mark.parametrize(
    ("leads_to", "cause"),
    [
        ("nemo.sqsh\n", "control character"),  # a name that the link does not show
        ("/proc/self/cwd/nemo.sqsh", "another file for each process"),  # the step's folder is the user's
    ],
)
def test_a_link_to_what_a_step_reads_otherwise_is_refused(tmp_path: Path, leads_to: str, cause: str) -> None:
    prolog = installed(tmp_path, "scontrol", "envbuild")
    (prolog.home / leads_to).write_bytes(b"an image") if leads_to.startswith("nemo") else None
    (prolog.home / "link.sqsh").symlink_to(leads_to)
    (prolog.home / "link.sqsh.intoto.jsonl").write_bytes(b"a certificate")
    (tmp_path / "slurmd").mkdir()
    (tmp_path / "slurmd/nemo.sqsh").write_bytes(b"a verified image")
    assert not prolog.starts("./link.sqsh", cwd=tmp_path / "slurmd")
    assert "envbuild certificate" not in prolog.commands
    assert cause in prolog.commands


def test_the_note_has_the_number_that_steps_of_a_heterogeneous_job_have(prolog: Prolog, sqsh: Path) -> None:
    assert prolog.starts(str(sqsh), SLURM_JOB_ID="8", SLURM_HET_JOB_ID="7")
    assert prolog.note.exists()
    prolog.run(str(sqsh), SLURM_JOB_ID="8", SLURM_HET_JOB_ID="7", SLURM_SCRIPT_CONTEXT="epilog_slurmd")
    assert not prolog.note.exists()


def test_the_user_reads_why(prolog: Prolog, sqsh: Path) -> None:
    with sqsh.open("ab") as stream:
        stream.write(b"changed")
    printed = prolog.run(str(sqsh)).stderr
    comment, message, cancelled = prolog.commands.splitlines()
    assert comment.startswith("scontrol update JobId=7 AdminComment=envbuild: cancelled. Cause: ")
    assert message.startswith("scontrol notify 7 envbuild cancels this job. Cause: ")
    assert cancelled == "scancel 7"
    for text in (printed, comment, message):
        assert f"{sqsh} has no certificate that counts here." in text
        assert "envbuild pull REGISTRY/REPO:TAG --output" in text


def test_verifying_has_an_end(prolog: Prolog, sqsh: Path) -> None:
    program = prolog.scripts.folder / "bin/timeout"
    program.write_text("#!/bin/sh\nexit 124\n")
    program.chmod(0o755)
    assert not prolog.starts(str(sqsh))
    assert "It could not be read in 20 minutes." in prolog.commands


@pytest.mark.parametrize("there", ["", ".intoto.jsonl"])
def test_a_missing_file_is_named(tmp_path: Path, there: str) -> None:
    prolog = installed(tmp_path, "scontrol", "envbuild")
    (prolog.home / f"a.sqsh{there}").write_bytes(b"x")
    assert not prolog.starts("./a.sqsh")
    assert f"{prolog.home}/./a.sqsh.intoto.jsonl, is missing" in prolog.commands


def test_a_note_of_an_earlier_start_goes(prolog: Prolog, sqsh: Path) -> None:
    prolog.scripts.notes.mkdir()
    prolog.note.write_text("sha256:0123\n")
    sqsh.write_bytes(b"another image")  # the job was requeued
    assert not prolog.starts(str(sqsh))
    assert not prolog.note.exists()


def test_images_of_roots_folder_alone(prolog: Prolog, sqsh: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir(0o755)
    for suffix in ("", ".intoto.jsonl"):
        (folder / f"nemo.sqsh{suffix}").write_bytes(Path(f"{sqsh}{suffix}").read_bytes())
        (folder / f"nemo.sqsh{suffix}").chmod(0o644)
    with prolog.scripts.settings.open("a") as stream:
        stream.write(f"ENVBUILD_IMAGE_FOLDER={folder}/\n")
    # Whatever account the tests have: one that is not root owns no such folder.
    assert prolog.starts(f"{folder}/nemo.sqsh") == (os.getuid() == 0)
    (folder / "link.sqsh").symlink_to("nemo.sqsh")
    (folder / "link.sqsh.intoto.jsonl").symlink_to("nemo.sqsh.intoto.jsonl")
    for image in (str(sqsh), f"{folder}/../home/nemo.sqsh", f"{folder}//nemo.sqsh", f"{folder}/link.sqsh"):
        (prolog.scripts.folder / "commands").unlink(missing_ok=True)
        assert not prolog.starts(image)
        assert f"Images start only from {folder}/" in prolog.commands
    folder.chmod(0o775)
    (prolog.scripts.folder / "commands").unlink()
    assert not prolog.starts(f"{folder}/nemo.sqsh")


def test_a_file_that_the_user_cannot_read_is_not_read_as_root(tmp_path: Path) -> None:
    prolog = installed(tmp_path, "scontrol", "envbuild")
    for suffix in ("", ".intoto.jsonl"):
        (prolog.home / f"a.sqsh{suffix}").write_bytes(b"x")
    prolog.home.chmod(0)
    # Root may enter every folder: the job is of another account then.
    other = {"SLURM_JOB_UID": "65534", "SLURM_JOB_GID": "65534"} if os.getuid() == 0 else {}
    try:
        assert not prolog.starts(f"{prolog.home}/a.sqsh", **other)
        assert "closed to the job's user" in prolog.commands
    finally:
        prolog.home.chmod(0o755)
