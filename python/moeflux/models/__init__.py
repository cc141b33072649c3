"""What a model is: its shape and flavours, its config.json, its tensors, where it comes from."""
