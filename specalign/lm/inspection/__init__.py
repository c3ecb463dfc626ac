"""What a target is made of, found by looking at its modules and by running them."""
