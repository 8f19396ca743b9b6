import subprocess
import sys

import pytest

_READ_ONLY = """
import ctypes, os, sys
from pathlib import Path
from penstock.offline.convert.worker import confine, mounts
libc = ctypes.CDLL(None, use_errno=True)
confine._without_network(libc)
writable = [Path.cwd(), *mounts.private_memory(libc, [])]
if not mounts.restrict_writing(libc, writable):
    sys.exit(3)
outside = sys.argv[1]
"""


@pytest.fixture
def restricted(tmp_path):
    """Runs code in a process whose mounts are read-only, except for ``own``. Returns what it prints."""
    (tmp_path / "own").mkdir()
    (tmp_path / "outside").write_text("kept")

    def run(code):
        command = [sys.executable, "-c", _READ_ONLY + code, str(tmp_path / "outside")]
        done = subprocess.run(command, cwd=tmp_path / "own", capture_output=True, text=True, check=False)
        if done.returncode == 3:
            pytest.skip("this system permits no mount namespace")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    yield run
    assert (tmp_path / "outside").read_text() == "kept"


@pytest.mark.parametrize("attempt", ["open(outside, 'w')", "os.truncate(outside, 0)", "os.chmod(outside, 0)"])
def test_mounts_are_read_only_outside_the_folder(restricted, attempt):
    code = f"""
try:
    {attempt}
except OSError as error:
    print(error.strerror)
"""
    assert restricted(code) == "Read-only file system"


def test_the_folder_and_shared_memory_can_be_written(restricted, tmp_path):
    code = """
open("mine", "w").write("1")
open("/dev/shm/mine", "w").write("2")
open(os.devnull, "w").write("3")
print(open("mine").read(), open("/dev/shm/mine").read())
"""
    assert restricted(code) == "1 2"
    assert (tmp_path / "own" / "mine").read_text() == "1"


def test_the_process_cannot_mount_again(restricted):
    code = """
remount = ctypes.c_ulong(32 | 4096)
done = [libc.mount(None, b"/", None, remount, None)]
done.append(libc.unshare(0x1000_0000 | 0x0002_0000) or libc.mount(None, b"/", None, remount, None))
try:
    open(outside, "w")
except OSError:
    print("refused", done[0])
"""
    assert restricted(code) == "refused -1"
