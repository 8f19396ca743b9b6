"""Web pages that need no network: one HTML document whose policy allows only the styles and the script that it contains.

Pages are readable in light and dark mode, on a telephone, and in print.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape

GENERATOR = '<meta name="generator" content="penstock">'
"""The tag by which a page of Penstock is recognised. It is among the first ``HEAD_BYTES`` bytes of a page."""
HEAD_BYTES = 256

STYLE = """
:root{color-scheme:light dark;--ink:#1b2430;--dim:#566170;--line:#d5dbe3;--card:#f5f7f9;--page:#fff;--link:#1d4ed8;
--good:#047857;--bad:#b42318;--warn:#7a4b00;--warn-card:#fdf3d7}
@media screen and (prefers-color-scheme:dark){:root{--ink:#e5e9ef;--dim:#9ba6b5;--line:#343d49;--card:#1a2029;
--page:#11161d;--link:#8ab4ff;--good:#4ade9c;--bad:#ff9a8f;--warn:#f7d58a;--warn-card:#3a2e10}}
*{box-sizing:border-box}
body{font:16px/1.55 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:62rem;margin:0 auto;
padding:1.5rem 1rem 3rem;overflow-wrap:anywhere}
h1{font-size:1.25rem;margin:0;color:var(--dim);font-weight:600} h2{font-size:1.15rem;margin:2.2rem 0 .4rem}
h3{font-size:1rem;margin:1.2rem 0 .3rem} p{margin:.5rem 0} a{color:var(--link)}
code,pre{font:.875em/1.5 ui-monospace,monospace} code{background:var(--card);padding:.1em .3em;border-radius:.25rem}
pre{background:var(--card);padding:.7rem;border-radius:.4rem;white-space:pre-wrap;margin:.5rem 0}
small,.dim{color:var(--dim);font-size:.875rem}
table{border-collapse:collapse;width:100%;font-size:.9rem}
td,th{padding:.35rem .5rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--line)}
td:first-child,th:first-child{text-align:left} th{font-weight:600;color:var(--dim)}
.busy{background:var(--warn-card);color:var(--warn);border-radius:.25rem;padding:0 .3em;font-size:.8125rem;
display:inline-block}
@media print{body{max-width:none;padding:0;font-size:11pt} h2,h3,h2+p{break-after:avoid} figure,tr{break-inside:avoid}}
"""
"""Style of all pages. Styles of single pages use its variables for their colours."""


def document(title: str, body: Sequence[str], styles: Sequence[str] = (), script: str = "", **directives: str) -> str:
    """An HTML document whose body is ``body``, which must be HTML. ``styles`` are all further styles that ``body`` uses.

    The policy in the document blocks all other styles and scripts, all requests and all forms, unless ``directives`` allow them.
    """
    sheets = (STYLE, *styles)
    rules = policy(sheets, script, **directives)
    head = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    rest = f'{view}<meta http-equiv="Content-Security-Policy" content="{rules}"><title>{escape(title)}</title>'
    style = "".join(f"<style>{sheet}</style>" for sheet in sheets)
    end = f"<script>{script}</script>" if script else ""
    return "\n".join([f"{head}{rest}", f"{style}</head><body>", *body, f"{end}</body></html>", ""])


def policy(styles: Sequence[str], script: str = "", **directives: str) -> str:
    """The Content-Security-Policy of a page with these styles and this script. ``directives`` add or replace directives, whose names
    have ``_`` for ``-``.
    """
    rules = {"default_src": "'none'", "base_uri": "'none'", "form_action": "'none'"}
    rules["style_src"] = " ".join(map(_hash, styles)) or "'none'"
    rules["script_src"] = _hash(script) if script else "'none'"
    return "; ".join(f"{name.replace('_', '-')} {value}" for name, value in (rules | directives).items())


def _hash(text: str) -> str:
    """The policy's name for an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
