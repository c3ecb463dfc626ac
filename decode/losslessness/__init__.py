"""Is a pair lossless? Checks, exact distributions, and where two outputs part."""
