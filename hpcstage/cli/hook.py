"""`hpcstage install-hook`: puts files into an environment's site-packages, or removes them. They let its Pythons find
the shim where a script has set PYTHONPATH anew, and do nothing outside of `hpcstage run`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import click

from hpcstage.cli.command import Command
from hpcstage.errors import UsageError
from hpcstage.node import shimdir
from hpcstage.writing import replace_text

MODULE = "_hpcstage_hook"
PTH = "hpcstage-hook.pth"
START = "hpcstage-hook.start"
START_FROM = [3, 15]
"""From this version on, Python reads .start files; they replace the import lines of the .pth file of the same name."""
OLDEST = [3, 8]
_LINE = (
    "import os; os.environ.get('HPCSTAGE_NODE_DIR') and "
    f"os.path.exists(os.path.join({{site!r}}, '{MODULE}.py')) and __import__('{MODULE}').attach()\n"
)
_ASK = (
    "import json, site, sys, sysconfig; print(json.dumps([list(sys.version_info[:2]), sysconfig.get_path('purelib'),"
    " site.getusersitepackages() if site.ENABLE_USER_SITE else None]))"
)


@click.command(
    "install-hook", cls=Command, short_help="Serve Pythons of this environment whose PYTHONPATH a script sets anew."
)
@click.option(
    "--python",
    default="python3",
    show_default=True,
    help="The interpreter whose environment is meant.",
)
@click.option("--remove", is_flag=True, help="Remove the hook again.")
def install_hook(python: str, remove: bool) -> int:
    """Write a hook into the site-packages of the active Python environment, or remove it.

    A script that sets PYTHONPATH without appending to it takes hpcstage's directory away from the Pythons that it
    starts: they are not served. Where the script cannot be changed, the hook serves them all the same. It does
    nothing outside of `hpcstage run`.

    \b
    hpcstage install-hook
    hpcstage install-hook --python ~/venv/bin/python
    hpcstage install-hook --remove

    Exit code 0: done, or nothing to remove; 2: the environment cannot be written, or there is no such Python.
    """
    if not remove:
        place = _install(python)
        click.echo(f"hpcstage: wrote {PTH} to {place} (remove it with hpcstage install-hook --remove)", err=True)
        return 0
    places = _removed(python)
    for place in places:
        click.echo(f"hpcstage: removed {PTH} from {place}", err=True)
    if not places:
        click.echo(f"hpcstage: there is no hook in the environment of {python}", err=True)
    return 0


def _install(python: str) -> Path:
    """Writes the files into the environment of an interpreter, or into the user's own if that cannot be written.
    Returns where they are."""
    version, places = _places(python)
    if version < OLDEST:
        raise UsageError(f"{python} is older than Python 3.8", "name another with --python")
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            _write(place, version)
        except OSError:
            continue
        return place
    raise UsageError(
        f"cannot write to {' or '.join(map(str, places))}", "activate an environment of your own, or name its --python"
    )


def _removed(python: str) -> list[Path]:
    """Removes the files, and returns the directories where they were."""
    found = []
    for place in _places(python)[1]:
        there = [path for name in (PTH, START, MODULE + ".py") if (path := place / name).exists()]
        for path in there:  # the module goes last: the files that name it must not be left without it
            try:
                path.unlink()
            except OSError as error:
                raise UsageError(f"cannot remove {path}: {error.strerror}", "remove it by hand") from None
        for compiled in (place / "__pycache__").glob(MODULE + ".*.pyc"):
            compiled.unlink(missing_ok=True)
        if there:
            found.append(place)
    return found


def _write(place: Path, version: list[int]) -> None:
    contents = {MODULE + ".py": (shimdir.SHIM / "python" / (MODULE + ".py")).read_text(encoding="utf-8")}
    if version >= START_FROM:
        contents[START] = f"{MODULE}:attach\n"
    contents[PTH] = _LINE.format(site=os.fspath(place))
    for name, content in contents.items():
        replace_text(place / name, content, 0o666)


def _places(python: str) -> tuple[list[int], list[Path]]:
    """Returns the version of an interpreter, and the directories in which it looks for .pth files, the environment's
    first."""
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, timeout=60, check=True, cwd="/")
        version, *places = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        raise UsageError(f"cannot ask {python} where its packages are", "name a Python with --python") from None
    return version, [Path(place) for place in places if place]
