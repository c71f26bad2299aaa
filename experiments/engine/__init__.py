"""The training system: settings, mesh, optimiser, training step, loop, checkpoints, logs."""
