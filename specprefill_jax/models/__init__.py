"""Llama models: configs, weights, checkpoints, and the network itself."""
