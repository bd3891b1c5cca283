"""How parameters, caches and prompts are laid out over a mesh of devices."""
