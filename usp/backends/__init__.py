"""The attention kernels that can be picked, one file for each library; `usp.attention` picks."""
