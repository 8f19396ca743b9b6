"""From a resolved version to a handle that serves requests: load, warm up, assemble."""
