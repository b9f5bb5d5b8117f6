"""Designs that were tried for the kernels, each checked and timed; the package holds the ones that measured best."""
