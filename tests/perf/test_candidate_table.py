from __future__ import annotations

from html import unescape
from xml.etree import ElementTree as ET

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from evidences import QUIET, accuracy, evidence, record
from penstock.bundle.evidence import CandidateRecord, Evidence
from penstock.measurement import Conditions
from penstock.perf.candidate_table import busy_mark, candidate_table, groups

BUSY = "other processes used 1.2 of 2 cores"
RECORDS = st.builds(
    lambda name, latency, status, reason: record(str(name), latency, status=status, reason=reason),
    st.integers(0, 99),
    st.one_of(st.none(), st.floats(1e-3, 1e3)),
    st.sampled_from(["baseline", "outrun", "rejected", "failed"]),
    st.sampled_from(["", "p99 3 ms, 2 ms are allowed", "loses 2 %"]),
)


def parse(found: Evidence) -> ET.Element:
    return ET.fromstring(candidate_table(found))


def rows(table: ET.Element) -> list[ET.Element]:
    """The rows of candidates."""
    return [row for row in table.iter("tr") if row.get("class") not in (None, "group")]


def text(element: ET.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def test_groups_are_in_order_and_the_fastest_of_each_comes_first() -> None:
    found = evidence(
        record("int8", 0.4, status="chosen"),
        record("failed", None, status="failed", reason="cannot load"),
        record("late", 0.9, status="rejected", reason="p99 3 ms, 2 ms are allowed (--p99)"),
        record("wrong", 0.2, 0.5, status="rejected", reason="loses 49 %"),
        record("slow", 3.0),
        record("close", 0.5),
        record("original-t2", 0.7, status="baseline", speedup=None),
    )
    names = [(title, [one.name for one in members]) for title, members in groups(found)]
    assert names == [
        ("Chosen", ["int8"]),
        ("The original", ["original-t2", "original"]),
        ("Accurate enough, but not the best choice", ["close", "slow"]),
        ("Rejected: less accurate than allowed", ["wrong"]),
        ("Rejected: slower than allowed", ["late"]),
        ("Failed", ["failed"]),
    ]
    heads = [text(row) for row in parse(found).iter("tr") if row.get("class") == "group"]
    assert heads == [f"{title} ({len(members)})" for title, members in names]


@given(st.lists(RECORDS, max_size=8))
def test_every_candidate_is_in_one_group(records: list[CandidateRecord]) -> None:
    found = evidence(*records, chosen="original")
    members = [one for _, group in groups(found) for one in group]
    assert sorted(members, key=repr) == sorted([found.baseline, *records], key=repr)
    assert len(rows(parse(found))) == len(records) + 1


def test_reasons_and_identifiers_are_visible_text() -> None:
    found = parse(evidence(record("broken", None, status="failed", reason="cannot load")))
    shown = text(rows(found)[-1])
    assert shown == "ONNX Runtime · FP32 · 1 thread failed: cannot load broken – – – 2.00 KiB"


def test_figures_and_the_values_by_which_they_are_sorted() -> None:
    (row, _) = rows(parse(evidence(record("int8", 0.4, 0.985, precision="int8", status="chosen"))))
    cells = [text(cell) for cell in row.iter("td")]
    assert cells[1:] == [
        "2.50× 2.25 to 2.75",
        "0.4 ms p99 0.6 ms",
        "98.50% loss +0.50% +0.30% to +0.70% output error 0.01",
        "2.00 KiB",
    ]
    assert [cell.get("data-key") for cell in row.iter("td")][1:] == ["2.5", "0.4", "0.985", "2048"]
    assert [cell.get("data-head") for cell in row.iter("td")] == ["Candidate", "Speed", "One call", "Accuracy", "Size"]


def test_errors_without_a_scale_are_sorted_by_loss() -> None:
    mae = accuracy(3.25, 0.02, metric="mae", is_share=False)
    (row, _) = rows(parse(evidence(record("a", status="chosen", accuracy=mae))))
    assert [cell.get("data-key") for cell in row.iter("td")][3] == "0.98"


def test_a_busy_machine_is_said_beside_the_figure() -> None:
    busy, quiet = record("busy", busy=BUSY, threads=2), record("quiet", 0.5, status="chosen")
    conditions = Conditions(0.1, 1.0, 0.0, dirty=True, busy=BUSY)
    table = parse(evidence(quiet, busy, conditions=conditions))
    marked = [text(row) for row in rows(table) for cell in row.iter("td") if "machine busy" in text(cell)]
    assert len(marked) == 1
    assert "2 threads" in marked[0]
    assert busy_mark("") == ""
    everywhere = parse(evidence(quiet, conditions=msgspec.structs.replace(QUIET, dirty=True)))
    assert sum("machine busy" in text(row) for row in rows(everywhere)) == 2


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1))
def test_names_and_reasons_are_text(name: str) -> None:
    evil = f"""<script>'"&{name}"""
    found = evidence(
        record(evil, engine=evil, precision=evil, calibration=evil, compression=evil, reason=evil, busy=evil)
    )
    shown = candidate_table(found)
    assert "<script" not in shown
    tags = {"table", "thead", "tbody", "tr", "th", "td", "span", "small", "code"}
    assert {element.tag for element in ET.fromstring(shown).iter()} <= tags
    assert evil in unescape(shown)
