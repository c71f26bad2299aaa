"""The study of leave_one_out.py on handwritten digits (8 x 8 pixels, 16 patches): ten models x 5 seeds.

python launch.py --config configs/leave_one_out_digits.py --workdir runs/leave_one_out_digits
170 runs, 12 minutes, two processes. Only the lack of positions is shown to cost (0.94 nats per digit): docs/ladder.md.
"""

from configs import ladder_digits, leave_one_out


def get_config():
    return leave_one_out.leave_one_out(ladder_digits.get_config())
