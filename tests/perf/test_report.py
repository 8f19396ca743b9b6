from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from bundles import FILES, manifest_for
from evidences import QUIET, accuracy, evidence, points, record
from penstock.artifact import Format
from penstock.bundle.evidence import Attempt, SizeGain
from penstock.bundle.manifest import Manifest, ServingConfig, SourceModel
from penstock.errors import ResourceExhausted
from penstock.measurement import Interval
from penstock.perf.candidate_table import SCRIPT
from penstock.perf.report import ServedRow, render, write_report

OPTIMIZATION = {
    "nodes_before": 30,
    "nodes_after": 21,
    "passes": [
        {
            "name": "fold",
            "status": "applied",
            "nodes_before": 30,
            "nodes_after": 21,
            "max_relative_error": 1e-7,
            "reason": "",
        },
        {
            "name": "wrong",
            "status": "reverted",
            "nodes_before": 21,
            "nodes_after": 21,
            "max_relative_error": None,
            "reason": "output y differs",
        },
        {
            "name": "idle",
            "status": "unchanged",
            "nodes_before": 21,
            "nodes_after": 21,
            "max_relative_error": None,
            "reason": "",
        },
    ],
}


def manifest(**changes: object) -> Manifest:
    found = evidence(
        record("int8", 0.4, 0.985, precision="int8", status="chosen", reason="2.5x the original's speed"),
        record("slow", 2.0, status="rejected", reason="p99 3 ms, 2 ms are allowed"),
        record("broken", None, status="failed", reason="cannot load"),
        optimization=OPTIMIZATION,
        data={"evaluate": "ab" * 32},
        notes=("INT8 on this CPU: fast",),
    )
    serving = ServingConfig("int8", 1, 2, max_batch=4, latency=points(0.4))
    return manifest_for(FILES, evidence=msgspec.structs.replace(found, **changes), serving=serving)


class Page(HTMLParser):
    """The resources that a page loads, and a check that its tags are nested correctly."""

    VOID = frozenset({"meta", "br", "line"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [
            f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "action", "data", "style")
        ]
        self.loads += [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not (self.open and self.open[-1] == "style"):
            self.text += data


def test_the_page_needs_nothing_else() -> None:
    page = render(manifest(), [ServedRow("requests/s", "100", "400", "4.0x")])
    parsed = Page(page)
    assert parsed.open == []
    assert parsed.loads == []
    assert parsed.scripts == [SCRIPT]
    assert not parsed.tags & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert "@import" not in page
    assert "url(" not in page
    assert set(re.findall(r"https?://[^\"']*", page)) <= {"http://www.w3.org/2000/svg"}


def test_the_page_says_everything() -> None:
    text = Page(render(manifest(), [ServedRow("requests/s", "100", "400", "4.0x")], "digits.bundle")).text
    for fact in (
        "2.50 times as fast, 0.50% loss of top-1 accuracy",
        "chose ONNX Runtime · INT8 · 1 thread: one call takes 0.4 ms instead of 1 ms.",
        "penstock serve digits.bundle",
        "2.50×",
        "+0.30% to +0.70%",
        "2 instance(s) × 1 thread(s), batches up to 4",
        "at most 1.00% loss of accuracy",
        "slower than allowed: p99 3 ms, 2 ms are allowed",
        "failed: cannot load",
        "30 nodes, 21 after the passes",
        "output y differs",
        "INT8 on this CPU: fast",
        "evaluate data: sha256 abababababababab…",
        "The machine was quiet enough.",
        "Test CPU",
        "4.0x",
    ):
        assert fact in text, fact
    assert "idle" not in text
    assert "nan" not in text.lower()
    assert "machine busy" not in text


def test_the_conclusion_comes_first_and_the_pictures_before_the_table() -> None:
    page = render(manifest())
    places = [page.index(f"{part}<") for part in ("Before and after", "Accuracy by latency ", "Every candidate")]
    assert places == sorted(places)
    assert page.index("<b>Asked.</b>") < places[0]


def test_before_and_after_are_bars_on_one_scale() -> None:
    page = render(manifest())
    section = page[page.index("<h2>Before and after") : page.index("<h2>Accuracy by latency")]
    assert re.findall(r"<h3>(.*?) </h3>", section) == [
        "One call, median",
        "One call, 99th percentile",
        "Most rows per second, one instance",
        "Top-1 accuracy",
        "Size of the model",
    ]
    assert re.findall(r'<rect width="([\d.]+%)".*?<b>(.*?)</b>', section)[:2] == [
        ("100.0%", "1 ms"),
        ("40.0%", "0.4 ms"),
    ]


def test_the_gain_at_each_size_has_bars_with_its_share_and_interval() -> None:
    page = render(manifest())
    assert "Gain by size" not in page
    gains = (
        SizeGain({"ids<b>": (1, 8)}, 0.75, 1.0, 0.5, Interval(2.0, 1.9, 2.1)),
        SizeGain({"ids<b>": (1, 64), "n": ()}, 0.25, 4.0, 5.0, Interval(0.8, 0.7, 0.9)),
    )
    found = manifest()
    assert found.evidence is not None
    found = msgspec.structs.replace(found, evidence=msgspec.structs.replace(found.evidence, by_size=gains))
    page = render(found)
    section = page[page.index("<h2>Gain by size") : page.index("<h2>Accuracy by latency")]
    assert re.findall(r"<h3>(.*?) </h3>", section) == [
        "ids&lt;b&gt; 1×8: 75% of the samples, 2.00x (1.90 … 2.10)",
        "ids&lt;b&gt; 1×64, n scalar: 25% of the samples, 0.80x (0.70 … 0.90)",
    ]
    assert re.findall(r'<rect width="([\d.]+%)".*?<b>(.*?)</b>', section) == [
        ("100.0%", "1 ms"),
        ("50.0%", "0.5 ms"),
        ("80.0%", "4 ms"),
        ("100.0%", "5 ms"),
    ]


def test_each_picture_is_there_for_large_and_small_screens() -> None:
    page = render(manifest())
    large, small = (
        re.findall(rf'<figure class="{kind}"><svg [^>]*viewBox="([^"]*)"', page) for kind in ("large", "small")
    )
    assert len(large) == len(small) == 2
    assert {box.split()[2] for box in large} == {"760"}
    assert {box.split()[2] for box in small} == {"380"}


def test_the_contract_and_the_conditions_are_said() -> None:
    busy = msgspec.structs.replace(QUIET, dirty=True, busy="other processes used 1.2 of 2 cores")
    text = Page(render(manifest(p99_ms=5.0, rows_per_call=16, conditions=busy))).text
    assert "p99 of one call within 5 ms" in text
    assert "A call has 16 rows." in text
    assert "Contract: at most 1.00% loss of accuracy, and p99" in text
    assert "The machine was busy (other processes used 1.2 of 2 cores)" in text
    for figure in ("One call, median", "One call, 99th percentile", "Accuracy by latency", "Throughput by batch size"):
        assert re.search(rf"{figure}[^.]*? machine busy", text), figure
    assert not re.search("Size of the model machine busy", text)


def test_an_original_that_won_is_reported_as_such() -> None:
    page = render(manifest_for(FILES, evidence=evidence(chosen="original"), serving=ServingConfig("original", 1, 1, 1)))
    assert "The original is kept" in Page(page).text
    assert "Served over HTTP" not in page
    assert "Before and after" not in page


def test_hostile_names_are_text() -> None:
    evil = """<script>alert('1')</script><img src=x onerror="1">{body}&`"""
    found = evidence(
        record(evil, 0.5, status="chosen", reason=evil, calibration=evil, engine=evil, precision=evil, busy=evil),
        notes=(evil,),
        data={evil: "0" * 64},
        metric=evil,
        metric_outputs=(evil,),
        attempts=(Attempt(evil, evil, "failed", evil),),
        optimization={**OPTIMIZATION, "passes": [{**OPTIMIZATION["passes"][1], "name": evil, "reason": evil}]},
    )
    serving = ServingConfig(evil, 1, 1, 1, latency=points(1.0))
    source = SourceModel("0" * 64, Format.ONNX, evil)
    page = render(
        manifest_for(FILES, name=evil, evidence=found, serving=serving, tools={evil: evil}, source=source),
        [ServedRow(evil, evil, evil, evil)],
        evil,
    )
    parsed = Page(page)
    assert parsed.scripts == [SCRIPT]
    assert "img" not in parsed.tags
    assert parsed.loads == []
    assert evil.rstrip("`") in parsed.text


def test_a_worthless_candidate_has_numbers_all_the_same() -> None:
    nothing = record("wrong", 0.1, status="rejected", accuracy=accuracy(0.0, 1.0, relative_error=1e6))
    text = Page(render(manifest(candidates=(record("int8", 0.4, 0.985), nothing)))).text.lower()
    assert "nan" not in text
    assert "inf" not in text.replace("info", "")


def test_a_bundle_without_evidence_says_so() -> None:
    assert "This bundle has no evidence" in render(manifest_for(FILES))


def test_the_report_is_written_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "report.html"
    write_report(target, manifest())
    assert target.read_text(encoding="utf-8") == render(manifest())
    assert list(target.parent.iterdir()) == [target]


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResourceExhausted, match=r"report\.html"):
        write_report(tmp_path / "file" / "report.html", manifest())
    (tmp_path / "folder").mkdir()
    with pytest.raises(ResourceExhausted):
        write_report(tmp_path / "folder", manifest())
    assert not list(tmp_path.glob("*.partial"))
