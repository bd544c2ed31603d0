"""What a compiled program holds in device memory."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes per device, by the compiler's own account.

    Attributes:
        arguments_bytes: Inputs.
        outputs_bytes: Results, those included that take the place of an input.
        aliased_bytes: Results that take the place of an input.
        temporaries_bytes: Everything in between, at its peak.
        code_bytes: The program.
    """

    arguments_bytes: int
    outputs_bytes: int
    aliased_bytes: int
    temporaries_bytes: int
    code_bytes: int

    @property
    def total_bytes(self) -> int:
        """What must be free on a device to run the program."""
        kept = self.arguments_bytes + self.outputs_bytes - self.aliased_bytes
        return kept + self.temporaries_bytes + self.code_bytes


def memory_of(compiled: Any) -> CompiledMemory:
    """Reads the memory of a `jax.stages.Compiled`.

    Raises:
        ValueError: if the backend gives no account.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this backend reports no memory of compiled programs")
    return CompiledMemory(
        arguments_bytes=stats.argument_size_in_bytes,
        outputs_bytes=stats.output_size_in_bytes,
        aliased_bytes=stats.alias_size_in_bytes,
        temporaries_bytes=stats.temp_size_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
    )
