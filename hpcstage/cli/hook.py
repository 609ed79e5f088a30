"""`hpcstage install-hook`: asks the launcher's room to write or remove the hook. No logic."""

from __future__ import annotations

import click


@click.command("install-hook", short_help="Serve Pythons of this environment whose PYTHONPATH a script sets anew.")
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
    from hpcstage.wrapper import hook

    if not remove:
        place = hook.install(python)
        click.echo(f"hpcstage: wrote {hook.PTH} to {place} (remove it with hpcstage install-hook --remove)", err=True)
        return 0
    places = hook.remove(python)
    for place in places:
        click.echo(f"hpcstage: removed {hook.PTH} from {place}", err=True)
    if not places:
        click.echo(f"hpcstage: there is no hook in the environment of {python}", err=True)
    return 0
