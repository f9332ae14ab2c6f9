"""The files of `envbuild ci init`: read by what will read them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command_line import run_here

TO, STATE = "registry.example.invalid:5000/team/envs", "s3://bucket/state"
# Of "Workflow syntax for GitHub Actions": the keys that a workflow, a job and a step may have.
WORKFLOW = {"name", "run-name", "on", "permissions", "env", "defaults", "concurrency", "jobs"}
JOB = {"name", "permissions", "needs", "if", "runs-on", "environment", "concurrency", "outputs", "env", "defaults"}
JOB |= {"steps", "timeout-minutes", "strategy", "continue-on-error", "container", "services", "uses", "with", "secrets"}
STEP = {"id", "if", "name", "uses", "run", "working-directory", "shell", "with", "env", "continue-on-error"}
STEP |= {"timeout-minutes"}


def init(project: Path, system: str, *more: str, targets: str = "cpu,h200", status: int = 0) -> dict[str, str]:
    project.mkdir(exist_ok=True)
    words = ["ci", "init", "--for", system, "--stack", "mcore", "--targets", targets, "--to", TO, *more]
    done = run_here(words, project, {})
    assert done.returncode == status, done.stderr
    files = [path for path in sorted(project.rglob("*")) if path.is_file()]
    return {str(path.relative_to(project)): path.read_text() for path in files} if status == 0 else {"": done.stderr}


class Workflow(yaml.SafeLoader):
    """YAML 1.2, as GitHub reads it: `on` is a text."""


Workflow.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def check_nightly(words: list[str]) -> None:
    """`envbuild nightly` takes these words."""
    from envbuild.cli.nightly import command

    known = {word for option in command.params for word in option.opts}
    assert {word for word in words if word.startswith("--")} <= known


def check_shell(text: str) -> None:
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


def test_a_workflow_has_the_keys_of_workflows_and_calls_the_nightly(tmp_path: Path) -> None:
    files = init(tmp_path, "github", "--state", STATE, "--at", "03:30")
    assert sorted(files) == [".github/workflows/envbuild-nightly-mcore.yml", "gpu-runner.sbatch"]
    workflow: dict[str, Any] = yaml.load(files[".github/workflows/envbuild-nightly-mcore.yml"], Workflow)
    assert workflow.keys() <= WORKFLOW
    assert workflow["on"]["schedule"] == [{"cron": "30 3 * * *"}]
    (job,) = workflow["jobs"].values()
    assert job.keys() <= JOB
    assert job["strategy"]["fail-fast"] == "false"
    assert [row["target"] for row in job["strategy"]["matrix"]["include"]] == ["cpu", "h200"]
    for step in job["steps"]:
        assert step.keys() <= STEP
        assert ("run" in step) != ("uses" in step)
        check_shell(step.get("run", ""))
        # A secret in a command line would be in the process list, and an expression in a script is code.
        assert "${{" not in step.get("run", "")
    (command,) = [step["run"] for step in job["steps"] if "nightly" in step.get("run", "")]
    assert shlex.split(command) == [
        *("envbuild", "nightly", "--stack", "mcore", "--targets", "$TARGET", "--to", TO, "--state", STATE)
    ]
    check_nightly(shlex.split(command)[2:])
    check_shell(files["gpu-runner.sbatch"])
    assert "gpu-runner.sbatch envbuild-h200" in files["gpu-runner.sbatch"]


def test_a_workflow_needs_a_ledger_that_lasts(tmp_path: Path) -> None:
    error = init(tmp_path, "github", status=2)[""]
    assert "--for github needs --state" in error
    assert list(tmp_path.iterdir()) == []


def test_a_timer_and_its_service_are_units(tmp_path: Path) -> None:
    files = init(tmp_path, "systemd", "--sqsh-to", "/lustre/images")
    service, timer = files["envbuild-nightly-mcore.service"], files["envbuild-nightly-mcore.timer"]
    (line,) = re.findall("^ExecStart=(.*)$", service, re.MULTILINE)
    assert shlex.split(line)[1:] == [
        *("nightly", "--stack", "mcore", "--targets", "cpu,h200", "--to", TO, "--sqsh-to", "/lustre/images")
    ]
    check_nightly(shlex.split(line)[2:])
    assert f"WorkingDirectory={tmp_path}\n" in service
    assert "SuccessExitStatus=8" in service, "waiting for hardware is no failure"
    assert "OnCalendar=*-*-* 02:00:00 UTC" in timer
    if (program := shutil.which("systemd-analyze")) is not None:
        # Without ExecStart, which must be a program of this machine.
        unit = tmp_path / "envbuild-nightly-mcore.service"
        unit.write_text(service.replace(line, "/bin/true"))
        words = [program, "verify", str(unit), str(tmp_path / "envbuild-nightly-mcore.timer")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        about = [text for text in done.stderr.splitlines() if "envbuild-nightly" in text]
        assert (done.returncode, about) == (0, [])


def test_a_crontab_of_slurm_submits_to_a_cluster(tmp_path: Path) -> None:
    files = init(tmp_path, "slurm", "--at", "23:05", "--on", "dgx-ib")
    assert list(files) == ["envbuild-nightly-mcore.scrontab"]
    *options, line = [
        text for text in files["envbuild-nightly-mcore.scrontab"].splitlines() if not text.startswith("# ")
    ]
    assert all(re.fullmatch(r"#SCRON --[a-z-]+=\S+", text) for text in options)
    assert line.startswith("5 23 * * * ")
    words = shlex.split(line.split(maxsplit=5)[5])
    assert words[1:8] == ["nightly", "--stack", "mcore", "--targets", "cpu,h200", "--to", TO]
    assert words[8:] == ["--on", "dgx-ib"]
    check_nightly(words[2:])
    check_shell(line)
    assert "--on" not in init(tmp_path / "cpu", "slurm", targets="cpu")["envbuild-nightly-mcore.scrontab"]
    assert "--for slurm needs --on" in init(tmp_path / "none", "slurm", status=2)[""]
    assert "--on has no effect with --for systemd" in init(tmp_path / "none", "systemd", "--on", "plain", status=2)[""]


def test_a_file_that_was_edited_stays(tmp_path: Path) -> None:
    init(tmp_path, "systemd")
    init(tmp_path, "systemd")
    (tmp_path / "envbuild-nightly-mcore.timer").write_text("edited")
    (tmp_path / "envbuild-nightly-mcore.service").unlink()
    assert "exists and is another file" in init(tmp_path, "systemd", status=2)[""]
    assert [path.name for path in tmp_path.iterdir()] == ["envbuild-nightly-mcore.timer"], "nothing is written then"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--to", "registry/x; rm -rf /"), "--to has characters that a CI file cannot hold"),
        (("--state", "s3://b/$(id)"), "--state has characters that a CI file cannot hold"),
        (("--at", "24:00"), "is not a time such as 02:00"),
        (("--targets", "cpu,h2000"), "stack mcore has no target 'h2000'"),
    ],
)
def test_what_would_be_read_as_something_else_is_refused(tmp_path: Path, more: tuple[str, str], words: str) -> None:
    assert words in init(tmp_path, "systemd", *more, status=2)[""]
    assert list(tmp_path.iterdir()) == []
