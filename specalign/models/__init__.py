"""The drafters' networks and their checkpoints, in plain torch."""
