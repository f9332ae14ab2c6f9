"""Certificates for servers on loopback."""

from __future__ import annotations

import ipaddress
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def write_tls(folder: Path, host: str = "127.0.0.1") -> None:
    """Write ``ca.pem``, and ``server.pem`` with ``server.key`` that it signed for an address."""
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = _certificate("tests CA", "tests CA", ca_key.public_key(), ca_key, x509.BasicConstraints(True, None))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    server = _certificate(host, "tests CA", key.public_key(), ca_key, address)
    for name, certificate in (("ca.pem", ca), ("server.pem", server)):
        (folder / name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.key").write_bytes(private)


def _certificate(
    name: str, issuer: str, public: ec.EllipticCurvePublicKey, key: ec.EllipticCurvePrivateKey, more: x509.ExtensionType
) -> x509.Certificate:
    now = datetime.now(timezone.utc)
    named, issued_by = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (name, issuer))
    builder = x509.CertificateBuilder().subject_name(named).issuer_name(issued_by).public_key(public)
    builder = builder.serial_number(x509.random_serial_number()).add_extension(more, critical=False)
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    return builder.sign(key, hashes.SHA256())
