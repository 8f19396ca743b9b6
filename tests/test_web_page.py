from __future__ import annotations

import base64
import hashlib
import re

from penstock.web_page import GENERATOR, HEAD_BYTES, STYLE, document, policy


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_policy_allows_the_styles_and_the_script_of_the_page_and_nothing_else() -> None:
    page = document("t", ["<p>text</p>"], ("p{color:red}",), "run()")
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    rules = dict(rule.split(" ", 1) for rule in found[1].split("; "))
    assert rules == {
        "default-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "style-src": f"{digest(STYLE)} {digest('p{color:red}')}",
        "script-src": digest("run()"),
    }
    assert re.findall(r"<style>(.*?)</style>", page, re.DOTALL) == [STYLE, "p{color:red}"]
    assert "<script>run()</script>" in page


def test_a_page_without_a_script_allows_none() -> None:
    assert "script-src 'none'" in document("t", [])
    assert "<script>" not in document("t", [])


def test_directives_are_added_or_replaced() -> None:
    rules = policy(("a",), form_action="'self'", frame_ancestors="'none'").split("; ")
    assert "form-action 'self'" in rules
    assert "frame-ancestors 'none'" in rules
    assert "form-action 'none'" not in rules


def test_a_page_is_recognised_by_its_first_bytes() -> None:
    assert GENERATOR in document("x" * 1000, []).encode()[:HEAD_BYTES].decode()


def test_a_title_is_text() -> None:
    assert "<title>&lt;/title&gt;&lt;script&gt;</title>" in document("</title><script>", [])
