"""Parts of the scenario ``repository``."""
