"""Command line, process set-up, files and reports."""
