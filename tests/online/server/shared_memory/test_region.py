from __future__ import annotations

import mmap
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import Code, InvalidArgument, PenstockError
from penstock.online.server.shared_memory.region import Region

PAGE = mmap.PAGESIZE
BYTES = 16 * PAGE


@pytest.fixture
def key() -> Iterator[str]:
    """An object of 16 pages, in which each byte is the number of its page."""
    name = f"penstock-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm", name)
    path.write_bytes(b"".join(bytes([page]) * PAGE for page in range(16)))
    path.chmod(0o600)
    yield name
    path.unlink(missing_ok=True)


def read(region: Region, offset: int, byte_size: int) -> bytes:
    into = bytearray(byte_size)
    region.read(offset, memoryview(into))
    return bytes(into)


def descriptors(key: str) -> int:
    return sum(key in os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def retire(region: Region) -> None:
    region.retire()
    assert region.closed.is_set()


@pytest.mark.parametrize("slash", ["", "/"])
def test_the_key_may_begin_with_a_slash(key: str, slash: str) -> None:
    region = Region("r", slash + key, 0, BYTES)
    assert region.describe() == {"name": "r", "key": slash + key, "offset": 0, "byte_size": BYTES}
    retire(region)


@pytest.mark.parametrize(
    "key", ["", "/", ".", "..", "../etc/passwd", "//x", "a/b", "a\0b", "x" * 256, "triton_python_backend_shm_region_1"]
)
def test_a_key_is_one_name(key: str) -> None:
    with pytest.raises(InvalidArgument, match="failed to register shared memory region 'r'"):
        Region("r", key, 0, 1)


def test_the_reserved_prefix_is_told_with_its_slash_too() -> None:
    with pytest.raises(InvalidArgument, match="must not start with 'triton_python_backend_shm_region_'"):
        Region("r", "/triton_python_backend_shm_region_1", 0, 1)


def test_an_unknown_object_has_the_code_of_triton() -> None:
    with pytest.raises(PenstockError, match="Unable to open shared memory region: '/penstock-none'") as caught:
        Region("r", "/penstock-none", 0, 1)
    assert caught.value.code is Code.INTERNAL


def test_links_pipes_and_folders_are_refused(key: str) -> None:
    for make in (lambda path: path.symlink_to(f"/dev/shm/{key}"), os.mkfifo, Path.mkdir):
        path = Path("/dev/shm", f"{key}-other")
        make(path)
        try:
            with pytest.raises(InvalidArgument):
                Region("r", path.name, 0, 1)
        finally:
            path.rmdir() if path.is_dir() else path.unlink()
    assert descriptors(key) == 0


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [
        (0, BYTES + 1),
        (BYTES, 1),
        (1, BYTES),
        (-1, 1),
        (0, -1),
        (0, 0),
        (2**63, 1),
        (1, 2**63 - 1),
        (0, 2**64),
        (True, 1),
    ],
)
def test_registering_beyond_the_object_is_refused(key: str, offset: int, byte_size: int) -> None:
    with pytest.raises(InvalidArgument, match="failed to register shared memory region 'r': invalid args"):
        Region("r", key, offset, byte_size)
    assert descriptors(key) == 0


NUMBERS = st.one_of(
    st.integers(-3, BYTES + 3), st.integers(), st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63)])
)


@given(offset=NUMBERS, byte_size=NUMBERS)
@example(offset=1, byte_size=2**63 - 1)
@example(offset=0, byte_size=BYTES)
def test_exactly_what_lies_within_is_admitted(offset: int, byte_size: int) -> None:
    name = "penstock-test-bounds"
    Path("/dev/shm", name).write_bytes(bytes(BYTES))
    region = Region("r", name, 0, BYTES)
    try:
        if 0 <= offset < BYTES and 0 <= byte_size <= BYTES - offset:
            region.check(offset, byte_size)
            assert len(read(region, offset, byte_size)) == byte_size
        else:
            with pytest.raises(InvalidArgument, match="for shared memory region: 'r'"):
                region.check(offset, byte_size)
    finally:
        retire(region)
        Path("/dev/shm", name).unlink()


@pytest.mark.parametrize("mode", [0o600, 0o666])
@given(start=st.integers(0, BYTES - 1), offset=st.integers(0, BYTES), data=st.data())
def test_reading_gives_the_bytes_there(mode: int, start: int, offset: int, data: st.DataObject) -> None:
    path = Path("/dev/shm", f"penstock-test-read-{mode:o}")
    content = bytes(index * 7 // 5 % 251 for index in range(BYTES))
    path.write_bytes(content)
    path.chmod(mode)
    region = Region("r", path.name, start, BYTES - start)
    try:
        offset = min(offset, BYTES - start - 1)
        size = data.draw(st.integers(0, BYTES - start - offset))
        assert read(region, offset, size) == content[start + offset : start + offset + size]
    finally:
        retire(region)
        path.unlink()


def test_a_region_is_never_mapped(key: str) -> None:
    """Access to a mapping of a truncated file would end the server with SIGBUS."""
    region = Region("r", key, 0, BYTES)
    into = bytearray(8 * PAGE)
    region.read(PAGE, memoryview(into))
    region.write(0, into)
    assert key not in Path("/proc/self/maps").read_text()
    retire(region)


def test_pages_never_written_are_read() -> None:
    path = Path("/dev/shm/penstock-test-hole")
    with path.open("wb") as file:
        file.truncate(BYTES)
    path.chmod(0o600)
    region = Region("r", path.name, 0, BYTES)
    assert read(region, 0, 8 * PAGE) == bytes(8 * PAGE)
    assert path.stat().st_blocks == 0, "reading took no memory"
    retire(region)
    path.unlink()


@pytest.mark.parametrize("size", [0, PAGE, 3 * PAGE + 5])
def test_a_file_cut_off_is_an_error_and_stays_as_it_is(key: str, size: int) -> None:
    region = Region("r", key, 0, BYTES)
    os.truncate(f"/dev/shm/{key}", size)
    for length in (PAGE, 8 * PAGE):
        with pytest.raises(InvalidArgument, match="is smaller than at its registration"):
            read(region, 4 * PAGE, length)
        with pytest.raises(InvalidArgument, match="region 'r' is smaller than at its registration"):
            region.write(4 * PAGE, bytes(length))
    assert Path("/dev/shm", key).stat().st_size == size
    retire(region)


@pytest.mark.parametrize("mode", [0o600, 0o666])
@pytest.mark.parametrize("count", [1, 2 * PAGE])
def test_writing_changes_just_those_bytes(key: str, count: int, mode: int) -> None:
    Path("/dev/shm", key).chmod(mode)
    region = Region("r", key, PAGE + 5, BYTES - PAGE - 5)
    before = Path("/dev/shm", key).read_bytes()
    region.write(PAGE, b"hello" * count)
    after = Path("/dev/shm", key).read_bytes()
    assert after == before[: 2 * PAGE + 5] + b"hello" * count + before[2 * PAGE + 5 + 5 * count :]
    retire(region)


def test_pages_never_written_are_written() -> None:
    path = Path("/dev/shm/penstock-test-hole")
    with path.open("wb") as file:
        file.truncate(BYTES)
    path.chmod(0o600)
    region = Region("r", path.name, 0, BYTES)
    region.write(PAGE, b"x" * 8 * PAGE)
    assert path.read_bytes() == bytes(PAGE) + b"x" * 8 * PAGE + bytes(7 * PAGE)
    retire(region)
    path.unlink()


def test_closing_gives_the_descriptor_back(key: str) -> None:
    region = Region("r", key, 0, BYTES)
    assert descriptors(key) == 1
    retire(region)
    assert descriptors(key) == 0


def test_a_full_shared_memory_is_an_error_and_no_signal() -> None:
    """Runs in a separate namespace, where /dev/shm can be made small."""
    code = (
        "import os\n"
        "from penstock.errors import ResourceExhausted\n"
        "from penstock.online.server.shared_memory.region import Region\n"
        "fd = os.open('/dev/shm/r', os.O_CREAT | os.O_RDWR, 0o600); os.ftruncate(fd, 4 << 20)\n"
        "region = Region('r', 'r', 0, 4 << 20)\n"
        "into = bytearray(b'x' * (2 << 20)); region.read(0, memoryview(into)); assert into == bytes(2 << 20)\n"
        "try: region.write(0, bytes(2 << 20))\n"
        "except ResourceExhausted as error: print(error)\n"
    )
    script = f'mount -t tmpfs -o size=1M none /dev/shm || exit 77; exec {sys.executable} -c "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("needs a mount namespace")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "cannot write to shared memory region 'r': No space left on device (make /dev/shm larger)"
    )
