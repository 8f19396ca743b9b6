"""TLS with real certificates, for three clients (Triton's library, the standard library, curl); and invalid files."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
import trustme

import real
from http_servers import LOOPS, Client, GatedServer, get, infer, post
from penstock.errors import InvalidConfig
from penstock.online.server.config import ServerConfig
from penstock.online.server.network.tls import make_context


class Files:
    """Files of an authority, and the certificates and keys of the server and a client."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca, self.certificate, self.key, self.client = (
            folder / f"{name}.pem" for name in ("ca", "cert", "key", "client")
        )
        authority.cert_pem.write_to_path(self.ca)
        server = authority.issue_cert("127.0.0.1", "localhost")
        server.cert_chain_pems[0].write_to_path(self.certificate)
        server.private_key_pem.write_to_path(self.key)
        authority.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(self.client)

    def config(self, **more: object) -> ServerConfig:
        given = {"tls_certificate": str(self.certificate), "tls_key": str(self.key)}
        return ServerConfig(**{**given, **more})  # type: ignore[arg-type]

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module", params=sorted(LOOPS))
def server(request: pytest.FixtureRequest, files: Files) -> Iterator[GatedServer]:
    with GatedServer(request.param, tls=make_context(files.config())) as server:
        yield server


def connect(server: GatedServer, context: ssl.SSLContext) -> Client:
    return Client(server.address, context)


def test_a_large_body_in_pieces(server: GatedServer, files: Files) -> None:
    request = infer(5, f"X-Padding: {'x' * 1000}\r\n", id="é" * 200_000)
    with connect(server, files.trusting()) as client:
        for _ in range(2):
            for start in range(0, len(request), 150_000):
                client.send(request[start : start + 150_000])
            assert client.read().data == [10, 0]


def test_requests_and_answers(server: GatedServer, files: Files) -> None:
    with connect(server, files.trusting()) as client:
        assert [client.ask(infer(value)).data for value in (1, 2)] == [[2, 0], [4, 0]]
        client.send(infer(1) * 100)
        assert all(client.read().status == 200 for _ in range(100))
        assert client.ask(post(b'{"x":[1,2]}', path="/v2/models/m/generate_stream")).body.startswith(b"data: ")
        refused = client.ask(b"nonsense\r\n\r\n")
        assert refused.status == 400
        assert client.is_closed
    with connect(server, files.trusting()) as client:
        assert client.ask(get("/v2", "Connection: close\r\n")).status == 200
        assert client.is_closed


def test_the_protocol_is_agreed_on(server: GatedServer, files: Files) -> None:
    context = files.trusting()
    context.set_alpn_protocols(["h2", "http/1.1"])
    with connect(server, context) as client:
        assert isinstance(client.socket, ssl.SSLSocket)
        assert client.socket.selected_alpn_protocol() == "http/1.1"
        assert client.socket.version() == "TLSv1.3"
        assert client.ask(infer(1)).data == [2, 0]


def test_old_versions_and_strangers_are_refused(server: GatedServer, files: Files) -> None:
    old = files.trusting()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = old.minimum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        connect(server, old)
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(server, ssl.create_default_context())


def test_the_library_over_tls(server: GatedServer, files: Files) -> None:
    x = np.array([[1, 2]], np.float32)
    tensor = triton.InferInput("x", [1, 2], "FP32")
    tensor.set_data_from_numpy(x)
    client = triton.InferenceServerClient(
        "{}:{}".format(*server.address), ssl=True, ssl_context_factory=files.trusting, insecure=False
    )
    try:
        np.testing.assert_array_equal(client.infer("m", [tensor]).as_numpy("y"), 2 * x)
    finally:
        client.close()


@pytest.mark.real
def test_curl(server: GatedServer, files: Files) -> None:
    url = "https://{}:{}".format(*server.address)
    done = real.run("curl", "-sS", "--fail", "--cacert", files.ca, f"{url}/v2")
    assert b'"penstock"' in done.stdout, done.stderr
    streamed = real.run("curl", "-sSN", "--cacert", files.ca, f"{url}/v2/models/m/generate_stream", "-d", '{"x":[1,2]}')
    assert b'"y":[2.0,4.0]' in streamed.stdout, streamed.stderr
    packed = real.run("curl", "-sS", "--compressed", "--cacert", files.ca, f"{url}/openapi.json")
    assert b'"openapi":"3.1.0"' in packed.stdout, packed.stderr
    stranger = real.run("curl", "-sS", f"{url}/v2")
    assert stranger.returncode == 60


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_clients_have_to_show_a_certificate_where_that_is_asked_for(loop: str, files: Files) -> None:
    context = make_context(files.config(tls_client_ca=str(files.ca)))
    with GatedServer(loop, tls=context) as server:
        known = files.trusting()
        known.load_cert_chain(files.client)
        with connect(server, known) as client:
            assert client.ask(infer(1)).data == [2, 0]
        with pytest.raises((ssl.SSLError, ConnectionError, EOFError)), connect(server, files.trusting()) as client:
            client.ask(infer(1))


def test_certificate_and_key_in_one_file(files: Files, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(files.key.read_bytes() + files.certificate.read_bytes())
    assert make_context(ServerConfig(tls_certificate=str(both))) is not None
    assert make_context(ServerConfig()) is None


def test_files_that_are_wrong(files: Files, tmp_path: Path) -> None:
    other = Files(tmp_path)
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nothing")
    for more, message in (
        ({"tls_certificate": str(tmp_path / "absent")}, "cannot read .*absent.*, given as 'tls_certificate'"),
        ({"tls_key": str(tmp_path / "absent")}, "cannot read .*absent.*, given as 'tls_key'"),
        ({"tls_client_ca": str(tmp_path)}, "cannot read .*, given as 'tls_client_ca'"),
        ({"tls_certificate": str(nonsense)}, "no certificate was found in .*nonsense"),
        ({"tls_key": str(other.key)}, "key values mismatch"),
        ({"tls_client_ca": str(nonsense)}, "as an authority for clients"),
        ({"tls_certificate": ""}, "'tls_key' requires 'tls_certificate'"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            make_context(files.config(**more))


def test_a_key_with_a_password(files: Files, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    done = real.run("openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", files.key, "-out", locked)
    if done.returncode:
        done = real.run("openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", files.key, "-out", locked)
    assert not done.returncode, done.stderr
    with pytest.raises(InvalidConfig, match="has a password"):
        make_context(files.config(tls_key=str(locked)))


SWAPPED = "(exchange 'tls_certificate' and 'tls_key')"
BOTH = "('tls_certificate' must name a PEM file with a certificate, and 'tls_key' one with its private key)"
NAME_KEY = "(name the key's file with --tls-key)"


@pytest.mark.parametrize(
    ("certificate", "key", "error"),
    [
        ("cert", "key", ""),
        ("both", "", ""),
        ("both", "both", ""),
        ("cert", "", f"no private key was found in 'cert' {NAME_KEY}"),
        ("cert", "cert", f"no private key was found in 'cert' {NAME_KEY}"),
        ("key", "", f"no certificate was found in 'key' {BOTH}"),
        ("cert", "text", f"no private key was found in 'text' {BOTH}"),
        ("request", "key", f"no certificate was found in 'request' {BOTH}"),
        ("key", "cert", f"no certificate was found in 'key', and no private key was found in 'cert' {SWAPPED}"),
        ("both", "cert", f"no private key was found in 'cert' {BOTH}"),
        ("text", "", f"no certificate was found in 'text', and no private key was found in 'text' {BOTH}"),
    ],
)
def test_the_error_names_what_is_missing_and_where(
    files: Files, tmp_path: Path, certificate: str, key: str, error: str
) -> None:
    contents = {
        "cert": files.certificate.read_bytes(),
        "key": files.key.read_bytes(),
        "both": files.key.read_bytes() + files.certificate.read_bytes(),
        "text": b"text",
        "request": b"-----BEGIN CERTIFICATE REQUEST-----",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    config = ServerConfig(tls_certificate=f"{tmp_path}/{certificate}", tls_key=f"{tmp_path}/{key}" if key else "")
    found = ""
    try:
        make_context(config)
    except InvalidConfig as refusal:
        found = str(refusal).replace(f"{tmp_path}/", "")
    assert found == error
