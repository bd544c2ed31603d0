"""Checkpoints of a sharded state, with the plan that it follows beside them."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxpar.errors import JaxparError

_KEPT = 2
_PLAN = "plan.json"


class Checkpoints:
    """A folder of checkpoints by step, and plan.json.

    Use it as a context; leaving it waits for what is still being written.
    """

    def __init__(self, folder: str | Path):
        """Opens the folder, and makes it if need be."""
        self.folder = Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "Checkpoints":
        """Nothing to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """Waits, then closes the folder."""
        self._manager.wait_until_finished()
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """The newest step that is there."""
        return self._manager.latest_step()

    def save_plan(self, plan: Any) -> None:
        """Writes plan.json, over an older one."""
        plan.save(self.folder / _PLAN)

    def save(self, step: int, state: Any) -> None:
        """Writes the state; an older checkpoint of this step is left as it is."""
        if step not in self._manager.all_steps():
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, abstract_state: Any) -> Any:
        """The newest state, laid out as asked; the mesh may be another one.

        Args:
            abstract_state: Structs with shardings.

        Raises:
            JaxparError: if there is none, or it is of another model or optimizer.
        """
        step = self.latest_step
        if step is None:
            raise JaxparError(f"there is no checkpoint in {self.folder}")
        try:
            args = ocp.args.StandardRestore(abstract_state)
            return self._manager.restore(step, args=args)
        except (KeyError, TypeError, ValueError) as error:
            raise JaxparError(
                f"the checkpoint of step {step} in {self.folder} does not fit: {error}",
                hint="resume with the model and optimizer that it was made with",
            ) from error
