"""Training runs. Only this package imports Lightning or DeepSpeed."""
