"""Training over several processes: DDP, FSDP2, DeepSpeed's ZeRO, and the end of all where one of
them dies or hangs."""
