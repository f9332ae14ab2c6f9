"""The record of a job in the folder of its run, by which another shell finds it again."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from envbuild.core.errors import ConfigurationError
from envbuild.core.files import write_atomic
from envbuild.core.validation import describe_errors

RECORD_FILE = "job.json"


class JobRecord(BaseModel):
    """A submitted job.

    Attributes:
        cluster: its name in envs/clusters/.
        folder: of the run, on the cluster's shared storage.
        nonce: of the plan that it runs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str
    cluster: str
    folder: str
    nonce: str


def read_record(folder: Path) -> JobRecord | None:
    """The record in the folder of a run; None without one.

    Raises:
        ConfigurationError: it is damaged.
    """
    file = folder / RECORD_FILE
    try:
        return JobRecord.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ConfigurationError(
            f"{file} is not the record of a job",
            why=f"{describe_errors(error)}.",
            fix=f"See `squeue --me` for a job of this run, cancel it, and remove {folder}.",
        ) from error


def write_record(record: JobRecord, folder: Path) -> None:
    """Write the record into the folder of a run."""
    write_atomic(folder / RECORD_FILE, record.model_dump_json(indent=2) + "\n")
