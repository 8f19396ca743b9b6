"""The settings of the server as command-line options, and the flags of Triton."""
