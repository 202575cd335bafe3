"""`twellc plugins` on the command line. Importing this imports nothing large."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from twellc.commands.terminal import Command


@click.command(cls=Command)
@click.option("--check", is_flag=True, help="Register the plugins in every TensorRT that is installed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.pass_context
def plugins(context: click.Context, check: bool, as_json: bool) -> None:
    """Show the plugin libraries: where they are, their version and their plugins.

    TwellAttention is in a separate library, which was built if cuDNN's headers were found.

    With --check, register them in every TensorRT of this machine, each in a separate process: in its Python modules,
    and in the libraries that the dynamic linker finds. Exit status 1 if one of them does not take them.
    """
    from twellc.plugins import library
    from twellc.plugins.registration import check_installed

    version = library.load().twell_version().decode()
    attention = library.attention_library_path()
    library.load_attention()  # fails for the library of another version
    names = [*library.PLUGIN_NAMES, *(library.ATTENTION_NAMES if attention is not None else [])]
    checks = check_installed() if check else []
    if as_json:
        found: dict[str, Any] = {
            "library": str(library.library_path()),
            "version": version,
            "namespace": library.PLUGIN_NAMESPACE,
            "attention_library": None if attention is None else str(attention),
            "plugins": [{"name": name, "version": library.PLUGIN_VERSION} for name in names],
        }
        if check:
            found["checks"] = [dataclasses.asdict(each) for each in checks]
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(f"library    {library.library_path()}")
        if attention is not None:
            click.echo(f"attention  {attention}")
        click.echo(f"version    {version}")
        click.echo(f"namespace  {library.PLUGIN_NAMESPACE}")
        for name in names:
            click.echo(f"plugin     {name}, version {library.PLUGIN_VERSION}")
        for each in checks:
            click.echo(f"{'ok     ' if each.good else 'FAILED '}    {each.host} {each.version}: {each.state}")
        if check and not checks:
            click.echo("no TensorRT is installed")
    context.exit(0 if all(each.good for each in checks) else 1)
