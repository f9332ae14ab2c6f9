"""Layers with what a test plants in them, read as images' layers are."""

from __future__ import annotations

from pathlib import Path

from helpers.layer_tars import Item, file, layer

from envbuild.core.progress import SilentReporter
from envbuild.image.scan.scan import CachedScan, scan_layer
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.single_layer import members_of
from envbuild.store.local import LocalStore

PLACES = ("/run/envbuild", "/data/build/store")
SITE = "opt/envbuild/venv/lib/python3.11/site-packages"
# Put together here, so that no file of ours holds what looks like one.
AWS_KEY = b"AKIA" + b"J5QXVTGWKD4Z7MHB"
HF_TOKEN = b"hf" + b"_" + b"aZbYcXdWeVfUgThSiRjQkPlOmNnMoLpKqJ"
PRIVATE_KEY = b"-----BEGIN " + b"PRIVATE KEY-----\n" + b"MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7\n"


def scanned(folder: Path, *items: Item, name: str = "planted") -> CachedScan:
    """The scan of a layer of these members."""
    folder.mkdir(parents=True, exist_ok=True)
    blob = layer(folder, *items)
    return scan_of(blob, folder, name)


def scan_of(blob: LayerBlob, folder: Path, name: str = "planted") -> CachedScan:
    """The scan of a layer that is there."""
    store = LocalStore(folder / "store", SilentReporter())
    digest = f"sha256:{blob.file.name:0>64}"
    return scan_layer(name, digest, lambda: members_of(blob), PLACES, store)


def package(name: str, version: str, metadata: str = "", record: str = "", **files: bytes) -> list[Item]:
    """A dist-info folder."""
    info = f"{SITE}/{name.replace('-', '_')}-{version}.dist-info"
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}\nThe description.\n"
    items = [file(f"{info}/METADATA", text.encode()), file(f"{info}/RECORD", record.encode())]
    return [*items, *(file(f"{info}/{key}", content) for key, content in files.items())]
