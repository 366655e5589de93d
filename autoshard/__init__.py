"""autoshard: an auto-parallelizing compiler for PyTorch."""
