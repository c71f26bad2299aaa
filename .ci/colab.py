"""Write .ci/colab-DATE.txt: the packages of Colab's image of this date, as constraints for pip.

python .ci/colab.py pip-freeze.tpu.txt 2026-08-19

The list is a file or a URL of https://github.com/googlecolab/backend-info, which publishes it. The date is the date of
its commit. All packages stay in the list, because an installation must not replace any package of the image.
"""

import datetime
import pathlib
import sys
import urllib.parse
import urllib.request

from packaging import requirements, utils

HEADER = """\
# Colab's TPU image of {date}, as constraints for pip: pip-freeze.tpu.txt of https://github.com/googlecolab/backend-info
# as .ci/colab.py rewrites it. Version from the wheel's name, without the address: {wheels}.
# Left out, because no wheel has the version: {rest}.
"""


def constraints(listing: str, date: str) -> str:
    """Return the lines of a `pip freeze` as constraints.

    `name @ address` becomes the version in the wheel's name. Other addresses and `-e`, which pip refuses, are left out.
    """
    versions, wheels, rest = [], [], []
    for line in (line.strip() for line in listing.splitlines()):
        if not line or line.startswith("#"):
            continue
        requirement = None if line.startswith("-") else requirements.Requirement(line)
        if requirement and requirement.specifier:
            versions.append(line)
        elif requirement and (path := urllib.parse.urlsplit(requirement.url).path).endswith(".whl"):
            version = utils.parse_wheel_filename(urllib.parse.unquote(path.split("/")[-1]))[1]
            wheels.append(requirement.name)
            versions.append(f"{requirement.name}=={version}")
        else:
            rest.append(requirement.name if requirement else line.split("#egg=")[-1])
    if not versions:
        raise ValueError("no line of the form name==version")
    header = HEADER.format(date=date, wheels=", ".join(wheels) or "none", rest=", ".join(rest) or "none")
    return header + "\n".join(versions) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python .ci/colab.py LIST DATE (a file or an address; such as 2026-08-19)")
    source, date = sys.argv[1:]
    address = source if "://" in source else pathlib.Path(source).absolute().as_uri()
    try:
        datetime.date.fromisoformat(date)
        with urllib.request.urlopen(address, timeout=60) as response:
            content = constraints(response.read().decode(), date)
        pathlib.Path(__file__).with_name(f"colab-{date}.txt").write_text(content, encoding="utf-8")
    except (OSError, ValueError) as error:  # InvalidRequirement, InvalidWheelFilename and invalid dates are ValueErrors
        sys.exit(f".ci/colab.py: {error}")
