"""Installing a lock: the very commands, their order, and what their failures are called."""

from pathlib import Path

import pytest
from helpers.locks import make_lock

from envbuild.catalog.stack import Phase
from envbuild.core.errors import BuildError, MachineError, NetworkError
from envbuild.core.process import Finished
from envbuild.core.progress import SilentReporter
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.uv.torch_builds import PACKAGE_INDEX, TorchSource
from envbuild.sync.install import InstallScope, add_files, install
from envbuild.sync.install_target import InstallTarget


class Recorder:
    """A place's way to run things, which only writes down what it is asked."""

    def __init__(self, failing: str = "", output: str = "", *, cached: bool = False) -> None:
        self.commands: list[list[str]] = []
        self.logs: list[str] = []
        self._failing = failing
        self._cached = cached
        self._output = output

    def __call__(self, argv, *, what, log):
        self.commands.append(list(argv))
        self.logs.append(log.name)
        failed = bool(self._failing) and self._failing in " ".join(argv)
        if "--offline" in argv and not self._cached:
            failed = True
        return Finished(status=2 if failed else 0, output=self._output, seconds=1.5)


def lock_with(tmp_path: Path, **packages: int) -> LockDirectory:
    lock = make_lock(tmp_path / "lock")
    phases = {name: phase.model_copy(update={"packages": packages[name]}) for name, phase in lock.phases.items()}
    return LockDirectory(tmp_path / "lock", lock.model_copy(update={"phases": phases}))


def run_install(lock, tmp_path, recorder, source=PACKAGE_INDEX, **more):
    return install(lock, place_for(tmp_path, recorder), source, SilentReporter(), InstallScope(**more))


def place_for(tmp_path, recorder):
    return InstallTarget(
        uv="/x/uv",
        lock="/x/lock",
        python="/usr/bin/python3.11",
        venv="/opt/venv",
        run=recorder,
        disk=tmp_path,
        logs=tmp_path / "logs",
    )


COMMON = ["/x/uv", "--color", "never", "pip", "install", "--python", "/opt/venv/bin/python", "--no-deps"]
COMMON += ["--find-links", "/w"]
VENV = ["/x/uv", "--color", "never", "venv", "--python", "/usr/bin/python3.11", "--no-project", "/opt/venv"]
PHASES = [
    [*COMMON, "--require-hashes", "--requirements", "/x/lock/main.txt"],
    [*COMMON, "--require-hashes", "--no-build-isolation", "--requirements", "/x/lock/compile.txt"],
    [*COMMON, "--no-build-isolation", "--requirements", "/x/lock/git.txt"],
]


def test_install_runs_the_phases_in_order_and_resolves_nothing(tmp_path):
    recorder = Recorder()
    phases = run_install(
        lock_with(tmp_path, main=14, compile=2, git=1), tmp_path, recorder, TorchSource("find-links", "/w")
    )
    assert [command for command in recorder.commands if "--offline" not in command] == [VENV, *PHASES]
    assert [(phase.phase, phase.packages, phase.seconds) for phase in phases] == [
        ("main", 14, 1.5),
        ("compile", 2, 1.5),
        ("git", 1, 1.5),
    ]


def test_install_asks_no_index_for_what_the_cache_has(tmp_path):
    recorder = Recorder(cached=True)
    run_install(lock_with(tmp_path, main=14, compile=2, git=1), tmp_path, recorder, TorchSource("find-links", "/w"))
    assert recorder.commands == [VENV, *[[*command, "--offline"] for command in PHASES]]


@pytest.mark.parametrize(("version", "again"), [("4.5.0", True), ("4.6.0", False)])
def test_what_lies_over_another_package_is_installed_again(tmp_path, version, again):
    recorder = Recorder(cached=True)
    lock = lock_with(tmp_path, main=2, compile=0, git=0)
    with (tmp_path / "lock/main.txt").open("a") as file:
        file.write(f"nvidia-cutlass-dsl-libs-base=={version}\nnvidia-cutlass-dsl-libs-cu13=={version}\n")
    run_install(lock, tmp_path, recorder, TorchSource("find-links", "/w"))
    main = [*PHASES[0], "--offline"]
    more = [*COMMON, "--reinstall-package", "nvidia-cutlass-dsl-libs-cu13", *main[len(COMMON) :]]
    assert recorder.commands == [VENV, main, *([more] if again else [])]


def test_install_takes_built_wheels_before_the_rest_of_their_phase(tmp_path):
    """uv leaves alone what is there in the pinned version, so nothing else of the phase changes."""
    recorder = Recorder(cached=True)
    wheels = {"b": "/w/b-1.whl", "a": "/w/a-2.whl"}
    run_install(
        lock_with(tmp_path, main=1, compile=2, git=1),
        tmp_path,
        recorder,
        TorchSource("find-links", "/w"),
        wheels=wheels,
    )
    taken = ["/x/uv", "--color", "never", "pip", "install", "--python", "/opt/venv/bin/python", "--no-deps"]
    taken += ["--no-index", "--offline", "/w/a-2.whl", "/w/b-1.whl"]
    main, compiled, git = ([*command, "--offline"] for command in PHASES)
    assert recorder.commands == [VENV, main, taken, compiled, git]


def test_packages_from_git_are_built_in_isolation_but_for_some(tmp_path):
    lock = lock_with(tmp_path, main=0, compile=0, git=2)
    component = next(iter(lock.lock.components.values()))
    built = {"git": "https://x/k", "commit": "a" * 40}
    components = {
        "alone": component.model_copy(update={**built, "phase": Phase.MAIN}),
        "kernels": component.model_copy(update={**built, "phase": Phase.COMPILE}),
    }
    git = lock.lock.phases["git"].model_copy(update={"builds": "sha256:1"})
    record = lock.lock.model_copy(update={"components": components, "phases": {**lock.lock.phases, "git": git}})
    recorder = Recorder(cached=True)
    trees = {"alone": "/x/sources/alone"}
    run_install(LockDirectory(lock.path, record), tmp_path, recorder, TorchSource("find-links", "/w"), wheels=trees)
    options = ["--build-constraints", "/x/lock/git-build.txt", "--no-build-isolation-package", "kernels"]
    _, tree, *_ = recorder.commands
    assert tree == [*COMMON, *options, "alone @ file:///x/sources/alone", "--offline"]


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ("error: Failed to fetch: `https://index.example/simple/x/`\n  Caused by: dns error", NetworkError),
        ("error: Hash mismatch for `torch==2.13.0`", BuildError),
        ("error: failed to write: No space left on device (os error 28)", MachineError),
    ],
)
def test_install_failure_is_named_by_its_cause(tmp_path, output, kind):
    recorder = Recorder(failing="main.txt", output=output)
    with pytest.raises(kind) as caught:
        run_install(lock_with(tmp_path, main=1, compile=1, git=0), tmp_path, recorder)
    assert type(caught.value) is kind
    assert caught.value.fix
    assert kind is not BuildError or ("Hash" in caught.value.why, caught.value.log.name) == (True, "install-main.log")
    assert "compile.txt" not in str(recorder.commands)


def test_missing_python_is_an_error_of_the_machine(tmp_path):
    recorder = Recorder(failing=" venv ", output="error: No interpreter found for Python 3.99 in virtual environments")
    with pytest.raises(MachineError, match=r"Python 3\.99 is missing on this machine"):
        run_install(lock_with(tmp_path, main=1, compile=0, git=0), tmp_path, recorder)


def test_packages_that_are_left_out_take_their_hashes_with_them(tmp_path):
    recorder = Recorder(cached=True)
    lock = lock_with(tmp_path, main=3, compile=0, git=0)
    (tmp_path / "lock/main.txt").write_text(
        "# a note\none==1.0 \\\n    --hash=sha256:aa\nTwo_x==2 ; x\n    --hash=sha256:bb\nthree @ https://x/three.whl\n"
    )
    (done,) = run_install(lock, tmp_path, recorder, leave_out={"two-x", "three"})
    file = tmp_path / "logs/installed-main.txt"
    assert file.read_text() == "# a note\none==1.0 \\\n    --hash=sha256:aa\n"
    assert (done.packages, str(file) in recorder.commands[-1]) == (1, True)


def test_a_file_that_the_stack_adds_changes_no_other_name_of_what_is_there(tmp_path):
    made = make_lock(tmp_path / "lock")
    lock = LockDirectory(tmp_path / "lock", made.model_copy(update={"files": {"a/b/Makefile": "all: ;\n"}}))
    original = tmp_path / "original"
    original.write_text("a package's")
    file = tmp_path / "site-packages/a/b/Makefile"
    add_files(lock, tmp_path / "site-packages")
    assert file.read_text() == "all: ;\n"
    file.unlink()
    file.hardlink_to(original)
    add_files(lock, tmp_path / "site-packages")
    assert (file.read_text(), original.read_text()) == ("all: ;\n", "a package's")
