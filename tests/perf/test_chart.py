from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evidences import evidence, points, record
from penstock.bundle.evidence import Accuracy, Attempt, Evidence
from penstock.measurement import Interval, LatencyPoint
from penstock.perf.chart import (
    NARROW,
    STYLE,
    Scale,
    attempts_chart,
    bar_chart,
    line_chart,
    pareto,
    pareto_chart,
    throughput_chart,
)

SVG = "{http://www.w3.org/2000/svg}"
WIDTH = 760


def parse(chart: str) -> ET.Element:
    """The chart's root, after a check that every coordinate is a number inside the picture."""
    root = ET.fromstring(chart)
    height = float((root.get("viewBox") or "").split()[3])
    for element in root.iter():
        for name, value in element.attrib.items():
            limit = {"x": WIDTH, "x1": WIDTH, "x2": WIDTH, "cx": WIDTH, "y": height, "y1": height, "y2": height}
            if name in limit or name == "cy":
                assert -20 <= float(value) <= limit.get(name, height) + 20, (element.tag, name, value)
    assert "nan" not in re.sub(r"<title>.*?</title>", "", chart).lower()
    return root


def titles(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(SVG + "title")]


def lines(root: ET.Element, css: str) -> list[ET.Element]:
    return [element for element in root.iter() if element.get("class") == css]


def test_the_front_holds_what_nothing_beats() -> None:
    quick, middle, worse, best = (
        record("quick", 0.2, 0.95),
        record("middle", 0.5, 0.97),
        record("worse", 0.6, 0.96),
        record("best", 0.9, 0.99),
    )
    failed = record("failed", None)
    assert pareto([best, worse, failed, quick, middle]) == [quick, middle, best]


def test_equal_candidates_are_on_the_front_once() -> None:
    assert len(pareto([record("a"), record("b")])) == 1
    assert pareto([]) == []


@given(
    st.lists(
        st.tuples(st.floats(0.001, 1000), st.floats(0, 1)).map(lambda pair: record("x", *pair)), min_size=1, max_size=20
    )
)
def test_everything_off_the_front_is_beaten_by_something_on_it(records: list) -> None:
    front = pareto(records)
    values = [(r.latency_ms, r.accuracy.value) for r in front]
    assert values == sorted(values)
    for one in records:
        assert any(f.latency_ms <= one.latency_ms and f.accuracy.value >= one.accuracy.value for f in front)


def test_every_measured_candidate_is_a_mark_with_its_reason() -> None:
    found = evidence(
        record("int8", 0.4, 0.985, precision="int8", status="chosen", reason="2.5x"),
        record("rejected-int8", 0.3, 0.5, precision="int8", threads=2, status="rejected", reason="loses 49 %"),
        record("openvino-fp32", 0.9, engine="openvino"),
        record("broken", None, status="failed", reason="does not load"),
    )
    root = parse(pareto_chart(found))
    tips = titles(root)
    assert [tip.split(":")[0] for tip in tips] == [
        "Original · ONNX Runtime · 1 thread",
        "ONNX Runtime · INT8 · 1 thread",
        "ONNX Runtime · INT8 · 2 threads",
        "OpenVINO · FP32 · 1 thread",
    ]
    assert "0.3 ms, 50.00% — less accurate than allowed: loses 49 %" in tips[2]
    assert len(list(root.iter(SVG + "rect"))) == 1
    named = [element.text for element in lines(root, "name")]
    assert named == ["original", "chosen"]
    (front,) = lines(root, "front")
    assert len((front.get("points") or "").split()) == 3


def test_the_least_accuracy_allowed_is_a_line_below_what_is_allowed() -> None:
    found = evidence(record("allowed", 0.5, 0.985, threads=2), record("not", 0.4, 0.97, threads=3))
    chart = parse(pareto_chart(found))
    (floor,) = lines(chart, "floor")
    marks = {
        tip.split(":")[0][-9:]: mark for mark in chart.iter() for tip in titles(mark) if mark.tag == SVG + "circle"
    }
    # Pixels are counted from the top.
    assert float(marks["2 threads"].get("cy", 0)) < float(floor.get("y1", 0)) < float(marks["3 threads"].get("cy", 0))


def test_names_and_reasons_are_escaped() -> None:
    name = """<script>alert("1")</script>&'"""
    chart = pareto_chart(evidence(record("x", 0.5, engine=name, reason="a < b & c")))
    assert "<script" not in chart
    assert any(tip.startswith(name) and tip.endswith("a < b & c") for tip in titles(parse(chart)))
    assert name in {element.text for element in parse(throughput_chart({name: points(1.0)})).iter(SVG + "text")}


def test_an_original_that_was_chosen_has_one_label() -> None:
    found = evidence(record("slow", 2.0), chosen="original")
    assert [element.text for element in lines(parse(pareto_chart(found)), "name")] == ["original, chosen"]


@given(st.lists(st.tuples(st.floats(0.001, 1000), st.floats(0, 1)), max_size=8), st.floats(0.001, 1000))
def test_a_narrow_chart_fits_its_width(candidates: list[tuple[float, float]], row_ms: float) -> None:
    found = evidence(*(record(str(index), *one) for index, one in enumerate(candidates)))
    for chart in (pareto_chart(found, NARROW), throughput_chart({"original": points(row_ms)}, NARROW)):
        root = parse(chart)
        assert (root.get("viewBox") or "").split()[2] == str(NARROW)
        for element in root.iter():
            for name in ("x", "x1", "x2", "cx"):
                assert -20 <= float(element.get(name, 0)) <= NARROW
        for (left, one), (right, another) in pairwise(ticks_across(root)):
            assert right - left >= 6.5 * (len(one) + len(another)) / 2


def test_the_style_holds_without_style_attributes() -> None:
    """A page whose policy names only the hash of the style sheet shows the chart as it is."""
    chart = line_chart({"a": [(1, 1), (2, 2)]}, "t", X, Y, marks=[("level", 1.5)])
    assert "style=" not in chart
    assert f"<style>{STYLE}</style>" in chart


@pytest.mark.parametrize(
    "found",
    [
        evidence(),
        evidence(record("same", 1.0, 0.99)),
        evidence(record("same", 1.0, 0.99), record("twin", 1.0, 0.99), max_accuracy_loss=0.0),
        evidence(record("hopeless", 1e-6, 0.0)),
        evidence(record("slow", 1e6, 1.0)),
        evidence(record("failed", None)),
    ],
    ids=["nothing tried", "equal", "no loss allowed", "zero accuracy", "very slow", "all failed"],
)
def test_degenerate_evidence_still_is_a_chart(found: Evidence) -> None:
    root = parse(pareto_chart(found))
    assert len(titles(root)) == 1 + sum(one.latency_ms is not None for one in found.candidates)


@given(st.lists(st.tuples(st.floats(1e-4, 1e4), st.floats(0, 1)), max_size=8))
def test_any_measurements_make_a_chart(measured: list[tuple[float, float]]) -> None:
    records = [record(f"c{index}", *pair) for index, pair in enumerate(measured)]
    assert len(titles(parse(pareto_chart(evidence(*records))))) == len(records) + 1


def test_throughput_has_a_line_and_a_name_for_each_profile() -> None:
    root = parse(throughput_chart({"original": points(2.0), "int8": points(1.0)}))
    assert len(list(root.iter(SVG + "polyline"))) == 2
    assert titles(root)[0] == "original: 500 rows/s at batch size 1"
    assert len(titles(root)) == 6


def test_throughput_of_one_point_or_an_empty_profile() -> None:
    root = parse(throughput_chart({"original": (), "int8": (LatencyPoint(1, 0.5, 0.6),)}))
    assert titles(root) == ["int8: 2,000 rows/s at batch size 1"]


def test_ticks_are_round_numbers() -> None:
    texts = [element.text or "" for element in parse(throughput_chart({"m": points(1.0)})).iter(SVG + "text")]
    numbers = [float(text.replace(",", "")) for text in texts if re.fullmatch(r"[\d.,]+", text)]
    assert len(numbers) >= 4
    mantissas = [number / 10 ** math.floor(math.log10(number)) for number in numbers]
    assert mantissas == pytest.approx([round(mantissa, 1) for mantissa in mantissas])


X, Y = Scale("groups", "{:.0f}"), Scale("top-1", "{:.1%}")


def test_each_series_is_a_line_through_its_points_with_its_name() -> None:
    root = parse(line_chart({"a": [(0, 0.5), (2, 0.75)], "b": [(0, 0.5)]}, "t", X, Y, marks=[("allowed", 0.6)]))
    assert titles(root) == ["a: 50.0% top-1 at groups 0", "a: 75.0% top-1 at groups 2", "b: 50.0% top-1 at groups 0"]
    first, second = (element.get("points") for element in root.iter(SVG + "polyline"))
    assert len((first or "").split()) == 2
    assert len((second or "").split()) == 1
    start, end = (tuple(map(float, point.split(","))) for point in (first or "").split())
    (floor,) = lines(root, "floor")
    assert start[0] < end[0]
    assert start[1] > float(floor.get("y1", 0)) > end[1]
    assert {"a", "b", "allowed"} <= {element.text for element in root.iter(SVG + "text")}


def test_names_of_lines_that_end_together_do_not_meet() -> None:
    names = {f"line {index}": [(0.0, 0.1), (1.0, 0.1)] for index in range(9)}
    texts = {element.text: element for element in parse(line_chart(names, "t", X, Y)).iter(SVG + "text")}
    heights = sorted(float(texts[name].get("y", 0)) for name in names)
    assert all(below - above >= 14 for above, below in pairwise(heights))


def test_what_a_logarithmic_axis_cannot_show_is_left_out() -> None:
    points = [(0.0, 1.0), (-1.0, 1.0), (1.0, float("nan")), (float("inf"), 1.0), (2.0, 3.0)]
    assert len(titles(parse(line_chart({"a": points}, "t", X._replace(log=True), Y)))) == 1
    empty = parse(line_chart({"a": points[:4], "b": []}, "t", X._replace(log=True), Y))
    assert not list(empty.iter(SVG + "polyline"))


@given(st.dictionaries(st.text("ab<&", max_size=3), st.lists(st.tuples(*[st.floats(-1e9, 1e9)] * 2), max_size=4)))
def test_any_points_make_a_chart(series: dict) -> None:
    root = parse(line_chart(series, "t", X, Y))
    assert len(titles(root)) == sum(len(points) for points in series.values())


def test_bars_reach_from_zero_to_their_value() -> None:
    root = parse(bar_chart([("up", 2.0, 1.0), ("down", -1.0, math.nan)], "t", Scale("loss"), Scale("ms")))
    up, down, other = (element for element in root.iter(SVG + "rect"))
    assert float(up.get("width", 0)) == pytest.approx(2 * float(down.get("width", 0)), abs=0.2)
    assert float(up.get("x", 0)) == pytest.approx(float(down.get("x", 0)) + float(down.get("width", 0)), abs=0.2)
    assert float(other.get("x", 0)) > float(up.get("x", 0)) + float(up.get("width", 0))
    assert titles(root) == ["up: 2 loss", "down: -1 loss", "up: 1 ms", "down: nan ms"]
    assert [e.text for e in root.iter(SVG + "text") if titles(e) == ["down: nan ms"]] == ["–"]


def test_long_names_are_cut_and_hostile_ones_escaped() -> None:
    hostile = "<b>" + "x" * 90
    chart = bar_chart([(hostile, 1.0)], "<t>", Scale("<loss>"))
    assert "<b>" not in chart
    texts = [element.text or "" for element in parse(chart).iter(SVG + "text")]
    assert texts[0].endswith("…")
    assert "<loss>" in texts
    assert titles(parse(chart))[0].startswith(hostile)
    assert not list(parse(bar_chart([], "none", Scale("loss"))).iter(SVG + "rect"))


def _attempt(name: str, parent: str, kib: float, loss: float, outcome: str = "kept") -> Attempt:
    accuracy = Accuracy("top-1", 0.99 - loss, Interval(loss, loss, loss), 0.1, 250)
    return Attempt(name, parent, outcome, "why", accuracy, Interval(1, 1, 1), 600_000, int(kib * 1024), "", 1.0)  # type: ignore[arg-type]


def test_a_plan_is_drawn_as_a_tree() -> None:
    attempts = [
        _attempt("prune", "original", 90, 0.004),
        _attempt("share-fine", "prune", 16, 0.004),
        _attempt("share-coarse", "prune", 14, 0.06, "rejected"),
        Attempt("shrink", "original", "failed", "not measured"),
    ]
    svg = parse(attempts_chart(attempts, 550 * 1024))
    circles = [one for one in svg.iter() if one.tag.endswith("circle")]
    lines = [one for one in svg.iter() if one.get("class") == "step"]
    assert [one.get("fill") == "none" for one in circles] == [False, False, False, True]
    assert len(lines) == 3
    ends = [(one.get("x1"), one.get("y1")) for one in lines]
    places = [(one.get("cx"), one.get("cy")) for one in circles]
    assert ends == [places[0], places[1], places[1]]
    across = [float(x or 0) for x, _ in places]
    assert across == sorted(across, reverse=True)
    titles = [one.text for one in svg.iter() if one.tag.endswith("title")]
    assert "pruned weights, shared weights (fine): 16 KiB, 98.60% — kept: why" in titles
    assert "KiB coded (logarithmic)" in [one.text for one in svg.iter()]
    assert attempts_chart(attempts[3:], 1) == ""


def ticks_across(root: ET.Element) -> list[tuple[float, str]]:
    """Centre and text of each tick below the picture, from the left."""
    marks = [one for one in root.iter(SVG + "text") if one.get("text-anchor") == "middle" and one.get("class") is None]
    return sorted((float(one.get("x", 0)), one.text or "") for one in marks)


def test_shares_stop_at_nothing_and_at_all() -> None:
    points = [(0.0, 0.0), (0.5, 0.9), (1.0, 1.0)]
    root = parse(line_chart({"a": points}, "t", Scale("sparsity", "{:.0%}"), Scale("top-1", "{:.0%}")))
    texts = [one.text for one in root.iter(SVG + "text")]
    assert texts.count("0%") == texts.count("100%") == 2
    assert not {"-20%", "120%"} & set(texts)
    beyond = parse(line_chart({"a": [(0.0, -0.5), (1.0, 1.5)]}, "t", X, Scale("change", "{:.0%}")))
    assert {"-50%", "150%"} <= {one.text for one in beyond.iter(SVG + "text")}


@pytest.mark.parametrize(("value", "allowed"), [(1.0, (0.98, 1.0)), (0.0, (0.0, 0.02))])
def test_shares_that_are_all_alike_have_a_narrow_axis(value: float, allowed: tuple[float, float]) -> None:
    root = parse(line_chart({"a": [(0, value), (1, value)]}, "t", X, Scale("top-1", "{:.2%}")))
    shares = [float(one.text[:-1]) / 100 for one in root.iter(SVG + "text") if one.text and one.text.endswith("%")]
    assert len(shares) > 1
    assert allowed[0] <= min(shares) <= max(shares) <= allowed[1]


@given(st.floats(-1, 1), st.floats(0, 1), st.integers(1, 3))
def test_ticks_side_by_side_do_not_meet(lost: float, other: float, columns: int) -> None:
    scales = [Scale("accuracy lost", "{:.2%}")] * columns
    rows = [("a", *[lost] * columns), ("b", *[other] * columns)]
    for (left, one), (right, another) in pairwise(ticks_across(parse(bar_chart(rows, "t", *scales)))):
        assert right - left >= 6.5 * (len(one) + len(another)) / 2


def test_a_title_is_left_of_the_ticks_and_the_axis_right_of_them() -> None:
    root = parse(line_chart({"a": [(0, 0.0), (1, 1.0)]}, "t", X, Scale("top-1", "{:.3%}")))
    ticks = [one for one in root.iter(SVG + "text") if (one.text or "").endswith("%")]
    wide = next(one for one in ticks if one.text == "100.000%")
    # The title is written upwards with its foot at 14, its letters reach down to 18; digits are seven wide.
    assert float(wide.get("x", 0)) - 7 * len("100.000%") >= 18
    assert all(float(one.get("x1", 0)) > float(wide.get("x", 0)) for one in lines(root, "grid"))


def test_a_long_logarithmic_axis_of_wide_numbers() -> None:
    points = [(10.0**power, 1.0) for power in range(0, 13, 3)]
    root = parse(line_chart({"a": points}, "t", Scale("rows", "{:,.0f}", log=True), Y))
    found = ticks_across(root)
    assert len(found) > 1
    assert all(right - left > 5 * (len(one) + len(two)) / 2 for (left, one), (right, two) in pairwise(found))


@pytest.mark.parametrize("width", [WIDTH, NARROW])
def test_labels_of_steps_point_away_from_the_nearer_edge(width: int) -> None:
    attempts = [_attempt("shrink-1.5x", "original", 600, 0.01), _attempt("int8-qat", "original", 60, 0.005)]
    root = ET.fromstring(attempts_chart(attempts, 600 * 1024, width))
    notes = {one.text: one for one in lines(root, "note")}
    assert notes["channels removed for 1.5x"].get("text-anchor") == notes["original"].get("text-anchor") == "end"
    assert notes["INT8 with training"].get("text-anchor") == "start"
