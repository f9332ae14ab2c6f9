"""Commands of Slurm and folders on a login host, over a real sshd whose shells print banners."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import shared_folder
from helpers.programs import path_without
from helpers.ssh_server import HOST, SshServer, ssh_server, sshd_program

from envbuild.core.errors import MachineError
from envbuild.launch.slurm.commands import SlurmCommands
from envbuild.launch.slurm.image_store import place_image
from envbuild.launch.slurm.login import LoginShell
from envbuild.launch.slurm.run_folder import RunFolder

# A site's profile: it prints, reads what would be the program's input, and has Slurm's folder.
PROFILE = """\
echo "Welcome to the cluster."
echo "12345"
cat
export PATH="$HOME/slurm:$PATH"
export SQUEUE_USERS=nobody SQUEUE_FORMAT=%i SBATCH_WAIT=1 SBATCH_ACCOUNT=lab
"""
SBATCH = """\
#!/bin/sh
[ "$1" != --version ] || exec echo "slurm 22.05.8"
cat >"$HOME/script"
env | grep -E "^(SBATCH|SQUEUE)_" >"$HOME/environment"
echo "sbatch: a plugin of the site" >&2
echo 77
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    folder = tmp_path_factory.mktemp("ssh")
    home = folder / "home"
    (home / "slurm").mkdir(parents=True)
    # bash reads ~/.bashrc for sessions of sshd, and ~/.profile for login shells.
    (home / ".bashrc").write_text('printf "no line end"\n')
    (home / ".profile").write_text(PROFILE)
    (home / "slurm/sbatch").write_text(SBATCH)
    (home / "slurm/sbatch").chmod(0o755)
    sshd = sshd_program(shared_folder(tmp_path_factory) / "sshd")
    with ssh_server(sshd, folder / "server", {"HOME": str(home)}) as running:
        yield running


@pytest.fixture(autouse=True)
def _ssh_of_the_tests(server: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{server.programs}:{os.environ['PATH']}")


def test_words_and_output_pass_as_they_are(tmp_path: Path) -> None:
    shell = LoginShell(host=HOST)
    words = ["a b", "$(touch pwned)", "it's", '"x"', "\\n", "`id`", "*", "ü", ""]
    done = shell.run(["printf", "<%s>\n", *words], what="print", seconds=60)
    assert done.output == "".join(f"<{word}>\n" for word in words)
    echoed = shell.run(["cat"], what="echo", seconds=60, stdin=b"#!/bin/sh\n\xff\n").output
    assert echoed == "#!/bin/sh\n\ufffd\n"


def test_a_job_is_submitted_with_the_sites_own_path(server: SshServer) -> None:
    commands = SlurmCommands(login=HOST)
    commands.check("mine")
    assert commands.submit("#!/bin/bash\nsrun x\n") == "77"
    assert (server.folder.parent / "home/script").read_text() == "#!/bin/bash\nsrun x\n"
    # What changes what commands list, and whether they wait, is not theirs to set.
    assert (server.folder.parent / "home/environment").read_text() == "SBATCH_ACCOUNT=lab\n"


@pytest.mark.parametrize("login", [None, HOST])
def test_a_folder_goes_there_and_its_results_come_back(tmp_path: Path, login: str | None) -> None:
    plan = tmp_path / "plan"
    (plan / "results").mkdir(parents=True)
    (plan / "plan.json").write_text("{}")
    (plan / "a file's name").write_bytes(bytes(range(256)) * 100)
    folder = RunFolder(path=f"{tmp_path}/there/run", login=login)
    # A copy that was interrupted.
    (tmp_path / "there/run.partial/half").mkdir(parents=True)
    assert not folder.exists()
    folder.bring_back(tmp_path / "early")
    folder.put(plan)
    assert sorted(os.listdir(folder.path)) == ["a file's name", "plan.json", "results"]
    assert os.listdir(tmp_path / "there") == ["run"]
    assert folder.exists()
    there = Path(folder.path)
    assert (there / "a file's name").read_bytes() == (plan / "a file's name").read_bytes()
    with pytest.raises(MachineError, match="cannot copy the plan to the cluster"):
        folder.put(plan)
    # What has not been written yet does not matter.
    folder.bring_back(tmp_path / "early")
    assert not list((tmp_path / "early").iterdir())
    (there / "results/cases/one").mkdir(parents=True)
    (there / "results/cases/one/rank0.log").write_bytes(b"\xff\0log")
    (there / "results/results.jsonl").write_text("lines\n")
    (there / "results/checkpoints").mkdir()
    folder.bring_back(tmp_path / "back")
    assert (tmp_path / "back/results/cases/one/rank0.log").read_bytes() == b"\xff\0log"
    assert (tmp_path / "back/results/results.jsonl").read_text() == "lines\n"
    assert not (tmp_path / "back/results/checkpoints").exists()
    assert (folder.read_from("results/results.jsonl", 2), folder.read_from("missing", 0)) == (b"nes\n", b"")
    folder.remove()
    assert not there.exists()


@pytest.mark.parametrize("login", [None, HOST])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_does_not_come_back(tmp_path: Path, login: str | None, kind: str) -> None:
    there = tmp_path / "there"
    (there / "results/cases").mkdir(parents=True)
    if kind == "link":
        (there / "results/cases/one").symlink_to("/etc/passwd")
    else:
        os.mkfifo(there / "results/cases/one")
    with pytest.raises(MachineError) as caught:
        RunFolder(path=str(there), login=login).bring_back(tmp_path / "back")
    assert "'results/cases/one' is no file, or would be elsewhere" in caught.value.why


def test_an_image_is_copied_once_and_its_digest_checked(tmp_path: Path) -> None:
    image = tmp_path / "image.sqsh"
    image.write_bytes(os.urandom(200_000))
    digest = hashlib.sha256(image.read_bytes()).hexdigest()
    place = place_image(image, f"sha256:{digest}", f"{tmp_path}/images", HOST)
    assert Path(place).read_bytes() == image.read_bytes()
    before = Path(place).stat()
    assert place_image(image, f"sha256:{digest}", f"{tmp_path}/images", HOST) == place
    assert Path(place).stat().st_ino == before.st_ino
    with pytest.raises(MachineError) as caught:
        place_image(image, f"sha256:{'0' * 64}", f"{tmp_path}/images", HOST)
    assert caught.value.why == "what arrived has another digest"
    left = [path.name for path in (tmp_path / "images").iterdir() if path.suffix != ".lock"]
    assert left == [f"{digest}.sqsh"]


def test_a_refused_key_is_named_with_what_to_do(server: SshServer, tmp_path: Path) -> None:
    authorized = server.folder / "authorized"
    known = authorized.read_text()
    authorized.write_text((server.folder / "stranger.pub").read_text())
    try:
        for action in (
            lambda: SlurmCommands(login=HOST).check("mine"),
            lambda: RunFolder(path=f"{tmp_path}/there", login=HOST).put(tmp_path),
            lambda: RunFolder(path=f"{tmp_path}/there", login=HOST).bring_back(tmp_path / "back"),
        ):
            with pytest.raises(MachineError) as caught:
                action()
            assert caught.value.what.endswith(f": ssh to {HOST} failed")
            assert "Permission denied (publickey)" in caught.value.why
            assert f"`ssh -o BatchMode=yes {HOST} true` must work without a question" in caught.value.fix
    finally:
        authorized.write_text(known)


def test_an_unknown_host_key_is_not_accepted(server: SshServer) -> None:
    known = server.folder / "known-hosts"
    text = known.read_text()
    known.write_text("")
    try:
        with pytest.raises(MachineError) as caught:
            SlurmCommands(login=HOST).check("mine")
    finally:
        known.write_text(text)
    assert "Host key verification failed" in caught.value.why


def test_a_login_host_without_slurm_is_named(server: SshServer, tmp_path: Path) -> None:
    profile = server.folder.parent / "home/.profile"
    profile.write_text(f"echo Welcome\nexport PATH={path_without(tmp_path, 'sbatch')}\n")
    try:
        with pytest.raises(MachineError) as caught:
            SlurmCommands(login=HOST).check("mine")
    finally:
        profile.write_text(PROFILE)
    assert caught.value.what == f"cannot submit a job to mine: {HOST} has no Slurm"
    assert caught.value.why.endswith("sbatch: not found")
