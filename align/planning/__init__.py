"""What a recipe costs, before it starts: sizes, memory, time, expected τ."""
