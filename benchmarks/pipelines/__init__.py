"""Pipelines: from pictures to labels, in a process and over HTTP."""
