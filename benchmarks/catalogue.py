"""The training steps of tpu_estimate.py and on_tpu.py: their names, and how to load them, with stand-ins for data."""

import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from benchmarks import stand_ins
from experiments import ablation
from experiments.config import by_name, files as config_files, settings as configs
from experiments.devices import compilation
from experiments.dry_run import dry_run as dry_runs, topology as topologies, user_function as user_functions
from experiments.engine import run as runs, run_plan, signals, train_step
from experiments.pretrained import adapters
from experiments.studies import programs, study as studies

VIT_S = "configs/vit.py image.source=photographs image.patch=16 model.M=12 model.D=384 model.H=6 model.mlp=gelu_tanh "
VIT_S += "model.compute_dtype=bfloat16 train.batch_size=64"
# Name -> config and changes. The layers of the two long trainings are unrolled.
STEPS = {name: f"configs/{name}.py" for name in ("vit", "causal_lm", "llama", "bert", "long_context", "translation")}
STEPS |= {
    "qk_ablation": "configs/qk_ablation.py study.seeds=[0,1,2,3,4]",
    "ViT-S/16": VIT_S,
    "ViT-S/16, long": f"{VIT_S} train.steps=100000",
    "ViT-S/16, long, explicit_bfloat16": f"{VIT_S} train.steps=100000 model.attention=explicit_bfloat16",
    "GPT-2": "configs/gpt2.py text.source=tinyshakespeare train.batch_size=8 train.accumulation=1 model.bias=none "
    "model.remat=none",
    "colab_v5e": "configs/colab_v5e.py text.source=tinyshakespeare",
}
# We assume that Pallas kernels compute half of the blocks (causal mask), and in training 7 products for every 2 in the
# forward pass.
CAUSAL, TRAINING = 0.5, 3.5


class Step(NamedTuple):
    """A program to compile, and the FLOPs of its products: of all, and of those in unmasked blocks of Pallas kernels.

    For a config, the FLOPs are three times those of the forward pass: they leave out what the backward pass computes
    again. `plan` is then the plan of the run, else None.
    """

    request: topologies.Request
    flops: float
    kernel_flops: float
    plan: run_plan.Plan | None


def load(code: str, devices: Sequence[Any], *changes: str) -> Step:
    """Return the step of a config with changes such as "model.M=3", or the user's function "my_file:step".

    devices: existing or described ones. Raises UserError if the config, its changes or its data are invalid.
    """
    if by_name.CODE.fullmatch(code):
        return load_user_function(code, devices)
    settings = config_files.load_settings(code, dict(change.partition("=")[::2] for change in changes))
    experiment = by_name.load_experiment(settings.experiment)
    with tempfile.TemporaryDirectory() as folder:
        settings = settings.replace(stand_ins.write(settings.to_dict(), pathlib.Path(folder)))
        if not hasattr(experiment, "prepare"):
            return load_study(settings, devices)
        mesh = runs.make_mesh(settings, chips=devices)
        work = adapters.prepare_work(settings, experiment, mesh)
        plan, state = run_plan.prepare(settings, work.task, mesh, dry_run=True)
    return make_step(next(dry_runs.programs(plan, state)), plan, state)


def load_study(settings: configs.Settings, devices: Sequence[Any]) -> Step:
    """Return the step of the program that the dry run of a study compiles."""
    mesh = runs.make_mesh(settings, seeds=settings.mesh.seed, chips=devices)
    study, only_check = studies.read(settings), {"measure": False, "keep_weights": False, "causal": None}
    session = programs.Session(study, mesh, signals.current(), printed=set(), **only_check)
    job = max(ablation.show_plan(settings, session, None), key=lambda job: job.step_flops)
    plan = programs.prepare(job, mesh).plan
    state = train_step.abstract_state(plan.task, plan.optimiser, mesh=mesh)
    return make_step(next(programs.requests(job, mesh)), plan, state, n_runs=len(job.program.runs))


def make_step(request: topologies.Request, plan: run_plan.Plan, state: train_step.State, n_runs: int = 1) -> Step:
    """Return the step with its FLOPs. n_runs: the number of runs that it trains together."""
    all_flops, kernel_flops = (run_plan.forward_flops(plan, state, kernels=kernels) for kernels in (False, True))
    return Step(request, n_runs * 3 * all_flops, n_runs * TRAINING * CAUSAL * kernel_flops, plan)


def load_user_function(name: str, devices: Sequence[Any]) -> Step:
    """Return a function of the user's. Its FLOPs are those of the traced function, with all that it computes again.

    Those inside a shard_map are of one device.
    """
    request = user_functions.load(name, devices)
    jaxpr = request.function.trace(*request.arguments).jaxpr  # without jit's options and static arguments
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jaxpr.in_avals]
    all_flops, kernel_flops = (
        compilation.flops(core.jaxpr_as_fun(jaxpr), *arrays, kernels=kernels) for kernels in (False, True)
    )
    return Step(request, all_flops, CAUSAL * kernel_flops, None)
