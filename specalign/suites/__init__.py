"""The benchmarks that `decode` measures with and training text excludes."""
