"""The native builder on a stack that installs in a second: same digests, nothing half-done, and its refusals."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Tool
from helpers.attackers import reachable_folder, watched
from helpers.files import flip_a_byte, record_programs, snapshot_of
from helpers.layer_tars import read_members
from helpers.mini import NAME, image_of, write_stack
from helpers.processes import in_child, unprivileged, wait_until

from envbuild.catalog.catalog import Catalog, HostDistribution, Selection, select
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core.digests import sha256_file
from envbuild.core.errors import BuildError
from envbuild.core.progress import SilentReporter
from envbuild.image.build import BuiltImage, build_image
from envbuild.image.inputs import ImageInputs
from envbuild.lock.lockdir import find_lock
from envbuild.lock.lockfile import LockDirectory
from envbuild.store.local import LocalStore

FULL = 11
NETWORK = 10
REFUSED = 5


@pytest.fixture(scope="module")
def selection(mini: Tool) -> Selection:
    return select(Catalog.open(mini.project), NAME, "cpu", None, HostDistribution.here())


@pytest.fixture(scope="module")
def lock(mini: Tool, selection: Selection) -> LockDirectory:
    return find_lock(mini.project, selection)


@pytest.fixture(scope="module")
def image(mini_image: dict[str, Any]) -> dict[str, Any]:
    return mini_image


def digests(result: dict[str, Any]) -> tuple[str, str]:
    record = result["record"]
    return record["oci_digest"], record["sqsh"]["digest"]


def image_layers(result: dict[str, Any]) -> dict[str, str]:
    return {layer["name"]: layer["digest"] for layer in result["record"]["layers"]}


@pytest.fixture
def warm(image: dict[str, Any], mini_cache: Path, tmp_path: Path) -> Path:
    """A store of its own that has the session's bases and uv cache, and nothing else."""
    folder = tmp_path / "a store elsewhere"
    folder.mkdir()
    (folder / "bases").symlink_to(mini_cache / "bases")
    (folder / "uv").mkdir()
    shutil.copytree(mini_cache / "uv/cache", folder / "uv/cache", symlinks=True)
    return folder


def build_in(store: Path, selection: Selection, lock: LockDirectory, **options: Any) -> BuiltImage:
    return build_image(ImageInputs(selection=selection, lock=lock, **options), context_of(store))


def context_of(store: Path, reporter: SilentReporter | None = None) -> Context:
    reporter = reporter or SilentReporter()
    site = load_site({**os.environ, "ENVBUILD_CACHE_DIR": str(store)})
    return Context(store=LocalStore(store, reporter), site=site, reporter=reporter)


def files_in(store: Path, *kinds: str) -> list[str]:
    return [path.name for kind in kinds for path in (store / kind).glob("*")]


def assert_closed(store: Path) -> None:
    """No other account enters what the store has of images and packages."""
    for kind in ("bases", "environments", "images", "layers", "layer-surveys", "staging", "uv"):
        with pytest.raises(PermissionError):
            os.listdir(store / kind)


@pytest.mark.slow
def test_image_from_nothing_in_another_cache_has_the_same_digests(mini: Tool, image: Any, tmp_path: Path) -> None:
    """Other paths, another umask, another temporary directory; the base is made anew."""
    (tmp_path / "t").mkdir()
    with reachable_folder() as folder, watched(folder) as seen:
        other = Tool(mini.project, folder / "some where" / "else", {"TMPDIR": str(tmp_path / "t"), "LANG": "C"})
        old = os.umask(0o002)
        try:
            result = image_of(other, out=str(tmp_path / "out"))
        finally:
            os.umask(old)
        assert unprivileged(lambda: assert_closed(other.cache)) == 0
    # Neither programs of the base's with root's rights nor its devices are in the store, at any moment.
    assert (seen.dangerous, seen.taken) == ([], [])
    assert result["built"] is True
    if result["record"]["base_packages"] != image["record"]["base_packages"]:
        # The distribution's mirror moved since the session's base was made: two of now are compared.
        image = image_of(Tool(mini.project, tmp_path / "third"), out=str(tmp_path / "third-out"))
    # By name first: a digest alone does not tell what differs.
    assert image_layers(result) == image_layers(image)
    assert digests(result) == digests(image)
    first, second = Path(image["path"]), Path(result["path"])
    assert sha256_file(first / "image.sqsh") == sha256_file(second / "image.sqsh") == digests(image)[1]
    assert not first.samefile(second)
    assert [path for path in (tmp_path / "t").rglob("*") if not path.is_dir()] == []


def test_image_again_starts_no_program_and_writes_nothing(
    mini: Tool, image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = (mini.cache / "images", mini.cache / "logs", mini.project / "out")
    before = snapshot_of(*places)
    started = record_programs(monkeypatch)
    again = image_of(mini)
    assert (again["built"], again["placed"], digests(again)) == (False, False, digests(image))
    assert started == []
    assert snapshot_of(*places) == before


@pytest.mark.slow
def test_image_changed_in_place_is_noticed_and_made_anew(mini: Tool, image: Any, tmp_path: Path) -> None:
    # In a store of its own: others read the image meanwhile.
    own = Tool(tmp_path / "p", tmp_path / "cache")
    subprocess.run(["cp", "-a", "--reflink=auto", mini.cache, own.cache], check=True)
    for folder in ("envs", "lockfiles"):
        shutil.copytree(mini.project / folder, own.project / folder)
    sqsh = Path(image_of(own)["path"]) / "image.sqsh"
    flip_a_byte(sqsh)
    # The output is a copy: the store's own file is as it was.
    again = image_of(own)
    assert (again["built"], again["placed"], sha256_file(sqsh)) == (False, True, digests(image)[1])
    [stored] = [path for path in (own.cache / "images").glob("*/image.sqsh") if sha256_file(path) == sha256_file(sqsh)]
    flip_a_byte(stored)
    done = own.run("image", "--stack", NAME, "--target", "cpu")
    assert "was damaged (image.sqsh was changed)" in done.stderr
    assert sha256_file(stored) == sha256_file(sqsh) == digests(image)[1]


@pytest.mark.slow
def test_lock_of_a_name_has_an_image_of_its_own(mini: Tool, image: Any, tmp_path: Path) -> None:
    other = Tool(tmp_path / "p", mini.cache)
    for folder in ("envs", "lockfiles"):
        shutil.copytree(mini.project / folder, other.project / folder)
    other.run("lock", "--stack", NAME, "--target", "cpu", "--pin", "packaging=24.2", "--name", "try1")
    named = image_of(other, "--name", "try1")
    base = named["record"]["base"]
    assert named["built"] is True
    assert Path(named["path"]) == other.project / "out" / "images" / f"try1-{base}-cpu"
    assert (named["record"]["stack"], named["record"]["packages"]["packaging"]) == (NAME, "24.2")
    own = image_of(other)
    assert Path(own["path"]) == other.project / "out" / "images" / f"{NAME}-{base}-cpu"
    assert digests(own) == digests(image) != digests(named)
    again = image_of(other, "--name", "try1")
    assert (again["built"], again["placed"]) == (False, False)


def test_sqsh_is_added_to_the_layers_that_are_there(warm: Path, selection: Selection, lock: LockDirectory) -> None:
    plain = build_in(warm, selection, lock, with_sqsh=False)
    assert plain.record.sqsh is None
    assert not list(plain.path.glob("*.sqsh"))
    both = build_in(warm, selection, lock, with_sqsh=True)
    assert both.record.oci_digest == plain.record.oci_digest
    for layer in both.record.layers[:-1]:
        blob = Path("oci/blobs/sha256") / layer.digest.removeprefix("sha256:")
        assert (plain.path / blob).samefile(both.path / blob)
    again = build_in(warm, selection, lock, with_sqsh=False)
    assert (again.path, again.built) == (both.path, False)


class KillingReporter(SilentReporter):
    """Kills its own process when a step begins or ends; counts them."""

    def __init__(self, number: int) -> None:
        self._left = number

    def _count(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        self._count()
        yield
        self._count()


@pytest.mark.slow
def test_kill_at_every_step_loses_nothing(image: Any, warm: Path, selection: Selection, lock: LockDirectory) -> None:
    """Each run goes on from what the one before left, and is killed a step later."""
    kills = 0
    while True:

        def build(number: int = kills) -> None:
            build_image(ImageInputs(selection=selection, lock=lock), context_of(warm, KillingReporter(number)))

        status = in_child(build)
        # What is taken for done is whole.
        for entry in [path for kind in ("images", "environments", "layers") for path in (warm / kind).glob("*")]:
            assert (entry / "record.json").is_file()
        if status == 0:
            break
        assert status == -signal.SIGKILL
        kills += 1
    built = build_in(warm, selection, lock)
    assert (built.built, built.record.oci_digest, built.record.sqsh_digest) == (False, *digests(image))
    with LocalStore(warm, SilentReporter()).staging("next") as folder:
        assert {name.removesuffix(".lock") for name in files_in(warm, "staging")} == {folder.name}
    assert kills >= 5


@pytest.mark.slow
def test_kill_while_the_base_is_made(mini: Tool, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    process = Tool(mini.project, cache, {"TMPDIR": str(tmp_path)}).start("image", "--stack", NAME, "--target", "cpu")
    wait_until(lambda: list(tmp_path.glob("envbuild-*/staging/*/mmdebstrap.*/usr")))
    process.kill()
    process.communicate(timeout=300)
    # Its programs go with it, and their mounts; the next command sweeps what they wrote.
    wait_until(lambda: running_in(tmp_path) == [])
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert files_in(cache, "bases") == []
    (temporary,) = tmp_path.glob("envbuild-*")
    with LocalStore(temporary, SilentReporter()).staging("next") as folder:
        assert {name.removesuffix(".lock") for name in files_in(temporary, "staging")} == {folder.name}
    with LocalStore(cache, SilentReporter()).staging("next") as folder:
        assert {name.removesuffix(".lock") for name in files_in(cache, "staging")} == {folder.name}


def running_in(folder: Path) -> list[str]:
    """Command lines of processes that work below ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            places = [os.readlink(process / name) for name in ("cwd", "root")]
            if str(folder) in words or any(place.startswith(str(folder)) for place in places):
                found.append(words)
    return found


def test_image_holds_nothing_of_this_machine(image: Any, mini: Tool) -> None:
    words = [str(mini.cache), str(mini.project), "/run/envbuild", "mmdebstrap"]
    for layer in image["record"]["layers"]:
        file = Path(image["path"]) / "oci/blobs/sha256" / layer["digest"].removeprefix("sha256:")
        for member, content in read_members(file):
            assert member.name not in ("etc/apt/sources.list", "etc/machine-id", "etc/hostname")
            assert not member.name.startswith(("etc/apt/sources.list.d/", "var/lib/apt/lists/", "var/log/", "dev/"))
            assert Path(member.name).name not in ("uv_cache.json", "CACHEDIR.TAG", ".lock")
            if content and layer["name"] != "base":
                data = content.read()
                found = [word for word in words if word.encode() in data]
                assert not found, f"{member.name} names {found}"


def test_image_records_what_is_in_it(image: Any) -> None:
    record = image["record"]
    assert record["packages"] == {"packaging": "25.0", "psutil": "7.0.0"}
    assert record["base_packages"]["libc6"]
    assert record["not_checked"] == {}
    assert [layer["name"] for layer in record["layers"]] == ["base", "python", "components", "configuration"]
    assert record["base_digest"] == record["layers"][0]["diff_id"]


def test_stack_whose_module_does_not_import_is_refused(mini: Tool, warm: Path, tmp_path: Path) -> None:
    write_stack(tmp_path / "p", module="psutil.no_such_part")
    tool = Tool(tmp_path / "p", warm)
    tool.run("lock", "--stack", NAME, "--target", "cpu")
    done = tool.run("image", "--stack", NAME, "--target", "cpu", status=REFUSED)
    assert "psutil.no_such_part (psutil) exited with status 1" in done.stderr
    assert "No module named 'psutil.no_such_part'" in done.stderr
    assert files_in(warm, "environments", "images", "staging", "uv/staging") == []


def test_file_that_is_not_the_locked_one_is_refused(
    warm: Path, selection: Selection, lock: LockDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index, here a local one, that serves other files under the names and versions that are locked."""
    shutil.rmtree(warm / "uv/cache")
    for name, version in lock.packages().items():
        serve_another_file(tmp_path / "index", name, version)
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"file://{tmp_path}/index")
    with pytest.raises(BuildError, match="install phase main") as caught:
        build_in(warm, selection, lock)
    assert "hash" in caught.value.why.lower()
    assert caught.value.log is not None
    assert caught.value.log.is_file()
    assert files_in(warm, "environments", "images", "staging", "uv/staging") == []


def serve_another_file(index: Path, name: str, version: str) -> None:
    """Put a wheel of that name and version, with nothing in it, into a local index (PEP 503)."""
    folder = index / name
    folder.mkdir(parents=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')


@pytest.mark.slow
def test_without_network_the_base_names_the_network(mini: Tool, tmp_path: Path) -> None:
    done = without_network(Tool(mini.project, tmp_path / "cache"))
    assert done.returncode == NETWORK, done.stderr
    assert "the package archive cannot be reached" in done.stderr
    assert files_in(tmp_path / "cache", "bases", "staging") == []


@pytest.mark.slow
def test_warm_cache_without_network_gives_the_same_digests(mini: Tool, image: Any, warm: Path, tmp_path: Path) -> None:
    """Another path, another umask, another temporary directory; the layers are made anew."""
    (tmp_path / "t").mkdir()
    other = Tool(mini.project, warm, {"TMPDIR": str(tmp_path / "t"), "LANG": "C"})
    old = os.umask(0o002)
    try:
        done = without_network(other, "--json", "--out-dir", str(warm / "out"))
    finally:
        os.umask(old)
    assert done.returncode == 0, done.stderr
    assert digests(json.loads(done.stdout)) == digests(image)
    assert [path for path in (tmp_path / "t").rglob("*") if not path.is_dir()] == []


def without_network(tool: Tool, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["unshare", "--user", "--map-root-user", "--net"] if os.geteuid() else ["unshare", "--net"]
    return subprocess.run(
        [*command, *tool.command("image", "--stack", NAME, "--target", "cpu", *arguments)],
        cwd=tool.project,
        env=tool.environment(),
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mebibytes", "step"), [(1, "install phase main"), (40, "write the OCI layout"), (130, "pack the .sqsh")]
)
def test_full_disk_is_named_and_nothing_is_kept(
    mini: Tool, warm: Path, tmp_path: Path, mebibytes: int, step: str
) -> None:
    """The store on a small disk that only this test sees; the base is on another one."""
    done = on_small_disk(mini, warm, tmp_path / "small", mebibytes)
    assert done.returncode == FULL, done.stdout + done.stderr
    assert "is full" in done.stderr
    steps = [line for line in done.stderr.splitlines() if line.startswith("* ")]
    assert steps[-1].startswith(f"* {step}")
    assert "left behind: none" in done.stdout


@pytest.mark.slow
def test_full_disk_while_the_base_is_made(mini: Tool, tmp_path: Path) -> None:
    done = on_small_disk(mini, None, tmp_path / "small", 100)
    assert done.returncode == FULL, done.stdout + done.stderr
    assert "is full" in done.stderr
    assert "left behind: none" in done.stdout


SMALL_DISK = """
set -u
disk=$1 size=$2 warm=$3
shift 3
mount -t tmpfs -o "size=${size}m" small "$disk"
if [ -n "$warm" ]; then
    ln -s "$warm/bases" "$disk/bases"
fi
"$@"
status=$?
left=$(find "$disk" -type f ! -path "$disk/locks/*" ! -path "$disk/logs/*" ! -path "$disk/uv/cache/*" \\
    ! -path "$disk/uv/locks/*" ! -path "$disk/environments/*" ! -path "$disk/layers/*" \\
    ! -path "$disk/layer-surveys/*" | head -3)
echo "left behind: ${left:-none}"
exit $status
"""


def on_small_disk(tool: Tool, warm: Path | None, disk: Path, mebibytes: int) -> subprocess.CompletedProcess[str]:
    disk.mkdir()
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", SMALL_DISK, "sh", disk, str(mebibytes)]
    small = Tool(tool.project, disk)
    return subprocess.run(
        [*command, str(warm or ""), *small.command("image", "--stack", NAME, "--target", "cpu")],
        cwd=tool.project,
        env=small.environment(),
        capture_output=True,
        text=True,
    )
