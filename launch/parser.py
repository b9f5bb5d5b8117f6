"""What argparse lacks: errors as exceptions, one spelling for dashes and underscores, and no silent last-one-wins."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from usp.errors import UserError


class Parser(argparse.ArgumentParser):
    """Raises instead of printing usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


class StoreOnce(argparse.Action):
    """Stores a value; a flag and its alias with two different values is an error, not a race."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, option: str | None = None) -> None:
        seen = vars(namespace).setdefault("_seen", set())
        if self.dest in seen and getattr(namespace, self.dest) != value:
            raise UserError(f"--{self.dest} is given twice: {getattr(namespace, self.dest)} and {value}")
        seen.add(self.dest)
        setattr(namespace, self.dest, value)


class Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, option: str | None = None) -> None:
        raise UserError(f"{option}: {self.const}")


def join_values(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """`--Some-flag VALUE` -> `--some_flag=VALUE`, so that a value may begin with a single dash."""
    takes_value = {o for action in parser._actions if action.nargs in (None, "?") for o in action.option_strings}
    joined: list[str] = []
    for argument in argv:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            joined.append("--" + name[2:].replace("-", "_") + equals + value)
        elif joined and joined[-1] in takes_value:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def explain_unknown(argument: str, parser: argparse.ArgumentParser) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}; quote a value that holds spaces or a *"
    name = argument.partition("=")[0]
    known = [o for action in parser._actions for o in action.option_strings if not isinstance(action, Refuse)]
    nearest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return f"unknown flag {name}; the nearest known one is {nearest} (--help lists all)"
