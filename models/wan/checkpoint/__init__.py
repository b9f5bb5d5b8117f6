"""Checkpoint files of Wan models: found, checked by their headers alone, and loaded. Only loader.py needs torch."""
