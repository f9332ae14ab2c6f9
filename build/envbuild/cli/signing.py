"""The options of commands that sign."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.cli.common import F, Session

if TYPE_CHECKING:
    from envbuild.certify.certificate.sign import Signer
    from envbuild.certify.certificate.trust import Trust

OFF = "off"


def key_options(function: F) -> F:
    """Add ``--key`` and ``--key-password``; :func:`signer_of` reads them."""
    for option in (
        click.option("--key-password", metavar="REF", help="Of that key, by reference: env:NAME or file:PATH."),
        click.option(
            "--key", metavar="FILE", help="Sign with this private key; env:NAME: it is in a variable; off: do not sign."
        ),
    ):
        function = option(function)
    return function


def signer_of(session: Session, key: str | None, password: str | None) -> Signer | None:
    """The signer that the options name, or the site's; None: certificates are not signed.

    Raises:
        ConfigurationError: the key cannot be used.
    """
    settings = session.site.signing
    if key is None:
        # The site's password is of the site's key.
        key, password = settings.key, password or settings.password
    if not key or key == OFF:
        return None
    from envbuild.certify.certificate.sign import load_signer

    return load_signer(key, password)


def trust_of(session: Session, named: Path | None) -> Trust | None:
    """The trusted keys that an option names, or the site; None where neither does.

    Raises:
        ConfigurationError: the file cannot be read, or is not as it should be.
    """
    path = named or session.site.signing.trust
    if not path:
        return None
    from envbuild.certify.certificate.trust import load_trust

    return load_trust(Path(path))
