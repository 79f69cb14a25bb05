"""What surrounds the reference: commands and their tables, experiments, kernels, adapters."""
