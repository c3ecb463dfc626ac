"""Systems: named ways to decode. Their declaration, how they are written, and their
construction."""
