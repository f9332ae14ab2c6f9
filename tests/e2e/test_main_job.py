"""The README's three commands, for real: lock, image, certify of stack mcore on target cpu."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Tool
from helpers.certify_world import statement_of
from helpers.files import flip_a_byte, record_programs, snapshot_of
from helpers.kept_entries import keep_environment
from helpers.stores import docker_registry, registry_program

from envbuild.catalog.catalog import Selection
from envbuild.catalog.data import data_root
from envbuild.certify.certificate.envelope import decode
from envbuild.core.digests import short
from envbuild.image.base import base_key
from envbuild.lock.lockdir import find_lock

STACK = ("--stack", "mcore", "--target", "cpu")
LOCK = ("lock", *STACK)
IMAGE = ("image", *STACK, "--format", "oci,sqsh")
CERTIFY = ("certify", *STACK)
MAIN_JOB = (LOCK, IMAGE, CERTIFY)
CASES = [
    "gpt-fp32-baseline",
    "gpt-fp32-baseline-dlr0.0005-mask-uneven-ptl",
    "gpt-fp32-baseline-gb4",
    "moe-fp32-baseline-clip0.1",
    "gpt-fp32-dp2",
    "gpt-fp32-tp2",
    "gpt-fp32-pp2",
    "gpt-fp32-pp2-vp2",
    "gpt-fp32-tp2-pp2",
    "gpt-fp32-dp2-do",
    "gpt-fp32-dp2-do-ogr-opg-bk20000",
    "gpt-fp32-dp2-pp2-dlr0.0005-mask-uneven-ptl",
    "gpt-fp32-resume3",
    "gpt-fp32-dp2-gb4",
    "moe-fp32-dp2-ep2-clip0.1",
]


@pytest.fixture(scope="module")
def main_job(tool: Tool, selection: Selection) -> list[dict]:
    """What each of the three commands printed with --json; base and environment are those of an earlier session."""
    locked = json.loads(tool.run(*LOCK, "--json").stdout)
    if "ENVBUILD_TEST_CACHE" not in os.environ:
        keep_environment(selection, find_lock(tool.project, selection), tool.cache)
    return [locked, *(json.loads(tool.run(*command, "--json").stdout) for command in (IMAGE, CERTIFY))]


def record_of(tool: Tool) -> dict:
    (path,) = (tool.project / "out" / "images").glob("*/record.json")
    return json.loads(path.read_text())


def digests(tool: Tool) -> tuple[str, str]:
    record = record_of(tool)
    return record["oci_digest"], record["sqsh"]["digest"]


def test_main_job_certifies_all_cases(main_job: list[dict]) -> None:
    certified = main_job[2]
    assert [case["id"] for case in certified["cases"]] == CASES
    assert all(case["passed"] for case in certified["cases"])
    assert all(len(case["steps"]) == 5 for case in certified["cases"])


def test_main_job_starts_the_driver_before_the_image_counts_as_built(main_job: list[dict], tool: Tool) -> None:
    (environment,) = (tool.cache / "environments").glob("*/record.json")
    assert json.loads(environment.read_text())["driver"] == "mcore"
    assert main_job[1]["record"]["not_checked"] == {}


def test_main_job_certificate_is_about_this_image_and_lock_and_is_not_signed(main_job: list[dict], tool: Tool) -> None:
    path = Path(main_job[2]["certificate"])
    statement = statement_of(path)
    oci, sqsh = digests(tool)
    subjects = {subject["name"].rsplit(".", 1)[1]: subject["digest"]["sha256"] for subject in statement["subject"]}
    # Docker's manifest of the same blobs: for registries that know no other.
    assert subjects.pop("docker") not in (oci, sqsh)
    assert subjects == {"oci": oci.removeprefix("sha256:"), "sqsh": sqsh.removeprefix("sha256:")}
    assert statement["predicate"]["lock_digest"] == main_job[0]["digest"]
    assert (main_job[2]["signed"], decode(path.read_bytes()).signed) == (False, None)
    versions = statement["predicate"]["measured"]["environment"]["versions"]
    assert versions["megatron-core"] == main_job[0]["components"]["megatron-core"]
    assert versions["torch"] == main_job[0]["torch"]["version"]


@pytest.mark.parametrize("command", [LOCK, IMAGE], ids=["lock", "image"])
def test_main_job_second_run_starts_no_program_and_writes_nothing(
    main_job: list[dict], tool: Tool, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = (tool.project, tool.cache / "images", tool.cache / "layers", tool.cache / "environments")
    before = snapshot_of(*places)
    started = record_programs(monkeypatch)
    assert "nothing to do" in tool.run(*command).stdout
    assert started == []
    assert snapshot_of(*places) == before


def test_main_job_second_certify_runs_no_case(main_job: list[dict], tool: Tool) -> None:
    before = snapshot_of(tool.project)
    assert "nothing to do" in tool.run(*CERTIFY).stdout
    assert snapshot_of(tool.project) == before


def test_image_outputs_deleted_are_put_back_from_the_store(main_job: list[dict], tool: Tool) -> None:
    before = digests(tool)
    shutil.rmtree(tool.project / "out" / "images")
    assert "put in place from the store" in tool.run(*IMAGE).stdout
    assert digests(tool) == before


@pytest.mark.slow
def test_certify_one_case_runs_it_and_its_baseline(main_job: list[dict], tool: Tool) -> None:
    done = json.loads(tool.run(*CERTIFY, "--only", "gpt-fp32-dp2", "--json").stdout)
    assert [case["id"] for case in done["cases"]] == ["gpt-fp32-baseline", "gpt-fp32-dp2"]
    assert statement_of(Path(done["certificate"]))["predicate"]["whole_matrix"] is False


def test_certify_refuses_an_sqsh_that_was_changed(main_job: list[dict], tool: Tool, tmp_path: Path) -> None:
    other = Tool(tmp_path, tool.cache)
    shutil.copytree(tool.project / "lockfiles", other.project / "lockfiles")
    shutil.copytree(tool.project / "out" / "images", other.project / "out" / "images")
    (sqsh,) = (other.project / "out" / "images").glob("*/image.sqsh")
    flip_a_byte(sqsh)
    assert "is not the one that was built" in other.run(*CERTIFY, status=5).stderr


def test_image_without_torchs_build_is_refused_before_the_base_is_made(
    main_job: list[dict], tool: Tool, tmp_path: Path
) -> None:
    nowhere = dict.fromkeys(("PIP_FIND_LINKS", "UV_FIND_LINKS"), "") | {"PIP_CONFIG_FILE": os.devnull}
    other = Tool(tmp_path, tmp_path / "cache", {**nowhere, "ENVBUILD_TORCH_INDEX": "http://127.0.0.1:9/"})
    shutil.copytree(tool.project / "lockfiles", other.project / "lockfiles")
    stderr = other.run(*IMAGE, status=10).stderr
    assert "--torch-build index" in stderr
    assert "make base" not in stderr


@pytest.mark.slow
def test_image_and_certify_several_at_once_end_well(main_job: list[dict], tool: Tool, tmp_path: Path) -> None:
    other = Tool(tmp_path, tool.cache)
    shutil.copytree(tool.project / "lockfiles", other.project / "lockfiles")
    for command in (IMAGE, (*CERTIFY, "--only", "gpt-fp32-dp2")):
        running = [other.start(*command) for _ in range(3)]
        for process in running:
            _, stderr = process.communicate()
            assert process.returncode == 0, stderr
    assert digests(other) == digests(tool)


def test_lock_replaced_while_its_image_is_built_is_refused(
    main_job: list[dict], tool: Tool, selection: Selection, tmp_path: Path
) -> None:
    other = Tool(tmp_path, tmp_path / "cache")
    shutil.copytree(tool.project / "lockfiles", other.project / "lockfiles")
    (other.cache / "locks").mkdir(parents=True)
    (other.cache / "bases").symlink_to(tool.cache / "bases")
    # Holds the image back until the lock has been replaced.
    in_use = other.cache / "locks" / f"in-use-{short(base_key(selection.base))}.lock"
    with in_use.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        process = other.start(*IMAGE)
        assert process.stderr is not None
        assert any("waiting for it" in line for line in process.stderr)
        envs = other.project / "envs" / "stacks"
        envs.mkdir(parents=True)
        shipped = (data_root() / "envs" / "stacks" / "mcore.toml").read_text()
        (envs / "mcore.toml").write_text(
            shipped.replace("[requirements.psutil]", '[requirements.psutil]\nversion = "<7.2"')
        )
        other.run(*LOCK)
    _, stderr = process.communicate()
    assert process.returncode == 5, stderr
    assert "was replaced while it was in use" in stderr


def blocks_of(page: str, command: str) -> list[str]:
    """The commands of a page's blocks that have this one."""
    blocks = re.findall(r"```sh\n(.*?)```", (data_root() / page).read_text(), re.DOTALL)
    return [block for block in blocks if f"envbuild {command}" in block]


@pytest.mark.slow
def test_commands_of_the_docs_publish_after_the_demo_at_once_and_build_nothing(
    main_job: list[dict], tool: Tool, tmp_path: Path
) -> None:
    other = Tool(tmp_path / "project", tool.cache, {"HOME": str(tmp_path / "home")})
    for name in ("lockfiles", "out"):
        shutil.copytree(tool.project / name, other.project / name)
    before = digests(other)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    (guide,) = blocks_of("docs/guides/publish.md", "certificate keygen")
    (first, second) = blocks_of("README.md", "certificate keygen") + blocks_of("README.md", "publish")
    with docker_registry(registry_program(tmp_path / "program"), tmp_path / "registry") as address:
        for script in (guide, first + second):
            place = script.replace("registry.example.org", address.removeprefix("http://"))
            done = subprocess.run(
                ["bash", "-euc", place], cwd=other.project, env={**other.environment(), "PATH": path},
                capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert re.search(r"^published: mcore-[a-z0-9]+-[0-9a-f]{12}-cpu$", done.stdout, re.MULTILINE), done.stdout
    assert digests(other) == before


def digests_after_kills(tool: Tool, kills: int, seed: int, longest: float) -> tuple[str, str]:
    """Run the main job in a new project and store, killing it again and again; then let it finish."""
    dice = random.Random(seed)
    for number in range(kills):
        deadline = time.monotonic() + dice.uniform(0.1, longest)
        blow = signal.SIGKILL if number % 2 else signal.SIGINT
        for command in MAIN_JOB:
            process = tool.start(*command)
            try:
                # At least until Python has come as far as envbuild.
                process.communicate(timeout=max(2.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(blow)
                _, stderr = process.communicate()
                # 0: the work was done when the signal came.
                assert process.returncode in ((130, 0) if blow == signal.SIGINT else (-signal.SIGKILL, 0)), stderr
                assert "Traceback" not in stderr
                break
    for command in MAIN_JOB:
        tool.run(*command)
    return digests(tool)


@pytest.mark.slow
def test_main_job_killed_at_random_moments_ends_with_the_same_digests_in_another_cache(
    main_job: list[dict], tool: Tool, tmp_path: Path
) -> None:
    other = Tool(tmp_path / "elsewhere", tmp_path / "cache" / "deeper")
    other.project.mkdir()
    shutil.copytree(tool.project / "lockfiles", other.project / "lockfiles")
    # That a base made anew has the same digest is shown on a smaller image.
    other.cache.mkdir(parents=True)
    (other.cache / "bases").symlink_to(tool.cache / "bases")
    assert digests_after_kills(other, kills=3, seed=20261121, longest=40.0) == digests(tool)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_main_job_killed_at_ten_random_moments_ends_with_the_same_digests(
    main_job: list[dict], tool: Tool, tmp_path: Path, seed: int
) -> None:
    other = Tool(tmp_path, tmp_path / "cache")
    shutil.copytree(tool.project / "lockfiles", other.project / "lockfiles")
    assert digests_after_kills(other, kills=10, seed=seed, longest=150.0) == digests(tool)
