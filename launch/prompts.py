"""Which prompts to make videos of: the flag's, a file's lines, or one of our own. Refuses what cannot be seeded."""

from pathlib import Path
from secrets import randbelow

from usp.errors import UserError
from usp.launch.values import MAX_SEED

DEFAULT_PROMPT = (
    "A paper boat drifts down a rain-filled street at dusk, lanterns mirrored in the water, camera following"
)
DRAWN_SEEDS = 2**32  # short enough to type again; leaves room above for any prompt file


def read_prompts(file: Path) -> tuple[str, ...]:
    """The lines of a UTF-8 file that are not blank. Raises UserError naming the file."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"--prompt_file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"--prompt_file {file} is not UTF-8: line {line} holds {error.object[error.start]:#x}"
        ) from error
    prompts = tuple(line.strip() for line in text.split("\n") if line.strip())
    if not prompts:
        raise UserError(f"--prompt_file {file} holds no prompt; write one a line")
    return prompts


def check_seeds(base_seed: int | None, num_prompts: int) -> None:
    """Prompt i uses base_seed + i, which must stay a seed."""
    last = (base_seed or 0) + num_prompts - 1
    if last > MAX_SEED:
        raise UserError(
            f"base_seed {base_seed} and {num_prompts} prompts need seeds up to {last}; "
            f"use a base_seed of at most {MAX_SEED - num_prompts + 1}"
        )


def draw_base_seed() -> int:
    """A seed for the request that has none; for rank 0, which tells the others."""
    return randbelow(DRAWN_SEEDS)
