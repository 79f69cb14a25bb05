"""What stands around a checkpoint folder: the hub that it comes from, a Llama -> a folder, and transformers."""
