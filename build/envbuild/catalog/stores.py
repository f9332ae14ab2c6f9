"""Remote stores of a site, and which of them are in force: the file's, a variable's, or the command line's."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from envbuild.catalog.fields import TomlModel
from envbuild.core.errors import ConfigurationError
from envbuild.core.validation import describe_errors
from envbuild.store.address import parse_address

OFF = "off"
VARIABLE, MODE_VARIABLE = "ENVBUILD_STORE", "ENVBUILD_STORE_MODE"


class StoreMode(str, Enum):
    """What a remote store is used for."""

    READ = "read"
    WRITE = "write"
    READ_WRITE = "read-write"


def _address(text: str) -> str:
    try:
        return str(parse_address(text))
    except ConfigurationError as error:
        raise ValueError(f"{error.what}. {error.why}") from error


def _endpoint(text: str) -> str:
    # USER:PASSWORD@ of a URL (RFC 3986, section 3.2.1): the file is no place for secrets.
    if "@" in text:
        raise ValueError("an endpoint holds no user name and no password; credentials come from AWS_* or ~/.aws")
    return text


class StoreSettings(TomlModel):
    """A remote store, besides the local one."""

    url: Annotated[str, AfterValidator(_address)] = Field(
        description="oci://HOST/REPOSITORY, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///DIRECTORY"
    )
    mode: StoreMode = Field(
        default=StoreMode.READ, description="whether it is read, written (what is built here), or both"
    )
    endpoint: Annotated[str, StringConstraints(pattern=r"^https?://\S+$"), AfterValidator(_endpoint)] | None = Field(
        default=None, description="of an S3 service that is not Amazon's; default: AWS_ENDPOINT_URL"
    )


class Store(StoreSettings):
    """A remote store in force."""

    name: str = Field(description="of the configuration file, else its address")

    @property
    def reads(self) -> bool:
        """Whether entries that are not here are looked for there."""
        return self.mode is not StoreMode.WRITE

    @property
    def writes(self) -> bool:
        """Whether what is made here is put there."""
        return self.mode is not StoreMode.READ


def choose_stores(known: Mapping[str, StoreSettings], text: str, mode: str, source: str) -> tuple[Store, ...]:
    """The stores that ``text`` means: all those known when empty, none for ``off``, else one by name or address.

    Args:
        mode: in the place of theirs; empty for theirs.
        source: the option or variable, for errors.

    Raises:
        ConfigurationError: it is not a name, an address or a mode.
    """
    if mode and mode not in [entry.value for entry in StoreMode]:
        raise ConfigurationError(
            f"{mode!r} is not a mode of a store",
            why=f"{MODE_VARIABLE} is one of {', '.join(entry.value for entry in StoreMode)}.",
            fix="Correct it, or unset it.",
        )
    if text == OFF:
        return ()
    if not text:
        chosen = dict(known)
    elif text in known:
        chosen = {text: known[text]}
    elif "://" in text:
        address = str(parse_address(text))
        # An address that the file has too keeps the settings of the file: its mode and endpoint.
        same = next((entry for entry in known.items() if entry[1].url == address), None)
        chosen = dict([same or (address, _unnamed(address))])
    else:
        raise ConfigurationError(
            f"there is no store {text!r}",
            why=f"{source} names it. The configuration file has: {', '.join(known) or 'none'}.",
            fix=f"Name one of these, an address (oci://..., s3://..., gs://..., file:///...), or {OFF!r} for none.",
        )
    return tuple(
        Store(name=name, url=entry.url, mode=StoreMode(mode) if mode else entry.mode, endpoint=entry.endpoint)
        for name, entry in chosen.items()
    )


def _unnamed(address: str) -> StoreSettings:
    try:
        return StoreSettings(url=address)
    except ValidationError as error:
        raise ConfigurationError(
            f"{address} cannot be the address of a store",
            why=describe_errors(error),
            fix="Write it without blanks, control characters and percent escapes.",
        ) from error


def stores_in_force(
    known: Mapping[str, StoreSettings], environ: Mapping[str, str], mode: str = ""
) -> tuple[Store, ...]:
    """The stores of the configuration file, or what ENVBUILD_STORE and ENVBUILD_STORE_MODE make of them.

    Args:
        mode: in the place of the variable's and the file's.
    """
    mode = mode or environ.get(MODE_VARIABLE, "").strip()
    return choose_stores(known, environ.get(VARIABLE, "").strip(), mode, VARIABLE)
