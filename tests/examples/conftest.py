from __future__ import annotations

from commands import penstock

__all__ = ["penstock"]
