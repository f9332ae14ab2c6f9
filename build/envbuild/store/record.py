"""Records of store entries: a model in ``record.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from envbuild.core.errors import ConfigurationError
from envbuild.core.validation import describe_errors

RECORD_FILE = "record.json"
M = TypeVar("M", bound=BaseModel)


def load(path: Path, model: type[M]) -> M:
    """Read a record.

    Raises:
        ConfigurationError: it was damaged, or written by another version of envbuild.
    """
    try:
        return model.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigurationError(
            f"cannot read the record {path}",
            why=describe_errors(error) if isinstance(error, ValidationError) else str(error),
            fix=f"Remove {path.parent} and run `envbuild image` again.",
        ) from error


def dump(record: BaseModel) -> bytes:
    return (json.dumps(record.model_dump(mode="json", by_alias=True), indent=2) + "\n").encode()
