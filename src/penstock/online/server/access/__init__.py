"""Who may do what: keys, admission and restrictions."""
