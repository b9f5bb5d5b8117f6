"""Wan text-to-video: transformer, checkpoint, text, VAE and the sampling loop. Knows no rank, except parallel.py."""
