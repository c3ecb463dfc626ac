"""Training runs: Lightning modules, callbacks, checkpoints, strategies. Only this package imports
Lightning or DeepSpeed."""
