"""CPUs with and without integer dot products."""

from penstock.resources import MachineFacts

VNNI = MachineFacts("a CPU", "x86_64", ("avx2", "avx512_vnni"), 2, 1 << 34, 1, "Linux", "3")
PLAIN = MachineFacts("a CPU", "x86_64", ("avx2",), 2, 1 << 34, 1, "Linux", "3")
