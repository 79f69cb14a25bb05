"""What stands around a checkpoint folder: the hub that it comes from, and a Llama -> a folder."""
