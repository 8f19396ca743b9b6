"""Write the tables of the server's settings into the reference pages, from the fields of ``ServerConfig``.

Run ``python docs/settings.py`` after a field has changed; ``tests/docs/test_settings.py`` fails while a page is out of date.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from penstock.cli.flags.server_options import grouped_settings, option_name
from penstock.config import write_text

REFERENCE = Path(__file__).resolve().parent / "reference"


def tables() -> dict[str, str]:
    """The text between the markers of each page."""
    groups = groupby(grouped_settings(), key=lambda pair: pair[0])
    by_panel = {panel: [setting for _, setting in pairs] for panel, pairs in groups}
    every, options = [], ["| Option | Default | |", "|---|---|---|"]
    for panel, settings in by_panel.items():
        every += [f"### {panel}", "", "| Setting | Default | | Option |", "|---|---|---|---|"]
        for setting in settings:
            default = f"`{write_text(setting.default)}`" if setting.default not in (None, "", ()) else "none"
            text = setting.help.replace("``", "`") + (f" Range: {setting.bounds}." if setting.bounds else "")
            option = f"`{option_name(setting)}`" if setting.is_flag else ""
            every.append(f"| `{setting.name}` | {default} | {text} | {option} |")
            if setting.is_flag:
                options.append(f"| {option} | {default} | {text} |")
        every.append("")
    return {"configuration.md": "\n".join(every).rstrip(), "cli.md": "\n".join(options)}


def refreshed(page: str, text: str) -> str:
    """``page`` with ``text`` between the markers."""
    pattern = r"(<!-- settings: .*? -->\n).*(<!-- end of settings -->)"
    found, count = re.subn(pattern, lambda match: f"{match[1]}{text}\n{match[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise SystemExit("the page has no markers, <!-- settings: … --> and <!-- end of settings -->")
    return found


if __name__ == "__main__":
    for name, text in tables().items():
        path = REFERENCE / name
        path.write_text(refreshed(path.read_text(), text))
