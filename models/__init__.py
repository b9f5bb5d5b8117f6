"""Models that run on usp."""
