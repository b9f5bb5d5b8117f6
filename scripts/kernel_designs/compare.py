"""Designs over the same arguments, held bit for bit against the first of them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

Arguments = dict[str, torch.Tensor]
Outputs = tuple[torch.Tensor, ...]
Design = Callable[[Arguments], Outputs | None]


@dataclass(frozen=True)
class DesignSet:
    """A design writes `outputs`, or returns what it wrote instead. The first one is the measure of the others."""

    name: str
    designs: dict[str, Design]
    arguments: Arguments
    outputs: Outputs
    nbytes: int

    def differing(self) -> dict[str, int]:
        """Elements that differ from the first design's, of each design that runs."""
        results, expected = {}, None
        for name, design in self.designs.items():
            try:
                found = self._run(design)
            except Exception as error:  # any: a design that this compiler or GPU cannot run does not stop the others
                print(f"{self.name}: {name} left out: {type(error).__name__}: {str(error)[-300:]}", file=sys.stderr)
                continue
            expected = expected or tuple(one.clone() for one in found)
            results[name] = sum(int((one != other).sum()) for one, other in zip(found, expected, strict=True))
        return results

    def _run(self, design: Design) -> Outputs:
        for output in self.outputs:
            output.fill_(float("nan"))
        written = design(self.arguments) or self.outputs
        torch.cuda.synchronize()
        return written
