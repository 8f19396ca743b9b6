"""Access control: keys, admission and restrictions."""
