"""Timelines and their exports."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

from penstock.pipeline.streaming.timeline import Timeline, svg_chart, text_chart

MS = 1_000_000


def example() -> Timeline:
    timeline = Timeline()
    timeline.add("decode", [0], "worker-0", 0, 10 * MS)
    timeline.add("decode", [1], "worker-1", 0, 10 * MS)
    timeline.add("net <b>", [0, 1], "worker-0", 10 * MS, 40 * MS)
    return timeline


def test_sums() -> None:
    timeline = example()
    assert timeline.steps == ["decode", "net <b>"]
    assert timeline.wall_ns == 40 * MS
    assert timeline.busy_ns() == {"decode": 20 * MS, "net <b>": 30 * MS}


def test_the_chrome_trace_has_a_row_for_each_thread() -> None:
    events = json.loads(example().chrome_trace())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    calls = [event for event in events if event["ph"] == "X"]
    assert set(names.values()) == {"worker-0", "worker-1"}
    assert [(names[one["tid"]], one["name"], one["ts"], one["dur"], one["args"]["batch"]) for one in calls] == [
        ("worker-0", "decode", 0, 10_000, 1),
        ("worker-1", "decode", 0, 10_000, 1),
        ("worker-0", "net <b>", 10_000, 30_000, 2),
    ]


def test_the_text_chart() -> None:
    assert text_chart(example(), 8).splitlines() == [
        "worker-0 |AABBBBBB|",
        "worker-1 |AA......|",
        "A decode: 20.0 ms, 50 % of 40.0 ms",
        "B net <b>: 30.0 ms, 75 % of 40.0 ms",
    ]


def test_the_svg_shows_timelines_on_one_scale() -> None:
    after = Timeline()
    after.add("decode", [0], "worker-0", 5 * MS, 25 * MS)
    root = ET.fromstring(svg_chart([("before & then", example()), ("after", after)]))
    boxes = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if one.get("width") != "12"]
    assert [float(one.get("width", "")) for one in boxes] == [250.0, 250.0, 750.0, 500.0]
    titles = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "before & then: 40.0 ms" in titles


def test_an_empty_timeline() -> None:
    assert text_chart(Timeline()) == "no step has run"
    assert json.loads(Timeline().chrome_trace())["traceEvents"] == []
    ET.fromstring(svg_chart([("nothing", Timeline())]))
