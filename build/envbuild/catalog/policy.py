"""A policy: what must hold before an image is published, and again where it is pulled (``envs/policies/*.toml``)."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Annotated

from pydantic import Field

from envbuild.catalog.fields import Device, Name, TomlModel


class Policy(TomlModel):
    """What must hold before an image is published, and again where it is pulled."""

    summary: str
    matrices: tuple[Name, ...] = Field(min_length=1, description="the matrices of which one must have passed")
    cpu_matrices: tuple[Name, ...] | None = Field(
        default=None, min_length=1, description="the same for targets without GPUs; default: matrices"
    )
    max_age_days: Annotated[int, Field(gt=0, le=3650)] = Field(
        description="how old the oldest number in the certificate may be when the image is published"
    )
    shipped_matrix: bool = Field(default=True, description="the matrix must be what envbuild ships under its name")
    whole_matrix: bool = Field(default=True, description="every case of it must have passed, not a part")
    max_excused_percent: Annotated[int, Field(ge=0, le=100)] = Field(
        default=12,
        description="how much of it may be left out or fail because a shipped conflict says that it trains wrongly",
    )
    target_gpus: bool = Field(default=True, description="the cases must have run on GPUs of the target's SMs")
    allow_not_vouched: bool = Field(
        default=False, description="publish although the locked versions are known to train something wrongly"
    )
    locked_base: bool = Field(default=True, description="the base in the image must be the one that the lock names")
    signed_publication: bool = Field(
        default=True, description="a trusted key must have signed the publication: its tags, its moment, its target"
    )
    keys: tuple[Name, ...] | None = Field(
        default=None, min_length=1, description="only these keys of the trust file count; without it all of them"
    )

    def matrices_for(self, device: Device) -> tuple[str, ...]:
        """The matrices that vouch for an image of a target with this device."""
        return self.matrices if self.cpu_matrices is None or device is Device.CUDA else self.cpu_matrices

    def as_toml(self) -> str:
        """The lines of its file; what is left at its default is not in them."""
        # Of texts, numbers, truth values and lists of texts JSON's form is TOML's.
        values = self.model_dump(mode="json", exclude_defaults=True)
        return "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())

    @property
    def max_age(self) -> timedelta:
        return timedelta(days=self.max_age_days)
