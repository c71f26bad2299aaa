"""Where the benchmark's profile says that the time goes: scopes of a compiled program, moments shared out, and sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import fresh, profile, trace
from experiments.compiler import program
from experiments.engine import errors

TEXT = """HloModule jit_step, is_scheduled=true

%fused (param_0: f32[3,5], param_1: f32[5,7]) -> f32[3,7] {
  %param_0 = f32[3,5]{1,0} parameter(0)
  %param_1 = f32[5,7]{1,0} parameter(1)
  ROOT %dot.3 = f32[3,7]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(step)/transpose(jvp(blocks))/mlp/dot_general" stack_frame_id=3}
}

ENTRY %main.9 (x.1: f32[3,5], w.1: f32[5,7]) -> f32[3,7] {
  %x.1 = f32[3,5]{1,0} parameter(0), metadata={op_name="x"}
  %w.1 = f32[5,7]{1,0} parameter(1), metadata={op_name="w"}
  %while.2 = (s32[], f32[3,5]{1,0}, /*index=2*/f32[5,7]{1,0}) while(%tuple.1), condition=%c, body=%b, \
metadata={op_name="jit(step)/jvp(blocks)/while"}
  ROOT %fusion.1 = f32[3,7]{1,0} fusion(%x.1, %w.1), kind=kLoop, calls=%fused, backend_config={"a":["2"]}
}
"""


@pytest.fixture
def lines() -> dict[str, program.Instruction]:
    return program.instructions(TEXT)


def test_instruction_of_compiled_text(lines):
    assert program.module(TEXT) == "jit_step"
    assert lines["while.2"].opcode == "while" and lines["while.2"].shape == "(s32[], f32[3,5], f32[5,7])"
    assert lines["fusion.1"].opcode == "fusion" and lines["fusion.1"].shape == "f32[3,7]"
    assert lines["fusion.1"].operands == ("f32[3,5]", "f32[5,7]")
    assert lines["fusion.1"].inside == ("dot",)


def test_fusion_stands_where_its_root_does(lines):
    assert lines["fusion.1"].op_name == "jit(step)/transpose(jvp(blocks))/mlp/dot_general"


def test_operations_of_a_product(lines):
    assert lines["dot.3"].flops == lines["fusion.1"].flops == 2 * 3 * 7 * 5
    assert lines["while.2"].flops == 0


@pytest.mark.parametrize(
    "path, scope, direction",
    [
        ("jit(step)/jvp(blocks)/mlp/dot_general", "blocks/mlp", "forward"),
        ("jit(step)/shard_map/transpose(jvp(blocks))/attention/score/transpose", "blocks/attention/score", "backward"),
        ("jit(step)/jvp(blocks)/while/body/closed_call/mlp/jit(gelu)/erfc", "blocks/mlp", "forward"),
        ("jit(step)/vmap(jvp(blocks/mlp))/add", "blocks/mlp", "forward"),
        ("jit(step)/transpose(jvp(blocks))/rematted_computation/mlp/erfc", "blocks/mlp", "recomputed"),
        ("jit(step)/jvp(blocks)/score/BND,HKD->BHNK/dot_general", "blocks/score", "forward"),
        ("jit(step)/jvp(blocks)/score/transpose;jit(step)/jvp(blocks)/average/transpose", "blocks/score", "forward"),
        ("jit(step)/jvp()/mul", program.NO_SCOPE, "forward"),
        ("optimiser/add", "optimiser", "forward"),
        ("", program.NO_SCOPE, "forward"),
    ],
)
def test_scope_and_direction_of_a_path(path, scope, direction):
    assert (program.scope(path), program.direction(path)) == (scope, direction)


def by_moments(found: list[trace.Interval], containers: set[str]) -> dict[str, float]:
    """Every nanosecond on its own."""
    spent: dict[str, float] = {}
    for moment in range(int(max(one.end for one in found))):
        names = [one.name for one in found if one.begin <= moment < one.end]
        names = [name for name in names if name not in containers] or names
        for name in names:
            spent[name] = spent.get(name, 0) + 1 / len(names)
    return spent


@pytest.mark.parametrize("seed", range(5))
def test_moments_are_shared_by_what_is_under_way(seed):
    rng = np.random.default_rng(seed)
    begins, lengths = rng.integers(0, 97, 23), rng.integers(0, 31, 23)
    found = [trace.Interval(f"i{i % 11}", b, b + n) for i, (b, n) in enumerate(zip(begins, lengths, strict=True))]
    expected = by_moments(found, {"i0", "i3"})
    got = {name: ns for name, ns in trace.shared(found, {"i0", "i3"}).items() if ns}
    assert got.keys() == expected.keys()
    for name, ns in expected.items():
        assert got[name] == pytest.approx(ns)


def test_loop_counts_only_outside_its_body():
    found = [trace.Interval("while", 0, 10), trace.Interval("dot", 2, 5), trace.Interval("dot", 6, 9)]
    assert trace.shared(found, {"while"}) == {"while": 4, "dot": 6}


def test_an_instruction_lasts_until_the_event_of_its_end():
    class Event:
        def __init__(self, name, begin, length, **stats):
            self.name, self.start_ns, self.duration_ns, self.stats = name, begin, length, stats.items()

    class Plane:
        def __init__(self, name, **lines):
            self.name = name
            self.lines = [type("Line", (), {"name": key, "events": events}) for key, events in lines.items()]

    first = [Event("dot.1", 3, 2, hlo_op="dot.1", hlo_module="jit_f", _p=5), Event("other", 0, 90)]
    first.append(Event("add.1", 0, 3, hlo_op="add.1", hlo_module="jit_f"))
    first.append(Event("add.7", 0, 3, hlo_op="add.7", hlo_module="jit_other"))
    cpu = Plane("/host:CPU", one=first, two=[Event("end: dot.1", 17, 1, _c=5)])
    found = trace.intervals(type("Profile", (), {"planes": [cpu]}), "jit_f")
    assert sorted(found) == [("add.1", 0, 3), ("dot.1", 3, 17)]

    after = [Event("ThunkExecutor::Execute", 9, 7), Event("add.2", 10, 4, hlo_op="add.2", hlo_module="jit_f")]
    other = Plane("/host:CPU", one=first, two=[*after, Event("end: dot.1", 17, 1, _c=5)])
    found = trace.intervals(type("Profile", (), {"planes": [other]}), "jit_f")
    assert sorted(found) == [("add.1", 0, 3), ("add.2", 10, 14), ("dot.1", 3, 9)]  # add.2 waited for dot.1

    loop = Plane("/host:CPU", one=[*first, *after, Event("end: dot.1", 17, 1, _c=5)])
    found = trace.intervals(type("Profile", (), {"planes": [loop]}), "jit_f")
    assert sorted(found) == [("add.1", 0, 3), ("add.2", 10, 14), ("dot.1", 3, 17)]  # add.2 was a part of it

    kernel = Event("gemm", 1, 4, hlo_op="dot.1", hlo_module="jit_f")
    gpu = Plane("/device:GPU:0", **{"Stream #7(Compute)": [kernel], "XLA Ops": [kernel]})
    found = trace.intervals(type("Profile", (), {"planes": [cpu, gpu]}), "jit_f")
    assert found == [("dot.1", 1, 5)]


def test_recorded_program():
    """A real trace: what takes long is found, in its scope, as often as it ran."""

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("large"):
            y = x @ x
        with jax.named_scope("small"):
            return jnp.tanh(y[:3])

    x = jnp.ones((499, 499))
    with fresh.compiled():
        compiled = step.lower(x).compile()
    lines = program.instructions(compiled.as_text())
    with trace.recorded(program.module(compiled.as_text())) as found:
        for _ in range(3):
            jax.block_until_ready(compiled(x))
    assert all(one.name in lines for one in found)
    products = [one for one in found if lines[one.name].flops]
    assert len(products) == 3 and all(lines[one.name].flops == 2 * 499**3 for one in products)
    scopes = profile.by_scope(trace.shared(found, ()), lines)
    assert scopes["large"]["forward"] > scopes["small"]["forward"] > 0
    assert next(iter(scopes)) == "large"


@functools.cache
def tiny() -> dict:
    changes = {"model.M": 2, "model.D": 14, "model.H": 2, "text.N": 13}
    return profile.of_workload("step_a", steps=3, changes=changes)


def test_profile_of_a_step_adds_up():
    found = tiny()
    assert 0 < found["covered_ms"] <= found["profiled_ms"]
    for total in (
        sum(row["ms"] for row in found["instructions"]),
        sum(sum(row.values()) for row in found["scopes"].values()),
    ):
        assert total == pytest.approx(found["covered_ms"])
    assert {"forward", "backward"} <= found["scopes"]["blocks/mlp"].keys()
    assert "optimiser" in found["scopes"]
    alike = [row for row in found["instructions"] if row["calls"] == 2]
    assert alike  # two layers are alike, and are one row


def test_profile_reads_well():
    found = tiny()
    shown = profile.show({"step_a": found})
    assert "blocks/mlp" in shown and f"{found['covered_ms']:.2f} ms" in shown and "GFLOP/s" in shown
    assert found["instructions"][0]["name"] in shown


def test_profile_of_what_is_none(capsys):
    with pytest.raises(errors.UserError, match='unknown workload "step_z"; the right ones are: step_a'):
        profile.workload("step_z")
    assert profile.main(["--workload", "generate"]) == 2
    assert capsys.readouterr().err.startswith('error: unknown workload "generate"')


def test_config_with_changes():
    settings = profile.settings_of("configs/shakespeare_char.py", ["--config.train.batch_size=7"])
    assert (settings.train.batch_size, settings.train.steps) == (7, 2000)
    with pytest.raises(errors.UserError, match="sample trains nothing"):
        profile.planned(profile.settings_of("configs/sample.py", []))
