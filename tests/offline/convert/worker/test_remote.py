from pathlib import Path

import numpy as np
import pytest

from penstock.errors import (
    InvalidArgument,
    PenstockError,
)
from penstock.offline.convert.base import ConvertOptions, Exported, InputSpec, Probes, TensorLink
from penstock.tensor import DataType

X = {"x": np.array([[1, 2]], np.float32)}


def test_a_remote_model_does_what_the_model_does(opened, tmp_path):
    model = opened()
    assert (model.framework, model.version) == ("Fake", "1.0")
    assert model.signature.input_names == ["x"]
    assert model.axes["x"][0].name == "batch"
    np.testing.assert_array_equal(model.forward(X)["y"], [[2, 4]])
    assert list(model.values(X, ["double", "other"])) == ["double"]
    exported = model.export(tmp_path / "model.onnx", 19)
    assert exported == Exported("fake 1.0", (TensorLink("y", "double", "line 3"),), ("Dropout",), ("be careful",))
    assert (tmp_path / "model.onnx").read_bytes() == b"ONNX 19"


def test_every_option_arrives(opened):
    options = ConvertOptions(
        (InputSpec("x", DataType.FP32, ("N", 2)), InputSpec("z", None, None)),
        {"x": np.ones((3, 2), np.float32)},
        {"x": {0: "batch"}},
        17,
        ("y",),
        Path("weights"),
        True,
        Path("ops.py"),
        "other",
    )
    code = """
if call == "forward":
    assert self.options.sample.pop("x").tolist() == [[1, 1]] * 3
    result = {"told": np.array([repr(self.options).encode()], object)}
"""
    (told,) = opened(code, options).forward(X)["told"]
    for part in (
        "InputSpec(name='x'",
        "('N', 2)",
        "{0: 'batch'}",
        "opset=17",
        f"{Path('ops.py').absolute()!r}",
        "'other'",
    ):
        assert part in told.decode()


def test_probes_arrive(opened):
    assert opened().probes(0) == Probes((), ("one of two",))
    code = (
        "if call == 'probes': result = [{'x': np.full((2, 2), seed, np.float32)}, {'x': np.zeros((1, 2), np.float32)}]"
    )
    first, second = opened(code).probes(7).calls
    assert first["x"].tolist() == [[7, 7], [7, 7]]
    assert second["x"].shape == (1, 2)


TREES = """
from penstock.offline.convert.tables.forest import Forest, Tree
if call == "trees":
    yes, no, leaves = np.array([1, -1, -1]), np.array([2, -1, -1]), np.array([[0.0], [1.0], [2.0]])
    tree = Tree(np.array([1, -1, -1]), np.array([0.5, 0, 0]), yes, no, np.zeros(3, bool), leaves)
    result = [Forest([tree], "<=", np.zeros(1), 2).arrays()]
"""


def test_trees_arrive(opened):
    assert opened().trees() == ()
    (forest,) = opened(TREES).trees()
    assert forest.threshold[0] == 0.5
    assert forest.value.tolist() == [1.0, 2.0]


def test_contradictory_trees_are_refused(opened):
    with pytest.raises(PenstockError, match="describes its trees inconsistently"):
        opened(TREES + "    result[0].yes[0] = 99").trees()


def test_the_number_of_probes_is_limited(opened):
    code = "if call == 'probes': result = [{'x': np.zeros((1, 2), np.float32)}] * 1000"
    assert len(opened(code).probes(0).calls) <= 100


def test_arrays_can_be_written(opened):
    """Some frameworks warn about arrays that are read-only."""
    found = opened("if call == 'forward': inputs['x'] += 1").forward(X)["y"]
    found += 1
    np.testing.assert_array_equal(found, [[5, 7]])


def test_a_link_in_the_export_is_not_followed(opened, tmp_path):
    with pytest.raises(PenstockError, match=r"'zdata', which is not a regular file"):
        opened("if call == 'export': os.symlink('/etc/passwd', target.with_name('zdata'))").export(
            tmp_path / "m.onnx", 17
        )
    assert not list(tmp_path.glob("*.onnx"))


@pytest.mark.parametrize(
    "code",
    [
        "self.axes = {'y': self.axes['x']}",
        "self.axes = {'x': (self.axes['x'][0].__class__(5, 'n'),)}",
        "self.signature = self.signature.__class__(self.signature.inputs * 2, ())",
    ],
)
def test_an_inconsistent_description_is_an_error(opened, code):
    with pytest.raises(PenstockError, match="inconsistently"):
        opened(code)


def test_a_source_that_was_removed_is_an_error_of_the_next_process(opened, tmp_path):
    model = opened("if call == 'forward': raise SystemExit")
    (tmp_path / "source").unlink()
    for message in ("ended with status 0", "FileNotFoundError", "FileNotFoundError"):
        with pytest.raises(PenstockError, match=message):
            model.forward(X)


def test_closing_twice_is_fine_and_a_closed_model_says_so(opened):
    model = opened()
    model.close()
    model.close()
    with pytest.raises(InvalidArgument, match="closed"):
        model.forward(X)
