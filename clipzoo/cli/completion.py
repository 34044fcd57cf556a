"""Shell completion: `eval "$(register-python-argcomplete clipzoo)"` switches it on."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO


def complete_if_asked(parser: argparse.ArgumentParser) -> None:
    """Answer the shell's request for completions and exit. No-op outside completion."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def override_completer(config_name: str) -> Callable[..., list[str]]:
    """Return an argcomplete completer of Hydra overrides for the configuration `config_name`."""

    def complete(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
        from clipzoo.cli.train import job
        from clipzoo.config.groups import hide_internal_options, own_folder

        own = own_folder()
        folder = [] if own is None else ["--config-dir", str(own)]
        hide_internal_options()
        sys.argv = ["clipzoo", "--config-name", config_name, *folder, "--shell-completion", "query=bash"]
        os.environ["COMP_LINE"] = " ".join(["clipzoo", *(parsed_args.overrides or []), prefix])
        with redirect_stdout(StringIO()) as completions:
            job()
        return completions.getvalue().split()

    return complete
