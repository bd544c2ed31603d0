"""The errors that users see: one base with a hint, five kinds."""


class JaxparError(Exception):
    """Base of every error that jaxpar raises on purpose.

    Args:
        message: What was found and where (path, dim, size, axis).
        hint: What the user can do about it; printed on its own line.
    """

    def __init__(self, message: str, *, hint: str = ""):
        super().__init__(f"{message}\n  hint: {hint}" if hint else message)
        self.message = message
        self.hint = hint


class ModelError(JaxparError):
    """The model, loss, optimizer or batch cannot be traced or used as given."""


class MeshError(JaxparError):
    """The mesh or topology does not fit the devices, the model or the batch."""


class RuleError(JaxparError):
    """A primitive has no factor rule, or a sharding rule names unknown things."""


class InfeasibleError(JaxparError):
    """No layout fits the memory limit."""


class PlanError(JaxparError):
    """A plan file is malformed, or does not belong to the model at hand."""
