"""The benchmarks that `decode` measures with, and that text for training keeps off: where their rows live, and those of our own."""
