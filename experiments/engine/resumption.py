"""A run that goes on: what it should be told of what has changed, and how it outlives a drive that is gone."""

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from experiments.engine import checkpoint, disk_errors, errors, json_file, mesh

COMPUTES = ("jax", "jaxlib")
OUTAGES = 5  # of a drive that one command outlives; a disk that is broken has no end of them
PATIENCE, PAUSE = 120.0, 1.0  # seconds that such a drive is waited for, and between two looks


def hardware(devices: Mesh) -> str:
    """How many devices of which kind."""
    return f"{devices.size} x {devices.devices.flat[0].device_kind}"


def changes(folder: pathlib.Path, config: dict[str, Any], devices: Mesh) -> list[str]:
    """Lines about the run in this folder that differs from `config`, or from the versions and devices here; none for a
    new one.

    Nothing about a config.json that is absent or damaged: that is refused elsewhere.
    """
    if checkpoint.newest(folder / "checkpoints") is None:
        return []
    try:
        saved = json_file.read(folder / "config.json", says="what was trained")
        before, versions = saved["config"], saved["versions"]
        steps, chips = before["train"]["steps"], saved.get("devices")
        told = {name: versions[name] for name in COMPUTES if versions.get(name)}
    except (errors.UserError, KeyError, TypeError, AttributeError):
        return []
    lines, now, here = [], config["train"]["steps"], mesh.versions()
    if steps != now and config["optim"]["schedule"] != "constant":
        lines.append(f"train.steps was {steps} and is {now}: the rest of the learning rate's schedule is another one")
    others = [f"with {name} {version}, now {here[name]}" for name, version in told.items() if version != here[name]]
    if chips not in (None, hardware(devices)):
        others.append(f"on {chips}, now {hardware(devices)}")
    if others:
        lines.append(f"it was trained {'; '.join(others)}: numbers may differ in the last bits from here on")
    return lines


def outlive(run: Callable[[], Any], folder: pathlib.Path | None) -> Any:
    """What `run` returns, which trains in this folder; it is called again where a mounted drive was gone and is back.

    It then does what the same command would: it goes on from the last checkpoint. Raises what `run` raises for another
    reason (also where it cannot begin, or where another drive is gone), for a drive that is not back within PATIENCE,
    and with several processes, of which the others would wait. folder: None where nothing is written.
    """
    outages = 0
    while True:
        try:
            return run()
        except (errors.UserError, errors.RunError) as error:
            begun = outages > 0 or isinstance(error, errors.RunError)
            if folder is None or not begun or not _lost(error, folder) or jax.process_count() > 1:
                raise
            outages += 1
            said = errors.line(error).replace(f": {disk_errors.REMEDY}", "")  # no other cell can run by now
            print(f"{said}\nwaiting for {folder}, {PATIENCE:.0f} seconds at most", flush=True)
            if outages > OUTAGES or not _back(folder):
                raise
        print(f"{folder} is back: the run goes on from its last checkpoint", flush=True)


def _lost(error: BaseException, folder: pathlib.Path) -> bool:
    """Whether the error says that the drive of the run's folder is gone, not that another one is."""
    try:
        os.listdir(folder)
    except FileNotFoundError:  # it was never made: there is nothing to go on with
        return False
    except OSError as now:  # of a drive on which there are other files too
        return disk_errors.gone(error) and disk_errors.gone(now)
    return disk_errors.gone(error, folder)


def _back(folder: pathlib.Path) -> bool:
    """Whether the run's folder can be used again, within PATIENCE."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        time.sleep(PAUSE)
        try:
            os.listdir(folder)
        except OSError:
            continue
        return True
    return False
