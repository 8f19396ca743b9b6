"""``tests/`` mirrors the package: ``src/penstock/a/b.py`` is tested by ``tests/a/test_b.py``."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "penstock"

EXCEPTIONS = {
    "cli/serve.py": "tests/e2e/test_serve_*.py start the command as a process",
    "offline/compress/training/torch.py": "the import of torch",
    "online/instances/python/typed.py": "test_typed_model.py loads decorated models in real processes",
    "online/instances/python/worker.py": "the child process, which test_process.py and test_typed_model.py start",
    "online/repository/loading/pipeline.py": "tests/online/scheduler/test_pipeline.py runs loaded pipelines",
    "online/server/app.py": "the composition root, which tests/e2e and tests/online/server/test_http.py run whole",
    "online/server/grpc/call.py": "protocols without behaviour",
    "online/server/h2/owner.py": "a protocol without behaviour",
    "samples/hints.py": "structs without behaviour",
}
"""Files without a test of their name, with the reason."""
MOST_PENDING = 8
"""Files that still lack one. Lower it with every test that is added."""


def untested() -> list[str]:
    """The source files without a test file of the same name."""
    files = (path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py")) if not path.name.startswith("__"))
    return [file.as_posix() for file in files if not (TESTS / file.parent / f"test_{file.name}").is_file()]


def test_every_file_has_a_test_of_its_name() -> None:
    pending = [file for file in untested() if file not in EXCEPTIONS]
    assert len(pending) <= MOST_PENDING, "\n".join(pending)


def test_exceptions_are_few_and_needed() -> None:
    assert len(EXCEPTIONS) <= 10
    assert set(EXCEPTIONS) <= set(untested())
