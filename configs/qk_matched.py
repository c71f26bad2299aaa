"""Does one matrix cost less if the MLP gets the parameters that it saves? Five scores against two matrices, ten seeds.

python launch.py --config configs/qk_matched.py --workdir runs/qk_matched
As qk_positions.py, but every arm has the number of parameters of `asymmetric`, up to 0.1 %. 264 runs, 34 minutes beside
other work. Nats per character against two matrices, with learned and rotary positions: tied +0.273 and +0.166,
sym_plus_skew:2 +0.259 and +0.159, pairwise -0.008 and -0.016, tied_noself -0.046 and -0.038, asymmetric_noself -0.021
and -0.038. pairwise, and asymmetric_noself with learned positions, are undecided.
"""

from configs import qk_positions

F = 256
# Units with the weights of the missing matrix. A hidden unit has 2 D = 128 weights and U_q of both heads D^2 = 4096;
# the skew rows of both heads have 4 D, and P of both heads 2 K^2 = 2048.
UNITS = {"tied": 32, "sym_plus_skew:2": 30, "pairwise": 16, "tied_noself": 32, "asymmetric_noself": 0}
UNITS |= {"asymmetric": 0}


def get_config():
    config = qk_positions.get_config()
    config.study.arms = [
        (score.replace(":", "_"), {"model.score": score, "model.F": F + units}) for score, units in UNITS.items()
    ]
    config.study.conditions = [(name, qk_positions.POSITIONS[name]) for name in ("learned", "rotary")]
    return config
