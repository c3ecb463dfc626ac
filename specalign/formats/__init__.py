"""Drafters in folders: as they are saved here, and as others publish them."""
