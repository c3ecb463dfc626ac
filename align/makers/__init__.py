"""New drafters as a recipe asks for them, made for a target."""
