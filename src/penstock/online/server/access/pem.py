"""Explains why the server's certificate or key file is unusable. OpenSSL's errors do not name the file and the missing part."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import InvalidConfig
from penstock.online.server.config import ServerConfig

_CERTIFICATE = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----")
_KEY = re.compile(rb"-----BEGIN (?:\w+ )*PRIVATE KEY-----")
_MAX_BYTES = 1 << 20


def missing_part(config: ServerConfig) -> InvalidConfig | None:
    """The error for a PEM file that lacks the certificate or the private key. None if both are present, or a file cannot be read."""
    certificate, key = config.tls_certificate, config.tls_key or config.tls_certificate
    try:
        in_certificate, in_key = _read(certificate), _read(key)
    except OSError:
        return None
    missing = []
    if not _CERTIFICATE.search(in_certificate):
        missing.append(f"no certificate was found in '{certificate}'")
    if not _KEY.search(in_key):
        missing.append(f"no private key was found in '{key}'")
    if not missing:
        return None
    if len(missing) == 2 and _KEY.search(in_certificate) and _CERTIFICATE.search(in_key):
        hint = "exchange 'tls_certificate' and 'tls_key'"
    elif not config.tls_key and _CERTIFICATE.search(in_certificate):
        hint = "name the key's file with --tls-key"
    else:
        hint = "'tls_certificate' must name a PEM file with a certificate, and 'tls_key' one with its private key"
    return InvalidConfig(", and ".join(missing), hint)


def _read(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(_MAX_BYTES)
