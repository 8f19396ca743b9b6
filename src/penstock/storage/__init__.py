"""Where files are kept: one seam for listing, reading, writing and publishing, and the one way of writing a file whole."""
