"""Options made from the fields of ``ServerConfig``."""

from __future__ import annotations

from penstock.cli.flags.server_options import grouped_settings, option_name
from penstock.online.server.config import PANELS, ServerConfig


def test_every_setting_is_in_a_group_and_explained() -> None:
    found = list(grouped_settings())
    assert [setting.name for _, setting in found] == list(ServerConfig.__struct_fields__)
    assert list(dict.fromkeys(panel for panel, _ in found)) == list(PANELS.values())
    assert all(setting.help.endswith(".") for _, setting in found)


def test_options_of_lists_are_singular() -> None:
    names = {setting.name: option_name(setting) for _, setting in grouped_settings()}
    assert (names["load_models"], names["instances"]) == ("--load-model", "--instances")


def test_help_shows_groups_defaults_and_bounds(penstock, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = penstock("serve", "--help").out
    panels = {panel for panel, setting in grouped_settings() if setting.is_flag}
    assert panels == set(PANELS.values())
    assert all(f" {panel} " in text for panel in panels)
    assert "[default: 8000, 0 to 65535]" in text
    assert "tables [models.NAME]" in text
