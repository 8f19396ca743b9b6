from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataset import Dataset, check_dataset, load_dataset, make_dataset
from penstock.errors import InvalidData, NotFound
from penstock.tensor import DataType, Signature, TensorSpec

Y = TensorSpec("y", DataType.FP32, (-1, 4))
SIGNATURE = Signature((TensorSpec("x", DataType.FP32, (-1, 3)),), (Y,))
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def taking(datatype: DataType, *shape: int) -> Signature:
    return Signature((TensorSpec("x", datatype, shape),), (Y,))


def saved(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


def test_inputs_and_labels_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "data.npz", x=X, labels=np.array([0, 1, 2, 3]), extra=np.zeros(99))
    data = load_dataset(path, SIGNATURE)
    np.testing.assert_array_equal(data.inputs["x"], X)
    np.testing.assert_array_equal(data.labels, [0, 1, 2, 3])
    assert list(data.inputs) == ["x"]
    assert data.count == 4
    np.testing.assert_array_equal(data.rows(1, 3)["x"], X[1:3])


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.npz")
    with pytest.raises(InvalidData, match="it is a pipe"):
        load_dataset(tmp_path / "data.npz", SIGNATURE)


def test_labels_are_optional_and_may_be_a_column() -> None:
    assert check_dataset({"x": X}, SIGNATURE).labels is None
    column = check_dataset({"x": X, "labels": np.array([[0], [1], [2], [3]], np.uint8)}, SIGNATURE).labels
    np.testing.assert_array_equal(column, [0, 1, 2, 3])


def test_a_model_input_called_labels_is_an_input() -> None:
    signature = Signature((*SIGNATURE.inputs, TensorSpec("labels", DataType.FP32, (-1,))), (Y,))
    data = check_dataset({"x": X, "labels": np.ones(4, np.float32)}, signature)
    assert data.labels is None
    assert list(data.inputs) == ["x", "labels"]


def test_the_digest_names_the_content() -> None:
    same = make_dataset({"x": X}, None).digest
    assert make_dataset({"x": X.copy(order="F")}, None).digest == same
    others = [
        make_dataset({"x": X + 1}, None),
        make_dataset({"z": X}, None),
        make_dataset({"x": X.reshape(3, 4)}, None),
        make_dataset({"x": X}, np.arange(4)),
    ]
    assert len({same, *(other.digest for other in others)}) == 5


def test_text_is_taken_for_bytes() -> None:
    data = check_dataset({"x": np.array([["a"], ["b"]])}, taking(DataType.BYTES, -1, 1))
    assert data.inputs["x"].dtype == object
    assert data.inputs["x"].tolist() == [["a"], ["b"]]
    assert len(data.digest) == 64


def test_bfloat16_comes_back_from_a_file(tmp_path: Path) -> None:
    rows = X.astype(ml_dtypes.bfloat16)
    data = load_dataset(saved(tmp_path / "data.npz", x=rows), taking(DataType.BF16, -1, 3))
    np.testing.assert_array_equal(data.inputs["x"].astype(np.float32), X)


def test_a_foreign_byte_order_is_turned() -> None:
    data = check_dataset({"x": X.astype(">f4")}, SIGNATURE)
    assert data.inputs["x"].dtype == np.dtype("=f4")
    np.testing.assert_array_equal(data.inputs["x"], X)


@pytest.mark.parametrize(
    ("arrays", "cause"),
    [
        ({}, r"no array for input\(s\) \['x'\]; the file has \[\]"),
        ({"image": X}, r"no array for input\(s\) \['x'\]; the file has \['image'\]"),
        ({"x": X[:, :2]}, r"has shape \[-1, 3\], but the data has shape \[4, 2\]"),
        ({"x": X[0]}, r"has 2 dimension\(s\) \[-1, 3\], but the data has shape \[3\]"),
        ({"x": np.float32(1)}, r"the data has shape \[\]"),
        ({"x": X.astype(np.float64)}, "is FP32, but the data is float64"),
        ({"x": X.astype(np.complex64)}, "is FP32, but the data is complex64"),
        ({"x": X.astype("datetime64[s]")}, "is FP32, but the data is datetime64"),
        ({"x": X.astype(str)}, "is FP32, but the data is <U"),
        ({"x": X[:0]}, "'x' has no samples"),
        ({"x": X, "labels": np.arange(3)}, r"differ in number of samples: \{'x': 4, 'labels': 3\}"),
        ({"x": X, "labels": np.float32([0, 1, np.nan, 3])}, "labels contain NaN"),
        ({"x": X, "labels": np.ones(4, complex)}, r"labels must be numbers or text, one row per sample.*complex"),
        (
            {"x": X, "labels": np.ones((4, 0), int)},
            r"labels must be numbers or text, one row per sample.*shape \[4, 0\]",
        ),
        ({"x": X, "labels": np.array(3)}, r"labels must be numbers or text, one row per sample.*shape \[\]"),
        ({"x": X, "labels": np.array([0, -1, 2, 3])}, "must not be negative, .* the label at index 1 is -1"),
    ],
)
def test_bad_data_is_refused_with_its_cause(tmp_path: Path, arrays: dict[str, np.ndarray], cause: str) -> None:
    with pytest.raises(InvalidData, match=cause) as raised:
        load_dataset(saved(tmp_path / "bad.npz", **arrays), SIGNATURE)
    assert "bad.npz" in raised.value.message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("datatype", [DataType.FP16, DataType.BF16, DataType.FP32, DataType.FP64])
def test_what_is_not_finite_is_found(datatype: DataType, value: float) -> None:
    rows = np.zeros((1000, 3), datatype.dtype)
    rows[700, 1] = rows[900, 2] = value
    with pytest.raises(InvalidData, match="in 2 of 1000 samples, first in sample 700") as raised:
        check_dataset({"x": rows}, taking(datatype, -1, 3))
    assert raised.value.hint


def test_inputs_must_agree_in_number_of_samples() -> None:
    signature = Signature((*SIGNATURE.inputs, TensorSpec("z", DataType.INT64, (-1,))), (Y,))
    with pytest.raises(InvalidData, match=r"\{'x': 4, 'z': 5\}"):
        check_dataset({"x": X, "z": np.arange(5)}, signature)


def test_an_input_without_an_axis_for_samples_is_refused() -> None:
    with pytest.raises(InvalidData, match="'x' is a single number"):
        check_dataset({"x": np.float32(1)}, taking(DataType.FP32))


def test_a_fixed_batch_takes_multiples_of_it() -> None:
    signature = taking(DataType.FP32, 2, 3)
    assert check_dataset({"x": X}, signature).count == 4
    with pytest.raises(InvalidData, match="takes exactly 2 samples at a time, but the data has 3"):
        check_dataset({"x": X[:3]}, signature)


class Bomb:
    """An object whose pickle creates the given file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.path,)  # type: ignore[return-value]


def test_pickles_are_refused_and_not_run(tmp_path: Path) -> None:
    fuse = tmp_path / "executed"
    objects = saved(tmp_path / "objects.npz", x=np.array([Bomb(fuse)], dtype=object))
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(Bomb(fuse)))
    for path in (objects, tmp_path / "pickle.npz"):
        with pytest.raises(InvalidData, match="cannot read") as raised:
            load_dataset(path, SIGNATURE)
        assert "without Python objects" in raised.value.hint
    assert not fuse.exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"none\.npz"):
        load_dataset(tmp_path / "none.npz", SIGNATURE)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("x = 1, 2, 3")
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "folder.npz").mkdir()
    np.save(tmp_path / "single.npy", X)
    with zipfile.ZipFile(tmp_path / "foreign.npz", "w") as archive:
        archive.writestr("x", b"not an array")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(InvalidData) as raised:
            load_dataset(path, SIGNATURE)
        assert path.name in raised.value.message


@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_archives_are_refused(tmp_path: Path, compressed: bool) -> None:
    whole = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(whole, x=np.random.default_rng(0).random((50, 3), np.float32))
    data, path = whole.getvalue(), tmp_path / "damaged.npz"
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(InvalidData):
            load_dataset(path, SIGNATURE)
    for place in range(0, len(data), 11):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        try:
            load_dataset(path, SIGNATURE)
        except InvalidData:
            continue


def test_a_header_that_is_not_python_is_refused(tmp_path: Path) -> None:
    header = b"{'shape': (3,),\n"
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(InvalidData, match="cannot read"):
        load_dataset(path, SIGNATURE)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("code", [0x110000, 0xFFFFFFFF, 0xD800, 0xDFFF])
def test_text_that_is_not_unicode_is_refused(code: int, order: str) -> None:
    signature = Signature((TensorSpec("t", DataType.BYTES, (-1,)),), ())
    codes = np.array([65, 0x10FFFF, 0xD7FF, 0xE000], f"{order}u4")
    assert check_dataset({"t": codes.view(f"{order}U2")}, signature).count == 2
    codes[1] = code
    with pytest.raises(InvalidData, match="not valid Unicode"):
        check_dataset({"t": codes.view(f"{order}U2")}, signature)


def test_a_shape_that_lies_is_refused(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**44, 3)})
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    with pytest.raises(InvalidData, match="cannot read"):
        load_dataset(tmp_path / "huge.npz", SIGNATURE)


@given(st.integers(2, 200), st.floats(0, 1), st.sampled_from([1, 2, 5]))
def test_a_split_loses_nothing_and_leaves_both_parts(parts: int, held_out: float, multiple: int) -> None:
    count = parts * multiple
    data = make_dataset({"x": np.arange(count)}, np.arange(count))
    first, second = data.split(held_out, multiple)
    np.testing.assert_array_equal(np.concatenate([first.inputs["x"], second.inputs["x"]]), data.inputs["x"])
    np.testing.assert_array_equal(first.labels, first.inputs["x"])
    for part in (first, second):
        assert part.count >= multiple
        assert part.count % multiple == 0
    assert first.digest != second.digest


@given(st.integers(2, 20), st.floats(0.05, 0.95), st.integers(1, 4), st.integers(0, 9))
def test_a_shuffled_split_loses_less_than_a_block_and_leaves_both_parts(
    parts: int, held_out: float, multiple: int, seed: int
) -> None:
    count = parts * multiple + seed % multiple
    data = make_dataset({"x": np.arange(count)}, np.arange(count) % 3)
    first, second = data.split_shuffled(held_out, multiple, seed)
    rows = np.concatenate([first.inputs["x"], second.inputs["x"]])
    assert len(set(rows.tolist())) == len(rows) > count - multiple
    for part in (first, second):
        assert part.count >= multiple
        assert part.count % multiple == 0
        np.testing.assert_array_equal(part.labels, part.inputs["x"] % 3)
        assert (np.diff(part.inputs["x"]) > 0).all()
    assert second.digest == data.split_shuffled(held_out, multiple, seed)[1].digest


def test_a_shuffled_split_has_every_class_in_proportion() -> None:
    """Sorted data, whose last fifth has a single class."""
    labels = np.repeat([0, 1, 2], [100, 50, 20])
    fitted, held = make_dataset({"x": np.arange(170)}, labels).split_shuffled(0.2)
    assert held.labels is not None
    np.testing.assert_allclose(np.bincount(held.labels), [20, 10, 4], atol=1)
    assert fitted.count == 136
    other = make_dataset({"x": np.arange(170)}, labels).split_shuffled(0.2, seed=1)[1]
    assert other.digest != held.digest


def test_classes_are_labels_of_one_number_per_sample() -> None:
    assert make_dataset({"x": X}, np.arange(4)).classes is not None
    for labels in (None, np.ones(4, np.float32), np.ones((4, 2), int), np.array(list("abcd"))):
        assert make_dataset({"x": X}, labels).classes is None


def test_labels_of_any_kind_have_one_row_per_sample() -> None:
    for labels in (np.ones((4, 3, 5), np.float32), np.array(list("abcd")), np.eye(4, dtype=bool)):
        np.testing.assert_array_equal(check_dataset({"x": X, "labels": labels}, SIGNATURE).labels, labels)


def test_a_split_follows_the_share() -> None:
    data = Dataset({"x": np.arange(10)}, None, "")
    assert [part.count for part in data.split(0.2)] == [8, 2]


@pytest.mark.parametrize(("count", "multiple"), [(1, 1), (4, 4)])
def test_too_little_to_split(count: int, multiple: int) -> None:
    with pytest.raises(InvalidData, match="cannot be split") as raised:
        Dataset({"x": np.arange(count)}, None, "").split(0.2, multiple)
    assert f"at least {2 * multiple} samples" in raised.value.hint


@given(st.integers(1, 5), st.integers(0, 60))
def test_every_fourth_block_is_held_out(multiple: int, blocks: int) -> None:
    count = multiple * blocks
    x = np.arange(count, dtype=np.float32)[:, np.newaxis]
    data = make_dataset({"x": x}, np.arange(count))
    if blocks < 2:
        with pytest.raises(InvalidData, match="cannot be split"):
            data.split_evenly(4, multiple)
        return
    fitted, held = data.split_evenly(4, multiple)
    assert fitted.labels is not None
    assert held.labels is not None
    assert sorted([*fitted.labels, *held.labels]) == list(range(count))
    assert fitted.count % multiple == held.count % multiple == 0
    assert (held.inputs["x"][:, 0] == held.labels).all()
    expected = [n for n in range(count) if (n // multiple) % min(4, blocks) == min(4, blocks) - 1]
    assert held.labels.tolist() == expected


def test_sorted_data_leave_all_classes_on_both_sides() -> None:
    labels = np.repeat(np.arange(10), 20)
    fitted, held = make_dataset({"x": np.zeros((200, 1), np.float32)}, labels).split_evenly(4)
    assert fitted.labels is not None
    assert held.labels is not None
    assert set(fitted.labels) == set(held.labels) == set(range(10))
