"""Recipes: their keys, how they are read, what they may not say."""
