"""Methods: the systems by name, their options as they are written, and the decoders that they stand for."""
