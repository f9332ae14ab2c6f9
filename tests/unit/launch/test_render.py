"""Batch scripts and environment definitions: golden files, and words that a shell would act on.

``ENVBUILD_WRITE_GOLDEN=1`` writes the golden files; look at what changed before you commit it.
"""

import json
import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.slurm_jobs import DIGEST, SHIPPED, cluster_of, job_of, shipped_job

from envbuild.core import tomlread
from envbuild.core.errors import ConfigurationError
from envbuild.launch.slurm.job import SlurmJob
from envbuild.launch.slurm.render import render_edf, render_sbatch

GOLDEN = Path(__file__).with_name("golden")
JOBS = {
    **{name: shipped_job(name) for name in SHIPPED},
    "bwrap": job_of(cluster_of('[slurm]\nruntime = "bwrap"\npython = "/opt/envbuild/bin/python"')),
    "edf": job_of(cluster_of('[slurm]\nruntime = "edf"')),
    "sbcast": job_of(cluster_of('[image]\nby = "sbcast"\nnode_folder = "/dev/shm"')),
    "importer": job_of(
        cluster_of('[image]\nby = "importer"\nrepository = "registry.example.org#team/nemo"'), form="oci"
    ),
    "everything": job_of(
        cluster_of("""[slurm]
partition = "batch"
account = "lab"
qos = "high"
reservation = "maintenance"
constraint = "h100&ib"
nodelist = "n[1-4]"
exclude = "n3"
gpus_by = "gres"
exclusive = false
directives = [{ line = "--comment='nightly run'", reason = "the site's accounting wants it" }]
[mounts.data]
source = "/data"
[mounts.checkpoints]
source = "/fast/{job_id}"
target = "/checkpoints"
read_only = false
""")
    ),
}
NO_COMMANDS: Mapping[str, str] = {}
# Each is something to a shell, to sbatch or to enroot.
EVIL = [
    "a b",
    "$(touch pwned)",
    "`touch pwned`",
    "x'y\"z'",
    "${HOME}",
    "$HOME",
    "* ?",
    ";touch pwned",
    "\\n\\",
    "#no",
    "ü&|<>!",
]


@pytest.mark.parametrize("name", sorted(JOBS))
def test_golden(name):
    files = {f"{name}.sbatch": render_sbatch(JOBS[name]), f"{name}.toml": render_edf(JOBS[name])}
    for file, text in files.items():
        if os.environ.get("ENVBUILD_WRITE_GOLDEN"):
            (GOLDEN / file).write_text(text)
        assert text == (GOLDEN / file).read_text()
    assert tomlread.loads(files[f"{name}.toml"])["workdir"] == "/"
    subprocess.run(["bash", "-n"], input=files[f"{name}.sbatch"], text=True, check=True)


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(JOBS)


def run_script(
    job: SlurmJob, folder: Path, commands: Mapping[str, str] = NO_COMMANDS, **environment: str
) -> tuple[list[str], dict[str, str]]:
    """The words and variables that a batch script starts its step with; Slurm's commands are small stand-ins.

    ``commands``: in the place of these.
    """
    programs = folder / "programs"
    programs.mkdir()
    for name, text in {
        "scontrol": "echo NodeAddr=10.0.0.1 NodeHostName=n1",
        "squeue": "echo 2026-11-28T12:00:00",
        # The first step looks for files on the nodes.
        "srun": f"""case "$*" in *"all nodes share"*) exit ;; esac
printf "%s\\0" "$@" >{folder}/words; env -0 >{folder}/variables; exit 7""",
        **commands,
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "42",
        "SLURMD_NODENAME": "n1",
        **environment,
    }
    done = subprocess.run(["bash", "-c", render_sbatch(job)], cwd=folder, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "")
    assert not list(folder.rglob("pwned"))
    words = (folder / "words").read_text().split("\0")[:-1]
    return words, dict(pair.split("=", 1) for pair in (folder / "variables").read_text().split("\0")[:-1])


def with_variables(folder: Path, more: str = "") -> SlurmJob:
    lines = "\n".join(f"V{number} = {json.dumps([word, 'second'])}" for number, word in enumerate(EVIL))
    cluster = cluster_of(
        f'[transport]\nnetwork = "NET/IB"\n{more}\n[transport.variables]\n{lines}\nJ = ["/run/{{job_id}}/x"]'
    )
    return job_of(cluster, folder=str(folder))


def test_variables_reach_the_step_as_they_are_written(tmp_path):
    words, variables = run_script(with_variables(tmp_path), tmp_path)
    assert [variables[f"V{number}"] for number in range(len(EVIL))] == [f"{word},second" for word in EVIL]
    assert variables["J"] == "/run/42/x"
    named = next(word for word in words if word.startswith("--container-env="))
    assert set(named.partition("=")[2].split(",")) == {"J", *(f"V{number}" for number in range(len(EVIL)))}
    assert (tmp_path / "token-42-0").stat().st_mode & 0o777 == 0o600


def test_variables_win_over_the_script_that_is_sourced_in_the_image(tmp_path):
    script = tmp_path / "site.sh"
    script.write_text("export V0=script J=script OWN=script LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/script\n")
    job = with_variables(tmp_path, f'script = "{script}"\nlibraries = ["/site/a", "/site/b"]')
    job = replace(job, python="/usr/bin/env", arguments=("$(touch pwned)", "it's"))
    words, _ = run_script(job, tmp_path)
    inside = words[words.index("bash") :]
    # env in place of the interpreter: it prints its variables, when its words are cut off.
    inside[2] = inside[2].partition("trap")[0] + "exec env -0"
    path = {"LD_LIBRARY_PATH": "/image", "SLURM_JOB_ID": "42", "PATH": os.environ["PATH"]}
    done = subprocess.run(inside, env=path, capture_output=True, text=True, check=True)
    variables = dict(pair.split("=", 1) for pair in done.stdout.split("\0")[:-1])
    assert [variables[f"V{number}"] for number in range(len(EVIL))] == [f"{word},second" for word in EVIL]
    assert (variables["J"], variables["OWN"]) == ("/run/42/x", "script")
    assert variables["LD_LIBRARY_PATH"] == "/site/a:/site/b:/image:/script"


def test_runners_words_and_the_nodes_number_are_the_steps_last(tmp_path):
    job = replace(with_variables(tmp_path), python="printf", arguments=("$(touch pwned)", "it's"))
    words, _ = run_script(job, tmp_path)
    shown = subprocess.run(
        [*words[words.index("bash") :]],
        env={"SLURM_NODEID": "3", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    # printf's format is the runner's path, which takes no more words: bash shows what it ran with -x.
    assert shown.stdout == "/envbuild/run/smoke.pyz"
    traced = subprocess.run(
        ["bash", "-xc", *words[words.index("bash") + 2 :]],
        env={"SLURM_NODEID": "3", "PATH": os.environ["PATH"], "PS4": ""},
        capture_output=True,
        text=True,
    )
    run = shlex.split(traced.stderr.splitlines()[1])
    assert run[run.index("2") + 1 : run.index("--node-rank")] == ["$(touch pwned)", "it's"]
    assert run[run.index("--node-rank") :][:4] == ["--node-rank", "3", "--head", "10.0.0.1:0"]


def test_what_the_submitting_shell_had_set_does_not_reach_the_step(tmp_path):
    job = job_of(cluster_of(""), folder=str(tmp_path))
    had = {"NCCL_NET": "Socket", "PYTHONPATH": "/mine", "PYXIS_CONTAINER_NAME": "old", "LD_PRELOAD": "", "SLURM_X": "1"}
    _, variables = run_script(job, tmp_path, **had)
    assert had.keys() & variables.keys() == {"SLURM_X"}


@pytest.mark.parametrize(("restarts", "requeued"), [("0", False), ("1", True)])
def test_a_start_that_was_replaced_does_not_put_its_preempted_job_back(tmp_path, restarts, requeued):
    job = job_of(cluster_of(""), folder=str(tmp_path))
    shown = "JobId=42 NodeAddr=10.0.0.1 Requeue=1 Restarts=1 BatchFlag=1 PreemptTime=2026-11-28T12:00:00"
    scontrol = f'[ "$1" != requeue ] || touch {tmp_path}/requeued\necho "{shown}"'
    run_script(job, tmp_path, {"scontrol": scontrol, "sleep": ""}, SLURM_RESTART_COUNT=restarts)
    assert (tmp_path / "requeued").exists() is requeued


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"name": "a\n#SBATCH --uid=0"}, "name of a job"),
        ({"name": "a b"}, "name of a job"),
        ({"folder": "/a b"}, "folder of a job"),
        ({"folder": "run"}, "folder of a job"),
        ({"folder": "/a/$(id)"}, "folder of a job"),
        ({"folder": "/a/%j"}, "folder of a job"),
        ({"folder": "/a\n"}, "folder of a job"),
        ({"image": "/a,b.sqsh"}, "image of a job"),
        ({"image": "nvcr.io#nvidia/nemo:25.09"}, "image of a job"),
        ({"image": f"nvcr.io#nvidia/`id`@{DIGEST}"}, "image of a job"),
    ],
)
def test_words_that_a_shell_or_sbatch_acts_on_are_refused(changed, named):
    with pytest.raises(ConfigurationError) as caught:
        replace(JOBS["plain"], **changed)
    assert named in caught.value.what


def test_nothing_of_the_transport_is_in_a_job_of_one_node():
    job = replace(JOBS["a3-high"], nodes=1)
    assert "tcpx" not in render_sbatch(job).lower()
    assert "tcpx" not in render_edf(job).lower()
    assert "NCCL" not in render_sbatch(job)


def test_strings_of_an_environment_definition_are_not_expanded():
    cluster = cluster_of(
        '[transport]\nnetwork = "NET/OFI"\nannotations = { "com.hooks.aws_ofi_nccl.enabled" = "true" }\n'
        '[transport.variables]\nA = ["${HOME} $HOME"]\nB = ["{job_id}"]\n'
    )
    document = tomlread.loads(render_edf(job_of(cluster)))
    assert document["env"] == {"A": "$${HOME} $HOME", "B": "${SLURM_JOB_ID}"}
    assert document["annotations"] == {"com.hooks.aws_ofi_nccl.enabled": "true"}


def test_a_job_from_a_registry_starts_in_the_image_of_its_digest_alone(tmp_path):
    words, _ = run_script(replace(JOBS["importer"], folder=str(tmp_path)), tmp_path)
    inside = words[words.index("bash") + 2]
    for first, expected in (
        (f"# enroot-provenance: oci:{DIGEST}", "started"),
        ("# enroot-provenance: oci:sha256:0", ""),
    ):
        rc = tmp_path / "rc"
        rc.write_text(f"{first}\nrest\n")
        script = inside.replace("/etc/rc", str(rc)).partition("trap")[0] + "echo started"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        assert done.stdout.strip() == expected
        assert (done.returncode == 3) == (not expected)
