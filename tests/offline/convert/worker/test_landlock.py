import ctypes
import subprocess
import sys

import pytest

from penstock.offline.convert.worker.landlock import _CREATE_RULESET, _VERSION


def test_landlock_alone_restricts_writing(tmp_path):
    """Without the namespaces that ``confine`` also uses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION) < 1:
        pytest.skip("this kernel has no Landlock")
    (tmp_path / "own").mkdir()
    (tmp_path / "outside").write_text("kept")
    code = f"""
import ctypes, os
from pathlib import Path
from penstock.offline.convert.worker.landlock import restrict_writing
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
assert restrict_writing(libc, [Path({str(tmp_path / "own")!r})])
for name in ({str(tmp_path / "own" / "new")!r}, os.devnull, {str(tmp_path / "outside")!r}):
    open(name, "w").write("changed")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr
    assert (tmp_path / "outside").read_text() == "kept"
    assert (tmp_path / "own" / "new").read_text() == "changed"
