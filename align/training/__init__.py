"""Training runs: Lightning modules, callbacks, checkpoints, strategies. Only this room imports
Lightning or DeepSpeed."""
