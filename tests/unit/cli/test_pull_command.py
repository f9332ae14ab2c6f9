"""`envbuild pull` and `envbuild importer` from the command line, and enroot's hook behind the importer."""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from helpers.command_line import run_here
from helpers.processes import NOBODY
from helpers.publish_world import make_publish_world
from helpers.pull_world import PullWorld, make_pull_world
from helpers.slurm_scripts import install_scripts

from envbuild.catalog.data import data_root
from envbuild.cli.main import run
from envbuild.core.digests import sha256_file
from envbuild.core.errors import CertificateRefusedError
from envbuild.core.files import clone_or_copy as clone
from envbuild.publish.models import Revocation

ENROOT = data_root() / "containers" / "enroot"
CONTENT = b"a squashfs file " * 10_000


@pytest.fixture
def there(tmp_path, monkeypatch) -> PullWorld:
    world = make_publish_world(tmp_path / "project")
    world.rebuild({"torch": CONTENT})
    place = make_pull_world(world, tmp_path / "home")
    for name in ("ENVBUILD_TRUST", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "ENVBUILD_CONFIG", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(place.home))
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(place.home / "cache"))
    monkeypatch.setenv("TMPDIR", str(place.home))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(place.home)
    return place


@pytest.fixture
def pull_json(there, capsys):
    """What `envbuild pull` prints with --json."""

    def command(*arguments, status=0, trust=True):
        trusted = ["--trust", str(there.world.project / "trust.toml")] if trust else []
        assert run(["pull", *arguments, *trusted, "--json"]) == status
        return json.loads(capsys.readouterr().out)

    return command


def test_pull_prints_where_the_file_is(there, pull_json):
    publication = there.publish()
    printed = pull_json(f"{there.store.address}:mcore-debian12", "--target", "cpu")
    assert Path(printed["path"]).read_bytes() == there.image.read_bytes()
    assert printed["digest"] == publication.sqsh.digest == sha256_file(Path(printed["path"]))
    assert (printed["key"], printed["tag"], printed["target"]) == ("lab", publication.tag, "cpu")


def test_output_and_its_certificate(there, pull_json, capsys):
    there.publish()
    printed = pull_json(f"{there.store.address}:mcore-debian12-cpu", "--output", "out/nemo.sqsh")
    assert printed["path"] == str(there.home / "out/nemo.sqsh")
    output = there.home / "out/nemo.sqsh"
    assert output.read_bytes() == there.image.read_bytes()
    words = ["certificate", "verify", "out/nemo.sqsh.intoto.jsonl", "--image", "out/nemo.sqsh"]
    assert run([*words, "--trust", str(there.world.project / "trust.toml")]) == 0
    assert "verified: signed by lab" in capsys.readouterr().out


def test_an_output_that_is_written_into_changes_no_other(there, pull_json):
    there.publish()
    reference = f"{there.store.address}:mcore-debian12-cpu"
    output = Path(pull_json(reference, "--output", "mine.sqsh")["path"])
    before = output.stat()
    # As another account does to which the file was given, and which puts its times back.
    with output.open("r+b") as stream:
        stream.write(b"evil")
    os.utime(output, ns=(before.st_atime_ns, before.st_mtime_ns))
    good = there.image.read_bytes()
    assert Path(pull_json(reference, "--output", "other.sqsh")["path"]).read_bytes() == good
    assert Path(pull_json(reference)["path"]).read_bytes() == good
    assert Path(pull_json(reference, "--output", "mine.sqsh")["path"]).read_bytes() == good


@pytest.mark.parametrize(
    ("prepare", "arguments", "status", "part"),
    [
        (lambda there: there.store.revoke(there.publish().oci_digest, BACK), [], 9, "wrong NCCL"),
        (lambda there: there.publish(), ["--max-age", "12x"], 2, "is not an age"),
        (lambda there: there.publish(), ["--format", "oci", "--output", "x"], 2, "has no OCI images"),
        (lambda there: None, [], 3, "has no such tag"),
    ],
)
def test_refusals(there, pull_json, prepare, arguments, status, part):
    prepare(there)
    error = pull_json(f"{there.store.address}:mcore-debian12-cpu", *arguments, "--output", "o", status=status)["error"]
    assert part in error["what"] + error["why"]
    assert error["fix"]
    assert not (there.home / "o").exists()


BACK = Revocation(reason="wrong NCCL", at="2026-11-20T07:00:00Z")


def test_a_layout_needs_a_place(pull_json):
    assert "needs --output" in pull_json("host/repo:tag", "--format", "oci", status=2)["error"]["what"]


def test_processes_of_one_output_copy_it_once(there, pull_json, monkeypatch):
    there.publish()
    copied = []
    monkeypatch.setattr("envbuild.publish.pull.clone_or_copy", lambda *files: copied.append(files) or clone(*files))
    words = (f"{there.store.address}:mcore-debian12-cpu", "--output", "mine.sqsh")
    for _ in range(3):
        assert Path(pull_json(*words)["path"]).read_bytes() == there.image.read_bytes()
    assert len(copied) == 2  # with its certificate
    for change in (lambda file: file.unlink(), lambda file: file.chmod(0o666)):
        change(there.home / "mine.sqsh")
        pull_json(*words)
        assert len(copied) == 3
        copied.pop()


@pytest.fixture
def site(there, tmp_path):
    """The importer's script as a site installs it, but for where its configuration is."""
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "trust.toml").write_bytes((there.world.project / "trust.toml").read_bytes())
    (folder / "config.toml").write_text(f'cache_dir = "{there.home}/cache"\n')
    script = folder / "importer.sh"
    script.write_text((ENROOT / "importer.sh").read_text().replace("/etc/envbuild", str(folder)))
    script.chmod(0o755)
    (folder / "bin").mkdir()
    (folder / "bin/envbuild").write_text(f'#!/bin/sh\nexec {sys.executable} -m envbuild "$@"\n')
    (folder / "bin/envbuild").chmod(0o755)
    return folder


@pytest.fixture
def slurm(there, site):
    """Run one of the scripts in a step of a job."""

    def command(*words, step="0", **more):
        own = {"PATH": f"{site}/bin:{os.environ['PATH']}", "HOME": str(there.home), "TMPDIR": str(there.home)}
        job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": step, "SLURM_JOB_UID": str(os.geteuid())}
        return subprocess.run(words, env={**own, **job, **more}, capture_output=True, text=True, check=False)

    return command


@pytest.fixture
def importer(there, site, slurm):
    """The importer's script, and what it runs in this process: with its words, and with the variables that it set."""
    note = site / "note" / "envbuild"
    note.parent.mkdir()
    note.write_text('#!/bin/sh\nenv -0 > "$0.env"\nprintf "%s\\n" "$@" > "$0.words"\n')
    note.chmod(0o755)

    def command(*words, **more):
        path = f"{note.parent}:{os.environ['PATH']}"
        assert slurm(site / "importer.sh", *words, **{"PATH": path, **more}).returncode == 0
        variables = note.with_suffix(".env").read_bytes().decode().strip("\0").split("\0")
        env = dict(line.split("=", 1) for line in variables)
        return run_here(note.with_suffix(".words").read_text().splitlines(), there.home, env)

    return command


def test_importer_serves_pyxis(there, site, slurm, importer):
    there.publish()
    (there.home / "old").mkdir()
    (there.home / "old/click.py").write_text("raise SystemExit('of another Python')\n")
    # What the job sets does not count, and the importer has nothing of the job's Python.
    own = {"ENVBUILD_TRUST": "/dev/null", "ENVBUILD_CACHE_DIR": "", "PYTHONPATH": str(there.home / "old")}
    uri = f"{there.store.address}:mcore-debian12-cpu"
    got = slurm(site / "importer.sh", "get", uri, PYTHONHOME="/nowhere", **own)
    assert got.returncode == 0, got.stderr
    (line,) = got.stdout.splitlines()
    assert Path(line).is_absolute()
    assert Path(line).read_bytes() == there.image.read_bytes()
    for _ in range(2):
        assert importer("release").returncode == 0
    assert Path(line).is_file()


@pytest.mark.parametrize("uri", ["docker://ubuntu:24.04", "{store}:uncertified"])
def test_importer_refuses_what_is_not_certified(there, slurm, importer, uri):
    there.publish(certified=False, moving_tag="uncertified")
    refused = importer("get", uri.format(store=there.store.address))
    assert refused.returncode != 0
    assert refused.stdout == ""
    assert "error: " in refused.stderr
    assert "help: " in refused.stderr
    assert slurm(ENROOT / "hook.sh", ENROOT_ROOTFS="/data/pyxis_7.0").returncode == 1


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("ENVBUILD_PULL_TARGET", "h200", "not for h200"),
        ("ENVBUILD_PULL_MAX_AGE", "12x", "is not an age"),
        ("ENVBUILD_PULL_POLICY", "strictest", "there is no policy 'strictest'"),
    ],
)
def test_importer_asks_as_the_sites_variables_want(there, monkeypatch, capsys, name, value, part):
    there.publish()
    monkeypatch.setenv("ENVBUILD_TRUST", str(there.world.project / "trust.toml"))
    words = ["importer", "get", f"{there.store.address}:mcore-debian12-cpu"]
    assert run(words) == 0
    monkeypatch.setenv(name, value)
    assert run(words) != 0
    assert part in capsys.readouterr().err


LENIENT = 'summary = "whatever"\nmatrices = ["certify-full"]\nmax_age_days = 30\nwhole_matrix = false\n'


def test_policy_holds_where_an_image_is_pulled(there, pull_json, monkeypatch):
    """The shipped one, whatever the current directory has under its name; another one where it is named."""
    monkeypatch.setattr(there.world, "certify", partial(there.world.certify, whole_matrix=False), raising=False)
    there.publish()
    policies = there.home / "envs/policies"
    policies.mkdir(parents=True)
    for name in ("default", "lenient"):
        (policies / f"{name}.toml").write_text(LENIENT)
    words = [f"{there.store.address}:mcore-debian12-cpu"]
    for named in ([], ["--policy", "default"]):
        refused = pull_json(*words, *named, status=CertificateRefusedError.exit_code)
        assert refused["error"]["reason"] == "part-of-matrix"
        assert "--policy" in refused["error"]["fix"]
    for policy in ("lenient", "envs/policies/lenient.toml"):
        assert pull_json(*words, "--policy", policy)["tag"]


def test_hook_lets_start_what_the_importer_verified(there, slurm, importer):
    there.publish()
    hook, root = ENROOT / "hook.sh", "/data/pyxis_7.0"
    refused = slurm(hook, ENROOT_ROOTFS=root)
    assert refused.returncode == 1
    assert "neither envbuild's importer nor Slurm's prolog has verified its image" in refused.stderr
    assert importer("get", f"{there.store.address}:mcore-debian12-cpu").returncode == 0
    assert importer("release").returncode == 0
    assert slurm(hook, ENROOT_ROOTFS=root).returncode == 0
    assert slurm(hook, ENROOT_ROOTFS="/data/pyxis_named").returncode == 0
    # Another step: of a path that pyxis starts without the importer, and of the container that has a name.
    assert slurm(hook, step="1", ENROOT_ROOTFS="/data/pyxis_7.1").returncode == 1
    assert slurm(hook, step="1", ENROOT_ROOTFS="/run/enroot/overlay").returncode == 1
    assert slurm(hook, step="1", ENROOT_ROOTFS="/data/pyxis_named").returncode == 0
    # Outside of a job it is nobody's business.
    assert slurm(hook, ENROOT_ROOTFS="/data/x", SLURM_JOB_ID="").returncode == 0


@pytest.mark.parametrize("place", ["TMPDIR", "TEMP"])
def test_hook_and_importer_agree_where_temporary_files_are(there, site, slurm, importer, place):
    # TMPDIR of the machine from which the job came is often none here; tempfile knows other variables, too.
    there.publish()
    (there.home / "other").mkdir()
    own = {"TMPDIR": "/nowhere", "TEMP": str(there.home / "other") if place == "TEMP" else ""}
    hook = site / "hook.sh"
    for script, source in ((hook, ENROOT / "hook.sh"), (site / "importer.sh", site / "importer.sh")):
        script.write_text(source.read_text().replace("TMPDIR=/tmp", f"TMPDIR={there.home}"))
        script.chmod(0o755)
    assert importer("get", f"{there.store.address}:mcore-debian12-cpu", **own).returncode == 0
    assert slurm(hook, ENROOT_ROOTFS="/data/pyxis_7.0", **own).returncode == 0


def test_hook_knows_a_batch_script(there, slurm, importer):
    there.publish()
    batch = {"step": "", "ENROOT_ROOTFS": "/data/pyxis_7.4294967291"}
    assert importer("get", f"{there.store.address}:mcore-debian12-cpu").returncode == 0
    # The step 0 that was verified is another one.
    assert slurm(ENROOT / "hook.sh", **batch).returncode == 1
    assert importer("get", f"{there.store.address}:mcore-debian12-cpu", step="").returncode == 0
    assert slurm(ENROOT / "hook.sh", **batch).returncode == 0


def test_hook_knows_the_steps_of_a_job_that_was_requeued(there, slurm, importer):
    there.publish()
    image, started = f"{there.store.address}:mcore-debian12-cpu", {"ENROOT_ROOTFS": "/data/pyxis_7.0"}
    assert importer("get", image).returncode == 0
    again = {"SLURM_RESTART_COUNT": "1"}
    assert slurm(ENROOT / "hook.sh", **started, **again).returncode == 1
    assert importer("get", image, **again).returncode == 0
    assert slurm(ENROOT / "hook.sh", **started, **again).returncode == 0


# Only root makes a folder that is another account's.
@pytest.mark.parametrize("link", [True, *[False] * (os.geteuid() == 0)])
def test_hook_believes_nothing_that_another_account_wrote(there, slurm, link):
    """/tmp is open to all, and the folder's name is known."""
    folder = there.home / f"envbuild-{os.geteuid()}"
    theirs = there.home / "theirs" if link else folder
    (theirs / "jobs/7/containers").mkdir(parents=True)
    for name in ("0", "containers/pyxis_named"):
        (theirs / "jobs/7" / name).write_text("verified\n")
    if link:
        folder.symlink_to(theirs)
    else:
        os.chown(theirs, NOBODY, NOBODY)
    for root in ("/data/pyxis_7.0", "/data/pyxis_named"):
        assert slurm(ENROOT / "hook.sh", ENROOT_ROOTFS=root).returncode == 1


@pytest.fixture
def prologs(tmp_path):
    """The hook of a site whose Prolog has verified the image of job 7; returns containers by their first line."""
    scripts = install_scripts(tmp_path / "slurm")
    scripts.notes.mkdir()
    (scripts.notes / "7").write_text("sha256:0123\n")

    def container(first, name="pyxis_7.0"):
        (tmp_path / name / "etc").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "etc/rc").write_text(f"{first}\nexec /bin/bash\n")
        return scripts.hook, str(tmp_path / name)

    return container


VERIFIED = "# enroot-provenance: oci:sha256:0123"


@pytest.mark.parametrize("step", ["0", "1", ""])
@pytest.mark.parametrize("image", ["", "/home/me/nemo.sqsh"])
def test_hook_lets_start_what_the_prolog_verified(prologs, slurm, step, image):
    hook, root = prologs(VERIFIED)
    assert slurm(hook, step=step, ENROOT_ROOTFS=root, PYXIS_CONTAINER_IMAGE=image).returncode == 0


@pytest.mark.parametrize("first", ["# enroot-provenance: oci:sha256:0124", "", "# enroot-provenance: oci:"])
@pytest.mark.parametrize("job", ["7", "8", "x/../7"])
def test_hook_refuses_another_image_than_the_jobs(prologs, slurm, first, job):
    hook, root = prologs(first)
    refused = slurm(hook, ENROOT_ROOTFS=root, SLURM_JOB_ID=job)
    assert refused.returncode == 1
    assert "nor Slurm's prolog has verified its image" in refused.stderr


def test_hook_says_that_a_named_container_is_older(slurm):
    refused = slurm(ENROOT / "hook.sh", ENROOT_ROOTFS="/data/pyxis_mine")
    assert refused.returncode == 1
    assert "cause: the container mine was made before this job" in refused.stderr


def test_hook_refuses_the_verified_image_in_another_job(prologs, slurm):
    hook, root = prologs(VERIFIED)
    for job in ("8", "../7", "x/../7"):
        assert slurm(hook, ENROOT_ROOTFS=root, SLURM_JOB_ID=job).returncode == 1


@pytest.mark.parametrize("image", ["/home/me/evil.sqsh", "./evil.sqsh", ".evil.sqsh", "/home/me/e#vil.sqsh"])
def test_hook_names_the_variable_that_no_prolog_sees(slurm, image):
    refused = slurm(ENROOT / "hook.sh", ENROOT_ROOTFS="/data/pyxis_7.0", PYXIS_CONTAINER_IMAGE=image)
    assert refused.returncode == 1
    assert "PYXIS_CONTAINER_IMAGE names a path" in refused.stderr
    assert "sbatch, salloc or srun --container-image=PATH" in refused.stderr


def test_a_named_container_of_a_verified_image_starts_again(prologs, slurm):
    hook, root = prologs(VERIFIED, "pyxis_named")
    assert slurm(hook, ENROOT_ROOTFS=root).returncode == 0
    prologs("# changed in the container", "pyxis_named")
    assert slurm(hook, step="1", ENROOT_ROOTFS=root).returncode == 0


def test_steps_of_old_jobs_are_forgotten(there, importer):
    there.publish()
    jobs = there.home / f"envbuild-{os.geteuid()}" / "jobs"
    for name in ("5", "6"):
        (jobs / name).mkdir(parents=True)
    os.utime(jobs / "5", (0, 0))
    assert importer("get", f"{there.store.address}:mcore-debian12-cpu").returncode == 0
    assert sorted(path.name for path in jobs.iterdir()) == ["6", "7"]
