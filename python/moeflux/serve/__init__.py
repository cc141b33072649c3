"""The server: what a scheduler does, behind the interfaces that people's clients and agents already speak."""
