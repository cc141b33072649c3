"""Making a store: from a checkpoint, from an MLX folder, from a seed; and whether it is whole."""
