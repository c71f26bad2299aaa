"""The training system: the step, the loop, a run."""

from experiments.config import errors as errors  # scripts of users catch engine.errors.UserError
