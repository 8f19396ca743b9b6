from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

import models
from benchmarks.zoo.caffe import MODELS
from commands import Command
from penstock.artifact import Artifact
from penstock.offline.convert.certificate import certificate_of

NETS = """
import numpy as np
import models
import onnx
from penstock.artifact import Artifact
from penstock.errors import Unsupported
from penstock.offline.convert.base import UnsupportedOperator, UnsupportedOperators
from source_models import OnnxSource


def right():
    return OnnxSource(models.linear(3, 2))


def wrong():
    proto = onnx.load_model_from_string(models.linear(3, 2).data)
    tensor = proto.graph.initializer[0]
    tensor.CopyFrom(onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(tensor), tensor.name))
    return OnnxSource(models.linear(3, 2), Artifact.from_bytes(proto.SerializeToString()))


def unsupported():
    def export():
        ways = ("write it with Sinh", "leave it out")
        raise UnsupportedOperators.of([UnsupportedOperator(f"op{n}", f"layer {n}", way) for n, way in enumerate(ways)])

    return OnnxSource(models.linear(3, 2), export)


def broken():
    raise RuntimeError("no weights")
"""


@pytest.fixture(autouse=True)
def nets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_nets.py").write_text(NETS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


def test_json_is_that_of_the_documentation(penstock: Command, folder: Path) -> None:
    done = penstock("convert", "linear.onnx", "-o", "out.onnx", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert set(found) == {
        "output", "format", "converter", "opset", "inputs", "outputs", "parity", "unsupported", "pipeline", "warnings",
    }  # fmt: skip
    assert (found["output"], found["format"], found["unsupported"]) == ("out.onnx", "onnx", [])
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    parity = found["parity"]
    assert parity["holds"]
    assert parity["first_divergent"] is None
    assert parity["cases"] > 1
    assert parity["max_error"] <= parity["tolerance"]
    assert certificate_of(Artifact.from_file("out.onnx")) is not None


def test_a_person_reads_the_result(penstock: Command, folder: Path) -> None:
    done = penstock("convert", "my_nets:right", "-o", "out.onnx")
    assert done.code == 0, done.err
    assert "out.onnx  opset 17, from custom by test 1.0" in done.out
    assert "input     x  FP32[N, 3]" in done.out
    assert "parity    holds in" in done.out
    assert "warning   a warning of the exporter" in done.out
    assert "next      penstock inspect out.onnx" in done.out


def test_wrong_outputs(penstock: Command, folder: Path) -> None:
    done = penstock("convert", "my_nets:wrong", "-o", "out.onnx", "--json")
    assert done.code == 4
    assert "error: the ONNX model does not give the outputs of 'my_nets:wrong'" in done.err
    assert "Traceback" not in done.err
    found = done.json
    assert not found["parity"]["holds"]
    first = found["parity"]["first_divergent"]
    assert first["node"]
    assert (first["source"], first["where"]) == ("y", "layer of the test")
    assert found["output"] is None
    assert found["error"]["code"] == "FAILED_PRECONDITION"
    assert not (folder / "out.onnx").exists()


def test_wrong_outputs_are_kept_on_request(penstock: Command, folder: Path) -> None:
    done = penstock("convert", "my_nets:wrong", "-o", "out.onnx", "--keep-failed")
    assert done.code == 4
    assert "parity    does not hold in" in done.out
    assert "'out.onnx' was written, but its outputs differ" in done.err
    assert "does not hold" in penstock("inspect", "out.onnx").out
    (line,) = penstock("convert", "my_nets:wrong", "-o", "out.onnx", "--keep-failed", "--json").out.splitlines()
    found = json.loads(line)
    assert (found["output"], found["error"]["code"], found["parity"]["holds"]) == (
        "out.onnx",
        "FAILED_PRECONDITION",
        False,
    )


def test_a_wrong_command_line_is_reported_as_json(penstock: Command) -> None:
    done = penstock("convert", "my_nets:right", "--json")
    assert (done.code, done.json["error"]["message"]) == (2, "Missing option '--output' / '-o'.")


def test_code_that_prints_at_the_end_does_not_spoil_the_output(folder: Path) -> None:
    with Path("my_nets.py").open("a") as file:
        file.write(
            "\nimport atexit, sys\natexit.register(print, 'first', file=sys.stdout)\natexit.register(print, 'last')\n"
        )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from penstock.cli.main import run; run()"
    command = [sys.executable, "-c", code, "convert", "my_nets:right", "-o", "out.onnx", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["output"] == "out.onnx"
    assert "last\nfirst\n" in done.stderr


def test_unsupported_operators_are_listed_with_a_way_out(penstock: Command) -> None:
    done = penstock("convert", "my_nets:unsupported", "-o", "out.onnx", "--json")
    assert done.code == 2
    assert "unsupported: op0 at layer 0: write it with Sinh\nunsupported: op1 at layer 1: leave it out\n" in done.err
    assert done.json["unsupported"] == [
        {"op": "op0", "where": "layer 0", "way_out": "write it with Sinh"},
        {"op": "op1", "where": "layer 1", "way_out": "leave it out"},
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "cause"),
    [
        (("absent.keras", "-o", "out.onnx"), 3, "no model 'absent.keras'"),
        (("linear.onnx", "-o", "out.bin"), 2, "must end in .onnx"),
        (("linear.onnx", "-o", "linear.onnx"), 2, "would overwrite"),
        (("linear.onnx", "-o", "new/out.onnx"), 3, "the folder 'new'"),
        (("linear.onnx", "-o", "text.onnx"), 8, "exists and is not an ONNX file"),
        (("linear.onnx", "-o", "out.onnx", "--from", "karas"), 2, "there is no format 'karas'"),
        (("linear.onnx", "-o", "out.onnx", "--inputs", "x:floot[1]"), 2, "unknown type 'floot'"),
        (("linear.onnx", "-o", "out.onnx", "--dynamic", "x"), 2, "does not name an input and its axes"),
        (("linear.onnx", "-o", "out.onnx", "--opset", "3"), 2, "--opset must be from 7"),
        (("linear.onnx", "-o", "out.onnx", "--sample", "absent.npz"), 3, "no sample 'absent.npz'"),
        (
            ("data.json", "-o", "out.onnx", "--from", "paddle"),
            2,
            "has the format xgboost (XGBoost (.json, .ubj)), not paddle",
        ),
        (("data.json", "-o", "out.onnx", "--from", "jax"), 2, "is a file, and JAX has no files of models"),
        (("data.json", "-o", "out.onnx", "--from", "huggingface"), 2, "is a file, not a Hugging Face folder"),
        (("text.onnx", "-o", "out.onnx", "--from", "sklearn"), 2, "'text.onnx' is not a skops file"),
        (
            ("data.json", "-o", "out.onnx", "--ops", "my_nets.py"),
            2,
            "only these formats take it: exported_program, graph_def",
        ),
        (("linear.onnx", "-o", "out.onnx", "--signature", ""), 2, "--signature is empty"),
        (("my_nets:broken", "-o", "out.onnx"), 2, "raised RuntimeError: no weights (my_nets.py, line 31)"),
        (("my_nets:absent", "-o", "out.onnx"), 2, "cannot load the model"),
        (("empty.pt2", "-o", "out.onnx"), 2, "is empty"),
        (("data.npz", "-o", "out.onnx"), 2, "contains arrays, not a model"),
    ],
)
def test_mistakes(penstock: Command, folder: Path, arguments: tuple[str, ...], code: int, cause: str) -> None:
    (folder / "text.onnx").write_text("no model")
    (folder / "empty.pt2").touch()
    (folder / "data.json").write_text('{"learner": {}}')
    before = sorted(path.name for path in folder.iterdir())
    done = penstock("convert", *arguments)
    assert (done.code, cause in done.err, "  fix: " in done.err) == (code, True, True), done.err
    assert "Traceback" not in done.err
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == before


def test_the_certificate_is_shown_and_goes_into_bundles(penstock: Command, folder: Path) -> None:
    assert penstock("convert", "linear.onnx", "-o", "out.onnx").code == 0
    shown = penstock("inspect", "out.onnx")
    assert "parity    holds in" in shown.out
    assert "proof     output '" in shown.out
    assert penstock("inspect", "out.onnx", "--json").json["certificate"]["holds"]
    built = penstock("build", "out.onnx", "--evaluate", "data.npz", "--budget", "5s", "-o", "out.bundle")
    assert built.code == 0, built.err
    assert "converted from onnx by" in built.out
    step = penstock("inspect", "out.bundle", "--json").json["manifest"]["provenance"][0]
    assert (step["name"], step["facts"]["certificate"]["holds"]) == ("convert", True)


def test_a_changed_model_is_said_to_have_no_valid_certificate(penstock: Command, folder: Path) -> None:
    assert penstock("convert", "linear.onnx", "-o", "changed.onnx").code == 0
    proto = onnx.load("changed.onnx")
    proto.graph.node[0].name = "renamed"
    onnx.save(proto, "changed.onnx")
    assert "the model was changed after its conversion" in penstock("inspect", "changed.onnx").out


def test_other_commands_convert_a_source_first(penstock: Command, folder: Path) -> None:
    given = MODELS["lenet"].make(folder)
    assert isinstance(given, Path)
    first = penstock("inspect", given, "--template", "samples.npz")
    assert first.code == 0, first.err
    assert f"penstock build {given} --calibrate samples.npz" in first.out
    (kept,) = (folder / "cache" / "penstock" / "converted").rglob("*.onnx")
    assert kept.stem == given.stem
    written = kept.stat().st_mtime_ns
    assert penstock("infer", given, "--inputs", "samples.npz").code == 0
    assert penstock("prune", given, "--sparsity", "50%", "-o", "pruned.onnx").code == 0
    assert kept.stat().st_mtime_ns == written
    assert penstock("infer", "my_nets:broken", "--inputs", "samples.npz").code == 2


def test_a_misnamed_onnx_file(penstock: Command, folder: Path) -> None:
    (folder / "net.bin").write_bytes(models.linear(3, 2).data)
    done = penstock("infer", "net.bin", "--inputs", "data.npz")
    assert (done.code, "rename it to net.onnx" in done.err) == (2, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_folder(folder: Path, number: signal.Signals) -> None:
    (temporary := folder / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from penstock.cli.main import run; run()"
    command = [sys.executable, "-c", code, "convert", "linear.onnx", "-o", "out.onnx"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 60
        while len(list(temporary.glob("penstock-convert-*"))) < 2 and time.monotonic() < until:
            os.sched_yield()
        process.send_signal(number)
        _, told = process.communicate()
    assert process.returncode == 130, told
    assert "interrupted" in told
    assert list(temporary.iterdir()) == []
    assert not Path("out.onnx").exists()
