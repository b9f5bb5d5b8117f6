"""Errors that a user can act on. The command line prints their message alone, without a traceback."""


class UserError(ValueError):
    """The request cannot be carried out as asked; the message names the numbers and what would work."""


class CheckpointError(UserError):
    """A checkpoint folder is incomplete, damaged or of a kind that is not supported."""


class RankMismatchError(UserError):
    """Ranks of one job were given different requests; the message names the fields and the ranks."""
