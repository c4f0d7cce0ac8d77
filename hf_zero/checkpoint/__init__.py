"""Saving and loading: safetensors files by byte ranges, training state, commits."""
