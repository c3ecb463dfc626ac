"""Methods: every system by name, as it is written, and the decoder that it means."""
