"""A .sqsh mounted and started through its own /etc/rc, by dash under bubblewrap: what runs, and what must not."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from envbuild.image.squashfs.pack import SqshSource, write_sqsh
from envbuild.oci.models import RunConfig
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.layer_writer import LayerWriter

EPOCH = 1_700_000_000
TOOLS = ("dash", "cat", "env", "printf", "pwd", "touch", "mkdir")


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system of dash, a few programs and the libraries that they need."""
    path = tmp_path_factory.mktemp("start") / "layer.tar.gz"
    files = {}
    for tool in TOOLS:
        program = subprocess.run(
            ["sh", "-c", f"command -v $(which {tool})"], capture_output=True, text=True, check=True
        )
        files[f"bin/{tool}"] = program.stdout.strip()
        listed = subprocess.run(["ldd", program.stdout.strip()], capture_output=True, text=True, check=True).stdout
        files |= {found.lstrip("/"): found for found in re.findall(r"(/\S+) \(0x", listed)}
    with LayerWriter(path, EPOCH) as writer:
        for name, source in files.items():
            writer.add_bytes(name, Path(source).read_bytes(), 0o755)
        for folder in ("proc", "dev", "tmp", "etc"):
            writer.add_directory(folder)
        writer.add_bytes("bin/sh", Path(files["bin/dash"]).read_bytes(), 0o755)
    return path


def source(layers: list[Path], config: RunConfig) -> SqshSource:
    blobs = [LayerBlob(file=layer) for layer in layers]
    return SqshSource(layers=blobs, config=config, provenance="oci:sha256:0", epoch=EPOCH)


@contextlib.contextmanager
def mounted(sqsh: Path, place: Path) -> Iterator[Path]:
    place.mkdir()
    if os.geteuid() == 0:
        mount, leave = ["mount", "-t", "squashfs", "-o", "loop,ro", sqsh, place], ["umount", place]
    else:
        mount, leave = ["squashfuse", sqsh, place], ["fusermount", "-u", place]
    subprocess.run(mount, check=True)
    try:
        yield place
    finally:
        subprocess.run(leave, check=True)


def start(layer: Path, tmp_path: Path, config: RunConfig, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the container of an image prints; /tmp in it is ``tmp_path/seen``."""
    sqsh = tmp_path / "image.sqsh"
    write_sqsh(sqsh, source([layer], config), tmp_path / "log")
    (tmp_path / "seen").mkdir()
    with mounted(sqsh, tmp_path / "root") as root:
        words = ["bwrap", "--ro-bind", root, "/", "--bind", tmp_path / "seen", "/tmp"]
        words += ["--dev", "/dev", "--proc", "/proc", "--unshare-all", "--clearenv", "--setenv", "PATH", "/bin"]
        words += ["sh", "/etc/rc", *arguments]
        return subprocess.run(words, capture_output=True, text=True, timeout=300)


HOSTILE = [
    "$(touch /tmp/x)",
    "`touch /tmp/x`",
    "\ntouch /tmp/x\n",
    "'; touch /tmp/x; '",
    '"; touch /tmp/x; "',
    "\\",
    "\r\n;",
]


def test_nothing_of_labels_and_words_is_run(layer: Path, tmp_path: Path) -> None:
    labels = tuple((f"label{number} {text}", text) for number, text in enumerate(HOSTILE))
    words = tuple(text for text in HOSTILE if text == text.strip())
    config = RunConfig(labels=labels, command=("/bin/sh",), environment=tuple(f"A={t}" for t in HOSTILE))
    done = start(layer, tmp_path, config, "printf", "<%s>", *words)
    assert done.stdout == "".join(f"<{word}>" for word in words)
    assert done.stderr == ""
    assert os.listdir(tmp_path / "seen") == []
