"""The estimate from a compiled TPU program: iterations of loops, named scopes, the longest branch, collectives."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from benchmarks import catalogue, on_tpu, tpu_estimate
from experiments.devices import compilation
from experiments.dry_run import topology as topologies
from tfm import shapes


def estimate(entry: str, *computations: str) -> tuple[dict[str, int], int]:
    """Estimate a program with these computations. "N cycles" stands for libtpu's notation."""
    entry = f"ENTRY %main.1 (x.1: f32[3,5]) -> f32[3,5] {{\n{entry}\n}}"
    text = "\n\n".join(["HloModule jit_step", *computations, entry])
    return tpu_estimate.estimate(re.sub(r"(\d+) cycles", r'backend_config={"estimated_cycles":"\1"}', text + "\n"))


def replace(text: str, **values: object) -> str:
    return functools.reduce(lambda text, item: text.replace(item[0], str(item[1])), values.items(), text)


LOOP = """
%body.1 (given.1: (s32[], f32[3,5])) -> (s32[], f32[3,5]) {
  %given.1 = (s32[]{:T(128)}, f32[3,5]{1,0:T(8,128)S(1)}) parameter(0)
  %x.2 = f32[3,5]{1,0:T(8,128)S(1)} get-tuple-element(%given.1), index=1
  %tanh.1 = f32[3,5]{1,0:T(8,128)} tanh(%x.2), metadata={op_name="jit(step)/jvp(blocks)/while/body/mlp/tanh"}, 7 cycles
  ROOT %tuple.2 = (s32[]{:T(128)}, f32[3,5]{1,0}) tuple(%add.1, %tanh.1)
}

%condition.1 (given.2: (s32[], f32[3,5])) -> pred[] {
  %end.1 = s32[]{:T(128)} constant(13)
  %i.2 = s32[]{:T(128)} get-tuple-element(%given.2), index=0
  ROOT %test.1 = pred[]{:T(512)} compare(%i.2, %end.1), direction=LT
}
""".strip()
ENTRY = """
  %while.1 = (s32[]{:T(128)}, f32[3,5]{1,0}) while(%tuple.1), condition=%condition.1, body=%body.1KNOWN
  ROOT %sin.1 = f32[3,5]{1,0:T(8,128)} sine(%x.1), metadata={op_name="jit(step)/sin"}, 11 cycles
"""
KNOWN = ', backend_config={"known_trip_count":{"n":"17"}}'


@pytest.mark.parametrize(
    ("changes", "turns"),
    [({}, 13), ({"KNOWN": KNOWN}, 17), ({"direction=LT": "direction=NE"}, None), ({"constant(13)": "copy(%a)"}, None)],
)
def test_the_number_of_iterations_is_read_from_the_condition_of_a_loop(changes, turns):
    changes = {"KNOWN": ""} | changes
    cycles, unknown_loops = estimate(replace(ENTRY, **changes), replace(LOOP, **changes))
    assert cycles == {"blocks/mlp": 7 * (turns or 1), "(none)": 11} and unknown_loops == (turns is None)


def test_a_fusion_counts_once_in_the_scope_of_its_root_and_the_longest_branch_counts():
    fusion = """%fused.1 (p.1: f32[3,5]) -> f32[3,5] {
  %exp.1 = f32[3,5]{1,0} exponential(%p.1), metadata={op_name="jit(step)/mlp/exp"}, 3 cycles
  ROOT %tanh.1 = f32[3,5]{1,0} tanh(%exp.1), metadata={op_name="jit(step)/transpose(jvp(blocks))/score/tanh"}
}"""
    branch = """%branch.N (p.N: f32[3,5]) -> f32[3,5] {
  ROOT %t.N = f32[3,5] tanh(%p.N), metadata={op_name="a/N/t"}, N7 cycles
}"""
    branches = [branch.replace("N", n) for n in "132"]
    computations = "branch_computations={%branch.1, %branch.3, %branch.2}"
    entry = "%x.1 = f32[3,5] fusion(%y), calls=%fused.1, 5 cycles\n ROOT %c.1 = f32[3,5] conditional(%x.1), "
    entry += computations
    assert estimate(entry, fusion, *branches)[0] == {"a/3": 37, "blocks/score": 5}


def test_the_estimate_of_libtpus_own_text(monkeypatch):
    """Seven products in a loop take about seven times as long as one."""
    pytest.importorskip("libtpu", reason="needs libtpu, the TPU's compiler")
    from jax.experimental import topologies as described

    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    before = jax.config.jax_enable_compilation_cache
    compilation.disable_cache()
    devices = described.get_topology_desc("v5e:2x4", platform="tpu").devices
    mesh = Mesh(np.array(devices), ("chips",), axis_types=(AxisType.Auto,))

    def cycles(function, *shapes):
        arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=NamedSharding(mesh, P())) for x in shapes]
        by_scope, unknown_loops = tpu_estimate.estimate(jax.jit(function).lower(*arrays).compile().as_text())
        assert unknown_loops == 0
        return sum(by_scope.values())

    n = 1024
    alone = cycles(lambda x, W: jnp.tanh(x @ W), (n, n), (n, n))
    loop = cycles(lambda x, W: jax.lax.scan(lambda x, W: (jnp.tanh(x @ W), None), x, W)[0], (n, n), (7, n, n))
    jax.config.update("jax_enable_compilation_cache", before)
    assert 1 < alone / 1.5e9 / (2 * n**3 / 197e12) < 4 and 6 < loop / alone < 11


def test_the_flops_of_a_users_function_include_its_backward_pass(tmp_path, monkeypatch):
    """Arguments of jax.jit do not matter: JAX 0.12 refuses compiler_options in a function that is traced again."""
    lines = ["import functools, jax, numpy", "options = {'xla_cpu_enable_fast_math': False}"]
    lines += ["@functools.partial(jax.jit, static_argnames='name', compiler_options=options)"]
    lines += ["def step(W, x, name): return jax.grad(lambda W, x: jax.numpy.square(x @ W).sum(), (0, 1))(W, x)"]
    lines += ["def example(): return numpy.ones((3, 7)), numpy.ones((5, 3)), 'any'"]
    (tmp_path / "my_product.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    request, flops, kernel_flops, _ = catalogue.load("my_product:step", jax.devices()[:1])
    assert request.name == "my_product:step" and (flops, kernel_flops) == (3 * 2 * 5 * 3 * 7, 0)


TINY = "configs/vit.py model.M=1 model.D=12 train.batch_size=2"
FAULTY = {"missing": "configs/vit.py image.source=absent.npz", "mistake": "configs/vit.py model.Z=3"}


def test_the_table_of_estimates_has_a_line_for_each_step(monkeypatch, capsys):
    pytest.importorskip("libtpu", reason="needs libtpu, the TPU's compiler")
    monkeypatch.setattr(catalogue, "STEPS", {"tiny": TINY})
    before = jax.config.jax_enable_compilation_cache
    tpu_estimate.main(["--all"])
    jax.config.update("jax_enable_compilation_cache", before)
    title, header, tiny = capsys.readouterr().out.splitlines()
    assert title.startswith("v5e-1, ") and header.split()[:2] == ["step", "ms"]
    name, milliseconds, kernels, share, mebibytes, _, unit = tiny.split()
    assert (name, kernels, unit) == ("tiny", "0", "s") and share.endswith("%")
    assert 1e-3 < float(milliseconds) < 1 and 0.01 < float(mebibytes) < 10


def test_the_table_says_why_a_step_has_no_estimate(monkeypatch, capsys):
    monkeypatch.setattr(catalogue, "STEPS", {**FAULTY, "refused": TINY})
    refuse = lambda requests: [topologies.Program(request, None, "needs 17 GiB") for request in requests]  # noqa: E731
    monkeypatch.setattr(topologies, "compile_programs", refuse)
    tpu_estimate.print_table(topologies.Topology("these chips", jax.devices()[:1], 0))
    _, _, missing, mistake, refused = capsys.readouterr().out.splitlines()
    assert missing.split()[:2] == ["missing", "none:"] and "absent.npz" in missing and "model.Z" in mistake
    assert "it needs 17 GiB" in refused


def test_measured_steps_have_a_line_each_and_a_step_that_fails_does_not_stop_the_others(monkeypatch, capsys):
    monkeypatch.setattr(catalogue, "STEPS", {**FAULTY, "ViT": TINY})
    monkeypatch.setattr(on_tpu, "STEPS", {"missing": "", "ViT": "model.M=2"})
    on_tpu.run(steps=2)
    versions, warning, header, missing, vit = capsys.readouterr().out.splitlines()
    assert f"jax {jax.__version__}" in versions and "CPU" in warning and "measured" in header
    assert "absent.npz" in missing
    name, milliseconds, estimate, peak, mebibytes = vit.split()
    assert (name, estimate, peak) == ("ViT", "none", "none") and float(milliseconds) > 0 and float(mebibytes) > 0


@pytest.mark.parametrize(
    ("command", "sizes"),
    [
        (f"{catalogue.STEPS['ViT-S/16']} {on_tpu.STEPS['ViT-S/16']}", {"v_BNP": (2, 196, 3 * 16**2)}),
        (f"{catalogue.STEPS['GPT-2']} {on_tpu.STEPS['GPT-2']}", {"w_BN": (2, 64), "E_WD": (50257, 96)}),
        ("configs/shakespeare_char.py model.M=1 model.D=12 train.batch_size=2", {"E_WD": (65, 12)}),
    ],
)
def test_stand_ins_have_the_sizes_of_the_data(command, sizes):
    plan = catalogue.load(command.split()[0], jax.devices()[:1], *command.split()[1:]).plan
    params = shapes.flat(jax.eval_shape(plan.task.init, jax.random.key(0)))
    arrays = plan.task.train[0] | {path.rpartition("/")[2]: leaf for path, leaf in params.items()}
    assert {name: arrays[name].shape for name in sizes} == sizes


MY_STUDY = """
from configs import base

def get_config():
    config = base.get_config("ablation", of="synthetic")
    config.study.arms = [[f"F_{F}", {"model.F": F}] for F in (5, 17, 3)]
    config.study.update(metric="eval/accuracy", seeds=[0, 1, 2])
    config.model.update(M=1, H=1, D=4)
    config.train.batch_size = 2
    return config
"""


def test_the_step_of_a_study_is_that_of_its_largest_program_with_all_its_runs(tmp_path):
    (tmp_path / "my_study.py").write_text(MY_STUDY)
    step = catalogue.load(str(tmp_path / "my_study.py"), jax.devices()[:1])
    assert step.request.arguments[0].params["blocks"]["mlp"]["W1_FD"].shape == (3, 1, 17, 4)  # runs, layers, F, D
    changes = ("model.M=1", "model.H=1", "model.D=4", "model.F=17", "train.batch_size=2")
    assert step.flops == 3 * catalogue.load("configs/synthetic.py", jax.devices()[:1], *changes).flops
