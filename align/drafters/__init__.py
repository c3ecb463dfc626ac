"""Networks and their checkpoints: plain torch, no Lightning."""
