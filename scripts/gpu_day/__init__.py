"""The parts of scripts/multi_gpu_day.py: each a program of its own, which checks before it times."""
