from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from penstock.dataset import Dataset
from penstock.errors import InvalidArgument, InvalidData, NotFound
from penstock.samples.open import data_path, load_dataset, open_data
from penstock.tensor import DataType, Signature, TensorSpec

ROWS = Signature((TensorSpec("x", DataType.FP32, (-1, 3)),), (TensorSpec("y", DataType.FP32, (-1, 4)),))
X = np.random.default_rng(0).integers(0, 9, (6, 3)).astype(np.float32)
LABELS = np.arange(6)


def every_kind(folder: Path) -> dict[str, object]:
    """The same six labelled rows in every kind of data."""
    rows = [{"x": x, "labels": label} for x, label in zip(X, LABELS, strict=True)]
    np.savez(folder / "rows.npz", x=X, labels=LABELS)
    (folder / "files").mkdir()
    for number, row in enumerate(rows):
        np.savez(folder / "files" / f"{number}.npz", **row)
    lines = [json.dumps({"x": row["x"].tolist(), "labels": int(row["labels"])}) for row in rows]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    cells = [",".join(map(str, [*row["x"], row["labels"]])) for row in rows]
    (folder / "table.csv").write_text("\n".join(["a,b,c,labels", *cells]))
    (folder / "my_samples.py").write_text(
        "import numpy as np\n"
        "def rows():\n    return dict(np.load('rows.npz'))\n"
        "def each():\n    print('loud')\n    data = np.load('rows.npz')\n"
        "    yield from ({'x': x, 'labels': label} for x, label in zip(data['x'], data['labels']))\n"
    )
    return {
        "npz": folder / "rows.npz",
        "folder": folder / "files",
        "lines": str(folder / "lines.jsonl"),
        "table": folder / "table.csv",
        "function of rows": "my_samples:rows",
        "function of samples": "my_samples:each",
        "mapping": {"x": X, "labels": LABELS},
        "list": rows,
        "iterator": iter(rows),
    }


def test_every_kind_gives_the_same_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, data in every_kind(tmp_path).items():
        found = open_data(data, ROWS)  # type: ignore[arg-type]
        np.testing.assert_array_equal(found.inputs["x"], X, kind)
        assert found.labels is not None
        assert found.labels.tolist() == LABELS.tolist(), kind
        assert found.digest == open_data({"x": X, "labels": LABELS}, ROWS).digest, kind
        assert open_data(found, ROWS) is found


@pytest.mark.parametrize(
    ("name", "error", "cause"),
    [
        ("none.csv", NotFound, "no data file 'none.csv'"),
        ("none", NotFound, "no data file 'none'"),
        ("no_such_module:f", InvalidArgument, "cannot load the data 'no_such_module:f': ModuleNotFoundError"),
        ("my_bad:none", InvalidArgument, "AttributeError"),
        ("my_bad:number", InvalidData, "'my_bad:number' failed at sample 0: TypeError"),
        ("my_bad:raising", InvalidData, "the function 'my_bad:raising' failed: ValueError: no disk"),
        ("my_bad:leaving", InvalidData, "the function 'my_bad:leaving' failed: SystemExit"),
        ("my_bad:empty", InvalidData, "'my_bad:empty' has no samples"),
    ],
)
def test_what_cannot_be_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[Exception], cause: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_bad.py").write_text(
        "def number():\n    return 3\ndef raising():\n    raise ValueError('no disk')\n"
        "def leaving():\n    raise SystemExit(0)\ndef empty():\n    return []\n"
    )
    with pytest.raises(error, match=cause):
        load_dataset(name, ROWS)


def test_a_file_whose_name_looks_like_a_function_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "rows.npz", x=X)
    (tmp_path / "rows.npz").rename(tmp_path / "a:b")
    assert load_dataset("a:b", ROWS).count == 6
    assert data_path("a:b") == Path("a:b")


def test_only_files_and_folders_have_paths(tmp_path: Path) -> None:
    assert data_path(tmp_path) == tmp_path
    for data in ("module:function", {"x": X}, [{"x": X}], None):
        assert data_path(data) is None  # type: ignore[arg-type]


def test_a_dataset_stays_as_it_is() -> None:
    data = open_data({"x": X}, ROWS)
    assert isinstance(data, Dataset)
    assert open_data(data, ROWS) is data


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl", "npz"])
def test_a_pipe_is_refused(suffix: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"pipe.{suffix}")
    with pytest.raises(InvalidData, match=rf"pipe\.{suffix}' is a pipe or a device, not a file"):
        load_dataset(tmp_path / f"pipe.{suffix}", ROWS)
