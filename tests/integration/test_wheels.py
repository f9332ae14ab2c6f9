"""`envbuild wheels` with the real nvcc: a CUDA extension that names four architectures, built for one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from helpers.cuda import make_kernels
from helpers.git_repos import History, Submodule
from helpers.lock_runs import OLD
from helpers.processes import alive, wait_until
from helpers.simple_index import SimpleIndex
from helpers.stack_files import GPU_BASE, write_base, write_stack, write_target
from helpers.upstreams import PUBLIC, made

from envbuild.wheels.architectures import Architectures
from envbuild.wheels.audit.elf import read_binary
from envbuild.wheels.toolchain.toolchain import Toolchain

SELECT = ("--stack", "k", "--target", "gpu")


@pytest.fixture
def counted(cuda: Toolchain, tmp_path: Path) -> Path:
    """A CUDA_HOME whose nvcc writes down each call."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    for part in cuda.home.iterdir():
        if part.name != "bin":
            (home / part.name).symlink_to(part)
    nvcc = home / "bin/nvcc"
    nvcc.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\nexec {cuda.nvcc} "$@"\n')
    nvcc.chmod(0o755)
    return home


@pytest.fixture
def own(tool: Any, tmp_path: Path, index: SimpleIndex, counted: Path) -> Any:
    """The tool in a project whose stack compiles `kernels`, which a loopback index has; the rest comes as usual."""
    project = tmp_path / "project"
    write_base(project, GPU_BASE, cuda="13.0", glibc="2.35")
    write_target(project, "gpu", sm=("90",))
    components = {
        "setuptools": {"version": ">=70,<81", "modules": ["setuptools"]},
        "kernels": {"version": "==1.0", "phase": "compile", "modules": ["kernels"]},
    }
    write_stack(project, "k", components, target="gpu", base=GPU_BASE, as_of="2025-06-01")
    runner = type(tool)(project, tmp_path / "cache")
    runner.env = {"UV_INDEX": index.url, "CUDA_HOME": str(counted), "UV_PYTHON_DOWNLOADS": "never"}
    runner.env |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "UV_FIND_LINKS": "", "PIP_FIND_LINKS": ""}
    return runner


def locked(own: Any, index: SimpleIndex, folder: Path, **changes: Any) -> Any:
    """The tool with a lock of the stack; ``changes`` are those of :func:`make_kernels`."""
    index.add(make_kernels(folder, **changes), OLD)
    own.run("lock", "--stack", "k")
    return own


def compiled(folder: Path) -> int:
    """How often nvcc was asked to compile."""
    calls = folder / "calls"
    return sum("kernel.cu" in line for line in calls.read_text().splitlines()) if calls.exists() else 0


def wheels(own: Any, *arguments: str, status: int = 0) -> dict[str, Any]:
    done = own.run("wheels", *SELECT, "--json", *arguments, status=status)
    assert "Traceback" not in done.stderr
    output: dict[str, Any] = json.loads(done.stdout)
    return output


def nothing_is_kept(own: Any) -> bool:
    """Whether there is no wheel, and nothing half done but what a build goes on from."""
    staging = own.cache / "staging"
    return not [*(own.cache / "wheels").glob("*")] and not (staging.is_dir() and [*staging.iterdir()])


def unfinished(own: Any) -> list[Path]:
    """The builds that have not come to their end."""
    return [*(own.cache / "wheel-builds").glob("*")]


def test_one_architecture_is_built_once(own: Any, index: SimpleIndex, tmp_path: Path) -> None:
    locked(own, index, tmp_path)
    (first,) = wheels(own)["wheels"]
    record = first["record"]
    assert first["built"] is True
    assert (record["sm"], record["ptx"], record["imported"]) == (["90"], [], ["kernels"])
    assert record["parts"]["cuda_toolkit"].startswith("13.0.")
    assert record["policy"].startswith("manylinux_2_")
    assert record["file"].endswith(f"-{record['policy']}_x86_64.whl")
    assert Path(first["path"]).name == record["file"]
    assert compiled(tmp_path) == 1
    calls = (tmp_path / "calls").read_text()
    assert "-gencode=arch=compute_90,code=sm_90" in calls
    assert "sm_75" not in calls

    (second,) = wheels(own)["wheels"]
    assert (second["built"], second["record"]) == (False, record)
    assert compiled(tmp_path) == 1, "the second run starts no compiler"
    assert unfinished(own) == []

    assert json.loads(own.run("wheels", "verify", "--json").stdout) == {"verified": 1}
    (listed,) = json.loads(own.run("wheels", "list", "--json").stdout)["wheels"]
    assert listed["record"] == record
    assert "imported = kernels" in own.run("wheels", "show", record["key"][:20]).stdout

    write_target(own.project, "gpu", sm=("100a",))
    (key,) = wheels(own, "--explain", "--against", record["key"])["keys"]
    assert key["differs"] == {"sm": ["90", "100a"]}
    assert compiled(tmp_path) == 1


@pytest.mark.slow
def test_no_wheel_names_a_place_of_this_machine(own: Any, index: SimpleIndex, tmp_path: Path) -> None:
    source = 'extern "C" const char *place() { return __FILE__; }'
    locked(own, index, tmp_path, before=f"open('kernel.cu', 'a').write({source!r})")
    (wheel,) = wheels(own)["wheels"]
    with zipfile.ZipFile(wheel["path"]) as archive:
        (library,) = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    assert str(tmp_path).encode() not in library
    assert b"kernel.cu\0" in library


@pytest.mark.slow
def test_another_cache_and_job_count_give_the_same_bytes(own: Any, index: SimpleIndex, tmp_path: Path) -> None:
    """nvcc puts a number made of its whole command into names of symbols that a file has for itself."""
    own_symbols = (
        "namespace { __global__ void hidden(float *v) { v[0] = 1; } }\nvoid go(float *v) { hidden<<<1, 1>>>(v); }\n"
    )
    # With its whole path, as torch.utils.cpp_extension names a source.
    locked(own, index, tmp_path, files={"own.cu": own_symbols}, link="os.path.abspath('own.cu')")
    (first,) = wheels(own, "--jobs", "1")["wheels"]
    other = type(own)(own.project, tmp_path / "another" / "place" / "of-a-cache")
    other.env = own.env
    (second,) = wheels(other, "--jobs", "2")["wheels"]
    assert compiled(tmp_path) == 2
    assert second["path"] != first["path"]
    assert second["record"]["digest"] == first["record"]["digest"]


@pytest.mark.slow
def test_a_wheel_that_is_not_what_was_asked_for_is_not_kept(
    own: Any, index: SimpleIndex, tmp_path: Path, cuda: Toolchain
) -> None:
    """Its build calls the real nvcc, and not the one that it is given."""
    locked(own, index, tmp_path, before=f"nvcc = os.path.realpath({str(cuda.nvcc)!r})")
    error = wheels(own, status=5)["error"]
    assert "It contains sm_75, sm_80, sm_90, sm_100; asked for was sm_90." in error["why"]
    assert Path(error["log"]).is_file()
    assert nothing_is_kept(own)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_build_that_is_stopped_leaves_nothing(
    own: Any, index: SimpleIndex, tmp_path: Path, number: int, status: int
) -> None:
    marker = tmp_path / "marker"
    wait = f"open({str(marker)!r}, 'w').write(str(os.getpid())); __import__('time').sleep(3600)"
    locked(own, index, tmp_path, before=wait)
    process = own.start("wheels", *SELECT)
    wait_until(lambda: marker.exists() and marker.read_text())
    process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode == status
    wait_until(lambda: not alive(int(marker.read_text())))
    assert number == signal.SIGKILL or nothing_is_kept(own)


# Compiles by ninja, as torch's extensions do: the kernel, and something that waits to be let go.
NINJA = """\
import sys; base = os.path.join("build", "temp.linux"); os.makedirs(base, exist_ok=True)
        rules = "rule compile\\n command = " + " ".join([nvcc, *GENCODE, "-c ../../kernel.cu -o $out"]) + "\\n"
        rules += "rule wait\\n command = while [ ! -e {gate} ]; do sleep 0.1; done; touch $out\\n"
        rules += "build kernel.o: compile ../../kernel.cu\\nbuild gate: wait kernel.o\\n"
        open(os.path.join(base, "build.ninja"), "w").write(rules)
        subprocess.run([os.path.join(os.path.dirname(sys.executable), "ninja"), "-v"], cwd=base, check=True)
        extension.sources[0] = os.path.join(base, "kernel.o")"""


@pytest.mark.slow
def test_a_build_that_was_ended_goes_on_where_it_was(own: Any, index: SimpleIndex, tmp_path: Path) -> None:
    file = own.project / "envs/stacks/k.toml"
    ninja = '\n[requirements.ninja]\nversion = ">=1.11"\nreason = "the build of kernels runs it"\n'
    file.write_text(file.read_text() + ninja)
    gate = tmp_path / "gate"
    locked(own, index, tmp_path, before=NINJA.format(gate=gate), link="'-Xcompiler', '-fPIC'")
    process = own.start("wheels", *SELECT)
    # ninja logs what it has finished.
    logs = "wheel-builds/*/source/*/build/temp.linux/.ninja_log"
    wait_until(lambda: any("kernel.o" in log.read_text() for log in own.cache.glob(logs)))
    process.kill()
    process.communicate(timeout=300)
    (folder,) = unfinished(own)
    assert compiled(tmp_path) == 1
    gate.touch()
    (wheel,) = wheels(own)["wheels"]
    assert (wheel["built"], wheel["record"]["sm"]) == (True, ["90"])
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("-c ../../kernel.cu" in line for line in calls) == 1, "the object file was there already"
    assert not folder.exists()


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_next_run_goes_on(own: Any, index: SimpleIndex, tmp_path: Path) -> None:
    fill = "open('big', 'wb').write(bytes(4 << 20))"
    locked(own, index, tmp_path, before=fill)
    wheels(own, "--explain")  # the sdist is here
    builds = own.cache / "wheel-builds"
    builds.mkdir()
    small = 'mount -t tmpfs -o size=1m tmpfs "$0" || exit 99; exec "$@"'
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", small, str(builds)]
    command = [*namespace, *own.command("wheels", *SELECT, "--json")]
    done = subprocess.run(command, cwd=own.project, env=own.environment(), capture_output=True, text=True)
    assert done.returncode == 11, done.stdout + done.stderr
    error = json.loads(done.stdout)["error"]
    assert "is full" in error["what"]
    assert nothing_is_kept(own)
    (wheel,) = wheels(own)["wheels"]
    assert wheel["built"] is True


@pytest.mark.slow
def test_one_that_fails_leaves_the_others_to_be_kept(own: Any, index: SimpleIndex, tmp_path: Path) -> None:
    file = own.project / "envs/stacks/k.toml"
    more = '\n[components.broken]\nversion = "==1.0"\nphase = "compile"\nmodules = ["broken"]\n'
    file.write_text(file.read_text() + more)
    index.add(make_kernels(tmp_path, name="broken", before="raise SystemExit('no luck')"), OLD)
    locked(own, index, tmp_path)
    done = own.run("wheels", *SELECT, "--json", status=6)
    assert json.loads(done.stdout)["error"]["what"].startswith("the wheel of broken 1.0 does not build")
    (kept,) = json.loads(own.run("wheels", "list", "--json").stdout)["wheels"]
    assert kept["record"]["parts"]["package"] == "kernels"


@pytest.mark.slow
def test_a_patch_of_the_recipe_is_applied_and_is_part_of_the_key(own: Any, index: SimpleIndex, tmp_path: Path) -> None:
    locked(own, index, tmp_path)
    (plain,) = wheels(own, "--explain")["keys"]
    patches = own.project / "envs/wheels/patches"
    patches.mkdir(parents=True)
    patch = "--- a/kernel.cu\n+++ b/kernel.cu\n@@ -2,1 +2,1 @@\n"
    (patches / "answer.patch").write_text(
        patch + '-extern "C" int answer() { return 42; }\n+extern "C" int answer() { return 43; }\n'
    )
    recipe = 'summary = "changed"\n\n[[patches]]\nfile = "answer.patch"\nversions = "<2"\nreason = "a test"\n'
    (own.project / "envs/wheels/kernels.toml").write_text(recipe)
    (wheel,) = wheels(own)["wheels"]
    assert wheel["record"]["key"] != plain["key"]
    own.run("sync", *SELECT, "--into", "venv")
    output = subprocess.run(
        [own.project / "venv/bin/python", "-c", "import kernels; print(kernels.answer())"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert output.stdout == "43\n"

    (patches / "answer.patch").write_text(patch + "-nothing like it\n+else\n")
    error = wheels(own, status=5)["error"]
    assert error["what"] == "the patch answer.patch does not apply to kernels 1.0"
    (patches / "answer.patch").unlink()
    assert wheels(own, status=3)["error"]["what"] == "there is no patch answer.patch"


@pytest.mark.slow
def test_a_package_from_git_is_built_from_its_commit_with_submodules(
    own: Any, index: SimpleIndex, tmp_path: Path
) -> None:
    sdist = make_kernels(tmp_path, before="extension.sources[0] = 'third/kernel.cu'")
    with tarfile.open(sdist) as tar:
        texts = {}
        for member in tar:
            content = tar.extractfile(member)
            texts[member.name.partition("/")[2]] = content.read().decode() if content else ""
    third = History(made(tmp_path / "git/x/third"))
    texts.pop("PKG-INFO")
    inside = third.commit("main", "2025-01-01T00:00:00Z", {"kernel.cu": texts.pop("kernel.cu")})
    modules = '[submodule "third"]\n\tpath = third\n\turl = ../third\n'
    files = {**texts, ".gitmodules": modules, "third": Submodule(inside)}
    commit = History(made(tmp_path / "git/x/kernels")).commit("main", "2025-02-01T00:00:00Z", files)
    settings = tmp_path / "gitconfig"
    rewritten = f'[url "file://{tmp_path}/git/"]\n\tinsteadOf = {PUBLIC}/\n[protocol "file"]\n\tallow = always\n'
    settings.write_text(rewritten)
    own.env |= {"GIT_CONFIG_GLOBAL": str(settings), "GIT_CONFIG_NOSYSTEM": "1"}
    components = {
        "setuptools": {"version": ">=70,<81", "modules": ["setuptools"]},
        "kernels": {"git": f"{PUBLIC}/x/kernels", "ref": "main", "phase": "compile", "modules": ["kernels"]},
    }
    write_stack(own.project, "k", components, target="gpu", base=GPU_BASE, as_of="2025-06-01")
    own.run("lock", "--stack", "k")
    (wheel,) = wheels(own)["wheels"]
    parts = wheel["record"]["parts"]
    assert (parts["commit"], parts["sdist"], wheel["record"]["sm"]) == (commit, "", ["90"])
    assert compiled(tmp_path) == 1
    output = json.loads(own.run("sync", *SELECT, "--into", "venv", "--json").stdout)
    assert output["wheels"] == {"kernels": wheel["record"]["key"]}
    assert "kernels" in output["imported"]
    assert compiled(tmp_path) == 1

    # Built again from what is kept: no repository is asked.
    shutil.rmtree(own.cache / "wheels")
    shutil.rmtree(tmp_path / "git")
    assert wheels(own)["wheels"][0]["built"] is True
    shutil.rmtree(own.cache / "wheels")
    shutil.rmtree(own.cache / "git-trees")
    error = wheels(own, status=10)["error"]
    assert error["what"] == f"cannot fetch the sources of kernels at {commit[:12]}"


@pytest.mark.slow
def test_an_sm_that_nvcc_does_not_know_is_refused_before_anything_is_made(
    own: Any, index: SimpleIndex, tmp_path: Path
) -> None:
    locked(own, index, tmp_path)
    write_target(own.project, "gpu", sm=("50", "90", "75a"))
    error = wheels(own, status=5)["error"]
    assert error["what"].endswith("does not compile for sm_50, sm_75a")
    assert "knows sm_75, sm_80, " in error["why"]
    assert "envs/targets" in error["fix"]
    assert compiled(tmp_path) == 0
    assert not (own.cache / "build-environments").exists()
    write_target(own.project, "gpu", sm=("100f", "90a"))
    assert wheels(own)["wheels"][0]["record"]["sm"] == ["90a", "100f"]


@pytest.mark.slow
def test_sync_takes_wheels_from_a_cache_that_is_read_only(own: Any, index: SimpleIndex, tmp_path: Path) -> None:
    locked(own, index, tmp_path)
    wheels(own)
    own.env["UV_CACHE_DIR"] = str(tmp_path / "uv")
    bound = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" || exit 99; exec "$@"'
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", bound, str(own.cache)]
    command = [*namespace, *own.command("sync", *SELECT, "--into", "venv", "--json")]
    environment = own.environment() | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=own.project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    output = json.loads(done.stdout)
    assert ("kernels" in output["imported"], [*output["wheels"]]) == (True, ["kernels"])
    assert f"the cache directory {own.cache} cannot be written" in done.stderr
    (logs,) = {Path(item["log"]).parent for item in output["phases"]}
    assert logs.parent.parent == tmp_path
    assert (logs / "import-kernels.log").is_file()
    assert not (own.cache / "logs/sync").exists()


@pytest.mark.slow
def test_architectures_are_read_as_nvcc_wrote_them(cuda: Toolchain, tmp_path: Path) -> None:
    """The fields of fat binaries that are read, against a compile for all kinds of architectures."""
    (tmp_path / "a.cu").write_text("__global__ void twice(float *x) { x[threadIdx.x] *= 2.0f; }\n")
    sass, ptx = ("80", "90", "90a", "100a", "100f", "120"), ("90a", "120")
    pairs = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in sass]
    pairs += [f"-gencode=arch=compute_{sm},code=compute_{sm}" for sm in ptx]
    out = tmp_path / "a.so"
    for more in ([], ["-rdc=true"]):
        command = [cuda.nvcc, "-shared", "-Xcompiler", "-fPIC", *pairs, *more, "-o", out, tmp_path / "a.cu"]
        subprocess.run(command, check=True)
        found = read_binary("a.so", out.read_bytes()).architectures
        assert found.sass == Architectures.named(sass).sass
        assert found.ptx == (Architectures.named(sass, ptx).ptx if not more else found.ptx)


@pytest.mark.slow
def test_sync_without_building_leaves_out_what_was_never_built(own: Any, index: SimpleIndex, tmp_path: Path) -> None:
    locked(own, index, tmp_path)
    select = (*SELECT, "--into", "venv", "--no-build", "--json")
    output = json.loads(own.run("sync", *select).stdout)
    assert output["never_built"] == ["kernels"]
    missing = {"module": "kernels", "component": "kernels", "reason": "locked, never built"}
    assert output["not_checked"] == [missing]
    assert [item["packages"] for item in output["phases"] if item["phase"] == "compile"] == [0]
    assert compiled(tmp_path) == 0
    wheels(own)
    output = json.loads(own.run("sync", *select).stdout)
    assert (output["never_built"], "kernels" in output["imported"]) == ([], True)


@pytest.mark.slow
def test_an_image_takes_the_wheel_where_the_base_has_no_compiler(own: Any, index: SimpleIndex, tmp_path: Path) -> None:
    select = (*SELECT, "--format", "oci", "--json")
    locked(own, index, tmp_path)
    own.run("image", *select, status=6)  # nvcc is not in the base
    (wheel,) = wheels(own)["wheels"]
    output = json.loads(own.run("image", *select).stdout)
    assert output["record"]["wheels"] == {"kernels": wheel["record"]["digest"]}
    assert output["record"]["packages"]["kernels"] == "1.0"
    assert output["record"]["not_checked"] == {}
    assert in_image(output) == Architectures.named(["90"])
    again = json.loads(own.run("image", *select).stdout)
    assert (again["built"], again["record"]) == (False, output["record"])
    assert compiled(tmp_path) == 1

    # Another wheel of the same name, version and file name: no cache may give out the first one.
    write_target(own.project, "gpu", sm=("80",))
    wheels(own)
    assert in_image(json.loads(own.run("image", *select).stdout)) == Architectures.named(["80"])


def in_image(output: dict[str, Any]) -> Architectures:
    """What the extension in an image is compiled for."""
    for layer in Path(output["path"], "oci/blobs/sha256").iterdir():
        if layer.read_bytes()[:2] != b"\x1f\x8b":
            continue
        with tarfile.open(layer) as tar:
            for member in tar:
                if Path(member.name).name.startswith("kernels.cpython"):
                    content = tar.extractfile(member)
                    assert content is not None
                    return read_binary(member.name, content.read()).architectures
    pytest.fail("the extension is not in the image")
