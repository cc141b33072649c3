"""How models write calls of tools: a reader for each family."""
