"""Is a pair lossless? Six exact checks on rounds that decoding really ran, and where two outputs
part."""
