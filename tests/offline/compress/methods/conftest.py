from __future__ import annotations

from commands import digits, folder, penstock

__all__ = ["digits", "folder", "penstock"]
