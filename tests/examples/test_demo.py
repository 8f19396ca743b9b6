from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import models

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(EXAMPLE), *filter(None, [os.environ.get("PYTHONPATH")])]),
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children that their parent was killed")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_servers_end_with_the_demo(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "linear.onnx").write_bytes(models.linear(3, 2).data)
    code = (
        "import time; from pathlib import Path; from demo import interrupted_by_sigterm, serving\n"
        "with interrupted_by_sigterm(), serving(Path('linear.onnx')) as address:\n"
        "    print(address.url, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://")
        process.send_signal(number)
        # The server holds the same stderr, so this returns when both have ended.
        _, errors = process.communicate(timeout=30)
    assert ("KeyboardInterrupt" in errors) is (number == signal.SIGTERM)


def test_sigterm_is_an_interrupt(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time; import demo; "
        "demo.build = lambda *_: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60)); demo.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--output", str(tmp_path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 130
    assert "error: interrupted" in done.stderr
    assert "Traceback" not in done.stderr
