"""The file of the keys whose certificates a user trusts (``trust.toml``)."""

from __future__ import annotations

from pydantic import Field, model_validator

from envbuild.catalog.fields import Moment, Name, TomlModel


class TrustedKeySettings(TomlModel):
    """One key of the file (``[keys.NAME]``)."""

    public: str | None = Field(default=None, description="the public key: the PEM text itself")
    file: str | None = Field(default=None, description="or a PEM file, by its path from the trust file's folder")
    not_before: Moment | None = Field(default=None, description="from when on it counts, as 2026-01-31T00:00:00Z")
    not_after: Moment | None = Field(default=None, description="until when it counts")
    # A reason, not a flag: whoever meets the refusal wants to know why.
    revoked: str | None = Field(default=None, min_length=1, description="why nothing it signed counts, ever")
    stacks: tuple[Name, ...] | None = Field(default=None, min_length=1, description="it counts for these stacks alone")
    targets: tuple[Name, ...] | None = Field(
        default=None, min_length=1, description="it counts for these targets alone"
    )

    @model_validator(mode="after")
    def _one_key_and_some_time(self) -> TrustedKeySettings:
        if (self.public is None) == (self.file is None):
            raise ValueError("a key has either `public` (PEM text) or `file` (a PEM file)")
        # Moments of this one form sort as text.
        if self.not_before and self.not_after and self.not_before >= self.not_after:
            raise ValueError("not_before must be earlier than not_after")
        return self


class TrustFile(TomlModel):
    """A file of trusted keys (``trust.toml``)."""

    keys: dict[Name, TrustedKeySettings] = Field(min_length=1)
