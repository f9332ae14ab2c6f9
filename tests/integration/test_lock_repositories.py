"""Repositories that are not as they should be: rewritten, shallow or partial, with files of another form."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.git_repos import History, git
from helpers.lock_runs import error, lock_of
from helpers.upstreams import Upstream, manifest, project_files

LOCK = ("lock", "--stack", "nemo", "--no-verify", "--json")
NO_COMMIT = "1" * 40
MANIFEST = "requirements/manifest.json"


def tip(upstream: Upstream, files: dict[str, str], *, when: str = "2025-04-01T00:00:00Z") -> str:
    project = project_files("nemo-toolkit", "2.3.0", "nemo", ("packaging==24.2",))
    return upstream.nemo.commit("main", when, {**project, MANIFEST: None, **files})


def serve_a_clone(history: History, *options: str) -> None:
    """Put a clone in the place of a repository."""
    clone = history.path.with_name("clone")
    subprocess.run(["git", "clone", "-q", "--bare", *options, f"file://{history.path}", clone], check=True)
    git(clone, "config", "uploadpack.allowFilter", "true")
    shutil.rmtree(history.path)
    clone.rename(history.path)


@pytest.mark.slow
def test_history_that_was_rewritten(nemo: Any, upstream: Upstream, tmp_path: Path) -> None:
    nemo.run(*LOCK)
    gone = upstream.commits["n2"]
    upstream.nemo.branch("main", None)
    files = project_files("nemo-toolkit", "2.5.0", "nemo") | {MANIFEST: manifest(upstream.commits["m3"])}
    upstream.nemo.commit("main", "2025-03-05T00:00:00Z", files, parents=())
    git(upstream.nemo.path, "gc", "-q", "--prune=now")
    assert "branch main moved" in error(nemo.run("lock", "--check", "--json", status=5))["why"]
    nemo.env["UV_CACHE_DIR"] = str(tmp_path / "uv")  # which has it in no other test's place
    refused = error(nemo.run("sync", "--into", "venv", "--json", status=10))
    assert f"does not have commit {gone[:12]}" in refused["what"], refused["why"]
    assert "forced push" in refused["why"]
    assert "envbuild lock --stack STACK --upgrade" in refused["fix"]
    shutil.rmtree(nemo.cache)
    refused = error(nemo.run("lock", "--nemo", gone, "--no-verify", "--json", status=3))
    assert "forced push" in refused["why"]
    nemo.run(*LOCK, "--upgrade")
    assert lock_of(nemo, "nemo").components["nemo-toolkit"].version == "2.5.0"


@pytest.mark.slow
def test_shallow_repository(nemo: Any, upstream: Upstream) -> None:
    """Its newest commits are taken; git 2.39 starts itself again and again in a partial mirror of one."""
    serve_a_clone(upstream.nemo, "--depth", "1")
    nemo.run(*LOCK)
    assert lock_of(nemo, "nemo").components["nemo-toolkit"].commit == upstream.commits["n2"]
    refused = error(nemo.run(*LOCK, "--as-of", "2025-03-01", "--name", "x", status=3))
    assert "is shallow: older commits are missing" in refused["why"]
    serve_a_clone(upstream.megatron, "--depth", "1")
    shutil.rmtree(nemo.cache)
    refused = error(nemo.run(*LOCK, "--name", "y", status=3))
    assert "requirements/manifest.json of nemo-toolkit" in refused["why"]
    assert "is shallow: older commits are missing" in refused["why"]
    assert "--pin megatron-core=REF" in refused["fix"]


def test_partial_repository(nemo: Any, upstream: Upstream) -> None:
    serve_a_clone(upstream.nemo, "--filter=blob:none")
    refused = error(nemo.run(*LOCK, status=10))
    assert "is a partial clone" in refused["what"]
    assert "git clone --mirror" in refused["fix"]


def test_manifest_with_unknown_keys_and_without_known_ones(nemo: Any, upstream: Upstream) -> None:
    content = json.loads(manifest(upstream.commits["m2"])) | {"new": {"key": 1}}
    entries = content["vcs-dependencies"]
    del entries["megatron-lm"]["repo"]
    entries |= {"other": {"url": "x"}, "text": "ref", "megatron-lm": entries["megatron-lm"] | {"branch": "main"}}
    tip(upstream, {MANIFEST: json.dumps(content)})
    nemo.run(*LOCK)
    assert lock_of(nemo, "nemo").components["megatron-core"].commit == upstream.commits["m2"]


def test_manifest_that_is_none(nemo: Any, upstream: Upstream) -> None:
    tip(upstream, {MANIFEST: "{"})
    refused = error(nemo.run(*LOCK, status=3))
    assert "cannot understand requirements/manifest.json" in refused["what"]
    assert "envbuild lock --as-of DATE --name NAME" in refused["fix"]
    nemo.run(*LOCK, "--as-of", "2025-03-31", "--name", "before")
    assert lock_of(nemo, "before").components["nemo-toolkit"].commit == upstream.commits["n2"]


def test_commit_that_does_not_exist(nemo: Any, upstream: Upstream) -> None:
    tip(upstream, {MANIFEST: manifest(NO_COMMIT)})
    refused = error(nemo.run(*LOCK, status=3))
    assert f"has no commit '{NO_COMMIT}'" in refused["what"]
    assert "requirements/manifest.json of nemo-toolkit" in refused["why"]
    nemo.run(*LOCK, "--pin", f"megatron-core={upstream.commits['m3']}", "--name", "pinned")
    refused = error(nemo.run(*LOCK, "--pin", f"megatron-core={NO_COMMIT}", "--name", "x", status=3))
    assert f"has no commit '{NO_COMMIT}'" in refused["what"]


@pytest.mark.slow
def test_commit_of_a_repository_that_cannot_be_reached(nemo: Any, upstream: Upstream) -> None:
    content = json.loads(manifest(upstream.commits["m2"]))
    content["vcs-dependencies"]["megatron-lm"]["repo"] = gone = "https://repositories.example/gone"
    nemo.env["GIT_CONFIG_COUNT"], nemo.env["GIT_CONFIG_KEY_0"] = "1", f"url.file://{upstream.nemo.path}-gone.insteadOf"
    nemo.env["GIT_CONFIG_VALUE_0"] = gone
    tip(upstream, {MANIFEST: json.dumps(content)})
    assert gone in error(nemo.run(*LOCK, status=10))["what"]
    upstream.nemo.path.rename(f"{upstream.nemo.path}-away")
    refused = error(nemo.run(*LOCK, "--as-of", "2025-04-02", "--name", "y", status=10))
    assert "NeMo" in refused["what"]


def test_dockerfile_that_pins_by_argument(nemo: Any, upstream: Upstream) -> None:
    text = f"FROM base\nARG MCORE_COMMIT={upstream.commits['m1']}\nRUN git checkout ${{MCORE_COMMIT}}\n"
    tip(upstream, {"docker/Dockerfile.ci": text})
    nemo.run(*LOCK)
    lock = lock_of(nemo, "nemo").components["megatron-core"]
    assert lock.commit == upstream.commits["m1"]
    assert lock.because.startswith("docker/Dockerfile.ci of nemo-toolkit")
