"""Training over several processes: DDP, FSDP2, DeepSpeed's ZeRO, and shutdown of all processes if
one of them dies or hangs."""
