"""The peers of other tests start, respond and stop."""

from __future__ import annotations

import sys

import pytest

from real import RealProcess, answers, free_port, require, run

SERVER = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1", "--directory", "{folder}"]


def test_a_process_answers_while_it_is_entered_and_is_gone_afterwards() -> None:
    with RealProcess(SERVER) as server:
        assert answers(server.port)
        assert server.folder.is_dir()
    assert not answers(server.port)
    assert server.process.returncode is not None
    assert not server.folder.exists()


def test_a_process_that_ends_at_once_is_told_with_its_output() -> None:
    with (
        pytest.raises(AssertionError, match="no such option"),
        RealProcess([sys.executable, "-c", "import sys; sys.exit('no such option')"]),
    ):
        pass


def test_what_is_not_installed_skips_and_says_how_to_get_it() -> None:
    with pytest.raises(pytest.skip.Exception, match="apt-get install no-such-program"):
        require("no-such-program")


def test_run_gives_back_what_a_program_wrote() -> None:
    result = run(sys.executable, "-c", "import sys; print(sys.stdin.read() + '!')", input="hello")
    assert (result.returncode, result.stdout) == (0, b"hello!\n")


def test_nobody_listens_on_a_free_port() -> None:
    assert not answers(free_port())


@pytest.mark.real
def test_a_real_client_reads_from_a_real_server() -> None:
    with RealProcess(SERVER) as server:
        (server.folder / "greeting").write_text("hello")
        result = run("curl", "--silent", "--show-error", "--fail", f"http://127.0.0.1:{server.port}/greeting")
        assert (result.stdout, result.stderr) == (b"hello", b"")
