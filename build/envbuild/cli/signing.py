"""The options of commands that sign, or that trust keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.cli.common import FILE, Session
from envbuild.cli.options import option

if TYPE_CHECKING:
    from envbuild.certify.certificate.sign import Signer
    from envbuild.certify.certificate.trust import Trust

OFF = "off"


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """The signing key; :func:`signer_of` loads it."""

    key: str | None = option(
        "--key FILE", "Sign with this private key. env:NAME: the key is in a variable; off: do not sign."
    )
    key_password: str | None = option("--key-password REF", "Where the key's password is: env:NAME or file:PATH.")


def trust_file() -> Any:
    return option("--trust", "The file of trusted keys; default: the configuration's signing.trust.", type=FILE)


def signer_of(session: Session, options: KeyOptions) -> Signer | None:
    """The signer that the options name, or the site's; None: certificates are not signed.

    Raises:
        ConfigurationError: the key cannot be used.
    """
    settings = session.site.signing
    key, password = options.key, options.key_password
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
