"""Memory, signals and copies shared by the processes of one host. Knows no attention and no model."""
