"""What a loaded model needs at run time: the plan of its memory, saved sessions, logits, recording."""
