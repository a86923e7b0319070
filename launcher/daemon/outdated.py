"""Running instances that are not what their slot would start now: other files of the model, or another configuration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from launcher.base.background import Failures, attempt
from launcher.base.errors import LauncherError
from launcher.instances.model_files_reader import Identify
from launcher.instances.slot_controller import SlotController
from launcher.instances.state_file import digest
from launcher.models.identity import ModelFiles

log = logging.getLogger("launcher.daemon")

# Between two looks at the models' files; one reads some small files.
OUTDATED_INTERVAL_S: Final = 15.0


class OutdatedWatch:
    """`controllers`: those of all slots. `identify` reads the files of a model as they are now."""

    def __init__(self, controllers: Mapping[int, SlotController], identify: Identify) -> None:
        self._controllers = controllers
        self._identify = identify
        self._found: Mapping[int, tuple[int, str]] = {}
        """By slot: the generation that was looked at, and why it is outdated."""

    def why(self, slot: int, generation: int) -> str | None:
        """Why a slot's instance is not what would start now; None where it is, or is unknown."""
        looked_at, text = self._found.get(slot, (generation, ""))
        return text or None if looked_at == generation else None

    async def run(self) -> None:
        failures = Failures(log, "compare the models' files")
        while True:
            await attempt(self.check, failures)
            await asyncio.sleep(OUTDATED_INTERVAL_S)

    async def check(self) -> None:
        """Look once at the files of all models; log what is new."""
        controllers = [each for each in self._controllers.values() if each.instance.launch is not None]
        now = {path: await self._files(path) for path in {each.slot.model.path for each in controllers}}
        found: dict[int, tuple[int, str]] = {}
        for controller in controllers:
            slot, generation = controller.slot, controller.slot_state.generation
            text = _why(controller, now[slot.model.path])
            if text and text != self.why(slot.id, generation):
                log.warning("slot %d %s", slot.id, text, extra={"slot": slot.id, "generation": generation})
            found[slot.id] = (generation, text)
        self._found = found

    async def _files(self, path: str) -> ModelFiles | None:
        try:
            return await self._identify(path)
        except LauncherError:  # unknown; the next start says so
            return None


def _why(controller: SlotController, files: ModelFiles | None) -> str:
    launch, slot = controller.instance.launch, controller.slot
    if launch is None or controller.instance.process is None:
        return ""
    was = launch.files
    if was is not None and files is not None and was != files:
        return (
            f"runs other files than '{slot.model.path}' names now: started from {was}, now {files}"
            if was.path != files.path
            else f"runs files of '{was.path}' that have been changed since it started"
        )
    if digest(launch) != digest(controller.engine.launch(slot, controller.slot_state.generation)):
        return "runs an earlier configuration: the one in force applies at its next start"
    return ""
