"""Errors about PEM files without a certificate or a private key."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from penstock.online.server.access.pem import missing_part
from penstock.online.server.config import ServerConfig

SWAPPED = "(exchange 'tls_certificate' and 'tls_key')"
BOTH = "('tls_certificate' must name a PEM file with a certificate, and 'tls_key' one with its private key)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pem")
    issued = trustme.CA().issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(folder / "cert")
    issued.private_key_pem.write_to_path(folder / "key")
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "both")
    (folder / "text").write_text("text")
    (folder / "request").write_text("-----BEGIN CERTIFICATE REQUEST-----")
    (folder / "locked").write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----")
    return folder


@pytest.mark.parametrize(
    ("certificate", "key", "error"),
    [
        ("cert", "key", ""),
        ("both", "", ""),
        ("both", "both", ""),
        ("cert", "locked", ""),
        ("absent", "key", ""),
        ("cert", "absent", ""),
        ("cert", "", "no private key was found in 'cert' (name the key's file with --tls-key)"),
        ("key", "", f"no certificate was found in 'key' {BOTH}"),
        ("cert", "cert", f"no private key was found in 'cert' {BOTH}"),
        ("cert", "text", f"no private key was found in 'text' {BOTH}"),
        ("request", "key", f"no certificate was found in 'request' {BOTH}"),
        (
            "key",
            "cert",
            f"no certificate was found in 'key', and no private key was found in 'cert' {SWAPPED}",
        ),
        ("both", "cert", f"no private key was found in 'cert' {BOTH}"),
        (
            "text",
            "",
            f"no certificate was found in 'text', and no private key was found in 'text' {BOTH}",
        ),
    ],
)
def test_the_error_names_what_is_missing_and_where(folder: Path, certificate: str, key: str, error: str) -> None:
    config = ServerConfig(tls_certificate=f"{folder}/{certificate}", tls_key=f"{folder}/{key}" if key else "")
    found = missing_part(config)
    assert (str(found).replace(f"{folder}/", "") if found else "") == error
