from __future__ import annotations

import input_models
from penstock.inputs.hints import hints_for
from penstock.inputs.meanings import meanings_of
from penstock.rows.graph import read_graph
from penstock.samples.hints import ImageForm, InputHints, SoundForm


def hints_of(model: input_models.Artifact) -> InputHints:
    return hints_for(meanings_of(input_models.signature_of(model), read_graph(model.data)))


def test_an_image_has_the_layout_and_range_that_the_graph_shows() -> None:
    found = hints_of(input_models.image_net(normalised=True)).images
    assert isinstance(found, ImageForm)
    assert (found.name, found.layout, found.low, found.high) == ("x", "NCHW", 0.0, 255.0)
    found = hints_of(input_models.image_net(last=True)).images
    assert found is not None
    assert (found.layout, found.low, found.high) == ("NHWC", 0.0, 1.0)


def test_a_voice_model_has_sounds_a_rate_and_a_state() -> None:
    found = hints_of(input_models.voice_activity())
    assert found.sounds == SoundForm("input", "sr", (8000, 16000))
    assert dict(found.states) == {"state": "stateN"}
    assert found.images is None


def test_a_text_model_has_neither() -> None:
    found = hints_of(input_models.text_encoder())
    assert (dict(found.states), found.images, found.sounds) == ({}, None, None)
