"""What stands around the reference: commands and their tables, experiments, kernels, adapters."""
