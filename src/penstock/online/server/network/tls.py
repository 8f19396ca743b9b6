"""TLS: the server's certificate, and checks of client certificates."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

from penstock.errors import InvalidConfig
from penstock.online.server.config import ServerConfig

_CERTIFICATE = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----")
_KEY = re.compile(rb"-----BEGIN (?:\w+ )*PRIVATE KEY-----")
_MAX_BYTES = 1 << 20


def make_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The TLS context for ``tls_certificate``, ``tls_key`` and ``tls_client_ca``; None without a certificate.

    The minimum is TLS 1.2 with forward-secret authenticated ciphers. With ``tls_client_ca``, clients need a certificate from that
    authority. Raises InvalidConfig if a file is missing or malformed, or if the key does not match the certificate.
    """
    if not config.tls_certificate:
        for name in ("tls_key", "tls_client_ca"):
            if getattr(config, name):
                raise InvalidConfig(f"'{name}' requires 'tls_certificate'")
        return None
    certificate, key = config.tls_certificate, config.tls_key or config.tls_certificate
    for name, path in (("tls_certificate", certificate), ("tls_key", key), ("tls_client_ca", config.tls_client_ca)):
        if path:
            _check_readable(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")
    # Renegotiation would let a client force repeated handshakes on one connection.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        # Without a callback, OpenSSL asks for the key's password on the terminal.
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except ssl.SSLError as error:
        _check_parts(certificate, key)
        raise InvalidConfig(
            f"cannot use the certificate '{certificate}' with the key '{key}': {_reason(error)}",
            "give PEM files: the certificate with its chain, and the key that matches it",
        ) from None
    if config.tls_client_ca:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except ssl.SSLError as error:
            raise InvalidConfig(
                f"cannot use '{config.tls_client_ca}' as an authority for clients: {_reason(error)}", "use a PEM file"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(name: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise InvalidConfig(f"cannot read '{path}', given as '{name}': {error.strerror}") from None


def _check_parts(certificate: str, key: str) -> None:
    """Raise InvalidConfig if a file lacks its certificate or private key: OpenSSL does not say what is missing where."""
    in_certificate, in_key = _read(certificate), _read(key)
    missing = []
    if not _CERTIFICATE.search(in_certificate):
        missing.append(f"no certificate was found in '{certificate}'")
    if not _KEY.search(in_key):
        missing.append(f"no private key was found in '{key}'")
    if not missing:
        return
    if len(missing) == 2 and _KEY.search(in_certificate) and _CERTIFICATE.search(in_key):
        hint = "exchange 'tls_certificate' and 'tls_key'"
    elif key == certificate and _CERTIFICATE.search(in_certificate):
        hint = "name the key's file with --tls-key"
    else:
        hint = "'tls_certificate' must name a PEM file with a certificate, and 'tls_key' one with its private key"
    raise InvalidConfig(", and ".join(missing), hint) from None


def _read(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(_MAX_BYTES)


def _refuse_password() -> str:
    raise InvalidConfig(
        "the certificate's key has a password", "use a key without a password, readable by the server only"
    )


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "not a PEM file").replace("_", " ").lower()
