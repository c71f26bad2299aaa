"""Compile a function of your own for a TPU that this machine does not have, and report its memory and collectives.

python -m experiments.dry_run my_file:step --topology=v5e-1 [--json=FILE]

my_file.py has the function `step`, jitted or not, and a function example(devices) or example(). It returns the tuple of
step's arguments: arrays or jax.ShapeDtypeStruct, with shardings on several chips. Nothing is run.
"""

from experiments import command as commands
from experiments.config import errors
from experiments.devices import compilation, mesh as meshes
from experiments.dry_run import dry_run as dry_runs, topology as topologies, user_function as user_functions

HELP = {
    "topology": f"The chips: {', '.join(topologies.NAMES)}. Without it: this machine's devices.",
    "json": "With --topology: a file for the compiler's report.",
    "example": "The function of the same file that returns the arguments.",
}


def run(functions: list[str], *, topology: str = "", json: str = "", example: str = "example") -> None:
    """Compile the one function in `functions`, such as "my_file:step", and print its memory and collectives.

    example: the function in the same file that returns its arguments. topology: the chips, '' for this machine. json:
    the file to write the results to, which needs `topology`. Raises UserError for an invalid flag or a mistake in the
    function, RunError if the compiler refuses the function.
    """
    errors.refuse(
        (len(functions) != 1, f"write one function, such as my_file:step, not: {' '.join(functions) or 'nothing'}"),
        (json and not topology, f"--json={json} needs --topology: add it, such as --topology=v5e-1"),
    )
    target = topologies.describe(topology) if topology else None
    if target is None:
        compilation.start("any")
    devices = target.devices if target else meshes.make().devices.flatten().tolist()
    request = user_functions.load(functions[0], devices, example)
    dry_runs.compile_and_report([request], target, json)


if __name__ == "__main__":
    commands.main(run, HELP, positional="functions")
