"""``envbuild render``: where its file goes, and which plans a cluster cannot run."""

import json
from pathlib import Path

import pytest
from helpers.slurm_jobs import DIGEST, plan_folder, plan_of

from envbuild.cli.main import run

MINE = 'extends = "dgx-ib"\nfolder = "{}"\n'


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    (tmp_path / "envs/clusters").mkdir(parents=True)
    (tmp_path / "envs/clusters/mine.toml").write_text(MINE.format(tmp_path / "shared"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def render(*words: str | Path, to: str = "sbatch", on: str = "mine") -> int:
    return run(["render", "--on", on, "--to", to, "--plan", *map(str, words)])


def test_the_script_is_the_only_thing_on_standard_output(project, capsys):
    folder = plan_folder(project / "shared/plan", plan_of("h200"))
    assert render("shared/plan") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/bin/bash\n")
    assert f"#SBATCH --output={folder}/" in shown.out
    assert "#SBATCH --nodes=2\n" in shown.out
    image = f"{project}/shared/images/{DIGEST.removeprefix('sha256:')}.sqsh"
    assert shown.out.count(image) == 3
    assert image in shown.err
    assert "Copy" not in shown.err


def test_a_plan_elsewhere_is_to_be_copied_to_the_clusters_folder(project, capsys):
    plan_folder(project / "my-plan", plan_of("h200"))
    assert render("my-plan", "--nodes", "2") == 0
    shown = capsys.readouterr()
    assert f"#SBATCH --output={project}/shared/my-plan/" in shown.out
    assert "#SBATCH --nodes=2\n" in shown.out
    assert f"Copy my-plan to {project}/shared/my-plan" in shown.err


@pytest.mark.parametrize(("to", "name"), [("sbatch", "job.sbatch"), ("edf", "environment.toml")])
def test_it_is_written_next_to_the_plan_where_that_is_wanted(project, capsys, to, name):
    folder = plan_folder(project / "shared/plan", plan_of("h200"))
    assert render(folder, "--write", to=to) == 0
    assert capsys.readouterr().out.strip() == f"shared/plan/{name}"
    text = (folder / name).read_text()
    assert render(folder, "--json", to=to) == 0
    assert json.loads(capsys.readouterr().out) == {"text": text}


@pytest.mark.parametrize(
    ("plan", "words", "what"),
    [
        (plan_of("h200", nodes=4), ["--nodes", "2"], "the plan was written with --nodes 4, and not 2"),
        (plan_of("h200", nodes=1), ["--nodes", "2"], "the plan was written with --nodes 1, and not 2"),
        (plan_of("b200"), [], "the plan is for target b200, and cluster mine has h100 and h200"),
        (plan_of("h200", nodes=1, data=16), [], "the plan needs 16 GPUs a node, and cluster mine has 8"),
        (plan_of("h200", form="oci"), [], "the plan is about form oci, and nodes of cluster mine get sqsh"),
        (plan_of("h200", form="none"), [], "the plan is about form none, and nodes of cluster mine get sqsh"),
    ],
)
def test_a_plan_that_the_cluster_cannot_run_is_refused(project, capsys, plan, words, what):
    assert render(plan_folder(project / "shared/plan", plan), *words) == 3
    shown = capsys.readouterr()
    assert f"error: {what}\n" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("on", "what"), [("dgx-ib", "cluster dgx-ib has no folder"), ("local", "cluster local has no scheduler")]
)
def test_a_cluster_that_lacks_what_a_site_decides_is_refused(project, capsys, on, what):
    assert render(plan_folder(project / "plan", plan_of("h200")), on=on) == 3
    message = capsys.readouterr().err
    assert f"error: {what}\n" in message
    assert on == "local" or 'extends = "dgx-ib" and folder = ' in message


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_folder_without_a_plan_is_refused(project, capsys, content):
    (project / "shared/plan").mkdir(parents=True)
    if content is not None:
        (project / "shared/plan/plan.json").write_text(content)
    assert render("shared/plan") == 3
    assert f"error: {project}/shared/plan has no plan\n" in capsys.readouterr().err


def test_a_folder_that_a_shell_would_act_on_is_refused(project, capsys):
    plan_folder(project / "shared/a plan", plan_of("h200"))
    assert render("shared/a plan") == 3
    assert "cannot be the folder of a job" in capsys.readouterr().err
