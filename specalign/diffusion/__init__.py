"""The forward process: noise schedules, graphs, parameterisations, noise over text."""
