"""Trains the small Wan-shaped model that comes with the package, from synthetic captioned clips; see `run`."""
