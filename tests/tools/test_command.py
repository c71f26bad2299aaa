"""What all tools share: flags are the arguments of a function, and what goes wrong is one sentence and an exit code."""

import contextlib
import dataclasses
import io
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import published
import pytest
import tiny

from configs import base
from experiments.engine import errors
from experiments.pretrained import families, open_model
from experiments.tools import classify, command, export, fill, sample, symmetry

ROOT = pathlib.Path(__file__).parents[2]
TOOLS = (sample, fill, classify, export, symmetry)


def own(fails: BaseException | None = None):
    """A tool that prints its arguments, or fails."""

    @command.tool(size="How large.", share="A share.", words="Of which several may be given.")
    def run(checkpoint: str, *, size: int = 3, share: float = 0.5, words: tuple[str, ...] = ()) -> tuple:
        if fails is not None:
            raise fails
        print(checkpoint, size, share, words, sep="|")
        return checkpoint, size, share, words

    return run


def told(run, *words) -> tiny.Outcome:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run.main(["tool", *words])
    return tiny.Outcome(code, out.getvalue(), err.getvalue())


def test_flags_are_the_arguments_and_have_their_defaults():
    assert told(own()) == (0, "|3|0.5|[]\n", "")
    words = ("--checkpoint=a", "--size=7", "--share", "0.25", "--words=b", "--words=c")
    assert told(own(), *words) == (0, "a|7|0.25|['b', 'c']\n", "")
    assert own()("a", size=7) == ("a", 7, 0.5, ())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--sise=7"], "Unknown command line flag 'sise'. Did you mean: size ?"),
        (["--size=many"], "flag --size=many: invalid literal for int"),
        (["7"], 'what is "7"? Each argument has its name: --checkpoint=PATH'),
        (["--share=inf"], "share = inf is no number that can be computed with"),
        ([f"--size={10**30}"], "is too large a number"),
    ],
)
def test_what_is_no_argument_is_refused_in_a_sentence(words, sentence):
    code, out, err = told(own(), *words)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and sentence in err


@pytest.mark.parametrize(
    ("error", "code", "err"),
    [
        (errors.UserError("a\nb"), 2, "error: a\\nb\n"),
        (errors.RunError("full"), 1, "error: full\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (errors.Interrupted("stopped here", 143), 143, "stopped here\n"),
    ],
)
def test_the_exit_code_says_what_went_wrong(error, code, err):
    assert told(own(error)) == (code, "", err)
    with pytest.raises(type(error)):  # of the function, in a notebook
        own(error)("a")


def process(*words, **more):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.tools.sample", *words], env=environment, text=True, **more
    )


def test_the_command_ends_at_once_at_ctrl_c_and_where_nobody_reads():
    reads, writes = os.pipe()
    os.close(reads)
    with process("--help", stdout=writes, stderr=subprocess.PIPE) as unread:
        os.close(writes)
        assert "Traceback" not in unread.communicate(timeout=100)[1] and unread.returncode == 1
    with process("--checkpoint=-", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as stopped:
        maps = pathlib.Path(f"/proc/{stopped.pid}/maps")
        while b"numpy" not in maps.read_bytes():  # it takes seconds to import the rest
            time.sleep(0.01)
        stopped.send_signal(signal.SIGINT)
        assert stopped.communicate(timeout=100) == ("", "stopped\n") and stopped.returncode == 130


def test_every_tool_explains_all_its_arguments(capsys):
    for tool in TOOLS:
        with pytest.raises(SystemExit) as end:
            tool.run.main(["tool", "--help"])
        shown = capsys.readouterr().out
        assert end.value.code == 0 and tool.__doc__.splitlines()[0] in shown and "--checkpoint: The model" in shown


def test_a_model_is_opened_in_a_notebook_by_two_lines(tmp_path):
    model = open_model.open(published.save(tmp_path / "gpt2", "gpt2"))
    w_BN = np.random.default_rng(0).integers(0, model.facts["W"], (2, 5))
    logits_BNW = model(w_BN)
    assert logits_BNW.shape == (2, 5, model.facts["W"])
    w_BN[:, 3:] = 0  # it sees no later word
    np.testing.assert_allclose(model(w_BN)[:, :3], logits_BNW[:, :3], rtol=1e-4, atol=1e-5)
    vit = open_model.open(published.save(tmp_path / "vit", "vit"))
    assert vit(np.zeros((3, 15, 10, 2), np.float32)).shape == (3, 3)
    shorter = {name: part for name, part in model.params.items() if name != "norm"}
    nan = jax.tree.map(lambda leaf: leaf * np.nan, model.params)
    for changes, sentence in (
        ({"params": shorter}, "norm/gain_D .* is missing"),
        ({"kind": "other"}, "predicts the next word is needed here, and .* of the experiment other"),
        ({"params": nan}, "values that are not finite numbers, and so do"),
    ):
        with pytest.raises(errors.UserError, match=sentence):
            dataclasses.replace(model, **changes)(w_BN)


def test_what_published_files_do_not_say_is_as_in_the_config():
    fields = base.get_config("language").model.to_dict()
    assert families.FREE == {name: fields[name] for name in families.FREE}
