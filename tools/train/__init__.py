"""Trains a qwen3_5_moe model from text files and exports it: `python -m tools.train --help`.

Needs torch, tokenizers, safetensors and numpy, and nothing of moeflux: the folder runs alone on a machine with a GPU.
"""
