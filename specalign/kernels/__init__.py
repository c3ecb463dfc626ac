"""Products and layers for few rows on a CPU, in C: no model and no recipe is known here."""
