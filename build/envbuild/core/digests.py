"""Digests of files and of values: the names under which everything is kept."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | tuple[Json, ...] | dict[str, Json] | None"

CHUNK_BYTES = 1 << 20
DIGEST_PATTERN = r"sha256:[0-9a-f]{64}"


def sha256_bytes(data: bytes) -> str:
    """``sha256:<hex>`` of ``data``."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def record_digest(data: bytes) -> str:
    """The SHA-256 digest of a file as RECORD has it, after ``sha256=`` (PEP 376)."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def is_digest(text: str) -> bool:
    """Whether a text is ``sha256:`` with its 64 digits, in lower case, and nothing more."""
    return re.fullmatch(DIGEST_PATTERN, text) is not None


def sha256_file(path: Path) -> str:
    """``sha256:<hex>`` of a file's bytes."""
    # hashlib.file_digest is there from Python 3.11 on.
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return "sha256:" + digest.hexdigest()


def canonical_json(value: Json) -> bytes:
    """The one byte form of a JSON value: sorted keys, no spaces, UTF-8."""
    # Keys of wheels, layers and images are digests of these bytes, so they never change. This is not RFC 8785: floats
    # are as Python prints them, and keys are sorted by code points.
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest_of(value: Json) -> str:
    """``sha256:<hex>`` of the canonical JSON of ``value``."""
    return sha256_bytes(canonical_json(value))


def hex_of(digest: str) -> str:
    """The hex digits of a digest alone, as paths have them."""
    return digest.removeprefix("sha256:")


def short(digest: str) -> str:
    """The first 12 hex digits of a digest, for people."""
    return hex_of(digest)[:12]


def digest_of_code(*folders: Path) -> str:
    """The digest of the Python files in folders and below: other code may find other things."""
    return digest_of([[file.name, sha256_file(file)] for folder in folders for file in sorted(folder.rglob("*.py"))])
