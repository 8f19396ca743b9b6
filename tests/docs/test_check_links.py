from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
_spec = importlib.util.spec_from_file_location("check_links", ROOT / "docs" / "check_links.py")
assert _spec is not None
assert _spec.loader is not None
check_links = importlib.util.module_from_spec(_spec)
sys.modules["check_links"] = check_links
_spec.loader.exec_module(check_links)


def faults(folder: Path, text: str) -> list[str]:
    (folder / "page.md").write_text(text)
    return check_links.check(folder)[0]


def test_the_documents_of_this_repository() -> None:
    found, documents, links = check_links.check(ROOT)
    assert found == []
    assert documents > 10
    assert links > 50


@pytest.mark.parametrize(
    "text",
    [
        "[here](other.md), [there](other.md#a-title-with-code-and-dots), [self](#top)\n# Top",
        "[again](other.md#twice-1) and [outside](https://example.org/nothing)",
        "`[not a link](nowhere.md)`",
        "```\n[not a link](nowhere.md)\n```",
        "[by reference][1]\n\n[1]: other.md",
        "```sh\npenstock serve digits.bundle --http-port=0 > out.txt &  # --nonsense\nls --nonsense\n```",
        "```console\n$ penstock --version\n$ penstock infer a.bundle \\\n    --inputs b.npz\n```",
    ],
    ids=["anchors", "repeated heading", "code span", "fence", "reference", "shell", "console"],
)
def test_what_is_right_passes(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.md").write_text("# A title, with `code` and dots.\n## Twice\n## Twice\n")
    assert faults(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\n\n[gone](gone.md)", "page.md:3: link to 'gone.md': there is no such file"),
        ("`a` [over two\nlines](gone.md)", "page.md:1: link to 'gone.md': there is no such file"),
        ("# A\n[to](#b)", "page.md:2: link to '#b': page.md has no such heading"),
        ("[1]: gone.md", "page.md:1: link to 'gone.md': there is no such file"),
        ("```sh\n# a comment\npenstock biuld x\n```", "page.md:3: there is no command 'penstock biuld'"),
        (
            "```sh\npenstock build m.onnx \\\n  --fast\n```",
            "page.md:2: 'penstock build' has no option '--fast'",
        ),
    ],
    ids=["file", "two lines", "heading", "reference", "command", "option"],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    assert faults(tmp_path, text) == [expected]
