"""``penstock serve`` as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

PATIENCE_S = 30


class ServerProcess:
    """Started with ``targets`` on a free port; ended by SIGTERM at the latest when left."""

    def __init__(
        self, *targets: str | Path, arguments: tuple[str, ...] = (), wait: bool = True, **settings: object
    ) -> None:
        """``settings`` become environment variables of the section ``server``; ``wait``: until it is ready."""
        self._waits = wait
        self._command = [sys.executable, "-m", "penstock", "serve", *map(str, targets), "--http-port", "0", *arguments]
        self._environment = os.environ | {f"PENSTOCK_SERVER_{k.upper()}": str(v) for k, v in settings.items()}

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip() if self._waits else ""
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.end()

    @property
    def address(self) -> tuple[str, int]:
        """As the ready line tells."""
        host, _, port = self.line.split()[1].removeprefix("http=").partition(":")
        return host, int(port)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end_unmerged(self) -> tuple[int, str]:
        """As ``end``, without the warnings about models whose first dimension is fixed."""
        code, text = self.end()
        lines = text.splitlines(keepends=True)
        return code, "".join(line for line in lines if "has no free first dimension" not in line)

    def end(self) -> tuple[int, str]:
        """Wait for it; exit code and stderr."""
        try:
            _, errors = self.process.communicate(timeout=PATIENCE_S)
        except ValueError:
            errors = ""  # read before
        return self.process.wait(PATIENCE_S), errors
