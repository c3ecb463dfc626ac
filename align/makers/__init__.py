"""Creates new drafters for a target, as specified by a recipe."""
