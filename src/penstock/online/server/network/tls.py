"""TLS: the certificate that the server shows, and those of clients that it asks for."""

from __future__ import annotations

import ssl
from pathlib import Path

from penstock.errors import InvalidConfig
from penstock.online.server.config import ServerConfig


def make_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What ``tls_certificate``, ``tls_key`` and ``tls_client_ca`` say; None without a certificate.

    TLS 1.2 is the least; of it only ciphers with forward secrecy and authentication. With ``tls_client_ca`` only clients with a
    certificate of that authority are let in. Raises InvalidConfig where a file is missing, is not what it should be, or
    the key does not belong to the certificate.
    """
    if not config.tls_certificate:
        for name in ("tls_key", "tls_client_ca"):
            if getattr(config, name):
                raise InvalidConfig(f"'{name}' is given, but no 'tls_certificate'")
        return None
    certificate, key = config.tls_certificate, config.tls_key or config.tls_certificate
    for name, path in (("tls_certificate", certificate), ("tls_key", key), ("tls_client_ca", config.tls_client_ca)):
        if path:
            _check_readable(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")
    # A client could make the server pay for one handshake after the other on one connection.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        # Without this OpenSSL would ask on the terminal for the password of a key that has one.
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except ssl.SSLError as error:
        raise InvalidConfig(
            f"cannot use the certificate '{certificate}' with the key '{key}': {_reason(error)}",
            "both must be PEM, the certificate with those that lead to its authority, and the key must be its own",
        ) from None
    if config.tls_client_ca:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except ssl.SSLError as error:
            raise InvalidConfig(
                f"cannot use '{config.tls_client_ca}' as an authority for clients: {_reason(error)}", "it must be PEM"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(name: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise InvalidConfig(f"cannot read '{path}', given as '{name}': {error.strerror}") from None


def _refuse_password() -> str:
    raise InvalidConfig(
        "the key of the certificate has a password", "give a key without one, readable by the server only"
    )


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "not a PEM file").replace("_", " ").lower()
