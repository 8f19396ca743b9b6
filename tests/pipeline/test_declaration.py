from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidConfig
from penstock.pipeline.declaration import parse
from penstock.pipeline.source import read_json, read_source
from penstock.pipeline.value import Media
from pipelines import SCORES, canonical, declared


def test_a_declaration_is_read() -> None:
    found = declared(SCORES)
    assert (found.name, found.outputs, found.models) == ("scores", ("label", "p"), {"linear": "linear.onnx"})
    assert found.inputs["features"].media is Media.TENSOR
    assert found.labels == {"pair": ("no", "yes")}
    assert [(step.name, step.kind, step.target) for step in found.steps] == [
        ("linear", "model", "linear"),
        ("softmax", "step", "softmax"),
        ("top_k", "step", "top_k"),
    ]
    assert found.steps[2].options == {"labels": "pair", "k": 1}


def test_the_canonical_form_is_read_back() -> None:
    steps = [
        {
            "map": "x",
            "as": "one",
            "out": {"y": "ys"},
            "steps": [{"step": "softmax", "in": ["one"], "out": "y", "axis": 0}],
        }
    ]
    for found in (
        declared(SCORES),
        declared(SCORES, steps=steps, optional=["p"], description="Text", constants={"c": [1, 2]}),
    ):
        again = parse(read_json(canonical(found), "pipeline.json"))
        assert canonical(again) == canonical(found)


def test_toml_is_the_same() -> None:
    text = 'name = "t"\noutputs = ["p"]\n[inputs.x]\nmedia = "text"\n[[steps]]\nstep = "softmax"\nin = "x"\nout = "p"\n'
    found = parse(read_source(text.encode(), "pipeline.toml"))
    assert (found.inputs["x"].media, found.steps[0].outputs) == (Media.TEXT, "p")
    broken = text.replace("outputs", "ouputs")
    with pytest.raises(
        InvalidConfig, match=r"pipeline.toml, line 2: unknown key 'ouputs' \(did you mean 'outputs'\?\)"
    ):
        parse(read_source(broken.encode(), "pipeline.toml"))


def test_steps_that_run_the_same_get_numbers() -> None:
    steps = [{"step": "softmax", "in": "a", "out": "b"}, {"step": "softmax", "in": "b", "out": "c"}]
    assert [step.name for step in declared(SCORES, steps=steps).steps] == ["softmax", "softmax-2"]


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ({"python": "own/steps.py:größe"}, "python"),
        ({"model": "n" * 100}, "model"),
        ({"model": "n" * 90}, "n" * 90),
        ({"map": "a b", "as": "x", "steps": []}, "map"),
        ({"python": ""}, "python"),
    ],
)
def test_default_names_can_be_stored(step: dict[str, Any], name: str) -> None:
    inner = {"steps": [{"step": "softmax", "in": "x", "out": "y"}]} if "map" in step else {}
    found = declared(SCORES, steps=[{**step, **inner, "out": "y"}] * 2)
    assert [one.name for one in found.steps] == [name, f"{name}-2"]
    assert canonical(parse(read_json(canonical(found), "pipeline.json"))) == canonical(found)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("outputs:", "output:", r"line 15: unknown key 'output' \(did you mean 'outputs'"),
        ("name: scores\n", "", r"the key 'name' is missing \(write the name"),
        (
            "media: tensor",
            "media: tenser",
            r"line 3: option 'media' of input 'features' is wrong: Invalid value 'tenser' \(did you mean 'tensor'",
        ),
        ("shape: [3]", "shap: [3]", r"line 3: input 'features' has no option 'shap' \(did you mean 'shape'"),
        ("shape: [3]", "shape: [-2]", "line 3: .*>= -1"),
        ("{step: softmax,", "{stap: softmax,", r"line 9: unknown key 'stap' in a step \(did you mean 'step'"),
        ("{step: softmax,", "{", "line 9: a step needs one of the keys step, model, map, python"),
        ("{step: softmax,", "{step: softmax, model: linear,", "line 9: a step needs one of .* has 2"),
        ("in: logits, out: p}", "in: logits}", r"line 9: step 'softmax': the key 'out' is missing"),
        ("{model: linear,", "{model: linear, axis: 1,", r"line 8: model 'linear': unknown key 'axis'"),
        ("out: logits}", "out: 5}", "line 8: 'out' is wrong: Expected"),
        ("out: logits}", "out: 'a b'}", "line 8: 'a b' is not a valid name"),
        ("pair: [no, yes]", "pair: [1.5]", "line 6: 'labels' is wrong: Expected 'whole number | text', got 'number'"),
        ("outputs: [label, p]", "outputs: []", "'outputs' is wrong"),
        (
            "outputs: [label, p]",
            "outputs: label",
            r"'outputs' is wrong: Expected 'list', got 'text' \(list the values to return",
        ),
    ],
)
def test_errors_name_line_and_fix(old: str, new: str, message: str) -> None:
    assert old in SCORES
    with pytest.raises(InvalidConfig, match=message):
        declared(SCORES.replace(old, new, 1))


@pytest.mark.parametrize("value", [None, 5, "text", [], [1]])
def test_other_data_is_refused(value: Any) -> None:
    with pytest.raises(InvalidConfig, match="the file has no keys"):
        parse(read_json(b"null" if value is None else repr(value).replace("'", '"').encode(), "pipeline.json"))


def test_a_key_after_a_table_of_toml() -> None:
    """It belongs to the table, so it is missing at the top."""
    text = 'name = "p"\n[inputs.x]\n[[steps]]\nstep = "softmax"\nin = "x"\nout = "y"\noutputs = ["y"]\n'
    with pytest.raises(
        InvalidConfig, match=r"'outputs' is missing .*in TOML, write outputs = … before the first \[table"
    ):
        parse(read_source(text.encode(), "pipeline.toml"))
